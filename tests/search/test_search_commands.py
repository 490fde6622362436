"""`python -m search`: printed texts, exit statuses and refusals."""

import json
import re
import subprocess
import sys

import msgspec
import paths
import pytest
from absl import flags

from jaxflow.flexgen.policy import load_policy
from jaxflow.model.energy import Power, shipped_power
from search import cost
from search.__main__ import COMMANDS, main

pytestmark = pytest.mark.usefixtures("no_flags")


def test_cost_prints_four_resources_and_what_binds(capsys):
    assert main(["search", "cost", "--model", "llama-3.1-8b", "--tokens", "2048"]) == 0
    out = capsys.readouterr().out
    assert "up_gate" in out and "Binding: energy" in out and "Eq. 5" in out
    last = [
        line.split()
        for line in out.splitlines()
        if line.endswith((" memory", " energy", " network", " compute"))
    ]
    bound_by = {words[0]: words[-1] for words in last}
    assert bound_by["decode_attention"] == "memory" and bound_by["up_gate"] == bound_by["total"] == "energy"
    assert (
        "Largest batch: 2234 tokens, of which 745 decode; T_mem / T_compute (Eq. 4): 29.4 / 32.3 ms = 0.91"
        in out
    )


def test_cost_says_what_eq_5_and_the_bound_are_of(capsys):
    """The bound has the work and the peaks of Eq. 5, and more work."""
    fp8 = ["--dtype", "float8_e4m3fn", "--kv_cache_dtype", "float8_e4m3fn"]
    assert main(["search", "cost", "--model", "llama-3-70b", "--gpus", "2", *fp8]) == 0
    optimum, bound = (line for line in capsys.readouterr().out.splitlines() if "(tokens/s/GPU)" in line)
    assert optimum.endswith(", of dense products alone (H200 float8_e4m3fn, at the power cap)")
    assert bound.endswith(", at the datasheet's rates and the least joules")
    assert int(optimum.partition(": ")[2].partition(",")[0]) > int(bound.partition(": ")[2].partition(",")[0])


def test_cost_without_joules_says_so(capsys):
    assert main(["search", "cost", "--model", "llama-2-70b", "--device", "A100-80GB", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert "nobody has measured" in out and "attn_reduce" in out and "compute binds" in out
    assert (
        "alone (A100-80GB bfloat16, measured, sustained)\n" in out and ", at the datasheet's rates\n" in out
    )


def test_cost_says_where_a_model_does_not_fit(capsys):
    assert main(["search", "cost", "--model", "llama-2-70b", "--device", "A100-80GB"]) == 0
    assert "the weights alone fill 1.7 x A100-80GB" in capsys.readouterr().out


def test_placement_prints_a_policy_and_writes_it(capsys, tmp_path):
    few = ["--gpu_batch_sizes", "1,12", "--num_gpu_batches", "1,4"]
    files = ["--output", str(tmp_path / "policy.json"), "--front", str(tmp_path / "front.json")]
    assert main(["search", "placement", "--model", "opt-30b", "--disk", "500", *few, *files]) == 0
    out = capsys.readouterr().out
    assert all(
        words in out
        for words in (
            "Predicted:",
            "Binding: prefill by",
            "Bound by the link",
            "no host attention",
            "does not fit",
        )
    )
    assert load_policy(tmp_path / "policy.json", model="opt-30b").gpu_batch_size == 12
    assert (tmp_path / "front.png").exists()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["fly"], 2, "cost"),
        (["cost", "--model", "no-such"], 1, "no-such"),
        (["cost", "--tokens", "0"], 2, "tokens"),
        (["cost", "--device", "A100-80GB", "--dtype", "float8_e4m3fn"], 2, "bfloat16"),
        (["cost", "stray"], 2, "stray"),
        (["cost", "--gpus", "3"], 2, "a divisor of llama-3.1-8b's 32 heads"),
        (
            ["cost", "--model", "qwen2.5-7b", "--gpus", "7"],
            2,
            "a divisor or a multiple of qwen2.5-7b's 4 key/value heads",
        ),
        (["cost", "--model", "llama-2-70b", "--prompt_tokens", "4000"], 2, "at most 4096"),
        (
            ["plan", "--modelled", "--tokens", "1000000000", "--time_limit_s", "60"],
            2,
            "tokens='1000000000' is not supported: whole numbers from 1 to 16384",
        ),
        (["plan"], 2, "--modelled"),
        (["plan", "--tokens", "few"], 2, "tokens='few'"),  # before the profile that lacks
        (["placement", "--gpu_mem", "16", "--cpu_mem", "10"], 1, "it would with gpu_mem="),
        (["placement", "--gpu_mem", "nan"], 2, "--gpu_mem=nan"),
        (["placement", "--machine", "abacus"], 1, "h200"),
        (["placement", "--prompt_tokens", "4000"], 2, "at most 2048"),
        (["placement", "--kv_bits", "4", "--host_attention", "on"], 1, "host_attention=on with kv_bits=4"),
        (["placement", "--gpu_batch_sizes", "few"], 1, "gpu_batch_sizes=few"),
        (["placement", "--output", "no/such/folder.json"], 2, "a folder that exists"),
        (["placement", "--front", "/"], 2, "front='/' is not supported: a file"),
        (["placement", "--front", "x.png"], 2, "front='x.png' is not supported: a file for JSON"),
        (["offload", "--output_json", "no/such/runs.json"], 2, "output_json='no/such/runs.json'"),
        (["offload", "--runs_json", "/"], 2, "runs_json='/'"),
        (["offload", "--output", "policy.json"], 2, "'output'"),
        (["offload", "--front", "front.json"], 2, "'front'"),
        (
            ["offload", "--only", "all on disk", "--link_mb", "1"],
            1,
            "no policy of all on disk fits gpu_mem=16, cpu_mem=100, disk=0 (GB)",
        ),
        (["offload", "--only", "no serach"], 2, "only='no serach'"),
        (
            ["offload", "--policies", "p.json", "--only", "no search"],
            2,
            "only='no search' is not supported: unset with policies",
        ),
        (["machine", "--disk_dir", "no/such"], 2, "disk_dir"),
        (["machine", "--output", "/"], 2, "output='/'"),
        (["machine", "--points", "no/such/points.json"], 2, "points="),
        (["machine", "--runs", "absent.json"], 1, "absent.json"),
        (["machine", "--measured", "gone.json"], 1, "gone.json"),
    ],
)
def test_what_is_refused_says_what_would_do(line, code, words, capsys):
    assert main(["search", *line]) == code
    assert words in capsys.readouterr().err


def test_help_of_every_command(capsys):
    assert main(["search", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_lists_every_flag_that_it_takes(command, capsys):
    others = set(flags.FLAGS)
    assert main(["search", command, "--help"]) == 0
    assert (
        set(re.findall(r"^  --(?:\[no\])?(\w+):", capsys.readouterr().out, re.MULTILINE))
        == set(flags.FLAGS) - others
    )


# Each command runs in a fork, since an import of every command takes seconds.
WITHOUT_EXTRA = """
import importlib, json, os, sys
for name in ("mip", "optax"):
    sys.modules[name] = None
from search.__main__ import COMMANDS, main
for module in COMMANDS.values():
    importlib.import_module(f"search.{module}")
lines, folder = json.loads(sys.argv[1]), sys.argv[2]
for number, words in enumerate(lines):
    child = os.fork()
    if child == 0:
        file = os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = main(["search", *words])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
LINES = (
    ["plan", "--help"],
    ["plan", "--modelled", "--tokens", "512"],
    ["placement"],
    ["energy", "--runs", str(paths.ROOT / "benchmarks" / "settings/h200-energy-runs.json")],
)


def test_commands_without_the_extra_print_help_and_name_the_extra(tmp_path):
    program = [sys.executable, "-c", WITHOUT_EXTRA, json.dumps(LINES), str(tmp_path)]
    found = subprocess.run(program, cwd=paths.ROOT, capture_output=True, text=True)
    assert found.stdout.split() == ["0", "1", "1", "1"], found.stderr
    described, *refused = [(tmp_path / str(number)).read_text() for number in range(len(LINES))]
    assert "--time_limit_s" in described
    for text in refused:
        assert "Traceback" not in text and "extra `search`: pip install 'jaxflow[search]'" in text


@pytest.mark.parametrize("given", ["--measured_alone", "--measured-alone"])
def test_a_renamed_flag_names_its_replacement(given, no_flags, capsys):
    assert main(["search", "correct", given]) == 2
    assert "--measured_alone is now --measured_only" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("a defect"), KeyError("a defect")])
def test_a_defect_keeps_its_traceback(error, monkeypatch):
    def fail() -> None:
        raise error

    monkeypatch.setattr(cost, "run", fail)
    with pytest.raises(type(error), match="a defect"):
        main(["search", "cost"])


RUNS = str(paths.ROOT / "benchmarks" / "settings/h200-energy-runs.json")


def test_energy_fits_runs_and_profiles_and_writes_what_engines_read(tmp_path, capsys):
    out, settings = tmp_path / "h200.json", paths.ROOT / "benchmarks" / "settings"
    profile = str(settings / "h200-llama-3.1-8b-first-profile.json")
    assert main(["search", "energy", "--runs", RUNS, "--profile", profile, "--out", str(out)]) == 0
    text, shipped = capsys.readouterr().out, shipped_power("H200")
    made = msgspec.json.decode(out.read_bytes(), type=Power)
    assert shipped is not None and made.flop.keys() == shipped.flop.keys()
    # No entry of this profile needed less than the runs.
    assert made.byte.joules == pytest.approx(shipped.byte.joules, rel=0.02)
    # Entries of fp8 needed less.
    assert made.flop["float8_e4m3fn"].joules > shipped.flop["float8_e4m3fn"].joules
    assert (
        f"{1e12 * shipped.byte.joules:.3f}, {shipped.byte.fixed:.0%} fixed" in text
        and "runs needed 1.000 to" in text
    )


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["--runs", "none.json"], 1, "none.json"),
        (
            ["--runs", str(paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json")],
            1,
            "h200-llama-3.1-8b.json: Object contains unknown field",
        ),
        (["--runs", RUNS, "--profile", RUNS], 1, "settings/h200-energy-runs.json"),
        (["--runs", RUNS, "--out", "no/such/folder.json"], 2, "out="),
    ],
)
def test_energy_of_no_runs(given, code, said, capsys):
    assert main(["search", "energy", *given]) == code
    assert said in capsys.readouterr().err

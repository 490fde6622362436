"""`python -m jaxflow.flexgen`, `LLM(offload=...)`, and the commands of bench and search that run policies."""

import contextlib
import json
from collections import Counter

import jax
import msgspec
import paths
import pytest
from offloaded import HOST, policy

from jaxflow import LLM
from jaxflow.bench.engine.offload import parse_blocks
from jaxflow.config import ConfigError
from jaxflow.flexgen import start
from jaxflow.flexgen.__main__ import main
from jaxflow.flexgen.accounting import DoesNotFit
from jaxflow.flexgen.config import random_prompts
from jaxflow.flexgen.policy import save_policy
from jaxflow.flexgen.report import measure_links
from jaxflow.flexgen.runtime import Runtime
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import InvalidRequest, SamplingParams
from search.__main__ import main as search
from search.placement import offload
from search.placement import solver as placement_solver
from search.placement.cost_model import predict
from search.placement.machine_curves import load_machine
from search.placement.workload import workload

MODEL = "stories260K"
POLICY = msgspec.to_builtins(policy(MODEL))
FOLDER = str(paths.MODELS / MODEL)

pytestmark = pytest.mark.usefixtures("no_flags")


@pytest.fixture
def file(tmp_path):
    save_policy(
        policy(MODEL, weights=HOST, kv=HOST, activations=HOST, gpu_batch_size=2), tmp_path / "policy.json"
    )
    return tmp_path / "policy.json"


def test_the_links_of_all_devices_are_measured_at_once(monkeypatch):
    """Each train of transfers has as many for each device, before the first is waited for."""
    wait, trains = jax.block_until_ready, []
    devices = jax.devices()[:3]
    monkeypatch.setattr(jax, "block_until_ready", lambda made: trains.append(made) or wait(made))
    rates = measure_links(devices, 1)
    assert rates.down_bytes_per_s > 0 and rates.up_bytes_per_s > 0
    for train in trains:
        assert Counter(array.device for array in train) == dict.fromkeys(devices, len(train) // 3)
    assert len(trains) > 2


def test_prompts_of_a_file_get_the_engines_tokens(file, tmp_path, capsys):
    golden = paths.golden(MODEL)["prompts"][:3]
    lines = [json.dumps({"prompt": p["prompt_ids"]}) for p in golden] + ["Once upon a time", ""]
    (tmp_path / "prompts").write_text("\n".join(lines))
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    arguments = [
        "--prompts",
        str(tmp_path / "prompts"),
        "--output",
        str(out),
        "--output_json",
        str(report),
        "--link_mb",
        "1",
    ]
    common = [
        "--model",
        FOLDER,
        "--policy",
        str(file),
        "--block_size",
        "16",
        "--weights_percent",
        "50,50,0",
        "--host_memory_limit",
        "1",
    ]
    assert main(["offload", *common, *arguments]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["token_ids"] for one in written[:3]] == [p["greedy_ids"][:6] for p in golden]
    assert written[3]["prompt"] == "Once upon a time" and written[3]["text"].startswith(", there was")
    result = json.loads(report.read_text())
    assert (
        result["tokens"] == 4 * 6
        and result["policy"]["weights"]["host"] == 50
        and result["compilations_after_warmup"] == 0
    )
    link = result["link"]
    assert result["traffic"]["fetch_layer"]["link_down_bytes"] > 0 < link["busy_share"]
    moved = [sum(one[f"link_{way}_bytes"] for one in result["traffic"].values()) for way in ("down", "up")]
    assert (
        0 < link["prefill_down_bytes"] < link["down_bytes"] == moved[0]
        and 0 < link["prefill_up_bytes"] < link["up_bytes"] == moved[1]
    )
    decodes = [
        (link[f"{way}_bytes"] - link[f"prefill_{way}_bytes"]) / link[f"{way}_bytes_per_s"]
        for way in ("down", "up")
    ]
    assert link["decode_busy_share"] == pytest.approx(max(decodes) / result["decode_s"])
    assert link["down_mean_bytes_per_s"] == pytest.approx(moved[0] / result["latency_s"])
    out, err = capsys.readouterr()
    assert "Generated tokens/s:" in out and err.count("kernels: cpu, for every op\n") == 1


WITHOUT_EFFECT = (
    ("--num_kv_pages", "40"),
    ("--kv_offloading_size", "1"),
    ("--max_num_seqs", "4"),
    ("--max_num_batched_tokens", "64"),
    ("--step_sizes", "16,32"),
    ("--max_model_len", "64"),
    ("--max_waiting", "3"),
    ("--calibration", "no-such-file"),
    ("--plan", "no-such-file"),
    ("--noenable_prefix_caching",),
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "`python -m search placement --model stories260K"),
        *(
            (
                ["--policy", "FILE", f"--{kind}_percent", given],
                f"{kind}_percent='{given}' is not supported: three percentages that sum to",
            )
            for kind, given in (
                ("weights", "20,90,0"),
                ("kv", "all"),
                ("kv", "nan,90,0"),
                ("activations", "130,-30,0"),
                ("weights", "100"),
            )
        ),
        (["--policy", "FILE", "--weights_percent", "0,0,100"], "disk_path=None"),
        (["--policy", "FILE", "--gpu_memory_limit", "0.00001"], "gpu_memory_limit"),
        (["--policy", "FILE", "--kv_bits", "4", "--host_attention"], "host_attention=True with kv_bits=4"),
        (["--policy", "no-such-file"], "no-such-file"),
        (
            ["--policy", "FILE", "--prompts", "no-such-file"],
            "prompts='no-such-file' is not supported: an existing file",
        ),
        (["--policy", "FILE", "--prompts", "/dev/null"], "prompts='/dev/null'"),
        (
            ["--policy", "FILE", "--prompts", "no-such-file", "--num_prompts", "3"],
            "num_prompts=3 is not supported: unset, because --prompts",
        ),
        (
            ["--policy", "FILE", "--seed", str(2**63)],
            "seed=9223372036854775808 is not accepted: a 64-bit integer",
        ),
        (["--policy", "FILE", "--temperature", "200"], "temperature"),
        (
            ["--policy", "FILE", "--output", "no/such/folder/out"],
            "output='no/such/folder/out' is not supported: a file",
        ),
        (
            ["--policy", "FILE", "--output_json", "/"],
            "output_json='/' is not supported: a file that can be written",
        ),
        *(
            (["--policy", "FILE", *given], "is not supported: unset: the policy (kv_bits for the KV)")
            for given in WITHOUT_EFFECT
        ),
    ],
)
def test_invalid_arguments_are_refused_in_a_line(file, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(
        start, "compile_programs", lambda *_: pytest.fail("refused only when it was compiled")
    )
    assert (
        main(["offload", "--model", FOLDER, *[str(file) if one == "FILE" else one for one in arguments]]) == 1
    )
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        *(
            (
                b'{"prompt": "Once"}\n\n{"prompt": %s}' % wrong,
                "line 3' is not supported: a text or a list of token ids as `prompt`",
            )
            for wrong in (b"42", b"null", b"[1, 2.5]", b"[1, true]", b"[[1]]", b'{"a": 1}')
        ),
        (b'{"prompt": 42}\n{"prompt": 43}', "line 1' is not supported: a text or a list"),
        (b"{Once", "line 1' is not supported: a text, or a JSON object with `prompt`"),
        (b'{"text": "Once"}', "line 1' is not supported: a text, or a JSON object with `prompt`"),
        (b"Once\nupon \xff a time", "line 2' is not supported: UTF-8 text (invalid start byte at byte 6)"),
        (
            b'Once\n{"prompt": [%s]}' % b",".join([b"5"] * 41),
            "line 2: 41 tokens' is not supported: at most 40 tokens",
        ),
        (b"Once " * 60, "tokens' is not supported: at most 40 tokens"),
        (b'{"prompt": [5, 512]}', "line 1: 512' is not supported: token ids 0 to 511"),
        (b'{"prompt": [-1]}', "line 1: -1' is not supported: token ids 0 to 511"),
        (b'{"prompt": []}', "line 1: []' is not supported: at least one token"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
    ],
)
def test_invalid_prompts_are_refused_by_their_line(file, tmp_path, lines, words, capsys, monkeypatch):
    monkeypatch.setattr(
        start, "compile_programs", lambda *_: pytest.fail("refused only when it was compiled")
    )
    (tmp_path / "prompts").write_bytes(lines)
    assert (
        main(["offload", "--model", FOLDER, "--policy", str(file), "--prompts", str(tmp_path / "prompts")])
        == 1
    )
    error = capsys.readouterr().err
    assert error.startswith(f"error: prompts='{tmp_path / 'prompts'}, line ") and words in error


def test_random_prompts_of_any_seed():
    assert random_prompts(2, 3, 512, 7) == random_prompts(2, 3, 512, 7) != random_prompts(2, 3, 512, -7)
    assert all(0 <= token < 5 for prompt in random_prompts(9, 9, 5, -1) for token in prompt)


def test_help_lists_the_flags_with_an_effect_only(capsys):
    assert main(["offload", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("--prompts", "--[no]overlap", "--kernels", "--policy"))
    assert not any(name in out for name in ("__main__", "--num_kv_pages"))


def test_the_python_api(file, tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=6, stop=["there"])
    with LLM(FOLDER, offload=str(file), block_size=16, progress=False) as llm:
        [out] = llm.generate("Once upon a time", params, use_tqdm=False)
        assert out.outputs[0].text == ", " and out.outputs[0].stop_reason == "there" and out.finished
        assert llm.max_model_len == 46 and llm.warm_up_s > 0
        for bad, field in (
            ({"max_tokens": 7}, "max_tokens"),
            ({"max_tokens": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
        ):
            with pytest.raises(InvalidRequest, match=field):
                llm.generate("Once", SamplingParams(**bad), use_tqdm=False)
        for tokens in (2, 6):
            with pytest.raises(
                InvalidRequest,
                match="prompt=41 tokens is not accepted: at most 40 tokens",
            ):
                llm.generate([[5] * 41], SamplingParams(max_tokens=tokens), use_tqdm=False)
    with pytest.raises(ValueError, match=r"offload=3.*python -m search placement"):
        LLM(FOLDER, offload=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "tier"), [("no memory", "gpu"), ("Out of host memory while trying to allocate", "host")]
)
def test_a_full_tier_at_the_start_names_its_limit(file, monkeypatch, message, tier):
    def full(self):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}\nand more lines")

    monkeypatch.setattr(Runtime, "warm_up", full)
    with pytest.raises(
        ConfigError, match=rf"(?s)^{tier}_memory_limit=.*RESOURCE_EXHAUSTED: {message}\ndevice .*GB"
    ):
        LLM(FOLDER, offload=str(file), block_size=16, progress=False)


def test_blocks_of_a_sweep():
    assert parse_blocks(["4x1", "48x3"]) == [(4, 1), (48, 3)]
    for bad in (["4"], ["0x1"], ["axb"], []):
        with pytest.raises(ConfigError, match="blocks="):
            parse_blocks(bad)


def test_search_runs_a_policy_and_its_prediction(tmp_path, capsys):
    arguments = [
        "--model",
        FOLDER,
        "--machine",
        "t4",
        "--prompt_tokens",
        "8",
        "--output_tokens",
        "2",
        "--gpu_mem",
        "1",
        "--cpu_mem",
        "1",
    ]
    arguments += [
        "--gpu_batch_sizes",
        "2",
        "--num_gpu_batches",
        "1",
        "--link_mb",
        "1",
        "--block_size",
        "8",
        "--only",
        "all on the host",
    ]
    assert search(["search", "offload", *arguments, "--output_json", str(tmp_path / "runs.json")]) == 0
    assert "all on the host" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert row["tokens"] == 4 and row["policy"]["kv"]["host"] == 100 and row["predicted"]["tokens_per_s"] > 0


def test_search_says_which_memory_of_the_runtime_is_short(monkeypatch, capsys):
    """The account of the runtime refuses policies that the cost model lets pass."""

    def start(*_, **__):
        raise DoesNotFit("disk", 3_000_000, 1_000_000, "at least 0.003 GB")

    monkeypatch.setattr(offload, "start", start)
    arguments = ["--model", FOLDER, "--prompt_tokens", "8", "--output_tokens", "2", "--link_mb", "1"]
    arguments += ["--gpu_batch_sizes", "2", "--num_gpu_batches", "1", "--block_size", "8", "--gpu_mem", "1"]
    arguments += ["--cpu_mem", "1", "--disk", "1", "--disk_path", ".", "--only", "all on disk"]
    assert search(["search", "offload", *arguments]) == 1
    told = (
        "all on disk: the disk is 0.002 GB too small: disk_limit='0.001 GB' is not supported: at least 0.003"
    )
    assert told in capsys.readouterr().err


def test_search_runs_given_policies_without_a_solver(tmp_path, capsys, monkeypatch):
    """A policy that does not fit gives a row with an error, and the next policy is run."""
    monkeypatch.setattr(placement_solver, "mip", None)
    files = [str(tmp_path / name) for name in ("large.json", "small.json")]
    for path, size in zip(files, (4000, 2), strict=True):
        save_policy(
            policy(MODEL, prompt_tokens=8, output_tokens=2, gpu_batch_size=size, num_gpu_batches=1, kv=HOST),
            path,
        )
    common = [
        "search",
        "offload",
        "--model",
        FOLDER,
        "--gpu_mem",
        "0.02",
        "--cpu_mem",
        "1",
        "--link_mb",
        "1",
        "--output_tokens",
        "2",
    ]
    arguments = [
        "--prompt_tokens",
        "8",
        "--policies",
        ",".join(files),
        "--output_json",
        str(tmp_path / "runs.json"),
    ]
    assert search([*common, *arguments]) == 0
    large, small = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert (
        "gpu_memory_limit" in large["failed"]
        and small["tokens"] == 4
        and small["start_s"].keys() >= {"compile", "warm_up"}
    )
    assert small["link_alone"].keys() <= small["link"].keys()
    assert "large" in capsys.readouterr().out


def test_a_search_whose_given_policies_all_fail_fails(tmp_path, capsys, monkeypatch):
    def start(*_, **__):
        raise DoesNotFit("host", 3_000_000, 1_000_000, "at least 0.003 GB")

    monkeypatch.setattr(offload, "start", start)
    save_policy(policy(MODEL, prompt_tokens=8, output_tokens=2), tmp_path / "one.json")
    arguments = ["--model", FOLDER, "--prompt_tokens", "8", "--output_tokens", "2", "--link_mb", "1"]
    assert search(["search", "offload", *arguments, "--policies", str(tmp_path / "one.json")]) == 1
    assert "one: host_memory_limit='0.001 GB' is not supported: at least 0.003" in capsys.readouterr().err


def test_search_runs_policies_of_one_number_of_stages(tmp_path, capsys):
    """The pinned pools of the process are made for it."""
    files = [str(tmp_path / f"{stages}.json") for stages in (1, 2)]
    for path, stages in zip(files, (1, 2), strict=True):
        save_policy(policy(MODEL, pipeline_parallel_size=stages), path)
    assert search(["search", "offload", "--model", FOLDER, "--policies", ",".join(files)]) == 2
    assert "policies of one pipeline_parallel_size, not of 1, 2" in capsys.readouterr().err


def test_search_leaves_more_room_after_a_policy_did_not_fit(monkeypatch, capsys):
    """Runs take 0.1 MB more than the cost model predicts, and the second policy leaves room for the
    difference.
    """
    tried, work = [], workload(MODEL, open_checkpoint(FOLDER).model_config, 8, 2, page_size=8, wide_bytes=4.0)

    @contextlib.contextmanager
    def start(settings, *_, **__):
        needed = int(predict(work, load_machine("h200"), settings.policy).memory_bytes[0]) + 100_000
        tried.append(settings.policy.weights.device)
        if needed > 900_000:
            raise DoesNotFit("device", needed, 900_000, "more")
        yield None

    measured = {
        "name": "all optimisations",
        "overlap": True,
        "tokens_per_s": 1.0,
        "predicted": {"tokens_per_s": 1.0, "latency_error": 0.0},
    }
    monkeypatch.setattr(offload, "start", start)
    monkeypatch.setattr(
        offload, "_measured", lambda *_: measured | {"policy": POLICY, "link": {"busy_share": 0.5}}
    )
    arguments = [
        "--model",
        FOLDER,
        "--prompt_tokens",
        "8",
        "--output_tokens",
        "2",
        "--gpu_mem",
        "0.0009",
        "--block_size",
        "8",
        "--cpu_mem",
        "1",
        "--link_mb",
        "1",
    ]
    arguments += ["--gpu_batch_sizes", "1,2", "--num_gpu_batches", "1", "--only", "all optimisations"]
    assert search(["search", "offload", *arguments]) == 0
    assert len(tried) == 2 and tried[0] > tried[1] > 0
    assert "link busy 50%" in capsys.readouterr().out

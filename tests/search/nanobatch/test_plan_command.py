"""`python -m search plan`: output files, printed commands and refusals."""

import shlex
from pathlib import Path

import msgspec
import paths
import pytest
from absl import flags
from search_toys import llama_shares

from jaxflow.bench.engine import throughput
from jaxflow.bench.plans import compare as bench
from jaxflow.bench.plans.steady import parse_workload
from jaxflow.cli.engine_flags import engine_config_from_flags, parse
from jaxflow.engine.step_plans import products_dtype
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.choice import Gain, is_sequential, portfolio
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import SHIPPED, load
from jaxflow.pipeline.program import check
from search.__main__ import main
from search.nanobatch import correct
from search.nanobatch import plan as command
from search.nanobatch.layer_tasks import StepShape, chains, make_task, repeated_layer
from search.nanobatch.options import task_options
from search.nanobatch.plan_report import default_out, engine_command, full_device_note, measure_commands
from search.profile.clock import ClockScaling
from search.profile.modelled import modelled_profile
from search.profile.op_times import PAIR_DECODES, PAIR_TOKENS, Pair, ProfileError, save_profile, seconds
from search.profile.share_times import ShareTimes, product_shapes

CONFIG = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config

FP8 = msgspec.structs.replace(
    llama_shares().profile,
    model="org/llama-3-70b",
    tensor_parallel_size=2,
    dtype="float8_e4m3fn",
    kv_cache_dtype="float8_e4m3fn",
)
pytestmark = pytest.mark.usefixtures("no_flags")


def test_a_plan_names_its_pipeline_stages(tmp_path, capsys):
    line = ["--modelled", "--tokens", "1024", "--nano_batches", "1", "--pipeline_parallel_size", "3"]
    assert main(["search", "plan", *line, "--out", str(tmp_path / "plan.json")]) == 0
    assert "--pipeline_parallel_size 3" in capsys.readouterr().out.splitlines()[-1]
    plan = load(tmp_path / "plan.json")
    assert sum(plan.stages) == CONFIG.num_layers and len(plan.stages) == 3
    assert plan.stages[-1] < max(plan.stages)  # the last stage also has the head
    assert plan.target.parallel.pp == 3


def test_more_stages_than_layers_are_refused(capsys):
    assert main(["search", "plan", "--modelled", "--pipeline_parallel_size", "33"]) == 2
    assert "pipeline_parallel_size=33 is not supported: 1 to 32" in capsys.readouterr().err


def test_a_portfolio_of_a_profile(tmp_path, capsys, monkeypatch):
    """The command writes one plan for each of two workloads, with the better of two step sizes."""
    monkeypatch.chdir(tmp_path)
    save_profile(llama_shares().profile, tmp_path / "h200.json")
    line = ["--profile", str(tmp_path / "h200.json"), "--tokens", "1024,2048", "--nano_batches", "1"]
    assert main(["search", "plan", *line, "--prompt_tokens", "1024,512", "--output_tokens", "512,512"]) == 0
    out = capsys.readouterr().out
    assert "1024-512.json" in out and "sequential" in out and "energy bound" in out
    folder = Path("plans") / "h200-llama-3.1-8b-bfloat16"
    assert (
        f"bench throughput --model llama-3.1-8b --plan {folder} --input_len 1024 --output_len 512"
        in out.splitlines()[-1]
    )
    for name, decodes in (("1024-512", 1 / 3), ("512-512", 1 / 2)):
        plan = load(folder / f"{name}.json")
        check(plan, model_graph(CONFIG))
        assert (
            plan.tokens in (1024, 2048)
            and plan.target.decode_tokens == round(plan.tokens * decodes)
            and plan.target.device == "H200"
        )


def test_what_was_found_is_run_by_the_line_that_is_printed():
    """The printed command carries the plan's devices and dtypes.

    The default file has a shipped plan's name.
    """
    out = default_out(FP8, several=False)
    assert out == Path("plans/h200-llama-3-70b-tp2-float8_e4m3fn.json") and (SHIPPED / out.name).exists()
    words = engine_command(FP8, "org/llama-3-70b", out, 512, 0).split()
    assert words[4:] == [
        "--model", "org/llama-3-70b", "--quantization", "fp8", "--kv_cache_dtype", "fp8",
        "--tensor_parallel_size", "2", "--plan", str(out), "--input_len", "512", "--output_len", "1",
        "--compare_sequential",
    ]  # fmt: skip
    throughput.define_flags()
    parse(words[3:])
    assert flags.FLAGS.compare_sequential and engine_config_from_flags().tensor_parallel_size == 2


PROFILE = str(paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json")
UNSURE = {Path("plans/two of them/1024-512.json"): "1024/512", Path("plans/two of them/512-0.json"): "512/0"}
LINES = [
    shlex.split(line) for line in measure_commands(FP8, "org/llama-3-70b", Path("plans/two of them"), UNSURE)
]


def test_the_bench_takes_the_line_that_measures_what_was_found():
    """The command measures both plans on both workloads with the plans' kind of engine."""
    assert LINES[0][:4] == ["python", "-m", "jaxflow.bench", "plans"] and len(LINES) == 3
    bench.define_flags()
    parse(LINES[0][3:])
    f, config = flags.FLAGS, engine_config_from_flags()
    assert (config.model, config.tensor_parallel_size, config.kv_cache_dtype) == ("org/llama-3-70b", 2, "fp8")
    assert products_dtype(config) == "float8_e4m3fn" and f.output_json == "two of them-measured.json"
    assert [Path(path) for path in f.plans] == list(UNSURE) and [
        parse_workload(text).name for text in f.workloads
    ] == [*UNSURE.values()]


@pytest.mark.parametrize("number", [1, 2])
def test_what_was_measured_of_it_is_written_by_the_lines_after_that(number):
    """`search correct` overwrites the plan file, and the last command runs the file."""
    assert LINES[number][:4] == ["python", "-m", "search", "correct"]
    correct.define_flags()
    parse(LINES[number][3:])
    f = flags.FLAGS
    assert Path(f.plan) == Path(f.out) == list(UNSURE)[number - 1] and f.report == [
        "two of them-measured.json"
    ]


def test_plans_that_are_not_sure_to_gain_are_printed_with_what_makes_them_run(tmp_path, capsys):
    """Plans below their margin need `bench plans` first, because an engine would run the sequential step."""
    kind = [
        "--modelled",
        "--orders",
        "phases",
        "--tokens",
        "2048",
        "--cuts",
        "1024",
        "--sms",
        "40",
        "--overlap",
        "memory",
    ]
    lengths = ["--prompt_tokens", "1024,512", "--output_tokens", "512,1024"]
    assert main(["search", "plan", *kind, *lengths, "--out", str(tmp_path / "found")]) == 0
    lines, files = (
        capsys.readouterr().out.splitlines(),
        [tmp_path / "found" / name for name in ("1024-512.json", "512-1024.json")],
    )
    assert lines[-5].startswith("The predicted gain is within the margin of error") and all(
        str(file) in lines[-5] for file in files
    )
    assert (
        f"--plans {files[0]},{files[1]} --workloads 1024/512,512/1024 --output_json found-measured.json"
        in lines[-4]
    )
    assert [
        f"--plan {file} --out {file}" in line for file, line in zip(files, lines[-3:-1], strict=True)
    ] == [True, True]
    assert f"bench throughput --model llama-3.1-8b --plan {tmp_path / 'found'}" in lines[-1]
    plans = [load(file) for file in files]
    assert (
        not any(Gain.of(plan.predictions).ever for plan in plans) and plans[0].nano_ops == plans[1].nano_ops
    )
    measured = [correct.corrected(plan, [correct.MeasuredGain(683, 1280.0, 1.1, 0.0)]) for plan in plans]
    assert [
        len(found)
        for found in portfolio(measured, (), lambda tokens: sequential_plan(CONFIG, tokens, 1)).values()
    ] == [3]


@pytest.mark.parametrize(
    ("out", "lengths", "words"),
    [
        ("folder", ["1024"], "a file that can be written, for the plan of one workload"),
        ("file/p.json", ["1024"], "a file that can be written"),
        ("file", ["1024", "512"], "a folder that is there or can be made"),
        ("taken", ["1024", "512"], "of files that can be written"),
    ],
)
def test_where_plans_could_not_be_written_is_refused_before_the_search(
    out, lengths, words, tmp_path, monkeypatch, capsys
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "512-512.json").mkdir(parents=True)
    monkeypatch.setattr(command, "solve_one", lambda *_: pytest.fail("searched"))
    line = [
        "--prompt_tokens",
        ",".join(lengths),
        "--output_tokens",
        ",".join("512" for _ in lengths),
        "--out",
        str(tmp_path / out),
    ]
    assert main(["search", "plan", "--modelled", *line]) == 2
    said = capsys.readouterr().err
    assert f"out='{tmp_path / out}'" in said and words in said


@pytest.mark.parametrize(
    ("flag", "value", "there"),
    [
        ("gpus", "4", "1"),
        ("dtype", "float8_e4m3fn", "'bfloat16'"),
        ("kv_cache_dtype", "float8_e4m3fn", "'bfloat16'"),
        ("device", "B200", "'H200'"),
    ],
)
def test_a_flag_that_differs_from_the_profile_is_refused(flag, value, there, tmp_path, capsys):
    save_profile(llama_shares().profile, tmp_path / "h200.json")
    alike = {"gpus": "1", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "device": "H200"} | {flag: value}
    given = [word for name, value in alike.items() for word in (f"--{name}", value)]
    assert (
        main(
            [
                "search",
                "plan",
                "--profile",
                str(tmp_path / "h200.json"),
                *given,
                "--out",
                str(tmp_path / "p.json"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert f"{flag}=" in said and value in said and f"{there}, which --profile" in said


@pytest.mark.parametrize(("device", "capability", "sms"), [("A100-80GB", "8.0", 108), ("B200", "10.0", 148)])
def test_where_kernels_take_the_whole_device_none_is_offered_a_part(
    device, capability, sms, tmp_path, capsys
):
    """These kernels ignore shares of SMs, so a predicted gain would not be real."""
    out = tmp_path / "p.json"
    assert (
        main(["search", "plan", "--modelled", "--device", device, "--cuts", "1024", "--out", str(out)]) == 0
    )
    said = capsys.readouterr().out
    assert (
        f"kernels always take the whole device, unless it has compute capability 9.0; {device} has "
        f"{capability}."
    ) in said.splitlines()[0]
    assert is_sequential(load(out)) and "an engine runs the sequential step" in said
    assert DEVICES[device].sms == sms


def test_a_profile_without_parts_of_a_device_says_so():
    profile = llama_shares().profile
    whole = msgspec.structs.replace(
        profile, op_times=tuple(one for one in profile.op_times if one.sms == 132)
    )
    assert len(ShareTimes(whole, model_graph(CONFIG)).offered_sms()) == 1
    assert full_device_note(whole).endswith("the profile has no times on a part of the device.")
    assert "B200 has 10.0" in full_device_note(msgspec.structs.replace(whole, device="NVIDIA B200"))


def test_shares_that_are_offered():
    base = llama_shares()
    assert base.offered_sms() == (28, 40, 92, 104, 132)
    tasks, step = tasks_of(base)
    few = ShareTimes(base.profile, base.graph, memory_sms=(40,)).at(1.5e9)
    assert few.offered_sms() == (40, 92, 132)
    offered = {
        name: [option.share for option in task_options(few, tasks[name], step, 9)]
        for name in ("decode_attention", "up_gate")
    }
    assert offered == {"decode_attention": [40, 132], "up_gate": [92, 132]}
    copied = ShareTimes(
        msgspec.structs.replace(
            base.profile, pairs=(Pair("up_gate", "exchange", 132, 0, 0.98, 0.9, 700.0, 1500.0),)
        ),
        base.graph,
    )
    assert copied.offered_sms() == base.offered_sms()  # copies hold no SMs


def test_sums_of_a_small_device_hold_no_more_than_it_has():
    """A CPU counts as one SM."""
    graph = model_graph(CONFIG, 2)
    shares = ShareTimes(
        modelled_profile("llama-3.1-8b", CONFIG, DEVICES["H200"], tp=2, total_sms=1, sms=(1,)), graph
    )
    whole = StepShape.steady_state(2048, 1024, 512)
    sums = [chain for chain in chains(repeated_layer(graph)) if chain.is_network]
    tasks = [make_task(chain, 0, 2048, whole, None, "bfloat16", ("network",), False) for chain in sums]
    assert [
        [option.share for option in task_options(shares, task, whole.part(0, 2048), 9)] for task in tasks
    ] == [
        [1],
        [1],
    ]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["--modelled", "--sms", "40,132"], 2, "1 to 131"),
        (["--modelled", "--device", "H100", "--sms", "0,40"], 2, "1 to 131 of a device's 132 SMs"),
        (
            ["--modelled", "--device", "B200", "--sms", "40"],
            2,
            "sms='40' is not supported: nothing: kernels always take the whole device",
        ),
        (["--modelled", "--tokens", "few"], 2, "whole numbers"),
        (["--modelled", "--prompt_tokens", "1,2"], 2, "output_tokens"),
        (
            ["--modelled", "--prompt_tokens", "0", "--output_tokens", "0"],
            2,
            "prompt_tokens='0' is not supported: whole numbers of 1 or more",
        ),
        (["--modelled", "--prompt_tokens", "1000000"], 2, "at most 131072, which llama-3.1-8b was made for"),
        (
            ["--modelled", "--prompt_tokens", "1024,131000", "--output_tokens", "512,512"],
            2,
            "prompt_tokens=131000",
        ),
        (["--modelled", "--gpus", "3"], 2, "gpus=3 is not supported: a divisor of llama-3.1-8b's 32 heads"),
        (
            ["--modelled", "--output_tokens", "-1"],
            2,
            "output_tokens='-1' is not supported: whole numbers of 0 or more",
        ),
        (["--modelled", "--orders", ""], 2, "orders='' is not supported: one or more of solver, sequential"),
        (["--modelled", "--orders", "two,three"], 2, "orders='three'"),
        ([], 2, "--modelled"),
        (["--modelled", "--profile", PROFILE], 2, "--modelled"),
        (["--profile", "absent.json"], 1, "absent.json"),
        (["--modelled", "--device", "A100-80GB", "--dtype", "float8_e4m3fn"], 2, "bfloat16"),
        (["--modelled", "--nano_batches", "1", "--split"], 1, "nano_batches"),
        (
            ["--profile", PROFILE, "--sms", "33"],
            2,
            "sms=33 is not supported: SMs that ops of the profile were timed on (24, 32, 40, ",
        ),
    ],
)
def test_what_is_refused_says_what_would_do(line, code, words, tmp_path, capsys):
    assert main(["search", "plan", *line, "--out", str(tmp_path / "p.json")]) == code
    assert words in capsys.readouterr().err


def tasks_of(shares):
    graph = model_graph(CONFIG)
    rates, whole = None, StepShape.steady_state(2048, 1024, 512)
    return {
        chain.names[-1]: make_task(chain, 0, 2048, whole, rates, "bfloat16", ("memory",), False)
        for chain in chains(repeated_layer(graph))
    }, whole.part(0, 2048)


def pair(profile, slower: float, clock_mhz: float, op="up_gate", load: float = 1.0) -> Pair:
    """Return a pair as `search measure` writes it.

    load: attention's seconds over the product's. slower: seconds together over the longer one of both.
    """
    here = ClockScaling(model_graph(CONFIG), profile).at(profile, clock_mhz * 1e6)
    product_s = seconds(here, op, PAIR_TOKENS, 0, 104)
    keys = next(
        keys
        for keys in range(1, 4096)
        if seconds(here, "decode_attention", PAIR_DECODES, keys, 28) >= load * product_s
    )
    together_s = slower * max(product_s, seconds(here, "decode_attention", PAIR_DECODES, keys, 28))
    best = (
        seconds(profile, op, PAIR_TOKENS, 0, 132),
        seconds(profile, "decode_attention", PAIR_DECODES, keys, 132),
    )
    return Pair(op, "decode_attention", 104, 28, *(alone / together_s for alone in best), 700.0, clock_mhz)


@pytest.mark.parametrize("load", [0.8, 1.0, 1.2])
def test_what_pairs_lose_beyond_sms_and_clock_is_found_whichever_of_them_ended_first(load):
    """The slowdown is the median over pairs. Pairs below the measured keys are left out."""
    base = llama_shares()
    drawn = [
        pair(base.profile, slower, clock, load=load)
        for slower, clock in ((1.1, 1440.0), (1.2, 1500.0), (1.9, 1700.0))
    ]
    short = Pair("out_proj", "decode_attention", 104, 28, 0.95, 1.0, 700.0, 1980.0)
    shares = ShareTimes(msgspec.structs.replace(base.profile, pairs=(*drawn, short)), base.graph)
    assert shares.overlap_slowdown == pytest.approx(1.2, rel=0.01)
    tasks, step = tasks_of(shares)
    found, alone = (
        {o.share: o.seconds for o in task_options(one, tasks["decode_attention"], step, 9)}
        for one in (shares, base)
    )
    assert found[28] == pytest.approx(1.2 * alone[28], rel=0.01)


def test_a_share_between_those_that_were_timed_has_a_rate_between_theirs():
    shares, step = llama_shares(), StepShape.steady_state(2048, 1024, 512).part(0, 2048)
    ops = {op.name: op for op in shares.graph.layers[-1]}
    few, between, many = (shares.seconds(ops["decode_attention"], step, sms) for sms in (28, 34, 40))
    assert 1 / between == pytest.approx((1 / few + 1 / many) / 2)
    with pytest.raises(ProfileError, match="sms=8"):
        shares.seconds(ops["decode_attention"], step, 8)


def test_shares_are_told_by_the_waves_they_fill():
    """104 SMs fill every wave at 1664 tokens, and 128 SMs at 2048 tokens."""
    shares = ShareTimes(llama_shares().profile, model_graph(CONFIG), product_shapes(CONFIG, 1))
    assert shares.fill("qkv", 1664, 104) == 1.0 == shares.fill("up_gate", 1664, 104)
    assert shares.fill("qkv", 2048, 128) == 1.0 > shares.fill("qkv", 2048, 132)


def test_more_of_the_device_is_never_slower():
    tasks, step = tasks_of(llama_shares())
    for task in tasks.values():
        options = task_options(llama_shares(), task, step, 9)
        assert [o.share for o in options] == sorted(o.share for o in options)
        assert [o.seconds for o in options] == sorted((o.seconds for o in options), reverse=True)

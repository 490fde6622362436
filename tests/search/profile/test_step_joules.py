"""The table of joules of a step: its arithmetic, the command on a simulated card, and its programs."""

import dataclasses
import itertools
import json
from pathlib import Path

import msgspec
import paths
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given
from hypothesis import strategies as st
from own_flags import own_flags

from jaxflow.bench.plans.steady import StepWorkload, average_step
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import bound, shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, model_graph
from pallas_kernels.cards import card_of
from pallas_kernels.kernel_set import kernel_set_for
from search.__main__ import main
from search.profile import measure as measuring
from search.profile import step_parts
from search.profile.clock import shipped_card
from search.profile.op_bench import LayerBench
from search.profile.op_times import OpTime, Profile, load_profile
from search.profile.step_joules import Account, Accounting, at_case, nearest, sequential, step_ops
from search.profile.sustain import Sustained

KERNELS = ("kCustomCall", "kKernel", "kMosaicGpu", "kCustomKernel", "kGemm", "kCublasLtMatmul")
NAME = str(paths.MODELS / "tiny-llama")
LLAMA = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
GRAPH = model_graph(LLAMA)
POWER, CARD = shipped_power("H200"), shipped_card("H200")
assert POWER is not None
STEP = average_step(StepWorkload(1024, 512), 2048, most_rows=4096, kv_tokens=10**9, page_size=64)
NAMES = tuple(dict.fromkeys(op.name for op in GRAPH.ops()))
OPS = step_ops(GRAPH, STEP, NAMES)
PROFILE = paths.ROOT / "search/profiles/h200-llama-3.1-8b.json"
REPORTS = paths.ROOT / "benchmarks/h200/llama-3.1-8b"
PLANS = REPORTS / "plans-bf16-sequential.json"


def of_curves(clock_mhz: float, factor: float = 1.0, sms: int = 132) -> Profile:
    """Return a profile of ops that need `factor` times the joules of the bound's curves, above idle."""
    times = []
    for one in OPS:
        least = bound(one.work, DEVICES["H200"], POWER)
        took = least.longest_s / one.layers
        share = 1e6 * clock_mhz / POWER.highest_clock_hz
        spent = (
            POWER.idle_w * took + factor * float(POWER.dynamic_j(one.work, "bfloat16", share)) / one.layers
        )
        case = one.case
        times.append(OpTime(case.op, case.tokens, case.keys, sms, took, spent / took, clock_mhz, spent))
    return Profile("NVIDIA H200", {}, "toy", 1, "bfloat16", "bfloat16", 132, "drawn", tuple(times))


def accounting(profile: Profile) -> Accounting:
    fixed = card_of("H200").fixed_joules
    return Accounting(GRAPH, profile, STEP, OPS, DEVICES["H200"], POWER, CARD, fixed)


def test_the_ops_of_a_step_hold_all_of_its_work():
    assert [one.op.name for one in OPS] == list(NAMES)
    assert sum(one.work.flops for one in OPS) == pytest.approx(GRAPH.work(STEP).flops)
    for one in OPS:  # a case in isolation has the work of one layer
        if one.op.name not in ("embed", "final_norm", "sample"):
            alone = one.op.work(one.case.composition)
            assert alone.flops * one.layers == pytest.approx(one.work.flops, rel=2e-3)
            assert alone.memory_bytes * one.layers == pytest.approx(one.work.memory_bytes, rel=0.02)


@given(st.floats(700, 1980), st.floats(700, 1980), st.floats(1, 2))
def test_joules_move_with_the_clock_as_in_sequential_steps(own, clock, factor):
    """The joules above idle scale with the curves; at an op's own clock nothing changes."""
    table, same = accounting(of_curves(own, factor)), accounting(of_curves(own, factor))
    for row in same.rows({}, own):
        assert row.now == pytest.approx(row.alone) and row.source == "this"
    for row in table.rows({}, clock):
        op = next(one for one in OPS if one.op.name == row.op)
        shares = [1e6 * mhz / POWER.highest_clock_hz for mhz in (own, clock)]
        before, then = (float(sequential(POWER, CARD).dynamic_j(op.work, "bfloat16", at)) for at in shares)
        above = factor * float(POWER.dynamic_j(op.work, "bfloat16", shares[0])) * then / before
        assert row.now > above and row.now - above < POWER.idle_w * 0.1
        assert row.bound is not None and row.difference == pytest.approx(row.now - min(row.now, row.bound))


def test_a_card_without_a_share_of_its_own_scales_bytes_as_the_bound_does():
    assert CARD is not None and sequential(POWER, None) is POWER
    assert sequential(POWER, msgspec.structs.replace(CARD, sequential_byte_fixed=None)) is POWER


def of_report(report: dict) -> Accounting:
    """Return the accounting of the ops of a committed report of `search joules`."""
    step = average_step(
        StepWorkload(1024, 512), report["step"]["tokens"], most_rows=4096, kv_tokens=10**9, page_size=64
    )
    graph = model_graph(LLAMA, 1, FP8 if report["dtype"] == "float8_e4m3fn" else BFLOAT16)
    ops, times = step_ops(graph, step, NAMES), []
    for row in report["ops"]:
        one = next(one for one in ops if one.op.name == row["op"])
        joules, case = row["alone"] / one.layers, one.case
        took, watts, clock = joules / row["watts"], row["watts"], row["clock_mhz"]
        times.append(OpTime(case.op, case.tokens, case.keys, 132, took, watts, clock, joules))
    dtypes = report["dtype"], report["kv_cache_dtype"]
    profile = Profile("NVIDIA H200", {}, "llama-3.1-8b", 1, *dtypes, 132, "read", tuple(times))
    return Accounting(graph, profile, step, ops, DEVICES["H200"], POWER, CARD)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_the_ops_at_the_steps_clock_add_up_to_the_measured_step(name):
    """Between two readings: the whole step, and the step less all idle time that its kernels leave."""
    report = json.loads((REPORTS / f"joules-{name}.json").read_text("utf-8"))
    whole, names = report["whole_step"], {row["op"] for row in report["ops"]}
    took, joules = of_report(report).of_ops(names, whole["clock_mhz"])
    assert whole["joules"] - POWER.cap_w * (whole["seconds"] - took) < joules * 1.01
    assert joules < whole["joules"]


def test_attention_needs_the_joules_that_the_parts_of_a_step_show():
    """The layers with attention less those without it, whose FLOPs are scaled to the same clock."""
    report = json.loads((REPORTS / "joules-bf16-parts.json").read_text("utf-8"))
    parts = {part["name"]: part for part in report["parts"]}
    layers, others = parts["layers"], parts["layers, no attention"]
    shares = [1e6 * part["clock_mhz"] / POWER.highest_clock_hz for part in (others, layers)]
    before, then = (POWER.flop["bfloat16"].at(share) for share in shares)
    idle_j = POWER.idle_w * others["seconds"]
    others_j = (others["joules"] - idle_j) * then / before + idle_j * shares[0] / shares[1]
    _, joules = of_report(report).of_ops(("decode_attention", "chunk_attention"), layers["clock_mhz"])
    assert joules == pytest.approx(layers["joules"] - others_j, rel=0.03)


def test_the_least_is_of_all_measurements_and_the_largest_difference_is_first():
    this, other = of_curves(1500, 1.5), of_curves(1500, 1.2)
    shared = of_curves(1500, 1.1, sms=108)
    both = msgspec.structs.replace(this, op_times=(*this.op_times, *shared.op_times[3:]))
    rows = accounting(both).rows({"other": other}, None)
    assert {row.source for row in rows} == {"other", "this, 108 SMs"}
    assert [row.difference for row in rows] == sorted((row.difference for row in rows), reverse=True)
    assert all(row.least < row.now for row in rows)


def test_the_accounts_are_of_the_same_work():
    fixed, curves, best = accounting(of_curves(1500)).accounts(POWER.highest_clock_hz / 1e6)
    work, constants = GRAPH.work(STEP), card_of("H200").fixed_joules
    assert constants is not None
    above = work.flops * constants["flop"]["bfloat16"] + work.memory_bytes * constants["byte"]
    assert fixed.dynamic_j == pytest.approx(above)
    assert fixed.tokens_per_s == pytest.approx(STEP.tokens * 580 / above)
    assert curves.dynamic_j == pytest.approx(float(POWER.dynamic_j(work, "bfloat16")))
    assert best.dynamic_j < curves.dynamic_j and best.tokens_per_s == pytest.approx(
        STEP.tokens / bound(work, DEVICES["H200"], POWER).longest_s
    )
    for account in (fixed, curves, best):
        assert nearest((fixed, curves, best), account.dynamic_j) == account
    assert nearest((Account("a", 1.0, None, 1.0), Account("b", 4.0, None, 1.0)), 1.9).name == "a"


def test_between_the_points_of_a_profile_joules_are_interpolated_and_the_clock_stays_inside():
    def entry(tokens: int, **values: float) -> OpTime:
        return OpTime("qkv", tokens, 0, 132, tokens * 1e-7, **values)

    whole = Profile(
        "H200", {}, "toy", 1, "bfloat16", "bfloat16", 132, "drawn",
        (
            entry(128, watts=400.0, clock_mhz=1900.0, joules=0.01),
            entry(256, watts=600.0, clock_mhz=1500.0),  # no counter: watts times seconds
            entry(192),  # neither
        ),
    )  # fmt: skip
    case = next(one.case for one in OPS if one.op.name == "qkv")
    found = at_case(whole, dataclasses.replace(case, tokens=192))
    assert found is not None and found.clock_mhz == 1700.0
    assert found.joules == pytest.approx((0.01 + 600 * 256e-7) / 2)
    beyond = at_case(whole, dataclasses.replace(case, tokens=512))
    assert beyond is not None and beyond.clock_mhz == 1500.0 and beyond.seconds == pytest.approx(512e-7)
    assert at_case(whole, dataclasses.replace(case, op="down")) is None


def test_the_table_of_a_profile_and_a_report(tmp_path, no_flags, capsys):
    """The measured step of the committed report, and the fixed account as the nearest to it."""
    out = tmp_path / "joules.json"
    files = ["--profile", str(PROFILE), "--plans", str(PLANS), "--output_json", str(out)]
    assert main(["search", "joules", *files]) == 0
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    row = next(
        row
        for row in json.loads(PLANS.read_text())["plans"]
        if (row["workload"], row["tokens"]) == ("1024/512", 2048)
    )
    assert found["whole_step"]["joules"] / found["whole_step"]["tokens"] == pytest.approx(
        row["joules_per_token"]
    )
    assert len(found["ops"]) == 9 and found["not_in_the_sum"] == ["embed", "final_norm", "logits", "sample"]
    assert "fixed constants" in printed.splitlines()[-2]


class FakeCard:
    """A card whose runs take 3 ms at 600 W; no program runs."""

    def __init__(self, monkeypatch):
        self.sustained: list[float] = []
        monkeypatch.setattr(measuring, "timed", self.timed)
        monkeypatch.setattr(measuring, "compiled", self.compiled)

    def compiled(self, layer, batch, threads):
        return [(layer.alone(entry), None) for entry in batch]

    def timed(self, executable, given, kept, seconds_each):
        self.sustained.append(seconds_each)
        return Sustained(3e-3, 600.0, 1500.0, 1.8, 0.1)


LINE = ["search", "joules", "--model", NAME, "--measure", "--dtype", "float32", "--tokens", "32"]
LINE += ["--prompt_tokens", "24", "--output_tokens", "16"]


def test_ops_and_the_step_are_measured_once_and_continued(tmp_path, capsys, monkeypatch):
    card, file, out = FakeCard(monkeypatch), str(tmp_path / "ops.json"), tmp_path / "report.json"
    run = Sustained(2e-3, 650.0, 1400.0, 1.2)
    monkeypatch.setattr(step_parts, "sustain", lambda enqueue, seconds: (enqueue(), run)[1])
    with own_flags():
        assert main([*LINE, "--profile", file, "--nostep", "--ops", "qkv,logits"]) == 0
    assert card.sustained == [2.0, 2.0]
    assert {one.op for one in load_profile(file).op_times} == {"qkv", "logits"}
    with own_flags():
        assert main([*LINE, "--profile", file, "--parts", "--output_json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert "attention alone" in capsys.readouterr().out
    assert len(card.sustained) == len(found["ops"]) == 10  # all but embed, final_norm and sample
    whole = found["whole_step"]
    assert (whole["joules"], found["watts"], found["clock_mhz"]) == (1.2, 650.0, 1400.0)
    config = open_checkpoint(NAME).model_config
    layer, _ = measuring.this_device(NAME, config, "float32", "auto")
    step = average_step(StepWorkload(24, 16), 32, most_rows=64, kv_tokens=10**9, page_size=64)
    for one in step_ops(model_graph(config), step, ["qkv", "down"]):
        row = next(row for row in found["ops"] if row["op"] == one.op.name)
        assert row["alone"] == pytest.approx(config.num_layers * 1.8 / layer.alone(one.case).calls)
    nested = [set(part["ops"]) for part in found["parts"] if part["nested"]]
    assert nested[0] == {op.name for op in model_graph(config).ops()}
    assert all(later < earlier for earlier, later in itertools.pairwise(nested))
    for part in found["parts"]:  # beside each part stand its ops alone
        alone = sum(row["alone"] for row in found["ops"] if row["op"] in part["ops"])
        assert part["alone_joules"] == pytest.approx(alone) and part["seconds"] == 2e-3


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["--model", NAME], 2, "profile=None"),
        (["--profile", "{none}", "--ops", "qkv"], 2, "ops='qkv'"),
        (["--profile", "{none}", "--parts"], 2, "parts=True"),
        ([*LINE[2:], "--profile", "{new}", "--ops", "qvk"], 2, "ops='qvk'"),
        ([*LINE[2:], "--profile", "{new}", "--sms", "64"], 2, "sms='64'"),
        ([*LINE[2:], "--profile", "{new}", "--seen", str(PROFILE)], 1, "device='NVIDIA H200'"),
        (["--profile", str(PROFILE), "--model", "llama-2-7b"], 1, "model='llama-3.1-8b'"),
        (["--profile", str(PROFILE), "--plans", str(PROFILE)], 1, "KeyError('plans')"),
        (["--profile", str(PROFILE), "--plans", str(PLANS), "--tokens", "1024"], 1, "step of 1024 tokens"),
        (["--profile", str(PROFILE), "--seen", "{fp8}"], 1, "dtype='float8_e4m3fn'"),
        (["--profile", "{fp8}", "--plans", str(PLANS)], 1, "a report of NVIDIA H200"),
        (["--profile", str(PROFILE), "--prompt_tokens", "200000"], 2, "prompt_tokens=200000"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_is_accepted(line, code, words, tmp_path, no_flags, capsys):
    fp8 = paths.ROOT / "benchmarks/settings/h200-llama-3.1-8b-fp8-profile.json"
    names = {"none": tmp_path / "none.json", "new": tmp_path / "new.json", "fp8": fp8}
    assert main(["search", "joules", *(word.format(**names) for word in line)]) == code
    error = capsys.readouterr().err
    assert words in error and not Path(tmp_path / "new.json").exists()


def bench(fp8: bool) -> LayerBench:
    kv = "float8_e4m3fn" if fp8 else "bfloat16"
    heads = {"head_dim": 128, "queries_per_kv_head": 4, "page_size": 64}
    kernels = kernel_set_for("gpu", "9.0", **heads, dtype="bfloat16", kv_dtype=kv, device="NVIDIA H200")
    return LayerBench(LLAMA, kernels, dtype="bfloat16", kv_dtype=kv, fp8=fp8, platform="gpu")


QUICK = [("logits", False), ("down", False), ("out_proj", False), ("mlp_norm", True)]  # under a second each


@pytest.mark.parametrize(
    ("name", "fp8"),
    [
        pytest.param(name, fp8, marks=() if (name, fp8) in QUICK else pytest.mark.slow)
        for name in NAMES
        if name not in ("embed", "final_norm", "sample")
        for fp8 in (False, True)
    ],
)
def test_the_loop_of_each_op_of_the_step_compiles_for_an_h200(name, fp8):
    case = next(one.case for one in OPS if one.op.name == name)
    layer = bench(fp8).head() if name == "logits" else bench(fp8)
    program, mesh = layer.alone(case), h200_mesh()
    compiled = compile_for_h200(
        program.function, abstract(mesh, program.given), abstract(mesh, program.kept), donate_argnums=(1,)
    )
    kernels = [thunk for thunk in compiled.thunks if thunk.kind in KERNELS]
    assert compiled.machine_code and kernels
    # A loop of one round is no loop: all calls are in a row.
    assert max(thunk.depth for thunk in kernels) > 0 or len(kernels) >= program.calls

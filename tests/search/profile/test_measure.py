"""Measurement of ops: a real profile of a tiny model, and compiled programs for an H200."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import paths
import pytest
import toy
from h200 import abstract, compile_for_h200, h200_mesh

from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.plan import load, save
from jaxflow.request import Request
from pallas_kernels.kernel_set import REFERENCE, kernel_set_for
from search.__main__ import main
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.simulate import simulate
from search.profile import measure as command
from search.profile.entries import PAIR_KEYS, OpPair, coarse_first, described, entries
from search.profile.measure import TimeBudget, resumed, this_device
from search.profile.op_bench import LayerBench, OpCase, draw
from search.profile.op_times import ATTENTION, OpTime, Pair, ProfileError, load_profile, save_profile, seconds
from search.profile.share_times import ShareTimes

NAME = str(paths.MODELS / "tiny-llama")
LLAMA = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
SHARES = (24, 32, 40, 48)


def tiny():
    return this_device(NAME, open_checkpoint(NAME).model_config, "auto", "auto")


def llama(fp8: bool = False) -> LayerBench:
    kv = "float8_e4m3fn" if fp8 else "bfloat16"
    heads = {"head_dim": 128, "queries_per_kv_head": 4, "page_size": 64}
    kernels = kernel_set_for("gpu", "9.0", **heads, dtype="bfloat16", kv_dtype=kv, device="NVIDIA H200")
    return LayerBench(LLAMA, kernels, dtype="bfloat16", kv_dtype=kv, fp8=fp8, platform="gpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return (path, profile) of a measured profile."""
    path = tmp_path_factory.mktemp("profiles") / "here.json"
    layer, empty = tiny()
    wanted = entries(layer.ops, (8, 32), (32,), (), empty.total_sms)
    profile, left = command.measure(empty, layer, wanted, path, TimeBudget(300), seconds_each=0.003)
    assert not left
    return path, profile


def test_a_profile_of_this_machine_answers_for_every_op(measured):
    path, profile = measured
    assert load_profile(path, device="cpu", model=NAME) == profile
    assert profile.total_sms == 1 and not profile.pairs
    for op in tiny()[0].ops:
        for tokens in (8, 20, 64):
            assert 0 < seconds(profile, op, tokens, 32) < 1
    assert all(one.watts is None and one.clock_mhz is None for one in profile.op_times)


def test_a_profile_that_was_cut_short_is_continued(measured, tmp_path):
    _, whole = measured
    path = tmp_path / "cut.json"
    kept = [one for one in whole.op_times if one.op != "down"]
    save_profile(msgspec.structs.replace(whole, op_times=tuple(kept)), path)
    layer, empty = tiny()
    wanted = entries(layer.ops, (8, 32), (32,), (), 1)
    cut = resumed(path, empty)
    assert command.measure(cut, layer, wanted, path, TimeBudget(0), seconds_each=0.003) == (
        cut,
        [OpCase("down", 32), OpCase("down", 8)],
    )
    profile, left = command.measure(cut, layer, wanted, path, TimeBudget(300), seconds_each=0.003)
    assert not left and list(profile.op_times[: len(kept)]) == kept
    assert {one.op for one in profile.op_times[len(kept) :]} == {"down"}
    assert load_profile(path) == profile
    assert command.measure(profile, layer, wanted, path, TimeBudget(300), seconds_each=0.003) == (profile, [])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ([], 0, "not known along tokens, keys, SMs, where no point lies between others"),
        ([], 0, "p.json: not written, nothing was measured of"),
        ([], 0, "14 of chunk_attention"),  # seven sizes at 256 and 512 keys
        (["--keys", "32,4096"], 2, "keys=4096 is not supported: at most 512"),
    ],
)
def test_contexts_that_nobody_asked_for_are_cut_to_the_model(line, code, words, tmp_path, no_flags, capsys):
    """A time limit of 0 measures nothing and states no interpolation error."""
    assert (
        main(
            [
                "search",
                "measure",
                "--model",
                NAME,
                "--time_limit_s",
                "0",
                "--out",
                str(tmp_path / "p.json"),
                *line,
            ]
        )
        == code
    )
    printed = capsys.readouterr()
    assert (
        words in printed.out + printed.err
        and "0.0%" not in printed.out
        and not (tmp_path / "p.json").exists()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "abacus"}, "device='abacus'"),
        ({"model": "llama-2-7b"}, "model='llama-2-7b'"),
        ({"versions": {"jax": "0"}}, "versions="),
        ({"dtype": "bfloat16"}, "dtype='float32'"),
        ({"total_sms": 132}, "total_sms=1"),
    ],
)
def test_anothers_profile_is_refused(tmp_path, changes, words):
    _, empty = tiny()
    save_profile(
        msgspec.structs.replace(empty, op_times=(OpTime("qkv", 8, 0, 1, 1e-3),), **changes),
        tmp_path / "p.json",
    )
    with pytest.raises((ProfileError, ConfigError)) as error:
        resumed(tmp_path / "p.json", empty)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "model", ["tiny-gemma2", "tiny-mixtral", "tiny-opt", "tiny-qwen3", "tiny-glm4_moe", "tiny-gpt_oss"]
)
def test_every_family_has_a_program_for_each_op(model):
    layer, _ = this_device(model, open_checkpoint(str(paths.MODELS / model)).model_config, "auto", "auto")
    for name in layer.ops:
        program = layer.alone(OpCase(name, 8, 16 if name in ATTENTION else 0))
        made = jax.eval_shape(program.function, program.given, program.kept)
        assert made == program.structs[1], name


@pytest.mark.parametrize(
    "case",
    [OpCase("down", 8), OpCase("attn_norm", 8), OpCase("chunk_attention", 8, 16)],
    ids=lambda case: case.op,
)
def test_every_round_is_run(case):
    """XLA moves no op out of the loop, so a program's work grows with its rounds."""
    compiled = tiny()[0].alone(case).compile().as_text()
    bodies = re.findall(r"body=%?([\w.-]+)", compiled)
    loops = [re.search(rf"^%?{re.escape(name)} .*?^}}", compiled, re.M | re.S)[0] for name in bodies]
    assert any("call(" in loop or "fusion(" in loop or "dot(" in loop for loop in loops), compiled


def test_experts_are_chosen_among_those_that_are_there():
    layer, _ = this_device(
        "", open_checkpoint(str(paths.MODELS / "tiny-mixtral")).model_config, "auto", "auto"
    )
    program = layer.alone(OpCase("expert_up_gate", 8))
    given, kept = draw(program.given), draw(program.kept, layer.config.num_experts)
    assert int(kept["inputs"][0][1].experts.max()) == layer.config.num_experts - 1
    made = program.function(given, kept)["made"]
    assert all(np.isfinite(one.rows).all() and np.ptp(one.rows) > 0 for one in made)


def test_what_is_drawn_is_about_normal():
    (x,) = jax.tree.leaves(draw(jax.ShapeDtypeStruct((100, 1000), jnp.float32)))
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    assert abs(float(jnp.corrcoef(x[:, :-1].ravel(), x[:, 1:].ravel())[0, 1])) < 0.02


@pytest.mark.parametrize("name", ["up_gate", "attn_norm", "mlp_norm", "down", "out_proj", "qkv"])
def test_with_fp8_what_goes_into_a_product_is_e4m3(name):
    layer = LayerBench(LLAMA, REFERENCE, dtype="bfloat16", kv_dtype="float8_e4m3fn", fp8=True, platform="gpu")
    made = jax.tree.leaves(layer.alone(OpCase(name, 128)).kept["made"])
    assert any(leaf.dtype == jnp.float8_e4m3fn for leaf in made) == (
        name in ("up_gate", "attn_norm", "mlp_norm")
    )


def test_a_program_of_pairs_computes_what_its_ops_do():
    layer, _ = tiny()
    product, attention = OpCase("up_gate", 16), OpCase("decode_attention", 4, 40)
    program = layer.concurrent(product, attention, 128, phases=2)
    given = draw(program.given)
    made = program.function(given, None)
    assert len(made) == 2 * program.calls
    c = layer.context()
    for at, op, weights, batch, inputs, kv in (
        (0, "decode_attention", given["attention"], given["batch"], given["queries"], given["kv"]),
        (1, "up_gate", given["weights"][0], given["own"], given["inputs"], None),
    ):
        expected = layer.call(op, weights, batch, inputs, kv, c=c)
        for one in made[at::2]:
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)
    for keys in (1, 100, 128):  # another load changes data, not shapes
        other = layer.batch(dataclasses.replace(attention, keys=keys), 128)
        assert jax.tree.map(jnp.shape, other) == jax.tree.map(jnp.shape, given["batch"])


def test_chunks_see_the_keys_that_they_say():
    for tokens, keys in ((2048, 256), (128, 4096), (1536, 1024), (100, 7)):
        case = OpCase("chunk_attention", tokens, keys)
        step = case.composition
        assert step.chunk_tokens == tokens
        assert step.count("chunk_pairs") / tokens == pytest.approx(keys + 0.5, abs=1)


def test_what_matters_most_is_measured_first():
    assert coarse_first([128, 256, 512, 1024, 2048]) == [2048, 128, 512, 256, 1024]
    assert coarse_first([7]) == [7]
    found = entries(llama().ops, (128, 256, 512, 768, 1024, 1536, 2048), (256, 1024, 4096), SHARES, 132)
    pairs = [entry for entry in found if isinstance(entry, OpPair)]
    assert len(pairs) == 24 and len(set(found)) == len(found)
    assert all(pair.product.sms + pair.other.sms == 132 for pair in pairs)
    before = found[: found.index(pairs[0])]
    for pair in pairs:  # both parts are timed earlier, on all SMs and on their shares
        for case in (pair.product, pair.other):
            for sms in (None, case.sms):
                assert (
                    len(
                        {
                            one.tokens
                            for one in before
                            if isinstance(one, OpCase) and (one.op, one.sms) == (case.op, sms)
                        }
                    )
                    > 1
                )
    assert {case.op for case in found[:9] if isinstance(case, OpCase)} > {"up_gate", "qkv", "down"}


class Machine:
    """A simulated H200 with its own clock. It compiles eight programs at once, and tunes products in turn."""

    def __init__(self, monkeypatch, tuning_s: float, kernel_s: float, measure_s: float):
        self.now, self.tuning_s, self.kernel_s, self.measure_s = 0.0, tuning_s, kernel_s, measure_s
        monkeypatch.setattr(command, "compiled", self.compile)
        monkeypatch.setattr(command, "_with", self.measure)
        monkeypatch.setattr(command, "_replace", lambda profile, path: None)

    def compile(self, layer, batch, threads):
        tuned = sum(
            isinstance(entry, OpCase) and entry.sms is None and layer.ops[entry.op].kind == "dense"
            for entry in batch
        )
        self.now += tuned * self.tuning_s + self.kernel_s * -(-len(batch) // 8)
        return [(None, None)] * len(batch)

    def measure(self, profile, layer, entry, program, executable, seconds_each):
        self.now += self.measure_s * (4 if isinstance(entry, OpPair) else 1)
        if isinstance(entry, OpCase):
            one = OpTime(entry.op, entry.tokens, entry.keys, entry.sms or 132, 1e-6 * entry.tokens)
            return msgspec.structs.replace(profile, op_times=(*profile.op_times, one))
        a, b = entry.product, entry.other
        return msgspec.structs.replace(
            profile, pairs=(*profile.pairs, Pair(a.op, b.op, a.sms, b.sms, 0.7, 0.5))
        )


@pytest.mark.parametrize(
    ("tuning_s", "kernel_s", "measure_s", "complete"),
    [(5.0, 4.0, 0.8, True), (12.0, 5.0, 0.8, False), (23.0, 5.0, 1.0, False), (60.0, 20.0, 3.0, False)],
)
def test_a_profile_takes_no_longer_than_it_may(
    monkeypatch, tmp_path, tuning_s, kernel_s, measure_s, complete
):
    """The least important entries are left out and named, for any speed of the compiler."""
    machine, layer = Machine(monkeypatch, tuning_s, kernel_s, measure_s), llama()
    empty = msgspec.structs.replace(tiny()[1], total_sms=132)
    wanted = entries(layer.ops, (128, 256, 512, 768, 1024, 1536, 2048), (256, 1024, 4096), SHARES, 132)
    profile, left = command.measure(
        empty, layer, wanted, tmp_path / "p", TimeBudget(480, lambda: machine.now), seconds_each=0.4
    )
    assert machine.now <= 480 + 4 * tuning_s  # one batch of products to tune may exceed the limit
    assert len(profile.op_times) + len(profile.pairs) + len(left) == len(wanted)
    assert left == wanted[len(wanted) - len(left) :] and (not left) == complete
    # Such a profile suffices for a plan: every pair, and all ops on the whole device.
    if tuning_s < 20:
        assert len(profile.pairs) == 24 and {time.op for time in profile.op_times if time.sms == 132} == set(
            layer.ops
        )
    assert not left or "of up_gate" in described(left)
    before = len(profile.op_times)
    again, rest = command.measure(
        profile, layer, wanted, tmp_path / "p", TimeBudget(480, lambda: machine.now), seconds_each=0.4
    )
    assert len(again.op_times) - before + len(again.pairs) - len(profile.pairs) == len(left) - len(rest)


def test_a_budget_learns_what_pieces_take():
    now = [0.0]
    budget = TimeBudget(100, lambda: now[0])
    assert budget.fits("compile") == 33  # an estimate before any measurement
    for _ in range(8):
        now[0] += 4
        budget.took("compile", 4.0, 2)
    assert budget.a_piece_s("compile") == pytest.approx(2.0, rel=0.3) and budget.left_s == 68
    now[0] = 200.0
    assert budget.fits("compile", "measure") == 0 and budget.left_s == 0


def test_without_kernels_to_bound_there_are_no_shares_or_pairs():
    layer = LayerBench(LLAMA, REFERENCE, dtype="bfloat16", kv_dtype="bfloat16", fp8=False, platform="gpu")
    assert not layer.kernels.can_be_bounded and llama().kernels.can_be_bounded
    assert all(
        isinstance(entry, OpCase) and entry.sms is None
        for entry in entries(layer.ops, (128,), (256,), (), 132)
    )


@pytest.mark.parametrize(
    "case",
    [
        OpCase("up_gate", 256, sms=100),
        OpCase("rope_append", 256),
    ],
    ids=lambda case: case.op,
)
def test_an_op_compiles_for_an_h200_and_leaves_caches_in_place(case):
    layer = llama()
    program = layer.alone(case)
    mesh = h200_mesh()
    compiled = compile_for_h200(
        program.function, abstract(mesh, program.given), abstract(mesh, program.kept), donate_argnums=(1,)
    )
    assert compiled.machine_code
    kernels = [
        thunk
        for thunk in compiled.thunks
        if thunk.kind in ("kCustomCall", "kKernel", "kMosaicGpu", "kCustomKernel", "kGemm")
    ]
    assert max(thunk.depth for thunk in kernels) > 0, compiled.thunks
    pages = layer.pages(case, case.keys)[2]
    assert compiled.copies(layer.cache(pages)[0].shape) == 0
    if case.sms:
        assert f"_{case.sms}" in compiled.hlo  # the kernel's name says its SMs


@pytest.mark.slow
def test_pairs_compile_for_an_h200_on_two_streams():
    product, attention = OpCase("up_gate", 256, sms=100), OpCase("decode_attention", 64, PAIR_KEYS, 32)
    program = llama(fp8=True).concurrent(product, attention, PAIR_KEYS, phases=2)
    mesh = h200_mesh()
    compiled = compile_for_h200(
        program.function, abstract(mesh, program.given), None, options=program.options
    )
    streams = {thunk.stream for thunk in compiled.thunks if thunk.kind == "kAsyncStart"}
    assert streams == {"computation_stream[1]", "computation_stream[2]"}
    starts = [thunk for thunk in compiled.thunks if thunk.kind == "kAsyncStart"]
    assert len(starts) == 2 * program.calls


def test_from_a_real_profile_to_an_engine_that_serves_under_its_plan(
    measured, tmp_path, no_flags, capsys, goldens
):
    """Measure, search, simulate and serve with two nano-batches, which gain nothing on a CPU."""
    path, profile = measured
    line = [
        "search",
        "plan",
        "--profile",
        str(path),
        "--model",
        NAME,
        "--tokens",
        "64",
        "--prompt_tokens",
        "24",
        "--output_tokens",
        "16",
    ]
    assert (
        main(
            [
                *line,
                "--split",
                "--overlap",
                "none",
                "--time_limit_s",
                "5",
                "--out",
                str(tmp_path / "found.json"),
            ]
        )
        == 0
    )
    found, graph = load(tmp_path / "found.json"), model_graph(open_checkpoint(NAME).model_config)
    assert found.target is not None and (found.target.device, found.target.dtype) == ("cpu", "float32")
    cuts = {nano.start for nano in found.nano_ops} - {0}
    assert len(cuts) == 1 and found.predictions is not None
    assert NAME not in found.name, "a path fills the columns of bench plans"
    timeline = simulate(found, graph, ShareTimes(profile, graph), StepShape.steady_state(64, 24, 16))
    lasts = [entry.stop_s - entry.start_s for entry in timeline.entries]
    assert timeline.busy_s == pytest.approx(sum(lasts)) and 0 < timeline.period_s <= timeline.busy_s, (
        "one stream"
    )
    products = [entry.run for entry in timeline.entries if entry.run.op.kind == "dense"]
    took = [last for entry, last in zip(timeline.entries, lasts, strict=True) if entry.run.op.kind == "dense"]
    assert len(products) >= 4 * timeline.layers
    assert took == pytest.approx(
        [seconds(profile, run.op.name, run.nano.stop - run.nano.start) for run in products]
    ), "as measured"
    # With predictions the engine would run the sequential step.
    save(msgspec.structs.replace(found, predictions=None), tmp_path / "plan.json")
    loop, golden = toy.loop("tiny-llama", plan=str(tmp_path / "plan.json")), goldens("tiny-llama")
    results = toy.run(
        loop, [Request(f"{i}", prompt, toy.GREEDY) for i, prompt in enumerate(toy.prompts(golden))]
    )
    assert [results[f"{i}"].tokens for i in range(len(results))] == [
        prompt["greedy_ids"][:32] for prompt in golden["prompts"]
    ]
    assert [set(layout.borders) for layout in loop.executor.layouts[64]] == [cuts]

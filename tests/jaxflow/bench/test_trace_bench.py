"""`bench trace`: the reading of a profiler's kernels, and the command on a toy model with a real trace."""

import collections
import dataclasses
import itertools
import json
import os
import sys
import types
from typing import Any

import jax
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_flags import own_flags

from jaxflow.bench.__main__ import main
from jaxflow.bench.plans.trace import graph_of, peaks_of, traced
from jaxflow.bench.plans.trace_plot import modelled
from jaxflow.bench.report.trace_events import (
    RESOURCES,
    Kernel,
    TraceError,
    _gaps,
    means,
    one_layer,
    part,
    scopes,
    shares,
)
from jaxflow.config import EngineConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Work, model_graph
from jaxflow.pipeline.handwritten import phased_plan, sequential_plan, swapped, two_nano_batch_plan
from jaxflow.pipeline.plan import save
from jaxflow.pipeline.program import program

NAME = str(paths.MODELS / "tiny-llama")
TINY = open_checkpoint(NAME).model_config
SIX = dataclasses.replace(TINY, layers=TINY.layers[:1] * 6)
STEP = Composition(20, 50.0, ((30, 10), (14, 3)))
TOKENS = 64
SWAPPED = paths.ROOT / "benchmarks/h200/llama-3-70b/trace-tp4-fp8-8-layers-swapped.json"
COUNTS = ("tokens", "decode_tokens", "decode_keys", "chunk_tokens", "chunk_pairs")


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), max_size=4),
    st.sets(st.integers(1, 199)),
)
def test_the_parts_of_a_step_sum_to_the_step(decodes, chunks, cuts):
    step = Composition(decodes, 33.0, tuple(chunks))
    edges = [0, *sorted(cut for cut in cuts if cut < step.tokens), int(step.tokens) + 7]  # padding is nothing
    parts = [part(step, low, high) for low, high in itertools.pairwise(edges)]
    for what in COUNTS:
        assert sum(one.count(what) for one in parts) == pytest.approx(step.count(what))


def fake(plan, tp, seconds, *, steps=4, beside=0.0):
    """Return (kernels, names) of steps of a plan. Nano-ops run one after the other, `seconds[i % n]` each. A
    nano-op of a side stream has a second kernel, `beside` times as long. Another program with equal names
    runs between steps.
    """
    graph = model_graph(SIX, tp, scattered=False)
    kernels, names, at = [], {}, 0.0
    lasting = itertools.cycle(seconds)
    for _ in range(steps):
        for i, run in enumerate(program(plan, graph)):
            took = next(lasting)
            for j in range(2 if beside and run.nano.stream else 1):
                name = f"kernel.{i}.{j}"
                names[name] = f"jit(run)/{run.nano.op}/{run.nano.id}/dot"
                kernels.append(
                    Kernel(
                        "k",
                        name,
                        ("jit_run", "1"),
                        "",
                        f"Stream #{run.nano.stream}",
                        at,
                        took * (beside if j else 1),
                    )
                )
            at += took
        kernels.append(Kernel("sampler", "kernel.0.0", ("jit_run", "2"), "", "Stream #0", at, 1e-6))
        at += 1e-6
    return kernels, names, graph


@pytest.mark.parametrize(("plan", "tp"), [
    (sequential_plan(SIX, TOKENS), 1), (phased_plan(SIX, TOKENS, 24), 1),
    (two_nano_batch_plan(SIX, TOKENS, 40, 2), 2),
], ids=["sequential", "phased", "two devices"])  # fmt: skip
@pytest.mark.parametrize("beside", [0.0, 0.5])
def test_one_layer_holds_a_layers_work(plan, tp, beside):
    """However its kernels last: all of it, at the moments when they run."""
    kernels, names, graph = fake(plan, tp, [3e-6, 1e-6, 5e-6], beside=beside)
    trace = one_layer(kernels, names, plan, graph, STEP)
    whole = sum(
        (
            op.work(part(STEP, nano.start, nano.stop))
            for op in graph.layers[2]
            for nano in plan.nano_ops
            if nano.op == op.name
        ),
        Work(),
    )
    found = sum((one.work for one in trace.used), Work())
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(whole))
    assert found.network_bytes if tp > 1 else not found.network_bytes
    assert all(one.nano is not None and one.kind is not None for one in trace.used)
    assert {one.nano.id for one in trace.used if one.nano} == {nano.id for nano in plan.nano_ops}
    peaks = {"compute": {"": 1e9, "down": 2e9}, "memory": {"": 1e8}, "network": {"": 1e7}}
    rows = shares(trace, peaks)
    mean, fast = means(rows), sum(one.work.flops for one in trace.used if one.nano and one.nano.op == "down")
    assert mean["compute"] * trace.seconds == pytest.approx((found.flops - fast) / 1e9 + fast / 2e9)
    assert mean["memory"] * trace.seconds == pytest.approx(found.memory_bytes / 1e8)
    assert mean["network"] * trace.seconds == pytest.approx(found.network_bytes / 1e7)
    assert trace.idle_s == pytest.approx(0.0, abs=1e-12) and trace.pause_s == pytest.approx(0.0, abs=1e-12)
    assert trace.step_s == pytest.approx(max(k.start_s for k in kernels if k.name == "sampler") / 4, rel=0.1)
    source, own = peaks_of(None, "float32", trace)
    assert source == "the highest rate in this trace"
    if not beside:
        assert max(row["memory"] for row in shares(trace, own)) == pytest.approx(1.0)


def test_reductions_are_counted_in_the_plans_form():
    """Swapped, both exchanges have their bytes, and together more than a ring's."""
    config = EngineConfig(NAME, dtype="float32", kv_cache_dtype="float32", tensor_parallel_size=4)
    bed: Any = types.SimpleNamespace(config=config, model=SIX)
    plain = two_nano_batch_plan(SIX, TOKENS, 40, 4)
    sent = {}
    for plan in (plain, swapped(plain)):
        ops = {op.name: op for op in graph_of(bed, plan).layers[0]}
        assert {nano.op for nano in plan.nano_ops} == set(ops)
        sent[plan.name] = {
            name: op.work(STEP).network_bytes for name, op in ops.items() if op.kind == "network"
        }
    ring, (swap, reduce) = (
        sent[plain.name]["mlp_reduce"],
        (sent[swapped(plain).name][f"mlp_{step}"] for step in ("swap", "reduce")),
    )
    assert swap == reduce == STEP.tokens * SIX.hidden_size * 4 and ring == pytest.approx(1.5 * swap)


def test_the_trace_of_swapped_sums_counts_both_exchanges():
    """A whole part of 2048 tokens in 16 bits each, of both halves and both blocks."""
    _, plan = json.loads(SWAPPED.read_text("utf-8"))["plans"]
    sent = collections.Counter()
    for kernel in plan["kernels"]:
        sent[kernel["op"], kernel["nano_op"]] += kernel["network_bytes"]
    exchanges = {nano: count for (op, nano), count in sent.items() if op.endswith(("_swap", "_reduce"))}
    assert list(exchanges.values()) == pytest.approx([2048 * 8192 * 2] * 8)
    assert None not in {kernel["kind"] for kernel in plan["kernels"]}
    assert plan["mean_shares"] == pytest.approx(means(plan["shares"]))


def test_a_trace_of_too_few_steps_is_refused():
    plan = sequential_plan(SIX, TOKENS)
    kernels, names, graph = fake(plan, 1, [1e-6], steps=2)
    with pytest.raises(TraceError, match="2 full steps"):
        one_layer(kernels, names, plan, graph, STEP)
    with pytest.raises(ValueError, match="no kernels"):
        one_layer([], names, plan, graph, STEP)
    with pytest.raises(ValueError, match=r"0 layers .* has 6"):
        one_layer(kernels, {}, plan, graph, STEP)


def test_gaps_between_a_steps_kernels():
    kernels = [
        Kernel("k", "k", ("p", "1"), "", "s", start, seconds)
        for start, seconds in ((0, 3), (1, 1), (4, 2), (5, 4), (11, 5))
    ]
    assert _gaps(kernels, 2.0, 13.0) == [1, 2]
    assert _gaps(kernels, 4.5, 10.0) == []  # the end of the last one is not recorded


def test_watts_are_the_models_scaled_to_the_sensors_mean():
    kernel = {"op": "down", "start_us": 0.0, "us": 100.0, "flops": 4e10, "memory_bytes": 1e8}
    stream = {"op": "decode_attention", "start_us": 50.0, "us": 100.0, "flops": 1e9, "memory_bytes": 4e8}
    rows = [
        {"start_us": 0.0, "stop_us": 50.0},
        {"start_us": 50.0, "stop_us": 100.0},
        {"start_us": 100.0, "stop_us": 200.0},
    ]
    plan = {
        "kernels": [kernel, stream],
        "shares": rows,
        "layer_us": 200.0,
        "watts": 500.0,
        "sm_clock_mhz": 1500.0,
    }
    result = {"device": "NVIDIA H200", "engine_config": {"quantization": "fp8", "dtype": "bfloat16"}}
    found, power = modelled(result, plan), shipped_power("H200")
    assert found is not None and power is not None and found.cap == power.cap_w
    assert sum(
        w * (row["stop_us"] - row["start_us"]) for w, row in zip(found.values, rows, strict=True)
    ) / 200 == pytest.approx(500.0)
    alone = modelled(result, plan | {"kernels": [kernel]})
    assert alone is not None and alone.values[2] == power.idle_w and alone.values[0] == alone.values[1]
    unread = modelled(result, plan | {"watts": None, "sm_clock_mhz": None})
    work = Work(flops=4e10, activation_bytes=1e8)
    assert unread is not None and unread.scale == 1.0
    assert unread.values[0] == pytest.approx(
        power.idle_w + float(power.dynamic_j(work, "float8_e4m3fn")) / 100e-6
    )
    assert modelled(result | {"device": "cpu"}, plan) is None


def test_eight_bits_have_a_peak_of_their_own():
    trace = one_layer(
        *fake(sequential_plan(SIX, TOKENS), 1, [1e-6])[:2],
        sequential_plan(SIX, TOKENS),
        model_graph(SIX),
        STEP,
    )
    source, peaks = peaks_of("H200", "float8_e4m3fn", trace)
    assert source == "H200, datasheet" and peaks["compute"]["qkv"] == 2 * peaks["compute"][""] + 1e12


def test_scopes_reads_the_op_of_each_instruction():
    def named(x):
        with jax.named_scope("qkv"), jax.named_scope("qkv.1"):
            return jax.numpy.tanh(x @ x.T)

    found = scopes(jax.jit(named).lower(jax.numpy.ones((8, 8))).compile().as_text() or "")
    assert any("/qkv/qkv.1/" in scope for scope in found.values())


def test_the_newest_trace_of_a_folder_is_read(tmp_path):
    older = tmp_path / "plugins" / "profile" / "2020_01_01" / "host.xplane.pb"
    older.parent.mkdir(parents=True)
    older.write_bytes(b"no trace")
    os.utime(older, (1, 1))
    run = jax.jit(jax.numpy.tanh)
    assert traced(types.SimpleNamespace(enqueue=lambda: run(jax.numpy.ones(8))), 1.0, 0.0, tmp_path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    save(two_nano_batch_plan(TINY, TOKENS, 32, 2), folder / "two.json")
    line = (
        f"bench trace --model {NAME} --load_format dummy --tensor_parallel_size 2 --workload 64/32 "
        f"--seconds 0.1 --traced_seconds 0.05"
    )
    line += (
        f" --num_kv_pages 64 --plans {folder}/two.json --plot {folder}/plot.png --output_json "
        f"{folder}/out.json"
    )
    sys.argv = line.split()
    with own_flags():
        assert main(line.split()) == 0
    return json.loads((folder / "out.json").read_text()), folder


def test_trace_command_reports_a_layers_time(report):
    result, folder = report
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    sequential, two = result["plans"]
    for plan, pieces in ((sequential, 1), (two, 2)):
        assert 0 <= plan["longest_pause_ms"] <= plan["traced_idle_ms"] <= plan["traced_step_ms"]
        assert (
            0 < plan["layer_us"] <= 1e3 * plan["traced_step_ms"]
            and plan["assigned_share_of_kernel_time"] > 0.5
        )
        wanted = {
            f"{op}.{i}" if pieces > 1 else op
            for op in ("qkv", "out_proj", "up_gate", "down", "mlp_reduce")
            for i in range(pieces)
        }
        assert wanted <= {kernel["nano_op"] for kernel in plan["kernels"]}
        assert all(0 < plan["mean_shares"][name] <= 1 for name in RESOURCES)
        assert {kernel["kind"] for kernel in plan["kernels"]} >= {"dense", "network", "attention"}
        rows = plan["shares"]
        assert all(a["stop_us"] == b["start_us"] for a, b in itertools.pairwise(rows))
        assert rows[0]["start_us"] == 0 and rows[-1]["stop_us"] == pytest.approx(plan["layer_us"])

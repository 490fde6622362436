"""The engine's step, compiled ahead of time for the H200: nothing copies the cache or a weight, and nothing
needs the host.
"""

import dataclasses
import json
import math
import re

import h200
import jax
import jax.numpy as jnp
import pytest

from jaxflow.config import EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.programs import Programs
from jaxflow.model.attention_spans import with_spans
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import DP, TP, axis_of, expert_axis_of
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan, whole_experts_plan
from jaxflow.pipeline.plan import borders
from pallas_kernels import this_device
from pallas_kernels.cards import this_card
from pallas_kernels.gemm.api import HopperGemm
from pallas_kernels.gemm.tuned_table import load
from pallas_kernels.kernel_set import REFERENCE, KernelSet, kernel_set_for
from pallas_kernels.quantized import Int4

PAGES = 8192
LAYERS = 2
# XLA would compile every fusion again to test its tiles. Only XLA's own GEMMs need this.
ONCE = {"xla_gpu_experimental_enable_fusion_autotuner": False}


def compiled(
    model: str,
    tokens: int,
    *,
    tp: int = 1,
    kernels: KernelSet | None = None,
    quantization: str | None = None,
    kv="bfloat16",
    decodes=False,
    hosts=1,
    spans: str | None = None,
    ranks: int = 1,
    split: int | None = None,
    whole_experts: bool = False,
    device: str = h200.H200,
) -> tuple[h200.Compiled, Executor]:
    """Return a step of the model's first layers. kernels: None selects the device's kernels with its tuned
    table. kv: the dtype of the cache. decodes: a step without prefill. hosts:
    that the devices are spread over.
    spans: a file of attention spans. ranks: data-parallel ranks. split: tokens of
    the first of two nano-batches; None for the sequential step. whole_experts: not in nano-batches.
    """
    checkpoint = open_checkpoint(model, load_format="dummy")
    config = with_spans(EngineConfig(model, attention_spans=spans), checkpoint.model_config, checkpoint.name)
    config = dataclasses.replace(config, layers=config.layers[:LAYERS])
    if kernels is None:
        group = config.num_heads // config.num_kv_heads
        heads = {"head_dim": config.head_dim, "queries_per_kv_head": group}
        if config.latent is not None:
            heads |= {"queries_per_kv_head": config.num_heads // tp, "latent_attention": True}
            heads |= {"latent_rank": config.latent.rank, "latent_rope_dim": config.latent.rope_dim}
            heads |= {"latent_value_dim": config.latent.value_dim}
        kernels = kernel_set_for(
            "gpu", "9.0", **heads, page_size=64, dtype="bfloat16", kv_dtype=kv, device=device
        )
    mesh = (
        h200.h200_mesh((tp,), hosts=hosts, device=device)
        if ranks == 1
        else h200.h200_mesh((ranks, tp), (DP, TP))
    )
    options = {"quantization": quantization, "kv_scales": kv == "float8_e4m3fn"}
    options |= {"expert_parallel": ranks > 1, "ranks": ranks}
    specs = shardings(config, mesh, **options)
    weights = h200.abstract(mesh, shapes(config, tp, jnp.bfloat16, **options), specs)
    in_two = whole_experts_plan if whole_experts else two_nano_batch_plan
    plan = (
        sequential_plan(config, tokens, tp, ranks=ranks)
        if split is None
        else in_two(config, tokens, split, tp, ranks=ranks)
    )
    layout = StepLayout(tokens, min(tokens, 256), 256, 64, borders(plan), len(config.windows))
    context = Context(config, kernels, axis_of(mesh), expert_axis=expert_axis_of(mesh) if ranks > 1 else None)
    programs = Programs(context, mesh, specs)
    forward = compile_plan(plan, config, tp, ranks=ranks, quantized=quantization == "fp8")
    made = Executor(
        programs, weights, [layout], lambda _: forward, kv_dtype=jnp.dtype(kv), max_model_len=8192
    )
    step = programs.step(dataclasses.replace(layout, decodes=decodes), forward)
    arguments = made.lower.step_arguments(layout, (PAGES,) * len(config.windows))
    options = {} if kernels is REFERENCE else ONCE
    return h200.compile_for_h200(step, *arguments, options=options | xla_options(plan, tp)), made


def check(step: h200.Compiled, executor: Executor, temporary: float = 0.1) -> None:
    """No copy of the cache or of a weight, the cache aliased whole, nothing for the host to do.

    temporary: the most temporary memory, as a part of the cache.
    """
    assert step.machine_code
    cache = jax.tree.leaves(executor.lower.state((PAGES,) * executor.groups)[0])
    kv_bytes = 0
    for pages in cache:
        shape = pages.sharding.shard_shape(pages.shape)
        kv_bytes += math.prod(shape) * pages.dtype.itemsize
        # The cache itself, and the flat views that appends write through.
        for seen in (shape, (math.prod(shape[:3]), *shape[3:]), (math.prod(shape[:2]), *shape[2:])):
            assert step.copies(seen) == 0, seen
    for leaf in jax.tree.leaves(executor.weights["layers"]):
        if leaf.ndim == 2:
            local = leaf.sharding.shard_shape(leaf.shape)
            assert step.copies(local) == step.copies(local[::-1]) == 0
    assert step.memory.alias_size_in_bytes >= kv_bytes
    assert step.memory.temp_size_in_bytes < temporary * kv_bytes
    assert not any(thunk.kind in ("kInfeed", "kOutfeed", "kHostSend", "kHostRecv") for thunk in step.thunks)


def last_layer(step: h200.Compiled) -> list[str]:
    """The kernels from the last append to the pages to the last product of its layer, XLA's own as fusions,
    in order.
    """
    entry = step.hlo[step.hlo.index("\nENTRY") :]
    found = []
    for line in entry.splitlines():
        if " custom-call(" in line:
            names = re.findall(
                r"(rope_append|(?:chunk|decode)_attention|quantize_rows|add_norm|[a-z0-9]+(?:_flat)?_gemm)_?",
                line.partition("custom_call")[2],
            )
            found.append(names[0] if names else "custom call")
        elif re.search(r" (fusion|copy|while|conditional)\(", line):
            found.append("xla")
    found = found[len(found) - found[::-1].index("rope_append") :]
    return found[: len(found) - next(i for i, name in enumerate(found[::-1]) if name.endswith("_gemm"))]


@pytest.mark.slow
def test_nothing_copies_the_cache_or_a_weight():
    check(*compiled("llama-3.1-8b", 256, tp=4, kernels=REFERENCE))


@pytest.mark.slow
def test_latent_pages_are_written_in_place():
    """Decodes and chunks run the latent kernel, and long chunks the one with keys and values by head. The
    layers share work lists, and nothing copies the pages.
    """
    step, executor = compiled("deepseek-v3", 256, tp=8)
    check(step, executor, temporary=0.2)
    named = r"custom-call\(.*(latent_(?:decode|chunk|window)_attention|latent_combine)_?"
    calls = re.findall(named, step.hlo)
    kernels = [f"latent_{op}_attention" for op in ("chunk", "decode", "window")] + ["latent_combine"] * 2
    assert sorted(calls) == sorted(kernels * LAYERS)


@pytest.mark.slow
def test_data_parallel_ranks_gather_their_tokens():
    """Two ranks. A layer has one gather, and one sum of which each rank gets its part."""
    step, executor = compiled("qwen3-30b-a3b", 2048, ranks=2)
    check(step, executor, temporary=0.4)
    kinds = [thunk.kind for thunk in step.thunks]
    assert kinds.count("kAllGather") == kinds.count("kReduceScatter") == LAYERS
    assert not any("AllToAll" in kind or "AllReduce" in kind for kind in kinds)


@pytest.mark.slow
def test_rows_for_other_ranks_travel_beside_the_other_nano_batch():
    """Each gather or scatter but the last one has a kernel of the step beside it."""
    step, _ = compiled("qwen3-30b-a3b", 2048, ranks=2, split=1024)
    kernels = [beside for _, beside in sent(step)]
    assert len(kernels) == 4 * LAYERS
    assert all(kernels[:-1]), kernels


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [256, 2048])
def test_rows_of_whole_experts_travel_beside_attention(tokens):
    """The gather of one half overlaps with attention of the other half, and so do the sums of the other half
    with attention of the next layer.
    """
    step, executor = compiled("qwen3-30b-a3b", tokens, ranks=2, split=tokens // 2, whole_experts=True)
    check(step, executor, temporary=0.4)
    found = sent(step)
    for collective, half in (("expert_dispatch.0", 1), ("expert_combine.1", 0)):
        windows = [beside for name, beside in found if name == collective]
        windows = windows[: LAYERS - (half == 0)]  # no layer follows the last one
        assert len(windows) >= LAYERS - 1
        assert all(any(f"_attention.{half}" in kernel for kernel in one) for one in windows), windows


def sent(step: h200.Compiled) -> list[tuple[str, list[str]]]:
    """Return the nano-op of each asynchronous gather or scatter, with those of the kernels beside it."""
    entry = step.hlo[step.hlo.index("\nENTRY") :].splitlines()
    opened: dict[str, int] = {}
    found = []

    def nano_op(line: str) -> str:
        return re.search(r'op_name="jit\(run\)/shard_map/\w+/([\w.]+)/', line)[1]  # pyright: ignore

    for at, line in enumerate(entry):
        if one := re.search(r"%([\w.-]*(?:all-gather|reduce-scatter)[\w.-]*) = .* [\w-]+-start\(", line):
            opened[one[1]] = at
        elif (one := re.search(r" [\w-]+-done\(.*?%([\w.-]+)", line)) and one[1] in opened:
            start = opened.pop(one[1])
            beside = [nano_op(kernel) for kernel in entry[start + 1 : at] if " custom-call(" in kernel]
            found.append((nano_op(entry[start]), beside))
    assert not opened
    return found


@pytest.mark.slow
def test_data_parallel_ranks_of_two_devices_sum_twice_a_layer():
    """Two ranks of two devices. The sum over a rank's devices follows attention, and the scatter of the
    experts' sums over the ranks.
    """
    step, executor = compiled("qwen3-30b-a3b", 2048, ranks=2, tp=2)
    check(step, executor, temporary=0.4)
    kinds = [thunk.kind for thunk in step.thunks]
    assert kinds.count("kAllGather") == kinds.count("kReduceScatter") == LAYERS
    assert kinds.count("kAllReduce") == 2 * LAYERS + 1  # the first one adds the parts of the embedding
    assert not any("AllToAll" in kind for kind in kinds)


@pytest.mark.slow
def test_many_data_parallel_ranks_send_rows_only():
    """Sixteen ranks, more than the experts of a token.

    The exchange is two all-to-alls a layer, and XLA's own kernels do not touch what arrives.
    """
    step, executor = compiled("qwen3-30b-a3b", 2048, ranks=16)
    check(step, executor, temporary=1.4)
    assert [thunk.kind for thunk in step.thunks].count("kRaggedAllToAll") == 2 * LAYERS
    room = 16 * 2048 * 8  # rows that the ranks of 2,048 tokens with 8 experts each could send to one
    made = {opcode: step.instructions(opcode) for opcode in ("ragged-all-to-all-done", "fusion", "copy")}
    large = {
        opcode: [
            one for one in results if (rows := re.search(r"\[(\d+),2048\]", one)) and int(rows[1]) >= room
        ]
        for opcode, results in made.items()
    }
    assert len(large.pop("ragged-all-to-all-done")) == LAYERS and not any(large.values())


def test_on_the_hopper_kernels_neither():
    """With many rows the tuned table chooses GEMM kernels; without the table XLA would run all.

    The gate runs in its GEMM's epilogue.
    """
    step, executor = compiled("llama-3.1-8b", 1024, tp=4)
    check(step, executor)
    assert last_layer(step) == [
        "chunk_attention",
        "decode_attention",
        "xla",
        "add_norm",
        "dense_gemm",
        "dense_gemm",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
def test_with_attention_spans_neither(kv, tmp_path):
    """Each of three groups of heads has its own append and attention, on the kernels."""
    name, layers = open_checkpoint("llama-3.1-8b", load_format="dummy").name, 32
    alpha, beta = [64, 2048, 64, 700, 64, 2048, 2048, 131072], [0.1, 0.5, 0.1, 0, 0.1, 0.5, 0.5, 1]
    file = {"schema_version": 1, "model": name, "layers": layers, "kv_heads": 8, "sinks": 64}
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(file | {"alpha": [alpha] * layers, "beta": [beta] * layers}))
    step, executor = compiled("llama-3.1-8b", 256, kv=kv, spans=str(path))
    check(step, executor)
    kernels = re.findall(r"(rope_append|(?:chunk|decode)_attention)_\d", step.hlo)
    assert set(kernels) == {"rope_append", "chunk_attention", "decode_attention"}


def test_of_8_bits_neither():
    """A decode-only step has no chunk kernel, no merge kernel, and one quantization kernel where no earlier
    GEMM quantizes.
    """
    step, executor = compiled("llama-3.1-8b", 64, quantization="fp8", kv="float8_e4m3fn", decodes=True)
    check(step, executor)
    fp8 = "fp8_flat_gemm"
    assert last_layer(step) == ["decode_attention", "quantize_rows", fp8, "add_norm", fp8, fp8]


@pytest.fixture
def on_an_h100(monkeypatch):
    """Let this process lower programs for an H100."""
    this_card.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(this_device, "_described", [this_device.DeviceKind("gpu", h200.H100, "9.0", 132)])
        yield
    this_card.cache_clear()


@pytest.mark.parametrize(
    ("model", "quantization"),
    [("llama-3.1-8b", None), pytest.param("gpt-oss-20b", "mxfp4", marks=pytest.mark.slow)],
)
def test_a_decode_step_of_an_h100_neither(model, quantization, on_an_h100, monkeypatch):
    """The H100 has no tuned table, and its card stores experts in MXFP4 in blocks."""
    monkeypatch.setitem(globals(), "LAYERS", 1)
    assert this_card().device == "H100" and not load(h200.H100).rules
    step, executor = compiled(model, 64, quantization=quantization, decodes=True, device=h200.H100)
    check(step, executor)
    assert {"decode_attention", "rope_append"} <= set(
        re.findall(r"(decode_attention|rope_append)_", step.hlo)
    )


@pytest.mark.slow
def test_of_weights_of_4_bits_neither():
    """With few rows the kernel reads the rows directly. Decodes write into the output of the chunk kernel."""
    step, executor = compiled("llama-3.1-8b", 64, quantization="int4")
    check(step, executor)
    int4 = "int4_gemm"
    assert last_layer(step) == ["chunk_attention", "decode_attention", int4, "add_norm", int4, int4]
    assert [thunk.kind for thunk in step.graph_thunks if not thunk.depth and thunk.kind != "kCopy"] == [
        "kCommandBuffer"
    ], "not one graph"


def test_many_rows_on_weights_of_4_bits_cost_one_wide_copy_of_a_matrix():
    half, factor = (
        jax.ShapeDtypeStruct((6144, 2048), jnp.uint8),
        jax.ShapeDtypeStruct((6144, 64), jnp.bfloat16),
    )
    arguments = jax.ShapeDtypeStruct((512, 4096), jnp.bfloat16), Int4(half, factor, factor)
    found = h200.compile_for_h200(
        HopperGemm(load("NVIDIA H200")), *h200.abstract(h200.h200_mesh(), arguments)
    )
    assert found.memory.temp_size_in_bytes < 1.1 * 2 * 6144 * 4096


@pytest.mark.slow  # the step of one host has the same operations, and compiles in the usual suite
@pytest.mark.parametrize("hosts", [2, 8])
def test_over_hosts_of_eight_devices(hosts):
    """The step compiles. The embedding and each half of a layer is summed once, over all devices."""
    step, executor = compiled("llama-3-70b", 256, tp=8 * hosts, hosts=hosts)
    check(step, executor)
    sums = re.findall(r"all-reduce(?:-start)?\(.*?replica_groups=(mesh\[\S+\])", step.hlo)
    assert sums == [f"mesh['tp'={8 * hosts}]"] * (1 + 2 * LAYERS)

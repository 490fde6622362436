"""Benchmark cases of a layer's dense ops with our kernels and with XLA, and of Llama 8B's decode step with
sampling."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from jaxflow.config import EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.layout import SlotSampling, pack
from jaxflow.engine.programs import PLAIN
from jaxflow.engine.settings import resolve
from jaxflow.model import ops
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.weights import dummy_weights
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.scheduler.state import StepWork
from pallas_kernels.gemm.fp8.gpu_check import xla
from pallas_kernels.kernel_set import REFERENCE, kernel_set_for
from pallas_kernels.pointwise.quantize import reference
from pallas_kernels.quantized import Quantized

MODEL = "llama-3.1-8b"
LAYERS = 4  # layers of a layer case: 1.7 GB of weights in bfloat16
CONTEXT = 1100  # tokens of each request
REQUESTS = (1, 64, 256)
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
LIMIT_MS = {"bf16": (4.2, 6.8, 15.5), "fp8": (2.6, 4.3, 9.5)}
VLLM_MS = {"bf16": (4.93, 7.67, 18.4), "fp8": (3.50, None, 13.9)}  # vLLM 0.24.0, on the same kind of machine


@functools.cache
def _executor(precision: str) -> Executor:
    """Return a warm executor of the model with dummy weights and a bucket for each number of requests."""
    checkpoint = open_checkpoint(MODEL, load_format="dummy")
    most, pages = max(REQUESTS), -(-(CONTEXT + 1) // 64)
    config = resolve(
        EngineConfig(
            MODEL,
            load_format="dummy",
            max_num_seqs=most,
            max_num_batched_tokens=most,
            max_model_len=2048,
            num_kv_pages=most * pages + 1,
            **PRECISIONS[precision],
        ),
        checkpoint.model_config,
    )
    buckets = sorted({max(8, requests) for requests in REQUESTS})
    plans = {tokens: (sequential_plan(checkpoint.model_config, tokens),) for tokens in buckets}
    executor = make_executor(config, checkpoint, plans, progress=False)
    executor.warm_up()
    fill_cache(executor)
    return executor


def fill_cache(executor: Executor) -> None:
    """Fill the executor's float cache with random numbers.

    Zeros draw fewer watts, and at the GPU's power limit fewer watts mean a shorter time.
    """

    def fill(i: int, old: jax.Array) -> jax.Array:
        draw = jax.jit(_normal, static_argnums=(1, 2), out_shardings=old.sharding)
        return draw(jax.random.key(i), old.shape, old.dtype)

    executor.fill_kv(fill)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (0.5 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def _decode_step(precision: str, requests: int) -> dict[str, Implementation]:
    """Prepare steps in which every request repeatedly decodes its token at position CONTEXT - 1."""
    # memory holds only one model next to its cache
    if _executor.cache_info().currsize and _last[0] != precision:
        _executor.cache_clear()
    _last[0] = precision
    executor = _executor(precision)
    bucket = max(8, requests)
    few = executor.decode_layouts
    layout = few.get(requests) or few.get(bucket) or executor.layouts[bucket][0]
    per = -(-(CONTEXT + 1) // layout.page_size)
    order = np.random.default_rng(0).permutation(executor.num_pages[0])
    slots = np.arange(requests, dtype=np.int32)
    appends = np.array([(0, slot, i, order[slot * per + i]) for slot in slots for i in range(per)], np.int32)
    table = SlotSampling.empty(executor.slots)
    table.sampler[:] = PLAIN
    nobody: Any = np.empty(0, object)
    positions = np.full(requests, CONTEXT - 1, np.int32)
    work = StepWork(nobody, slots, positions, (), (), requests, layout.tokens, np.empty((0, 4), np.int32))
    buffer, _ = pack(layout, work, table)
    executor.run(layout, buffer, appends, full=False)
    return {
        precision: Implementation(
            lambda: executor.run(layout, buffer, appends[:0], full=False).tokens, 1, float(requests)
        )
    }


_last = [""]


def _layer(fp8: bool, tokens: int) -> dict[str, Implementation]:
    """Prepare the dense ops and norms of LAYERS consecutive layers. Queries replace the attention output."""
    model = open_checkpoint(MODEL, load_format="dummy").model_config
    model = dataclasses.replace(model, layers=model.layers[:LAYERS])
    weights = dummy_weights(model, jnp.bfloat16)["layers"]
    if fp8:
        dense = {"qkv", "out_proj", "up_gate", "down"}
        rows = jax.jit(reference.quantize_rows)
        weights = [{name: rows(a) if name in dense else a for name, a in layer.items()} for layer in weights]
    x = jax.random.normal(jax.random.key(0), (tokens, model.hidden_size), jnp.bfloat16)
    shapes = [layer[name].shape for layer in weights for name in ("qkv", "out_proj", "up_gate", "down")]
    flop = 2.0 * tokens * sum(n * k for n, k in shapes)
    rival = (
        dataclasses.replace(
            REFERENCE, name="xla", gemm=lambda *args, out_dtype=None, **behind: xla(*args, **behind)
        )
        if fp8
        else REFERENCE
    )
    hopper = kernel_set_for(
        "gpu",
        "9.0",
        head_dim=model.head_dim,
        queries_per_kv_head=model.num_heads // model.num_kv_heads,
        page_size=64,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        device=jax.devices()[0].device_kind,
    )
    return {
        name: _through(Context(model, kernels), weights, x, flop)
        for name, kernels in (("ours", hopper), ("xla", rival))
    }


def _through(c: Context, weights: list, x: jax.Array, flop: float) -> Implementation:
    def run(weights, x):
        y = None
        for w in weights:
            site = Site(c, w)
            x, h = ops.attn_norm(site, x, y)
            q = ops.qkv(site, h)[:, : c.config.num_heads * c.config.head_dim].reshape(
                x.shape[0], c.config.num_heads, -1
            )
            y = ops.out_proj(site, q)
            x, h = ops.mlp_norm(site, x, y)
            y = ops.down(site, ops.up_gate(site, h))
        return x, y

    program = jax.jit(run)
    dtype = "float8_e4m3fn" if isinstance(weights[0]["qkv"], Quantized) else "bfloat16"
    return Implementation(lambda: program(weights, x), LAYERS, flop / LAYERS, dtype=dtype, tuned=True)


def _steps(precision: str) -> tuple[KernelCase, ...]:
    cases = []
    for requests, limit, vllm in zip(REQUESTS, LIMIT_MS[precision], VLLM_MS[precision], strict=True):
        recorded = {} if vllm is None else {"vLLM 0.24": vllm * 1e3}
        make = functools.partial(_decode_step, precision, requests)
        cases.append(
            KernelCase(f"{requests} x {CONTEXT}", make, rate=requests / limit * 1e3, recorded_us=recorded)
        )
    return tuple(cases)


GROUPS = (
    *(
        KernelGroup(
            f"layer_{name}",
            "TFLOP/s",
            tuple(KernelCase(f"M {m}", functools.partial(_layer, fp8, m), ratio=1.05) for m in (1024, 2048)),
        )
        for name, fp8 in (("bf16", False), ("fp8", True))
    ),
    *(
        KernelGroup(f"decode_step_{precision}", "tok/s", _steps(precision), together=True, on_request=True)
        for precision in PRECISIONS
    ),
)

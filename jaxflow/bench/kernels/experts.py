"""Benchmark cases of a mixture's products: Qwen3-30B-A3B's and Mixtral's experts, even and skewed routings.

A call of `grouped_gemm` is `expert_up_gate` and `expert_down` over rows that are sorted already. Its rate
counts the weights of the experts that the routing touches. `lax.ragged_dot` multiplies every row with every
expert's weight, and runs for few tokens only. JAX's Mosaic kernel and the dense product leave gates to XLA
or read one weight. In e4m3 a call also quantizes the rows between the products. A call of `expert_layer` is
the layer's part from the router to the sum by token; `top_k` and `sort_rows` are ops of this part. gpt-oss's
experts are in MXFP4; XLA applies their gates for all implementations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from jaxflow.config import gate_block
from jaxflow.model import ops
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import MXFP4
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.weight_spec import QUANTIZED_EXPERTS
from pallas_kernels.gemm.block_fp8_format import quantize_block_fp8
from pallas_kernels.gemm.dense.api import dense_gemm
from pallas_kernels.gemm.grouped import api, groups, padded, reference, swapped
from pallas_kernels.gemm.grouped.int4_format import quantize_experts
from pallas_kernels.gemm.grouped.mxfp4_format import quantize_mxfp4
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.reference import finish
from pallas_kernels.gemm.sorted_rows import api as sorted_rows
from pallas_kernels.gemm.sorted_rows.reference import gather
from pallas_kernels.kernel_set import kernel_set_for
from pallas_kernels.measure.peaks import Least
from pallas_kernels.measure.timing import looped
from pallas_kernels.pointwise.quantize import api as quantize_api
from pallas_kernels.pointwise.quantize.reference import quantize_blocks, quantize_rows
from pallas_kernels.pointwise.top_k import api as top_k_api
from pallas_kernels.pointwise.top_k import reference as top_k_reference
from pallas_kernels.quantized import GROUP

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b")
GPT_OSS = "gpt-oss-20b"
TOKENS = (64, 1, 2048, 256, 8)
ZIPF = {"even": 0.0, "zipf 1.2": 1.2}
MOSAIC = {"swapped": swapped, "tiles of 128": padded}
STREAM_BYTES_PER_S = 4.5e12  # measured reads of an H200
INT4_BYTES = 1 / 2 + 4 / GROUP  # a scale and a zero have two bytes each
FEW = 64  # tokens up to which XLA's ragged product runs
_CALLS, _ROUNDS = 8, 32  # of `top_k` and `sort_rows`: calls in a loop's body, and rounds of the loop


@functools.cache
def _config(model: str):
    return open_checkpoint(model, load_format="dummy").model_config


@functools.cache
def _weights(model: str) -> dict[str, jax.Array]:
    """Return random weights of the router and of all experts. One expert at a time, to save memory."""
    config = _config(model)
    d, f, experts = config.hidden_size, config.expert_intermediate_size, config.num_experts

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drawn(seed: int, n: int, k: int) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed), experts)
        return lax.map(lambda key: jax.random.normal(key, (n, k), jnp.bfloat16) * k**-0.5, keys)

    return {
        "expert_up_gate": drawn(0, 2 * f, d),
        "expert_down": drawn(1, d, f),
        "router": jax.random.normal(jax.random.key(2), (experts, d), jnp.bfloat16) * d**-0.5,
    }


def _gates(model: str) -> dict[str, Any]:
    return {
        "activation": _config(model).activation,
        "gate_block": gate_block(_config(model).expert_intermediate_size),
    }


def _grouped(product: Callable, gates: dict[str, Any], x: tuple, w: dict[str, jax.Array]) -> jax.Array:
    rows, listed = x
    return product(product(rows, w["expert_up_gate"], listed, **gates), w["expert_down"], listed)


def _jax_mosaic(gates: dict[str, Any], x: tuple, w: dict[str, jax.Array]) -> jax.Array:
    """Return both products by JAX's Mosaic kernel. XLA applies the gates between them."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    rows, listed = x
    tile = {
        "block_m": 128 if rows.shape[0] >= 128 * w["router"].shape[0] else 64,
        "block_n": 128,
        "block_k": 64,
    }
    one = functools.partial(
        ragged_dot,
        group_sizes=listed.sizes,
        max_concurrent_steps=4,
        grid_block_n=1,
        transpose_rhs=True,
        **tile,
    )
    a = finish(one(rows, w["expert_up_gate"]), dtype=rows.dtype, **gates)
    return one(a, w["expert_down"])


def _e4m3(gates: dict[str, Any], x: tuple, w: dict[str, Any]) -> jax.Array:
    """Return both products in e4m3. The rows between the products are quantized."""
    rows, listed = x
    a = swapped.grouped_gemm(rows, w["expert_up_gate"], listed, **gates)
    return swapped.grouped_gemm(quantize_api.quantize_rows(a), w["expert_down"], listed)


def _e4m3_blocks(gates: dict[str, Any], x: tuple, w: dict[str, Any]) -> jax.Array:
    """Return both products in e4m3 blocks. The rows between the products are quantized."""
    rows, listed = x
    a = swapped.grouped_gemm(rows, w["expert_up_gate"], listed, **gates)
    return swapped.grouped_gemm(quantize_blocks(a), w["expert_down"], listed)


def _dense(gates: dict[str, Any], x: tuple, w: dict[str, jax.Array]) -> jax.Array:
    """Return both products of as many rows with the weight of one expert."""
    return dense_gemm(dense_gemm(x[0], w["expert_up_gate"][0], **gates), w["expert_down"][0])


@functools.cache
def _int4_weights(model: str) -> dict[str, Any]:
    """Return the experts' weights in int4, one expert at a time, to save memory."""
    own = _weights(model)

    def one(w: jax.Array) -> Any:
        return jax.tree.map(lambda part: part[0], quantize_experts(w[None]))

    return {name: jax.jit(functools.partial(lax.map, one))(own[name]) for name in QUANTIZED_EXPERTS}


@functools.cache
def _e4m3_weights(model: str) -> dict[str, Any]:
    """Return the experts' weights in e4m3, one expert at a time, to save memory."""
    own = _weights(model)
    return {name: jax.jit(functools.partial(lax.map, quantize_rows))(own[name]) for name in QUANTIZED_EXPERTS}


@functools.cache
def _block_weights(model: str) -> dict[str, Any]:
    """Return the experts' weights in e4m3 blocks, one expert at a time, to save memory."""
    own, block = _weights(model), _gates(model)["gate_block"]

    def made(w: jax.Array, gate_block: int | None) -> Any:
        one = lambda expert: jax.tree.map(lambda part: part[0], quantize_block_fp8(expert[None], gate_block))
        return jax.jit(functools.partial(lax.map, one))(w)

    return {
        "expert_up_gate": made(own["expert_up_gate"], block),
        "expert_down": made(own["expert_down"], None),
    }


@dataclasses.dataclass(frozen=True)
class _Calls:
    """The routings of a case, as many as a run has calls, so that few tokens
    touch other experts in each call.

    elements: of the experts that a call touches, on average. flop: of a call.
    """

    model: str
    tokens: int
    picked: tuple[np.ndarray, ...]
    elements: float
    flop: float

    def program(
        self,
        one: Callable,
        list_groups: Callable,
        w: dict[str, Any],
        *,
        element_bytes: float = 2.0,
        one_weight: bool = False,
        quantize: Callable = lambda x: x,
        work: float | None = None,
    ) -> Implementation:
        """Prepare an implementation.

        one_weight: it reads no expert's weight but one. work: of `Implementation`.
        """
        config, calls, moved = _config(self.model), len(self.picked), element_bytes * self.elements
        least = Least(flop=self.flop) if one_weight else Least(moved, self.flop)

        @jax.jit
        def ready(seed: int, experts: jax.Array) -> tuple:
            listed = list_groups(experts, config.num_experts)
            x = jax.random.normal(jax.random.key(seed), (self.tokens, config.hidden_size), jnp.bfloat16)
            return jax.tree.map(lambda rows: rows[listed.pairs // experts.shape[1]], quantize(x)), listed

        xs = [ready(seed, jnp.asarray(experts)) for seed, experts in enumerate(self.picked)]
        rounds = max(1, round(5e-3 / calls / max(moved / 4e12, self.flop / (1e15 / element_bytes))))
        run = looped(jax.jit(functools.partial(one, _gates(self.model))), rounds)
        return Implementation(lambda: run(xs, [w] * calls), rounds * calls, moved, work, least=least)


def _calls(model: str, tokens: int, zipf: float) -> _Calls:
    config, rng = _config(model), np.random.default_rng(tokens)
    chosen, number = config.experts_per_token, 8 if tokens <= 256 else 4
    picked = tuple(draw_routing(rng, tokens, config.num_experts, chosen, zipf) for _ in range(number))
    elements = 3.0 * config.hidden_size * config.expert_intermediate_size  # one expert
    touched = float(np.mean([len(np.unique(one)) for one in picked]))
    return _Calls(model, tokens, picked, elements * touched, 2.0 * elements * tokens * chosen)


def _products(model: str, tokens: int, zipf: float) -> dict[str, Implementation]:
    calls, w = _calls(model, tokens, zipf), _weights(model)
    made = {
        name: calls.program(functools.partial(_grouped, module.grouped_gemm), module.list_groups, w)
        for name, module in MOSAIC.items()
    }
    made["jax mosaic"] = calls.program(_jax_mosaic, groups.list_groups, w)
    if tokens <= FEW:
        product = functools.partial(_grouped, reference.grouped_gemm)
        made["xla"] = calls.program(product, groups.list_groups, w)
    if tokens >= 2048:
        made["dense, one weight"] = calls.program(_dense, groups.list_groups, w, one_weight=True)
    return made


def _e4m3_products(model: str, tokens: int, zipf: float) -> dict[str, Implementation]:
    """Prepare both products in e4m3, and as a rival in bfloat16."""
    calls, list_groups, w = _calls(model, tokens, zipf), swapped.list_groups, _e4m3_weights(model)
    wide = functools.partial(_grouped, swapped.grouped_gemm)
    return {
        "e4m3": calls.program(_e4m3, list_groups, w, element_bytes=1.0, quantize=quantize_rows),
        "bfloat16": calls.program(wide, list_groups, _weights(model)),
    }


def _block_products(model: str, tokens: int, zipf: float) -> dict[str, Implementation]:
    """Prepare both products in e4m3 with scales of blocks, and as rivals with scales of rows and in bfloat16.

    The ratio is that of times.
    """
    calls, list_groups = _calls(model, tokens, zipf), swapped.list_groups
    one = functools.partial(calls.program, list_groups=list_groups, work=calls.elements)
    wide = functools.partial(_grouped, swapped.grouped_gemm)
    return {
        "e4m3 blocks": one(
            _e4m3_blocks, w=_block_weights(model), element_bytes=1.0, quantize=quantize_blocks
        ),
        "e4m3 rows": one(_e4m3, w=_e4m3_weights(model), element_bytes=1.0, quantize=quantize_rows),
        "bfloat16": one(wide, w=_weights(model)),
    }


def _int4_products(model: str, tokens: int, zipf: float) -> dict[str, Implementation]:
    """Prepare both products in int4, and as a rival in bfloat16. The ratio is that of times."""
    calls, wide = _calls(model, tokens, zipf), _weights(model)
    ours = functools.partial(_grouped, api.grouped_gemm)
    one = functools.partial(calls.program, work=calls.elements)
    return {
        "int4": one(ours, api.list_groups, _int4_weights(model), element_bytes=INT4_BYTES),
        "bfloat16": one(ours, api.list_groups, wide),
    }


def _mxfp4_products(tokens: int, zipf: float) -> dict[str, Implementation]:
    """Prepare both products of gpt-oss in MXFP4, and as rivals in bfloat16. Ratios are those of times."""
    calls, wide = _calls(GPT_OSS, tokens, zipf), _weights(GPT_OSS)
    ours = functools.partial(_grouped, api.grouped_gemm)
    one = functools.partial(calls.program, work=calls.elements)
    kept = {
        name: jax.jit(functools.partial(lax.map, quantize_mxfp4))(wide[name]) for name in QUANTIZED_EXPERTS
    }
    made = {
        "mxfp4": one(ours, api.list_groups, kept, element_bytes=MXFP4.experts),
        "bfloat16": one(ours, api.list_groups, wide),
        "jax mosaic": one(_jax_mosaic, groups.list_groups, wide),
    }
    if tokens <= FEW:
        made["xla"] = one(functools.partial(_grouped, reference.grouped_gemm), groups.list_groups, wide)
    return made


def _layer(model: str, tokens: int) -> dict[str, Implementation]:
    """Prepare the layer from the router to the sum by token, with both grouped kernels."""
    config, w = _config(model), _weights(model)
    sizes: dict[str, Any] = {
        "head_dim": config.head_dim,
        "queries_per_kv_head": config.num_heads // config.num_kv_heads,
        "page_size": 64,
        "device": jax.devices()[0].device_kind,
    }
    kernels = kernel_set_for("gpu", "9.0", **sizes, dtype="bfloat16", kv_dtype="bfloat16")
    touched = config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** tokens)
    moved = 6.0 * config.hidden_size * config.expert_intermediate_size * touched
    calls = 8
    xs = [
        jax.random.normal(jax.random.key(i), (tokens, config.hidden_size), jnp.bfloat16) for i in range(calls)
    ]

    def program(module: Any) -> Implementation:
        def sort(h: jax.Array, experts: jax.Array, number: int, **_: Any) -> tuple:
            listed = module.list_groups(experts, number)
            return listed, gather(h, listed)

        own = dataclasses.replace(kernels, grouped_gemm=module.grouped_gemm, list_groups=module.list_groups)
        if module is padded:  # the engine's sort lists groups for the kernel that suits the rows
            own = dataclasses.replace(own, sort_rows=sort)

        def one(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
            site = Site(Context(config, own), w)
            routing = ops.router(site, h)
            return ops.expert_down(site, ops.expert_up_gate(site, h, routing), routing)

        run = looped(jax.jit(one), 4)
        return Implementation(lambda: run(xs, [w] * calls), 4 * calls, moved, least=Least())

    return {name: program(module) for name, module in MOSAIC.items()}


def _top_k(model: str, tokens: int) -> dict[str, Implementation]:
    """Prepare the choice of each token's experts, with their softmax."""
    config = _config(model)
    shape = (tokens, config.num_experts)
    xs = [jax.random.normal(jax.random.key(i), shape, jnp.float32) for i in range(_CALLS)]

    def program(choose: Callable) -> Implementation:
        one = functools.partial(choose, chosen=config.experts_per_token, softmax=True)
        run = looped(jax.jit(lambda x, _: one(x)), _ROUNDS)
        return Implementation(lambda: run(xs, [None] * _CALLS), _ROUNDS * _CALLS, float(tokens))

    return {"mosaic": program(top_k_api.top_k), "xla": program(top_k_reference.top_k)}


def _sort_rows(model: str, tokens: int, quantize: bool) -> dict[str, Implementation]:
    """Prepare the sort of the tokens' rows by expert. Each call has a routing and rows of its own."""
    config, rng = _config(model), np.random.default_rng(tokens)
    number, chosen = config.num_experts, config.experts_per_token
    xs = [
        (
            jax.random.normal(jax.random.key(i), (tokens, config.hidden_size), jnp.bfloat16),
            jnp.asarray(draw_routing(rng, tokens, number, chosen)),
        )
        for i in range(_CALLS)
    ]

    def program(sort: Callable) -> Implementation:
        def one(x: tuple[jax.Array, jax.Array], _: None) -> Any:
            return sort(*x, number, quantize=quantize)

        run = looped(jax.jit(one), _ROUNDS)
        return Implementation(lambda: run(xs, [None] * _CALLS), _ROUNDS * _CALLS, float(tokens))

    return {"mosaic": program(sorted_rows.sort_rows), "xla": program(sorted_rows.sort_by_xla)}


GROUPS = (
    KernelGroup(
        "sort_rows",
        "tok/s",
        tuple(
            KernelCase(
                f"{model} T {tokens}{name}",
                functools.partial(_sort_rows, model, tokens, quantize),
                ratio=1.0,
            )
            for tokens in TOKENS
            if tokens <= sorted_rows.MOST_TOKENS
            for model in MODELS
            for name, quantize in {"": False, " e4m3": True}.items()
        ),
        on_request=True,
    ),
    KernelGroup(
        "top_k",
        "tok/s",
        tuple(
            KernelCase(f"{model} T {tokens}", functools.partial(_top_k, model, tokens), ratio=1.0)
            for tokens in TOKENS
            for model in MODELS
        ),
        on_request=True,
    ),
    KernelGroup(
        "grouped_gemm",
        "TB/s",
        tuple(
            KernelCase(
                f"{model} T {tokens} {name}",
                functools.partial(_products, model, tokens, zipf),
                rate=0.85 * STREAM_BYTES_PER_S if tokens == 64 else None,
                ratio=1.0,
            )
            for tokens in TOKENS
            for model in MODELS
            for name, zipf in ZIPF.items()
        )
        + tuple(
            KernelCase(
                f"{model} T {tokens} {name} fp8",
                functools.partial(_e4m3_products, model, tokens, zipf),
                rate=0.85 * STREAM_BYTES_PER_S if tokens == 64 else None,
            )
            for tokens in TOKENS
            for model in MODELS
            for name, zipf in ZIPF.items()
        )
        + tuple(
            KernelCase(
                f"{model} T {tokens} {name} int4", functools.partial(_int4_products, model, tokens, zipf)
            )
            for tokens in TOKENS
            for model in MODELS
            for name, zipf in ZIPF.items()
        )
        + tuple(
            KernelCase(
                f"{GPT_OSS} T {tokens} {name} mxfp4",
                functools.partial(_mxfp4_products, tokens, zipf),
                ratio=1.0,
            )
            for tokens in TOKENS
            for name, zipf in ZIPF.items()
        ),
    ),
    KernelGroup(
        "grouped_gemm_blocks",
        "TB/s",
        tuple(
            KernelCase(
                f"{MODELS[0]} T {tokens} {name}", functools.partial(_block_products, MODELS[0], tokens, zipf)
            )
            for tokens in TOKENS
            for name, zipf in ZIPF.items()
        ),
        on_request=True,
    ),
    KernelGroup(
        "expert_layer",
        "TB/s",
        tuple(
            KernelCase(f"{model} T {tokens}", functools.partial(_layer, model, tokens), ratio=1.0)
            for tokens in TOKENS
            for model in MODELS
        ),
    ),
)

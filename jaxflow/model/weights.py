"""The weights of a model as a pytree: shapes, sharding over devices, and the checkpoint tensors that fill
them.

    {"embed": [V', D], "positions": [max_position + 2, D] (OPT), "final_norm": [D], "final_norm_bias": [D],
     "lm_head": [V', D] (absent if tied), "layers": one dict a layer, its keys in `_layer`}

A model with an embedding of each layer, of p columns, also has "layer_embed" [V', L p], "layer_embed_proj"
[L p, D] and "layer_embed_norm" [p].

Every matrix is [out, in], as in Hugging Face checkpoints: y = x @ w.T. V' is the vocabulary padded with rows
of zeros. Matrices that one GEMM can compute together are fused. Their rows are ordered so that a contiguous
range is a tensor-parallel shard. Experts are an array [E, out, in], of which each device has a part of every
expert, or under expert parallelism some experts whole. `qkv` holds, for each key/value head, its query heads,
its key head and its value head, or only the query heads in a layer that shares keys and values. `up_gate`
alternates blocks of gate rows and up rows (`ModelConfig.gate_block`). With fewer key/value heads than shards,
each head is repeated, so that every shard has one.

Latent attention has other matrices in the place of `qkv` (`jaxflow.model.latent_weights`).

Under quantization the matrices named in `QUANTIZED` are `Quantized` e4m3 with a scale per row (fp8), or
`Int4` in groups of 64 columns (int4). The experts are then `Quantized` or `ExpertInt4`. mxfp4 affects only
the experts of gpt-oss, which are `Mxfp4` in groups of 32 columns, as in its checkpoints, or `Mxfp4Blocks`.
int4_zero_point is int4 with zero points. fp8_per_block makes `BlockFp8` of experts, and of the matrices of
`DENSE_BLOCKS` that are whole blocks on each device. The embeddings, the head, norms and routers are not
quantized, and shared experts only by fp8_per_block.
An e4m3 cache has its scales here: "k_scale" and "v_scale" [K], float32, in each layer. An e4m3 MLP may be
padded with zeros (`mlp_width`), and so may the experts of gpt-oss (`expert_width`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxflow.config import ConfigError, Layer, ModelConfig, Rope, gate_block
from jaxflow.model.architectures.tensor_names import layer_names, model_names
from jaxflow.model.latent_weights import latent_leaves
from jaxflow.model.rope import rotary_order
from jaxflow.model.stage import Stage
from jaxflow.model.weight_spec import (
    AFFECTED,
    FP8_PER_BLOCK,
    INT4_ZERO_POINT,
    TENSOR_PARALLEL_AXIS,
    Init,
    Leaf,
    Piece,
    draw,
)
from jaxflow.parallel.mesh import DP, TP, sharded
from pallas_kernels.cards import this_card
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS, GROUP, MXFP4_GROUP

Weights = dict[str, Any]
VOCAB_TILE = 64  # each shard's number of vocabulary rows is a multiple of 64
# The leaves whose first axis counts the experts: under expert parallelism each device holds some of them.
EXPERT_LEAVES = ("expert_up_gate", "expert_up_gate_bias", "expert_down", "expert_down_bias")
# The matrices besides experts that fp8_per_block affects where they are whole blocks.
DENSE_BLOCKS = ("qkv", "out_proj", "up_gate", "down", "shared_up_gate", "shared_down")
EXPERT_TILE = 64  # columns of an expert that grouped kernels take together
# Columns with one scale.
GROUPS = {"int4": GROUP, INT4_ZERO_POINT: GROUP, "mxfp4": MXFP4_GROUP, FP8_PER_BLOCK: BLOCK}


def leaves(
    config: ModelConfig,
    tp: int = 1,
    *,
    quantization: str | None = None,
    kv_scales: bool = False,
    expert_parallel: bool = False,
    ranks: int = 1,
) -> Weights:
    """Return the pytree of weights for `tp` devices, with a `Leaf` in the place of each array.

    Args:
      quantization: fp8, int4, int4_zero_point, mxfp4 or fp8_per_block, for the matrices of `AFFECTED`.
      kv_scales: whether to include the scales of an e4m3 cache.
      expert_parallel: each device holds some experts whole, instead of a share of every expert.
      ranks: the data-parallel ranks, over which the whole experts are spread.

    Raises:
      ConfigError: `tensor_parallel_size` does not divide the heads, the MLP or the whole experts, or splits a
      group of a 4-bit matrix or a block of e4m3. Expert parallelism without experts. mxfp4 for another model
      than gpt-oss. fp8_per_block for a model whose experts, or dense MLPs, have partial blocks.
    """
    _check_cuts(config, tp, expert_parallel, ranks)
    if quantization == "mxfp4" and "all_up_gate" not in layer_names(config):
        accepted = f"fp8, int4 or unset: no checkpoint of {config.architecture} has experts in MXFP4"
        raise ConfigError("quantization", quantization, accepted)
    if quantization == FP8_PER_BLOCK and not has_whole_blocks(config):
        accepted = (
            f"fp8, int4 or unset: {config.architecture} has no MLPs of whole blocks of {BLOCK} x {BLOCK}"
        )
        raise ConfigError("quantization", quantization, accepted)
    names = model_names(config)
    d, v = config.hidden_size, config.vocab_size
    padded = -(-v // (VOCAB_TILE * tp)) * VOCAB_TILE * tp
    tree: Weights = {"embed": _padded("embed", names["embed"], (v, d), padded)}
    if config.learned_position_offset is not None:
        tree["positions"] = _whole(
            "positions",
            names["positions"],
            (config.max_position + config.learned_position_offset, d),
            "matrix",
        )
    tree |= _norm("final_norm", names["final_norm"], d, config)
    if config.layer_input_size:
        tree |= _layer_embed(config, names, padded)
    if not config.tie_word_embeddings:
        tree["lm_head"] = _padded("lm_head", names["lm_head"], (v, d), padded)
    widths = [
        mlp_width(config.for_layer(layer).intermediate_size, tp, quantization) for layer in config.layers
    ]
    tree["layers"] = [
        _layer(config, layer, names["layer"].format(i), tp, widths[i], expert_parallel, ranks)
        for i, layer in enumerate(config.layers)
    ]
    for i, layer in enumerate(tree["layers"]):
        prefix, width = names["layer"].format(i), widths[i]
        if quantization is not None:
            scales = _scales(config, config.layers[i], prefix, tp, width) if quantization == "fp8" else {}
            for key in layer.keys() & {*AFFECTED[quantization]}:
                layer[key] = dataclasses.replace(layer[key], quantization=quantization, scale=scales.get(key))
        if quantization == FP8_PER_BLOCK:
            layer |= _block_experts(config, layer, prefix)
            layer |= _block_matrices(config, config.layers[i], layer, prefix, tp)
        if quantization in GROUPS:
            _check_groups(layer, tp, quantization)
        if quantization == INT4_ZERO_POINT:
            factors = _group_factors(config, config.layers[i], prefix, tp)
            for key in layer.keys() & factors.keys():
                own = layer[key]
                placed = {"whole_experts": own.whole_experts, "over_ranks": own.over_ranks}
                layer[key] = dataclasses.replace(own, scale=dataclasses.replace(factors[key], **placed))
        if quantization == "mxfp4":
            layer |= _stored_experts(config, layer, prefix, tp)
        if kv_scales:  # of the layer whose cache this layer reads
            own = names["layer"].format(config.cache_of(i))
            layer |= {
                key: _kv_scale(key, f"{own}self_attn.{key}", config.for_layer(config.layers[i]), tp)
                for key in ("k_scale", "v_scale")
            }
    return tree


def shapes(
    config: ModelConfig,
    tp: int = 1,
    dtype: Any = jnp.float32,
    **options: Any,
) -> Weights:
    """Return the pytree with a `jax.ShapeDtypeStruct` for each array: global shapes, over all `tp` devices.

    options: of `leaves`.
    """
    return jax.tree.map(lambda leaf: leaf.struct(dtype), leaves(config, tp, **options))


def shardings(config: ModelConfig, mesh: Mesh | None = None, **options: Any) -> Weights:
    """Return the pytree with a `PartitionSpec` over the mesh axis "tp" for each array.

    mesh: decides which models are refused; None for one device. options: of `leaves`.
    """
    devices = 1 if mesh is None else mesh.shape[TP]
    return jax.tree.map(lambda leaf: leaf.specs, leaves(config, devices, **options))


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of this model must have."""
    return {piece.name: piece.shape for leaf in jax.tree.leaves(leaves(config)) for piece in leaf.pieces}


def dummy_weights(
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | None = None,
    seed: int = 0,
    *,
    stage: Stage | None = None,
    **options: Any,
) -> Weights:
    """Return random weights, made on the devices that hold them.

    Every mesh gets the same numbers, rounded to `dtype`. Matrices are nearly normal with a variance of 1 /
    fan-in, norms scale by 1 and biases are 0, so that activations keep their size from layer to layer. The
    norm of queries scales by 1 / sqrt(H) in a model whose attention does not scale its scores. Each
    distinct layer is compiled once. Quantized matrices are the quantized form of the rounded ones. options:
    of `leaves`. stage: the part to make; None for the complete model.
    """
    outer, *layers = dummy_groups(config, dtype, mesh, seed, stage=stage, **options)
    return outer | {"layers": layers}


def dummy_groups(
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | None = None,
    seed: int = 0,
    *,
    stage: Stage | None = None,
    **options: Any,
) -> Iterator[Weights]:
    """Yield `dummy_weights` in groups: the weights outside the layers, then each layer."""
    tree = leaves(config, 1 if mesh is None else mesh.shape[TP], **options)
    held = tree if stage is None else stage.weights(tree)
    first = 0 if stage is None else stage.first
    makers: dict[tuple[Any, ...], Callable[[np.ndarray], Any]] = {}

    def make(group: dict[str, Leaf], number: int, names: Iterable[str]) -> dict[str, jax.Array]:
        """`names`: of all weights of the group, so that a stage draws the same numbers."""
        kind = tuple((name, leaf.shape) for name, leaf in group.items())
        if kind not in makers:
            specs = {name: leaf.specs for name, leaf in group.items()}
            placed = None if mesh is None else jax.tree.map(functools.partial(sharded, mesh), specs)
            offset = config.norm_weight_offset
            draw = functools.partial(_draw_group, group=group, dtype=dtype, norm_offset=offset)
            makers[kind] = jax.jit(draw, out_shardings=placed)
        names = list(names)
        seeds = np.random.SeedSequence([seed, number]).generate_state(2 * len(names)).reshape(-1, 2)
        return makers[kind](seeds[[names.index(name) for name in group]])

    outer = [name for name in tree if name != "layers"]
    yield make({name: held[name] for name in outer if name in held}, 0, outer)
    for number, layer in enumerate(held["layers"], start=1 + first):
        yield make(layer, number, layer)


def _draw_group(
    seeds: jax.Array, *, group: Mapping[str, Leaf], dtype: Any, norm_offset: float
) -> dict[str, Any]:
    return {name: draw(seeds[i], leaf, norm_offset, dtype) for i, (name, leaf) in enumerate(group.items())}


def _check_cuts(config: ModelConfig, tp: int, expert_parallel: bool, ranks: int) -> None:
    def check(ok: bool, accepted: str) -> None:
        if not ok:
            raise ConfigError("tensor_parallel_size", tp, accepted)

    heads = config.num_heads
    check(tp >= 1 and heads % tp == 0, f"a divisor of the {heads} attention heads")
    for kv_heads, _ in sorted(config.head_shapes):
        check(
            kv_heads % tp == 0 or tp % kv_heads == 0,
            f"a divisor or a multiple of the {kv_heads} key/value heads",
        )
    experts = any(layer.experts for layer in config.layers)
    if expert_parallel and not experts:
        raise ConfigError("enable_expert_parallel", True, "False for a model without experts")
    check(
        not expert_parallel or config.num_experts % tp == 0,
        f"a divisor of the {config.num_experts} experts, which enable_expert_parallel spreads whole",
    )
    if config.num_experts % (ranks * tp) and ranks > 1:
        accepted = f"a divisor of the {config.num_experts} experts, which are spread over the ranks"
        if tp > 1:
            accepted += f" of tensor_parallel_size={tp} devices"
        raise ConfigError("data_parallel_size", ranks, accepted)
    widths = {config.for_layer(layer).intermediate_size for layer in config.layers if not layer.experts}
    widths |= {config.expert_intermediate_size} if experts and not expert_parallel else set()
    widths |= {config.shared_expert_intermediate_size} - {0}
    for width in widths:
        block = gate_block(width) if config.gated_mlp else 1
        check(
            width % (block * tp) == 0,
            f"a divisor of the {width // block} blocks of {block} rows of the MLP width {width}",
        )


def _check_groups(layer: Mapping[str, Leaf], tp: int, quantization: str) -> None:
    """Refuse a matrix with a partial group of columns, or a group that two devices share."""
    group = GROUPS[quantization]
    for leaf in (layer[key] for key in AFFECTED[quantization] if key in layer):
        columns = (leaf.filled or leaf.shape)[-1]
        if columns % group:
            raise ConfigError(
                "quantization",
                quantization,
                f"fp8 or unset: {leaf.key} has {columns} columns, no multiple of a group's {group}",
            )
        cut = len(leaf.spec) == len(leaf.shape)  # the last axis is spread over devices
        if cut and leaf.shape[-1] % (group * tp):
            accepted = (
                f"a divisor of the {leaf.shape[-1] // group} groups of {group} columns of {leaf.key} that "
                f"quantization={quantization} cuts"
            )
            raise ConfigError("tensor_parallel_size", tp, accepted)


def has_whole_blocks(config: ModelConfig) -> bool:
    """Return whether the matrices of a model's experts are whole blocks of 128 x 128, each in tensors of its
    own; or those of its MLPs, without experts.
    """
    experts = any(layer.experts for layer in config.layers)
    width = config.expert_intermediate_size if experts else config.intermediate_size
    whole = config.hidden_size % BLOCK == 0 and width % BLOCK == 0
    return whole and not (experts and _experts_in_one_tensor(config))


def _experts_in_one_tensor(config: ModelConfig) -> bool:
    """Return whether a tensor of a checkpoint holds all experts of a layer."""
    return not layer_names(config).keys().isdisjoint(("all_up_gate", "stacked_up_gate"))


def mlp_width(width: int, tp: int, quantization: str | None) -> int:
    """Return the stored columns of a dense MLP of width F for `tp` devices: F, or a little more.

    GEMMs of e4m3 take full blocks of 128 columns on each device. Qwen2-72B's 29,568 columns are 115.5 blocks
    on each of two devices. Zeros fill the last block, which add nothing, if they are at most a 32nd of the
    width.
    """
    whole = -(-width // (BLOCK * tp)) * BLOCK * tp
    return whole if quantization == "fp8" and whole - width <= width // 32 else width


def expert_width(width: int, tp: int) -> int:
    """Return the stored columns of an expert of width F for `tp` devices: F, or a little more.

    Grouped kernels take multiples of 64 columns on each device. gpt-oss's 2,880 columns are 22.5 multiples on
    each of two devices. Zeros fill the last one, which add nothing, if they are at most a 12th of the width.
    """
    whole = -(-width // (EXPERT_TILE * tp)) * EXPERT_TILE * tp
    return whole if whole - width <= width // 12 else width


def kv_head_copies(config: ModelConfig, tp: int) -> int:
    """Return how often each key/value head is stored, so that each of `tp` devices has one."""
    return max(1, tp // config.num_kv_heads)


# ---- leaves and the tensors that fill them


def _whole(key: str, name: str, shape: tuple[int, ...], init: Init) -> Leaf:
    return Leaf(key, shape, (Piece(name, shape, shape, lambda out: out),), init)


def _padded(key: str, name: str, shape: tuple[int, int], rows: int, columns: int | None = None) -> Leaf:
    """Return a matrix of `shape`, padded with rows and columns of zeros."""
    piece = Piece(name, shape, shape, lambda out: out[: shape[0], : shape[1]])
    return Leaf(key, (rows, columns or shape[1]), (piece,), "matrix", filled=shape)


def _norm(key: str, name: str, width: int, config: ModelConfig) -> dict[str, Leaf]:
    norm = {key: _whole(key, f"{name}.weight", (width,), "norm")}
    if config.norm == "layer_norm":
        norm[f"{key}_bias"] = _whole(f"{key}_bias", f"{name}.bias", (width,), "zero")
    return norm


def _layer_embed(config: ModelConfig, names: Mapping[str, str], rows: int) -> dict[str, Leaf]:
    """Return the leaves that make the input of each layer. rows: V'."""
    p, columns = config.layer_input_size, config.num_layers * config.layer_input_size
    proj, table = names["layer_embed_proj"], names["layer_embed"]
    return {
        "layer_embed": _padded("layer_embed", table, (config.vocab_size, columns), rows),
        "layer_embed_proj": _whole("layer_embed_proj", proj, (columns, config.hidden_size), "matrix"),
        **_norm("layer_embed_norm", names["layer_embed_norm"], p, config),
    }


def _qkv(
    config: ModelConfig, layer: Layer, names: Mapping[str, str], tp: int, suffix: str, *tail: int
) -> Leaf:
    """Return rows grouped by key/value head. `tail` is (D,) for the weight, () for the bias.

    A layer that shares keys and values has the rows of its queries only.
    """
    k, h, copies = config.num_kv_heads, config.head_dim, kv_head_copies(config, tp)
    key, init, rope = "qkv" if tail else "qkv_bias", "matrix" if tail else "zero", layer.rope
    if layer.shares_kv:
        shape, order = (config.num_heads * h, *tail), _order_of_heads(rope, config.num_heads, h)
        return Leaf(key, shape, (Piece(names["q"] + suffix, shape, shape, lambda out: out, order),), init)
    group = config.num_heads // (k * copies)  # query heads per stored key head

    def heads(out: np.ndarray) -> np.ndarray:
        return out.reshape(k, copies, group + 2, h, *tail)

    pieces = (
        Piece(
            names["q"] + suffix,
            (config.num_heads * h, *tail),
            (k, copies, group, h, *tail),
            lambda out: heads(out)[:, :, :group],
            _order_of_heads(rope, config.num_heads, h),
        ),
        Piece(
            names["k"] + suffix,
            (k * h, *tail),
            (k, 1, h, *tail),
            lambda out: heads(out)[:, :, group],
            _order_of_heads(rope, k, h),
        ),
        Piece(names["v"] + suffix, (k * h, *tail), (k, 1, h, *tail), lambda out: heads(out)[:, :, group + 1]),
    )
    shape = (k * copies * (group + 2) * h, *tail)
    rows = _copied_rows(config, copies) if copies > 1 else None
    return Leaf(key, shape, pieces, init, rows)


def _order_of_heads(rope: Rope | None, heads: int, head_dim: int) -> np.ndarray | None:
    """Return `rotary_order` for the rows of several heads."""
    order = rotary_order(rope, head_dim)
    return None if order is None else (np.arange(heads)[:, None] * head_dim + order).reshape(-1)


def _copied_rows(config: ModelConfig, copies: int) -> np.ndarray:
    """Return, for each row of `qkv` with repeated key/value heads, its row in the unrepeated `qkv`."""
    k, h = config.num_kv_heads, config.head_dim
    group = config.num_heads // k
    whole = np.arange(k * (group + 2) * h).reshape(k, group + 2, h)
    queries = whole[:, :group].reshape(k, copies, group // copies, h)
    keys_values = np.broadcast_to(whole[:, None, group:], (k, copies, 2, h))
    return np.concatenate([queries, keys_values], axis=2).reshape(-1)


def _up_gate(
    names: Mapping[str, str], width: int, gated: bool, suffix: str, *tail: int, stored: int | None = None
) -> Leaf:
    """Return the fused gate and up rows. stored: `mlp_width` of the width; None for the width."""
    key = "up_gate" if tail else "up_gate_bias"
    init, stored = "matrix" if tail else "zero", stored or width
    if not gated:
        piece = Piece(names["up"] + suffix, (width, *tail), (width, *tail), lambda out: out[:width])
        return Leaf(key, (stored, *tail), (piece,), init, filled=(width, *tail))
    block = gate_block(width)
    shape, blocks = (width, *tail), (width // block, block, *tail)

    def alternating(out: np.ndarray) -> np.ndarray:
        return out[: 2 * width].reshape(width // block, 2, block, *tail)

    pieces = (
        Piece(names["gate"] + suffix, shape, blocks, lambda out: alternating(out)[:, 0]),
        Piece(names["up"] + suffix, shape, blocks, lambda out: alternating(out)[:, 1]),
    )
    return Leaf(key, (2 * stored, *tail), pieces, init, filled=(2 * width, *tail))


def _per_expert(key: str, one: Callable[[int], Leaf], experts: int) -> Leaf:
    """Return the leaves of all experts as one array [E, ...]."""

    def within(expert: int, piece: Piece) -> Piece:
        return dataclasses.replace(piece, view=lambda out: piece.view(out[expert]))

    made = [one(expert) for expert in range(experts)]
    pieces = tuple(within(expert, piece) for expert, leaf in enumerate(made) for piece in leaf.pieces)
    return Leaf(key, (experts, *made[0].shape), pieces, "matrix")


def _names_in(config: ModelConfig, layer: Layer, prefix: str) -> dict[str, str]:
    """Return the names of the tensors of a layer by their roles."""
    names = {role: prefix + name for role, name in layer_names(config).items()}
    return names | {"v": names["k"]} if layer.keys_are_values else names


def _layer(
    config: ModelConfig, layer: Layer, prefix: str, tp: int, width: int, expert_parallel: bool, ranks: int
) -> dict[str, Leaf]:
    """Return the leaves of one layer. width: `mlp_width` of its dense MLP. Other arguments: see `leaves`."""
    names, config = _names_in(config, layer, prefix), config.for_layer(layer)
    latent = config.latent
    d, width_of_head = config.hidden_size, config.head_dim if latent is None else latent.value_dim
    tree = _norm("attn_norm", names["attn_norm"], d, config)
    if latent is None:
        tree |= _heads(config, layer, names, tp)
    else:
        tree |= latent_leaves(config, latent, names)
    attention_width = config.num_heads * width_of_head
    tree["out_proj"] = _whole("out_proj", names["out"] + ".weight", (d, attention_width), "matrix")
    if config.out_proj_bias:
        tree["out_proj_bias"] = _whole("out_proj_bias", names["out"] + ".bias", (d,), "zero")
    if config.attention_sinks:
        tree["sink_logits"] = _whole("sink_logits", names["sinks"], (config.num_heads,), "zero")
    if config.post_norms:
        tree |= _norm("post_attn_norm", names["post_attn_norm"], d, config)
    if not (layer.experts and config.branch_norms):
        tree |= _norm("mlp_norm", names["mlp_norm"], d, config)
    if not layer.experts:
        tree |= _mlp(config, names, width)
    elif expert_parallel:
        over_ranks = None if ranks == 1 else DP if tp == 1 else (DP, TP)
        tree |= {
            key: dataclasses.replace(leaf, whole_experts=key in EXPERT_LEAVES, over_ranks=over_ranks)
            for key, leaf in _experts(config, names, 1).items()
        }
    else:
        tree |= _experts(config, names, tp)
    if config.post_norms:
        tree |= _norm("post_mlp_norm", names["post_mlp_norm"], d, config)
    if p := config.layer_input_size:
        tree["layer_gate"] = _whole("layer_gate", names["layer_gate"] + ".weight", (p, d), "matrix")
        tree["layer_proj"] = _whole("layer_proj", names["layer_proj"] + ".weight", (d, p), "matrix")
        tree |= _norm("post_layer_norm", names["post_layer_norm"], d, config)
    if config.layer_scalars:
        tree["layer_scalar"] = _whole("layer_scalar", names["layer_scalar"], (1,), "one")
    return tree


def _heads(config: ModelConfig, layer: Layer, names: Mapping[str, str], tp: int) -> dict[str, Leaf]:
    """Return the leaves that make queries, keys and values."""
    tree, d = {}, config.hidden_size
    tree["qkv"] = _qkv(config, layer, names, tp, ".weight", d)
    if config.qkv_bias:
        tree["qkv_bias"] = _qkv(config, layer, names, tp, ".bias")
    if config.qk_norm:
        q_norm = _head_norm("q_norm", names["q_norm"], config, layer.rope)
        tree["q_norm"] = dataclasses.replace(q_norm, norm=_dummy_query_norm(config))
        if not layer.shares_kv:
            tree["k_norm"] = _head_norm("k_norm", names["k_norm"], config, layer.rope)
    return tree


def _dummy_query_norm(config: ModelConfig) -> float:
    """Return what the norm of queries scales by in dummy weights.

    Gemma 4 does not scale its scores (`attention_scale` is 1). With norms of 1 the scores of random heads
    have a standard deviation of sqrt(H). A softmax of such scores takes nearly one key alone, and each layer
    multiplies the rounding errors. After 17 layers of Gemma 4 E2B, bfloat16 and float32 then differ by 0.56
    nats a token. With scores of size 1 they differ by 0.014.
    """
    return config.head_dim**-0.5 if config.attention_scale == 1.0 else 1.0


def _head_norm(key: str, name: str, config: ModelConfig, rope: Rope | None) -> Leaf:
    shape = (config.head_dim,)
    order = _order_of_heads(rope, 1, config.head_dim)
    return Leaf(key, shape, (Piece(f"{name}.weight", shape, shape, lambda out: out, order),), "norm")


def _mlp(config: ModelConfig, names: Mapping[str, str], stored: int) -> dict[str, Leaf]:
    d, width = config.hidden_size, config.intermediate_size
    tree = {"up_gate": _up_gate(names, width, config.gated_mlp, ".weight", d, stored=stored)}
    if config.mlp_bias:
        tree["up_gate_bias"] = _up_gate(names, width, config.gated_mlp, ".bias", stored=stored)
    tree["down"] = _padded("down", names["down"] + ".weight", (d, width), d, stored)
    if config.mlp_bias:
        tree["down_bias"] = _whole("down_bias", names["down"] + ".bias", (d,), "zero")
    return tree


def _scales(config: ModelConfig, layer: Layer, prefix: str, tp: int, stored: int) -> dict[str, Leaf]:
    """Return the scales of each e4m3 matrix's rows, by the names of an e4m3 checkpoint."""
    names, config = _names_in(config, layer, prefix), config.for_layer(layer)
    d, suffix = config.hidden_size, ".weight_scale"
    return {
        "qkv": _qkv(config, layer, names, tp, suffix),
        "out_proj": _whole("out_proj_scale", names["out"] + suffix, (d,), "one"),
        "up_gate": _up_gate(names, config.intermediate_size, config.gated_mlp, suffix, stored=stored),
        "down": _whole("down_scale", names["down"] + suffix, (d,), "one"),
    }


def _group_factors(config: ModelConfig, layer: Layer, prefix: str, tp: int) -> dict[str, Leaf]:
    """Return the scales of the groups of each 4-bit matrix, [rows, columns / 64].

    The zero points have the same shapes. The names are those of the weights.
    """
    names, config = _names_in(config, layer, prefix), config.for_layer(layer)
    suffix, groups = ".weight", config.hidden_size // GROUP
    width = config.num_heads * (config.head_dim if config.latent is None else config.latent.value_dim)

    def narrowing(key: str, name: str, columns: int) -> Leaf:
        return _whole(key, name + suffix, (config.hidden_size, columns // GROUP), "one")

    tree = {"out_proj": narrowing("out_proj", names["out"], width)}
    if config.latent is None:
        tree["qkv"] = _qkv(config, layer, names, tp, suffix, groups)
    if not layer.experts:
        width, gated = config.intermediate_size, config.gated_mlp
        up_gate, down = _up_gate(names, width, gated, suffix, groups), names["down"]
        return tree | {"up_gate": up_gate, "down": narrowing("down", down, width)}
    if _experts_in_one_tensor(config):  # no checkpoint has these experts in groups with zero points
        return tree
    width, experts = config.expert_intermediate_size, config.num_experts

    def up_gate_of(expert: int) -> Leaf:
        own = {role: names[f"expert_{role}"].format(expert) for role in ("gate", "up")}
        return _up_gate(own, width, config.gated_mlp, suffix, groups)

    def down_of(expert: int) -> Leaf:
        return narrowing("down", names["expert_down"].format(expert), width)

    return tree | {
        "expert_up_gate": _per_expert("expert_up_gate", up_gate_of, experts),
        "expert_down": _per_expert("expert_down", down_of, experts),
    }


def _kv_scale(key: str, name: str, config: ModelConfig, tp: int) -> Leaf:
    k, copies = config.num_kv_heads, kv_head_copies(config, tp)
    return Leaf(key, (k * copies,), (Piece(name, (k,), (k, 1), lambda out: out.reshape(k, copies)),), "one")


def _experts(config: ModelConfig, names: Mapping[str, str], tp: int) -> dict[str, Leaf]:
    d, width, experts = config.hidden_size, config.expert_intermediate_size, config.num_experts
    router = {"router": _whole("router", names["router"] + ".weight", (experts, d), "matrix")}
    if config.router_bias:
        router["router_bias"] = _whole("router_bias", names["router"] + ".bias", (experts,), "zero")
    if config.router_scales:
        router["router_columns"] = _whole("router_columns", names["router_columns"], (d,), "one")
        router["expert_factors"] = _whole("expert_factors", names["expert_factors"], (experts,), "one")
    if "all_up_gate" in names:
        return router | _all_experts(config, names, tp)

    def of(expert: int) -> dict[str, str]:
        return {role: names[f"expert_{role}"].format(expert) for role in ("gate", "up", "down")}

    if "stacked_up_gate" in names:
        tree = router | _stacked_experts(config, names)
    else:
        tree = router | {
            "expert_up_gate": _per_expert(
                "expert_up_gate", lambda e: _up_gate(of(e), width, config.gated_mlp, ".weight", d), experts
            ),
            "expert_down": _per_expert(
                "expert_down",
                lambda e: _whole("down", of(e)["down"] + ".weight", (d, width), "matrix"),
                experts,
            ),
        }
    if config.router is not None:
        tree["score_bias"] = _whole("score_bias", names["score_bias"], (experts,), "zero")
    if shared := config.shared_expert_intermediate_size:
        of_shared = {role: names[f"shared_{role}"] for role in ("gate", "up", "down")}
        up_gate = _up_gate(of_shared, shared, config.gated_mlp, ".weight", d)
        tree["shared_up_gate"] = dataclasses.replace(up_gate, key="shared_up_gate")
        tree["shared_down"] = _whole("shared_down", of_shared["down"] + ".weight", (d, shared), "matrix")
    if config.branch_norms:
        for key in ("shared_norm", "routed_norm", "post_shared_norm", "post_routed_norm"):
            tree |= _norm(key, names[key], d, config)
    return tree


def _stacked_experts(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Leaf]:
    """Return the leaves of experts whose tensors hold all experts, as Gemma 4 has them.

    A tensor of weights is [E, out, in]. Its gates come before its ups.
    """
    d, width, e = config.hidden_size, config.expert_intermediate_size, config.num_experts
    blocks = width // gate_block(width)
    up_gate = Piece(
        names["stacked_up_gate"],
        (e, 2 * width, d),
        (e, 2, blocks, width // blocks, d),
        lambda out: _rows_of_pairs(config, out).swapaxes(1, 2),
    )
    return {
        "expert_up_gate": Leaf("expert_up_gate", (e, 2 * width, d), (up_gate,), "matrix"),
        "expert_down": _whole("expert_down", names["stacked_down"], (e, d, width), "matrix"),
    }


def _rows_of_pairs(config: ModelConfig, out: np.ndarray) -> np.ndarray:
    """Return the gates and ups of a leaf [E, 2 F', ...] as [E, blocks, gate
    or up, places of a block, ...].
    """
    width = config.expert_intermediate_size
    block = gate_block(width)
    return out[:, : 2 * width].reshape(out.shape[0], width // block, 2, block, *out.shape[2:])


def _all_experts(config: ModelConfig, names: Mapping[str, str], tp: int) -> dict[str, Leaf]:
    """Return the leaves of experts whose tensors hold all experts, as gpt-oss has them.

    A tensor of weights is [E, in, out]. Its gates and ups alternate by column.
    """
    d, width, e = config.hidden_size, config.expert_intermediate_size, config.num_experts
    stored, block, rows = (
        expert_width(width, tp),
        gate_block(width),
        functools.partial(_rows_of_pairs, config),
    )

    up_gate = Piece(
        names["all_up_gate"],
        (e, d, 2 * width),
        (e, d, width // block, block, 2),
        lambda out: rows(out).transpose(0, 4, 1, 3, 2),
    )
    down = Piece(
        names["all_down"], (e, width, d), (e, width, d), lambda out: out[:, :, :width].swapaxes(1, 2)
    )
    tree = {
        "expert_up_gate": Leaf(
            "expert_up_gate", (e, 2 * stored, d), (up_gate,), "matrix", filled=(e, 2 * width, d)
        ),
        "expert_down": Leaf("expert_down", (e, d, stored), (down,), "matrix", filled=(e, d, width)),
    }
    if config.expert_bias:
        bias = Piece(
            names["all_up_gate"] + "_bias",
            (e, 2 * width),
            (e, width // block, block, 2),
            lambda out: rows(out).swapaxes(2, 3),
        )
        tree["expert_up_gate_bias"] = Leaf("expert_up_gate_bias", (e, 2 * stored), (bias,), "zero")
        tree["expert_down_bias"] = _whole("expert_down_bias", names["all_down"] + "_bias", (e, d), "zero")
    return tree


def _stored_experts(config: ModelConfig, layer: Mapping[str, Leaf], prefix: str, tp: int) -> dict[str, Leaf]:
    """Return the leaves of experts in MXFP4 with what a checkpoint stores of them.

    A tensor of a checkpoint has a row for each output, [E, out, in / 32, 16] bytes or [E, out, in / 32]
    scales. Its gates and ups alternate by row.
    """
    names, (e, d) = layer_names(config), (config.num_experts, config.hidden_size)
    width = config.expert_intermediate_size
    block = gate_block(width)

    def up_gate(name: str, columns: int, *tail: int) -> Piece:
        stored = (e, 2 * width, columns // math.prod(tail), *tail)
        by_row = (e, width // block, block, 2, columns)
        return Piece(name, stored, by_row, lambda out: _rows_of_pairs(config, out).swapaxes(2, 3))

    def down(name: str, columns: int, *tail: int) -> Piece:
        stored = (e, d, columns // math.prod(tail), *tail)
        return Piece(name, stored, (e, d, columns), lambda out: out[:, :, :columns])

    def complete(key: str, piece: Callable[..., Piece], name: str) -> Leaf:
        leaf = layer[key]
        columns = (leaf.filled or leaf.shape)[-1]

        def part(ending: str, per: int, *tail: int) -> Leaf:
            shape = (*leaf.shape[:-1], leaf.shape[-1] // per)
            return Leaf(
                key,
                shape,
                (piece(f"{prefix}{name}{ending}", columns // per, *tail),),
                "zero",
                whole_experts=leaf.whole_experts,
                over_ranks=leaf.over_ranks,
            )

        parts = part("_blocks", 2, MXFP4_GROUP // 2), part("_scales", MXFP4_GROUP)
        cut = 0 if leaf.whole_experts else TENSOR_PARALLEL_AXIS[key]
        of_device = [size // (tp if axis == cut else 1) for axis, size in enumerate(leaf.shape)]
        whole = all(size % EXPERT_TILE == 0 for size in of_device[1:])
        return dataclasses.replace(leaf, stored=parts, in_blocks=whole and this_card().mxfp4_in_blocks)

    return {
        "expert_up_gate": complete("expert_up_gate", up_gate, names["all_up_gate"]),
        "expert_down": complete("expert_down", down, names["all_down"]),
    }


def _block_experts(config: ModelConfig, layer: Mapping[str, Leaf], prefix: str) -> dict[str, Leaf]:
    """Return the leaves of experts in e4m3 with the scales of a checkpoint's blocks of 128 x 128.

    A scale of a checkpoint is two scales of 64 rows each (`pallas_kernels.gemm.block_fp8_format`).
    """
    if "expert_up_gate" not in layer:
        return {}
    d, width, twice = config.hidden_size, config.expert_intermediate_size, BLOCK // BLOCK_ROWS
    names = {role: prefix + name for role, name in layer_names(config).items()}

    def scales(expert: int, role: str, rows: int, columns: int, view: Callable) -> Piece:
        name = names[f"expert_{role}"].format(expert) + ".weight_scale_inv"
        stored = (rows // BLOCK, columns // BLOCK)
        return Piece(name, stored, (stored[0], 1, stored[1]), view)

    def up_gate(expert: int) -> Leaf:
        sides = ("gate", "up") if config.gated_mlp else ("up",)
        split = (width // BLOCK, twice, len(sides), d // BLOCK)
        pieces = tuple(
            scales(expert, role, width, d, lambda out, side=side: out.reshape(split)[:, :, side])
            for side, role in enumerate(sides)
        )
        return Leaf("", (len(sides) * width // BLOCK_ROWS, d // BLOCK), pieces, "one")

    def down(expert: int) -> Leaf:
        split = (d // BLOCK, twice, width // BLOCK)
        piece = scales(expert, "down", d, width, lambda out: out.reshape(split))
        return Leaf("", (d // BLOCK_ROWS, width // BLOCK), (piece,), "one")

    def complete(key: str, one: Callable[[int], Leaf], gates: int | None) -> Leaf:
        leaf = layer[key]
        own = _per_expert(key, one, config.num_experts)
        own = dataclasses.replace(own, whole_experts=leaf.whole_experts, over_ranks=leaf.over_ranks)
        return dataclasses.replace(leaf, scale=own, gate_block=gates)

    gates = gate_block(width) if config.gated_mlp else None
    return {
        "expert_up_gate": complete("expert_up_gate", up_gate, gates),
        "expert_down": complete("expert_down", down, None),
    }


def _block_matrices(
    config: ModelConfig, layer: Layer, tree: Mapping[str, Leaf], prefix: str, tp: int
) -> dict[str, Leaf]:
    """Return the matrices of `DENSE_BLOCKS` in e4m3 with the scales of a checkpoint's blocks of 128 x 128.

    Matrices with partial blocks on a device are left out. So are gates in narrower blocks than 64 rows, which
    no kernel takes, and heads that share a block.
    """
    names, config = _names_in(config, layer, prefix), config.for_layer(layer)
    widths = {"up_gate": config.intermediate_size, "shared_up_gate": config.shared_expert_intermediate_size}
    made = {}
    for key in DENSE_BLOCKS:
        leaf = tree.get(key)
        if leaf is None or leaf.filled not in (None, leaf.shape) or not _is_in_blocks(leaf, tp):
            continue
        side = "shared_" if key.startswith("shared_") else ""
        if key == "qkv":
            scale = _qkv_blocks(config, layer, leaf, names, tp)
        elif key in widths:
            gated, width = config.gated_mlp, widths[key]
            own = {role: names.get(side + role, "") for role in ("gate", "up")}
            scale = None if gated and gate_block(width) != BLOCK_ROWS else _up_gate_blocks(own, leaf, gated)
        else:
            scale = _blocks_in_order(leaf, names["out" if key == "out_proj" else f"{side}down"])
        if scale is not None:
            gates = BLOCK_ROWS if key in widths and config.gated_mlp else None
            made[key] = dataclasses.replace(leaf, quantization=FP8_PER_BLOCK, scale=scale, gate_block=gates)
    return made


def _is_in_blocks(leaf: Leaf, tp: int) -> bool:
    """Return whether each device's share of a matrix is whole blocks."""
    cut = TENSOR_PARALLEL_AXIS[leaf.key]
    return all(size % (BLOCK * (tp if axis == cut else 1)) == 0 for axis, size in enumerate(leaf.shape))


def _scale_piece(name: str, rows: int, columns: int, block: tuple[int, ...], view: Callable) -> Piece:
    """Return the scales of a matrix's blocks. block: the axes of the rows, for `view`."""
    stored = (rows // BLOCK, columns // BLOCK)
    return Piece(f"{name}.weight_scale_inv", stored, (*block, stored[1]), view)


def _scale_leaf(leaf: Leaf, pieces: tuple[Piece, ...]) -> Leaf:
    rows, columns = leaf.shape
    return Leaf("", (rows // BLOCK_ROWS, columns // BLOCK), pieces, "one")


def _blocks_in_order(leaf: Leaf, name: str) -> Leaf:
    """Return the scales of a matrix whose rows have the order of the checkpoint."""
    rows, columns = leaf.shape
    split = (rows // BLOCK, BLOCK // BLOCK_ROWS, columns // BLOCK)
    piece = _scale_piece(name, rows, columns, (split[0], 1), lambda out: out.reshape(split))
    return _scale_leaf(leaf, (piece,))


def _up_gate_blocks(names: Mapping[str, str], leaf: Leaf, gated: bool) -> Leaf:
    """Return the scales of gates and ups in alternating blocks of 64 rows, or of ups."""
    if not gated:
        return _blocks_in_order(leaf, names["up"])
    rows, columns = leaf.shape
    split = (rows // 2 // BLOCK, BLOCK // BLOCK_ROWS, 2, columns // BLOCK)
    pieces = tuple(
        _scale_piece(
            names[role], rows // 2, columns, (split[0], 1), lambda out, at=at: out.reshape(split)[:, :, at]
        )
        for at, role in enumerate(("gate", "up"))
    )
    return _scale_leaf(leaf, pieces)


def _qkv_blocks(
    config: ModelConfig, layer: Layer, leaf: Leaf, names: Mapping[str, str], tp: int
) -> Leaf | None:
    """Return the scales of `_qkv`; None where a head is no whole block, or where its rows move to another."""
    k, h, copies = config.num_kv_heads, config.head_dim, kv_head_copies(config, tp)
    if h % BLOCK or (h > BLOCK and rotary_order(layer.rope, h) is not None):
        return None
    if layer.shares_kv:
        return _blocks_in_order(leaf, names["q"])
    group, own, d = config.num_heads // (k * copies), h // BLOCK, config.hidden_size
    split = (k, copies, group + 2, own, BLOCK // BLOCK_ROWS, d // BLOCK)
    rows = {"q": config.num_heads * h, "k": k * h, "v": k * h}
    places: dict[str, Any] = {"q": slice(group), "k": group, "v": group + 1}
    axes = {"q": (k, copies, group, own, 1), "k": (k, 1, own, 1), "v": (k, 1, own, 1)}

    def view(role: str) -> Callable[[np.ndarray], np.ndarray]:
        return lambda out: out.reshape(split)[:, :, places[role]]

    pieces = tuple(_scale_piece(names[role], rows[role], d, axes[role], view(role)) for role in rows)
    return Leaf("", (k * copies * (group + 2) * h // BLOCK_ROWS, d // BLOCK), pieces, "one")

"""Check the expert products of a mixture-of-experts layer against float32 on a GPU, and time them.

    python -m pallas_kernels.gemm.grouped.gpu_check [--seconds 0.6] [--only NAMES] [--json FILE]

Both kernels run: `padded` with tiles of 128 rows, and `swapped` with a height by the mean rows of an expert.
The comparisons are XLA's grouped product, and one dense product with the same number of rows. Errors are
‖kernel − exact‖ / ‖exact‖ over the rows of all (token, expert) pairs. Routings are random, and the skewed
ones leave experts without a token.

`check_mxfp4` compares the products of gpt-oss-20b's experts in MXFP4, and `mxfp4` times them next to bfloat16
ones. `check_int4` and `int4` do the same for int4, with Qwen3-30B-A3B's and Mixtral's experts. `check_blocks`
and `blocks` do the same for e4m3 with scales of blocks, beside e4m3 with scales of rows, with Qwen3-30B-A3B's
and DeepSeek-V3's experts. `check_bias` compares products with a bias and clamped gates. The other names are
`check` and `time`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.block_fp8_format import dequantize_block_fp8, quantize_block_fp8
from pallas_kernels.gemm.dense.api import dense_gemm
from pallas_kernels.gemm.grouped import api, padded, swapped
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts, quantize_experts
from pallas_kernels.gemm.grouped.mxfp4_blocks import dequantize_blocks, to_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4, quantize_mxfp4
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.tiles import int4_tile, mxfp4_tile
from pallas_kernels.gemm.int4.reference import nearest_levels, nearest_to_zero_point
from pallas_kernels.gemm.reference import CLAMPED_SWIGLU
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_blocks, quantize_rows
from pallas_kernels.quantized import EXPERT_INT4_GROUPS, BlockFp8, ExpertInt4, Mxfp4, Mxfp4Blocks, Quantized

BF16, F32 = jnp.bfloat16, jnp.float32
MODELS = {  # experts, experts per token, {op: (N, K, block width of the gate)}
    "mixtral-8x7b": (8, 2, {"expert_up_gate": (28672, 4096, 64), "expert_down": (4096, 14336, None)}),
    "qwen3-30b-a3b": (128, 8, {"expert_up_gate": (1536, 2048, 32), "expert_down": (2048, 768, None)}),
}
ROWS = 256  # rows of one product of the comparison
# DeepSeek-V3 with a fourth of its experts.
DEEPSEEK = (64, 8, {"expert_up_gate": (4096, 7168, 64), "expert_down": (7168, 2048, None)})
GPT_OSS = (32, 4, {"expert_up_gate": (5760, 2880), "expert_down": (2880, 2880)})  # without gates


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key, shape, scale=1.0):
    return (jax.random.normal(key, shape) * scale).astype(BF16)


KERNELS = {"swapped": swapped, "tiles of 128": padded}


def routing(rng, tokens: int, experts: int, chosen: int, zipf: float = 0.0) -> jax.Array:
    return jnp.asarray(draw_routing(rng, tokens, experts, chosen, zipf))


def gates_of(block: int | None, clamped: bool = False) -> dict:
    activation = CLAMPED_SWIGLU if clamped else "silu"
    return {} if block is None else {"activation": activation, "gate_block": block}


def check(
    rows, rng, kernel, tokens, experts, chosen, n, k, block=None, sms=None, zipf=0.0, stored="bfloat16",
    biased=False, module=None,
):  # fmt: skip
    """Compare one product.

    module: the `list_groups` and the `grouped_gemm` of another kernel than those of `KERNELS`.
    biased: the product has a bias, and clamps its gates and ups.
    stored: the format of the weight: bfloat16, e4m3 or e4m3-blocks as are then the rows, mxfp4, int4-64
        or int4-zero-64, which has zero points.
    """
    keys = jax.random.split(jax.random.key(rng.integers(2**31)), 3)
    x, w = normal(keys[0], (tokens, k), 4.0 if biased else 1.0), normal(keys[1], (experts, n, k), k**-0.5)
    bias, clamped = normal(keys[2], (experts, n), 3.0) if biased else None, biased and block is not None
    epilogue = gates_of(block, clamped) | ({"bias": bias} if biased else {})
    if stored == "e4m3":
        x, w = jax.jit(quantize_rows)(x), jax.jit(quantize_rows)(w)
    elif stored == "e4m3-blocks":
        x, w = jax.jit(quantize_blocks)(x), jax.jit(quantize_block_fp8, static_argnums=1)(w, block)
        w = w._replace(scale=w.scale * jax.random.uniform(keys[1], w.scale.shape, minval=0.1, maxval=10.0))
    elif stored.startswith("mxfp4"):
        w = jax.jit(quantize_mxfp4)(w)
        w = w if biased else with_scales(keys[1], w)  # clamps need sums of known size
        w = jax.jit(to_blocks)(w) if "blocks" in stored else w
    elif stored.startswith("int4"):
        nearest = nearest_to_zero_point if "zero" in stored else nearest_levels
        w = jax.jit(quantize_experts, static_argnums=(1, 2))(w, int(stored.rpartition("-")[2]), nearest)
    picked, module = routing(rng, tokens, experts, chosen, zipf), module or KERNELS[kernel]
    groups_of = jax.jit(functools.partial(module.list_groups, num_experts=experts))

    @jax.jit
    def run(x, w, picked):
        groups = groups_of(picked)
        given = jax.tree.map(lambda one: one[groups.pairs // chosen], x)
        y = module.grouped_gemm(given, w, groups, **epilogue, sms=sms)
        return y[groups.places]

    poison_memory(jax.eval_shape(run, x, w, picked))
    got, again = run(x, w, picked), run(x, w, picked)
    off = total = 0.0
    with jax.default_matmul_precision("highest"):
        for expert in range(experts):
            token, choice = np.nonzero(np.asarray(picked) == expert)
            for first in range(0, len(token), ROWS):
                at = [np.resize(index[first : first + ROWS], ROWS) for index in (token, choice)]
                count = min(ROWS, len(token) - first)
                found = squares(
                    rows_of(got, *at),
                    rows_of(x, at[0]),
                    rows_of(w, expert, block=block),
                    None if bias is None else bias[expert],
                    count,
                    block,
                    clamped,
                )
                off, total = off + float(found[0]), total + float(found[1])
    err, same = (off / total) ** 0.5, bool((got == again).all())
    about = {
        "kernel": kernel,
        "height": jax.eval_shape(groups_of, picked).rows,
        "t": tokens,
        "experts": experts,
        "chosen": chosen,
        "n": n,
        "k": k,
        "gates": block,
        "sms": sms,
        "zipf": zipf,
        "stored": stored,
        "biased": biased,
    }
    record(rows, what="check grouped_gemm", ok=err < 4e-3 and same, error=err, same_bits=same, **about)


@functools.partial(jax.jit, static_argnames="block")
def rows_of(given, *at, block=None):
    """Return rows of an array in any format in float32, or the weight of one expert.

    block: gates and ups of the weight alternate in blocks of so many rows, or None.
    """
    taken = jax.tree.map(lambda part: part[at], given)
    if isinstance(taken, BlockFp8):
        return dequantize_block_fp8(jax.tree.map(lambda part: part[None], taken), block)[0]
    if isinstance(taken, ExpertInt4):
        return in_float32(jax.tree.map(lambda part: part[None], taken))[0]
    return in_float32(taken)


@functools.partial(jax.jit, static_argnums=(5, 6))
def squares(got, rows, weight, bias, count, block, clamped):
    """Return ‖got − exact‖² and ‖exact‖² over the first `count` rows.

    XLA compiles this product once for each shape of a weight, whatever the numbers of tokens.
    """
    want = gemm_reference.gemm(rows, weight, bias, **gates_of(block, clamped))
    assert isinstance(want, jax.Array)  # nothing was asked to be quantized
    used = jnp.arange(ROWS)[:, None] < count
    return [jnp.sum(jnp.where(used, part, 0.0) ** 2) for part in (got - want, want)]


def in_float32(given):
    """Return the float32 numbers of rows or of a weight in any format."""
    if isinstance(given, Mxfp4):
        return dequantize_mxfp4(given, F32)
    if isinstance(given, Mxfp4Blocks):
        return dequantize_blocks(given, F32)
    if isinstance(given, ExpertInt4):
        return dequantize_experts(given).astype(F32)  # the kernel multiplies numbers in bfloat16
    return dequantize(given) if isinstance(given, Quantized) else given.astype(F32)


def with_scales(key, w: Mxfp4) -> Mxfp4:
    """Return the weight with scales that differ by up to 2 ** 12 between neighbors."""
    moved = jax.random.randint(key, w.scale.shape, -8, 4)
    return w._replace(scale=(w.scale.astype(jnp.int32) + moved).astype(jnp.uint8))


def checks(rows):
    rng = np.random.default_rng(time.time_ns())
    for kernel in KERNELS:
        case = functools.partial(check, rows, rng, kernel)
        for experts, chosen, ops in MODELS.values():
            for n, k, block in ops.values():
                case(512, experts, chosen, n, k, block)
        case(1, 8, 2, 4096, 14336)
        case(700, 8, 2, 3584, 4096, 64, sms=104)
        case(2048, 128, 8, 192, 2048, 32, zipf=3.0)
        case(77, 5, 1, 320, 192, zipf=3.0)
        case(200, 40, 2, 14336, 4096)  # 2.3e9 elements of weights
    case = functools.partial(check, rows, rng, "swapped")
    experts, chosen, ops = MODELS["qwen3-30b-a3b"]
    for tokens in (1, 8, 64, 128, 256, 700, 1024, 1536, 2048):  # tiles of 8 to 144 rows
        for n, k, block in ops.values():
            for stored in ("bfloat16", "e4m3"):
                case(tokens, experts, chosen, n, k, block, zipf=1.2 if tokens == 256 else 0.0, stored=stored)
    for block in (16, 64):
        case(64, 8, 2, 28672, 4096, block, stored="e4m3")
    case(2048, experts, chosen, *ops["expert_up_gate"], zipf=1.2)
    case(64, 8, 2, 28672, 4096, 64, zipf=1.2)


def bias_checks(rows):
    """Check gpt-oss-20b's products with biases and clamps. Gates and ups alternate in blocks of 8 rows."""
    case = functools.partial(check, rows, np.random.default_rng(time.time_ns()), "swapped", biased=True)
    experts, chosen, ops = GPT_OSS
    up_gate, down = ops["expert_up_gate"], ops["expert_down"]
    for stored in ("mxfp4", "mxfp4-blocks"):
        for tokens in (1, 64, 2048):  # tiles of 8 to 144 rows
            case(tokens, experts, chosen, *up_gate, 8, stored=stored, zipf=1.2 if tokens == 64 else 0.0)
        case(64, experts, chosen, *down, stored=stored)
    case(33, 5, 2, 384, 192, 64, sms=3, stored="mxfp4-blocks")
    for tokens in (8, 200):
        case(tokens, 5, 2, 640, 448, 8, stored="bfloat16")
        case(tokens, 5, 2, 640, 448, stored="bfloat16")
    case(64, 8, 2, 768, 1024, 8, stored="int4-64")


def mxfp4_checks(rows):
    case = functools.partial(check, rows, np.random.default_rng(time.time_ns()), "swapped", stored="mxfp4")
    experts, chosen, ops = GPT_OSS
    for tokens in (1, 8, 64, 128, 256, 512, 1024):  # tiles of 8 to 144 rows
        for n, k in ops.values():
            case(tokens, experts, chosen, n, k, zipf=1.2 if tokens == 256 else 0.0)
    case(64, 32, 4, 2880, 1472)  # a share of two devices
    case(64, 32, 4, 5760, 2880, sms=28)
    case(77, 5, 1, 320, 192, zipf=3.0)
    case(64, 8, 2, 28672, 4096, 64)
    case(700, 8, 2, 3584, 4096, 32)
    case(200, 72, 2, 14336, 4096, zipf=1.2)  # more than 2 ** 31 bytes of weights


def int4_checks(rows):
    case = functools.partial(check, rows, np.random.default_rng(time.time_ns()), "swapped")
    for group in EXPERT_INT4_GROUPS:
        own = functools.partial(case, stored=f"int4-{group}")
        experts, chosen, ops = MODELS["qwen3-30b-a3b"]
        for tokens in (1, 64, 256, 700, 1536, 2048):  # tiles of 8 to 144 rows
            for n, k, block in ops.values():
                own(tokens, experts, chosen, n, k, block, zipf=1.2 if tokens == 256 else 0.0)
        for tokens in (8, 512):
            for n, k, block in MODELS["mixtral-8x7b"][2].values():
                own(tokens, 8, 2, n, k, block)
        own(64, 128, 8, 2048, 384)  # a share of two devices
        own(64, 8, 2, 3584, 4096, 16, sms=28)
        case(64, 8, 2, 28672, 4096, 64, stored=f"int4-zero-{group}")
        case(1, 128, 8, 2048, 768, stored=f"int4-zero-{group}")
    case(77, 5, 1, 320, 192, zipf=3.0, stored="int4-64")


def block_checks(rows):
    rng = np.random.default_rng(time.time_ns())
    case = functools.partial(check, rows, rng, "swapped", stored="e4m3-blocks")
    experts, chosen, ops = MODELS["qwen3-30b-a3b"]
    for tokens in (1, 8, 64, 256, 700, 1024, 1536, 2048):  # tiles of 8 to 144 rows
        for n, k, block in ops.values():
            case(tokens, experts, chosen, n, k, block, zipf=1.2 if tokens == 256 else 0.0)
    experts, chosen, ops = DEEPSEEK
    for tokens in (1, 64, 512):
        for n, k, block in ops.values():
            case(tokens, experts, chosen, n, k, block)
    case(64, 128, 8, 2048, 384)  # a share of two devices
    case(64, 8, 2, 3584, 4096, 16, sms=28)
    case(77, 5, 1, 320, 384, zipf=3.0)


def block_timings(rows, seconds):
    """Time products of experts in e4m3 with scales of blocks and of rows, and in
    bfloat16. Rows are quantized before.
    """
    rng = np.random.default_rng(0)
    for model, (experts, chosen, ops) in {
        "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"],
        "deepseek-v3": DEEPSEEK,
    }.items():
        for op, (n, k, block) in ops.items():
            wide = normal(jax.random.key(1), (experts, n, k), k**-0.5)
            one_by_one = lambda quantize, w: jax.jit(functools.partial(lax.map, quantize))(w)

            def in_blocks(w, block=block):
                return jax.tree.map(lambda part: part[0], quantize_block_fp8(w[None], block))

            ways: dict[str, tuple] = {
                "bfloat16": (wide, lambda x: x),
                "e4m3 rows": (one_by_one(quantize_rows, wide), quantize_rows),
                "e4m3 blocks": (one_by_one(in_blocks, wide), quantize_blocks),
            }
            for tokens in (1, 64, 256, 2048):
                picked = routing(rng, tokens, experts, chosen)
                xs = [normal(jax.random.key(2 + i), (tokens, k)) for i in range(4)]

                def product(xs, w, picked, experts=experts, chosen=chosen, block=block):
                    groups = swapped.list_groups(picked, experts)
                    given = [jax.tree.map(lambda one: one[groups.pairs // chosen], x) for x in xs]
                    return [swapped.grouped_gemm(x, w, groups, **gates_of(block)) for x in given]

                programs = {
                    name: functools.partial(jax.jit(product), [jax.jit(quantize)(x) for x in xs], w, picked)
                    for name, (w, quantize) in ways.items()
                }
                record_products(rows, programs, ways, model, op, picked, experts, 2.0 * n * k, seconds)


def int4_timings(rows, seconds):
    """Time the products of experts in int4 with one and with two multiplying warpgroups, and in bfloat16."""
    rng = np.random.default_rng(0)
    for model, (experts, chosen, ops) in MODELS.items():
        for op, (n, k, block) in ops.items():
            wide = normal(jax.random.key(1), (experts, n, k), k**-0.5)
            kept = jax.jit(quantize_experts)(wide)
            for tokens in (1, 64, 256, 2048):
                picked = routing(rng, tokens, experts, chosen)
                xs = [normal(jax.random.key(2 + i), (tokens, k)) for i in range(4)]

                def product(xs, w, picked, warpgroups=None, experts=experts, chosen=chosen, block=block):
                    groups = api.list_groups(picked, experts)
                    tile = int4_tile(groups.rows, warpgroups=warpgroups) if warpgroups else None
                    way = functools.partial(swapped.grouped_gemm, tile=tile) if tile else api.grouped_gemm
                    return [way(x[groups.pairs // chosen], w, groups, **gates_of(block)) for x in xs]

                ways: dict[str, tuple] = {
                    "bfloat16": (wide, None),
                    "int4, 1": (kept, 1),
                    "int4, 2": (kept, 2),
                }
                programs = {
                    name: functools.partial(jax.jit(product, static_argnums=3), xs, w, picked, number)
                    for name, (w, number) in ways.items()
                }
                record_products(rows, programs, ways, model, op, picked, experts, 2.0 * n * k, seconds)


def record_products(rows, programs, ways, model, op, picked, experts, flop_a_pair, seconds):
    """Time products of equal rows with weights in several formats, the first of which is the comparison.

    ways: (weight, ...) by name. picked: the routing of the rows.
    """
    touched, flop = len(np.unique(np.asarray(picked))), flop_a_pair * picked.size
    timed = interleaved(programs, calls=4, seconds=seconds)
    for name, t in timed.items():
        size = sum(part.nbytes for part in jax.tree.leaves(ways[name][0])) / experts
        rates = {"tb_per_s": touched * size / t.us / 1e6, "tflops": flop / t.us / 1e6}
        own = {"t": picked.shape[0], "touched": touched, "speedup": timed["bfloat16"].us / t.us}
        record(rows, what=name, model=model, op=op, **own, **rates, **dataclasses.asdict(t))


def mxfp4_timings(rows, seconds):
    """Time gpt-oss-20b's products in MXFP4 with one and with two multiplying warpgroups, and in bfloat16."""
    rng, (experts, chosen, ops) = np.random.default_rng(0), GPT_OSS
    for op, (n, k) in ops.items():
        wide = normal(jax.random.key(1), (experts, n, k), k**-0.5)
        kept = jax.jit(quantize_mxfp4)(wide)
        for tokens in (1, 8, 64, 256, 2048):
            picked = routing(rng, tokens, experts, chosen)
            xs = [normal(jax.random.key(2 + i), (tokens, k)) for i in range(4)]

            def product(xs, w, picked, warpgroups=None, k=k):
                groups = api.list_groups(picked, experts)
                tile = mxfp4_tile(groups.rows, k, warpgroups) if warpgroups else None
                way = functools.partial(swapped.grouped_gemm, tile=tile) if tile else api.grouped_gemm
                return [way(x[groups.pairs // chosen], w, groups) for x in xs]

            ways: dict[str, tuple] = {"bfloat16": (wide, None), "mxfp4, 1": (kept, 1), "mxfp4, 2": (kept, 2)}
            programs = {
                name: functools.partial(jax.jit(product, static_argnums=3), xs, w, picked, number)
                for name, (w, number) in ways.items()
            }
            record_products(rows, programs, ways, "gpt-oss-20b", op, picked, experts, 2.0 * n * k, seconds)


def timings(rows, seconds):
    """Time our product, XLA's `ragged_dot`, and a dense product of the same rows that reads one weight
    once.
    """
    rng = np.random.default_rng(0)
    for model, (experts, chosen, ops) in MODELS.items():
        for op, (n, k, block) in ops.items():
            w = normal(jax.random.key(1), (experts, n, k), k**-0.5)
            for tokens in (64, 512, 2048):
                picked = routing(rng, tokens, experts, chosen)
                xs = [normal(jax.random.key(2 + i), (tokens * chosen, k)) for i in range(4)]

                def grouped(product, groups_of, xs, w, picked, block=block, experts=experts):
                    groups = groups_of(picked, experts)
                    return [product(x[groups.pairs], w, groups, **gates_of(block)) for x in xs]

                def dense(xs, w, picked, block=block):
                    return [dense_gemm(x, w[i % w.shape[0]], **gates_of(block)) for i, x in enumerate(xs)]

                ways: dict[str, Callable] = {
                    name: functools.partial(grouped, module.grouped_gemm, module.list_groups)
                    for name, module in KERNELS.items()
                }
                ways["dense"] = dense
                if tokens <= 64:  # XLA multiplies every row with every expert's weight
                    ways["xla"] = functools.partial(
                        grouped, grouped_reference.grouped_gemm, expert_groups.list_groups
                    )
                programs = {
                    name: functools.partial(jax.jit(way), xs, w, picked) for name, way in ways.items()
                }
                flop = 2.0 * tokens * chosen * n * k
                for name, t in interleaved(programs, calls=len(xs), seconds=seconds).items():
                    record(
                        rows,
                        what=name,
                        model=model,
                        op=op,
                        t=tokens,
                        tflops=flop / t.us / 1e6,
                        **dataclasses.asdict(t),
                    )


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, *_: checks(rows),
            "check_bias": lambda rows, *_: bias_checks(rows),
            "check_mxfp4": lambda rows, *_: mxfp4_checks(rows),
            "check_int4": lambda rows, *_: int4_checks(rows),
            "check_blocks": lambda rows, *_: block_checks(rows),
            "time": lambda rows, _, seconds: timings(rows, seconds),
            "mxfp4": lambda rows, _, seconds: mxfp4_timings(rows, seconds),
            "int4": lambda rows, _, seconds: int4_timings(rows, seconds),
            "blocks": lambda rows, _, seconds: block_timings(rows, seconds),
        },
    )

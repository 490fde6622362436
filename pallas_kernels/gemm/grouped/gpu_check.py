"""Check the expert products of a mixture-of-experts layer against float32 on a GPU, and time them.

    python -m pallas_kernels.gemm.grouped.gpu_check [--seconds 0.6] [--only check,time] [--json FILE]

The comparisons are XLA's grouped product, and one dense product with the same number of rows. Errors are
‖kernel − exact‖ / ‖exact‖ over the rows of all (token, expert) pairs. Routings are random, and some leave
experts without a token.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.dense.api import dense_gemm
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.gemm.grouped.api import grouped_gemm, list_groups
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved

BF16, F32 = jnp.bfloat16, jnp.float32
MODELS = {  # experts, experts per token, {op: (N, K, block width of the gate)}
    "mixtral-8x7b": (8, 2, {"expert_up_gate": (28672, 4096, 64), "expert_down": (4096, 14336, None)}),
    "qwen3-30b-a3b": (128, 8, {"expert_up_gate": (1536, 2048, 32), "expert_down": (2048, 768, None)}),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key, shape, scale=1.0):
    return (jax.random.normal(key, shape) * scale).astype(BF16)


def routing(rng, tokens: int, experts: int, chosen: int, skewed: bool) -> jax.Array:
    """Return [T, e] int32: different experts for each token.

    skewed: only the first quarter of the experts.
    """
    among = max(chosen, experts // 4) if skewed else experts
    return jnp.asarray(np.argsort(rng.random((tokens, among)), axis=1)[:, :chosen], jnp.int32)


def gates_of(block: int | None) -> dict:
    return {} if block is None else {"activation": "silu", "gate_block": block}


def check(rows, rng, tokens, experts, chosen, n, k, block=None, sms=None, skewed=False):
    keys = jax.random.split(jax.random.key(rng.integers(2**31)), 2)
    x, w = normal(keys[0], (tokens, k)), normal(keys[1], (experts, n, k), k**-0.5)
    picked = routing(rng, tokens, experts, chosen, skewed)

    @jax.jit
    def run(x, w, picked):
        groups = list_groups(picked, experts)
        return grouped_gemm(x[groups.pairs // chosen], w, groups, **gates_of(block), sms=sms)[groups.places]

    poison_memory(jax.eval_shape(run, x, w, picked))
    got, again = run(x, w, picked), run(x, w, picked)
    off = total = 0.0
    with jax.default_matmul_precision("highest"):
        one = jax.jit(functools.partial(gemm_reference.gemm, **gates_of(block)))
        for expert in range(experts):
            token, choice = np.nonzero(np.asarray(picked) == expert)
            if len(token):
                want = one(x.astype(F32), w[expert].astype(F32))[token]  # all tokens: one shape to compile
                off += float(jnp.sum((got[token, choice].astype(F32) - want) ** 2))
                total += float(jnp.sum(want**2))
    err, same = (off / total) ** 0.5, bool((got == again).all())
    about = {
        "t": tokens,
        "experts": experts,
        "chosen": chosen,
        "n": n,
        "k": k,
        "gates": block,
        "sms": sms,
        "skewed": skewed,
    }
    record(rows, what="check grouped_gemm", ok=err < 4e-3 and same, error=err, same_bits=same, **about)


def checks(rows):
    rng = np.random.default_rng(time.time_ns())
    case = functools.partial(check, rows, rng)
    for experts, chosen, ops in MODELS.values():
        for n, k, block in ops.values():
            case(512, experts, chosen, n, k, block)
    case(1, 8, 2, 4096, 14336)
    case(700, 8, 2, 3584, 4096, 64, sms=104)
    case(2048, 128, 8, 192, 2048, 32, skewed=True)
    case(77, 5, 1, 320, 192, skewed=True)
    case(200, 40, 2, 14336, 4096)  # 2.3e9 elements of weights


def timings(rows, seconds):
    """Time our product, XLA's `ragged_dot`, and a dense product of the same rows that reads one weight
    once.
    """
    rng = np.random.default_rng(0)
    for model, (experts, chosen, ops) in MODELS.items():
        for op, (n, k, block) in ops.items():
            w = normal(jax.random.key(1), (experts, n, k), k**-0.5)
            for tokens in (64, 512, 2048):
                picked = routing(rng, tokens, experts, chosen, False)
                xs = [normal(jax.random.key(2 + i), (tokens * chosen, k)) for i in range(4)]

                def ours(xs, w, picked, block=block, experts=experts):
                    groups = list_groups(picked, experts)
                    return [grouped_gemm(x[groups.pairs], w, groups, **gates_of(block)) for x in xs]

                def xla(xs, w, picked, block=block, experts=experts):
                    groups = expert_groups.list_groups(picked, experts)
                    return [
                        grouped_reference.grouped_gemm(x[groups.pairs], w, groups, **gates_of(block))
                        for x in xs
                    ]

                def dense(xs, w, picked, block=block):
                    return [dense_gemm(x, w[i % w.shape[0]], **gates_of(block)) for i, x in enumerate(xs)]

                ways = {"grouped": ours, "xla": xla, "dense": dense}
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
        {"check": lambda rows, *_: checks(rows), "time": lambda rows, _, seconds: timings(rows, seconds)},
    )

"""Dense GEMM: the schedule, the kernel in the interpreter against its reference, and the H200 code."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.dense.api import dense_gemm, supports
from pallas_kernels.gemm.tile_schedule import GemmTile, gemm_plan, plan_of, schedule, snake

INTERPRET = plgpu.InterpretGPUParams()
LLAMA = [  # [N, K] of qkv, out_proj, up_gate and down: 8B, and 70B on 4 GPUs
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    *[(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)],
]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16))
def test_the_snake_visits_each_tile_once_and_moves_to_a_neighbour(tiles_m, tiles_n, width):
    order = snake(tiles_m, tiles_n, width)
    assert len({tuple(at) for at in order}) == len(order) == tiles_m * tiles_n
    for before, after in itertools.pairwise(order):
        assert (
            before[1] == after[1] or abs(before[1] - after[1]) == 1 or before[0] // width != after[0] // width
        )


@settings(max_examples=150)
@given(
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(1, 40),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 4)),
)
def test_every_step_of_every_tile_is_done_once_and_no_one_waits_for_a_later_cta(
    tiles_m, tiles_n, steps, sms, whole_rounds
):
    made = schedule(tiles_m, tiles_n, steps, sms, whole_rounds)
    done = np.zeros((tiles_m, tiles_n, steps), int)
    giver, takes = {}, {}  # slot -> (cta, tile, steps); slot -> cta
    for cta, items in enumerate(made.table):
        ended = taking = False
        for row, column, first, count, give, take, taken in items.tolist():
            ended |= count == 0
            assert not (ended and count)  # empty items come last
            if not count:
                continue
            done[row, column, first : first + count] += 1
            if give >= 0:
                assert give not in giver and not taken and not taking  # gives before it takes
                giver[give] = cta, (row, column), range(first, first + count)
            else:
                assert first + count == steps
                before = [giver.get(slot) for slot in range(take, take + taken)]
                assert all(part is not None and part[0] < cta and part[1] == (row, column) for part in before)
                assert [step for part in before for step in part[2]] == list(range(first))
                takes |= dict.fromkeys(range(take, take + taken), cta)
                taking |= taken > 0
    assert (done == 1).all()
    assert giver.keys() == takes.keys() == set(range(made.slots))


def most_work(m, weight, sms, gate_block):
    """Return the work of the busiest CTA over an equal share, padding
    included, and whether tiles are split.
    """
    (n, k), plan = weight, gemm_plan(m, *weight, sms, gate_block)
    table, tile = plan.schedule.table, plan.tile
    assert table.shape[0] * tile.cluster <= sms
    return table[:, :, 3].sum(1).max() * tile.rows * tile.cols * tile.depth * sms / (
        -(-m // 128) * 128 * n * k
    ), plan.schedule.slots > 0


@pytest.mark.parametrize("sms", [20, 104, 112, 120, 132])
def test_no_sm_does_much_more_than_its_share(sms):
    """Up to 3 of 104 shapes from 512 rows are excepted, because a split would cost more there."""
    found = [most_work(m, weight, sms, None) for m in range(512, 2049, 128) for weight in LLAMA]
    uneven = [(share, cut) for share, cut in found if share > 1.13]
    assert len(uneven) <= 0.03 * len(found) and max(share for share, _ in found) <= 1.31
    assert all(share <= 1.2 for share, cut in uneven if cut)


@settings(max_examples=60)
@given(st.integers(1, 2048), st.sampled_from(LLAMA), st.integers(1, 132), st.sampled_from([None, 64]))
def test_no_sm_does_far_more_than_its_share_at_any_size(m, weight, sms, gate_block):
    share, _ = most_work(m, weight, sms, gate_block)
    assert share <= 4 / 3 or m < 512


@pytest.mark.parametrize(
    ("m", "weight", "cols"),
    [(512, LLAMA[0], 192), (512, LLAMA[1], 128), (768, LLAMA[3], 192), (1024, LLAMA[1], 256)],
)
def test_tiles_that_fill_the_sms_once_are_not_cut(m, weight, cols):
    plan = gemm_plan(m, *weight, 132)
    assert (plan.tile.cols, plan.tile.cluster, plan.schedule.slots) == (cols, 2, 0) and plan.schedule.table[
        :, :, 3
    ].astype(bool).sum() >= 64


def operands(seed, m, n, k):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in [(m, k), (n, k), (n,), (m, n)])


SMALL = GemmTile(rows=128, cols=128, stages=2)


@pytest.mark.parametrize(
    ("m", "n", "k", "cluster", "rounds", "with_bias", "with_residual", "extra"),
    [
        (200, 192, 192, 2, 0, True, False, {}),  # rows and columns that fill no tile, every tile cut along K
        (72, 128, 128, 1, None, False, True, {"activation": "relu"}),
        (13, 256, 64, 1, None, True, True, {"gate_block": 64, "activation": "silu"}),
        (130, 128, 192, 1, 0, False, False, {"gate_block": 16, "activation": "gelu_tanh"}),
        (64, 64, 128, 1, 0, False, False, {"out_dtype": jnp.float32}),
    ],
)
def test_dense_gemm_equals_its_reference(m, n, k, cluster, rounds, with_bias, with_residual, extra):
    x, w, bias, residual = operands(m, m, n, k)
    bias = bias if with_bias else None
    residual = residual[:, : n // 2 if "gate_block" in extra else n] if with_residual else None
    plan = plan_of(
        dataclasses.replace(SMALL, cols=192 if n == 192 else 128, cluster=cluster),
        m,
        n,
        k,
        3 * cluster,
        rounds,
    )
    residual = None if residual is None else residual.astype(extra.get("out_dtype", jnp.bfloat16))
    # One program for each function: eager operations would be a program each.
    got = jax.jit(functools.partial(dense_gemm, plan=plan, interpret=INTERPRET, **extra))(
        x, w, bias, residual=residual
    )
    exact = (None if v is None else v.astype(jnp.float32) for v in (x, w, bias, residual))
    x, w, bias, residual = exact
    want = np.asarray(jax.jit(functools.partial(reference.gemm, **extra))(x, w, bias, residual=residual))
    assert got.dtype == extra.get("out_dtype", jnp.bfloat16) and got.shape == want.shape
    assert np.linalg.norm(np.asarray(got, np.float32) - want) < (
        1e-5 if got.dtype == jnp.float32 else 3e-3
    ) * np.linalg.norm(want)


def shapes(m, n, k):
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(m, k), (n, k), (n,), (m, n)])


FORMS = [
    (1000, 6144, 4096, {"sms": 104}),
    (256, 6144, 4096, {"activation": "relu"}),  # 192 columns, cut, with bias and residual
    (256, 28672, 4096, {"gate_block": 64, "activation": "silu"}),
    (768, 4096, 14336, {}),  # 192 columns, whole
    (1024, 4096, 14336, {"activation": "gelu_tanh"}),  # 256 columns, with bias and residual
    (2**20, 256, 4096, {}),  # 2^32 elements
]


@pytest.mark.slow
def test_for_the_h200_it_uses_its_units_and_spills_nothing(tmp_path, monkeypatch):
    """One program holds all variants."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def step(inputs):
        more = [
            (b, r) if form[3].keys() == {"activation"} else (None, None)
            for (_, _, b, r), form in zip(inputs, FORMS, strict=True)
        ]
        return [
            dense_gemm(x, w, b, residual=r, **form[3])
            for (x, w, *_), (b, r), form in zip(inputs, more, FORMS, strict=True)
        ]

    compiled = compile_for_h200(step, *abstract(h200_mesh(), ([shapes(*form[:3]) for form in FORMS],)))
    assert compiled.machine_code
    assert not any(compiled.copies((m, k)) or compiled.copies((n, k)) for m, n, k, _ in FORMS)
    logs, texts = (
        [path.read_text(errors="replace") for path in tmp_path.glob(f"dense_gemm*{end}")]
        for end in (".ptxas", ".ptx")
    )
    assert {int(n) for n in re.findall(r"(\d+) bytes spill stores", "".join(logs))} == {0}
    assert len(texts) == len(FORMS) and all(
        "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx for ptx in texts
    )
    # The warpgroups' registers equal those of the CTA. A larger request would wait forever.
    for ptx in texts:
        registers = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
        assert sorted(registers) == [24, 240] and 24 + 2 * 240 == 3 * 168


def test_it_fits_a_stream_region():
    def step(x, w):
        fn = functools.partial(dense_gemm, gate_block=64, activation="silu", sms=104)
        return compute_on.compute_on(
            lambda *a: fn(*a), compute_type="gpu_stream:2", out_memory_spaces=jax.memory.Space.Device
        )(x, w)

    compiled = compile_for_h200(step, *abstract(h200_mesh(), shapes(1024, 14336, 4096)[:2]))
    on_stream = [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[2]"
    ]
    assert (
        on_stream[-1] == "kCustomCall" and len(on_stream) <= 2
    )  # the semaphores' zeros, and the kernel: no copy


def test_dense_gemm_names_unsupported_arguments():
    assert supports(1, 64, 64) and supports(7, 256, 128, 64)
    assert (
        not supports(8, 100, 64)
        and not supports(8, 64, 100)
        and not supports(8, 192, 64, 64)
        and not supports(8, 128, 64, 8)
    )
    x, w, *_ = operands(0, 8, 100, 64)
    with pytest.raises(ValueError, match="n=100"):
        dense_gemm(x, w)
    with pytest.raises(ValueError, match="float32"):
        dense_gemm(x.astype(jnp.float32), w[:64])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bias": jnp.zeros(64)}, r"bias \[64\]: accepted is \[256\]"),
        (
            {"residual": jnp.zeros((8, 64), jnp.bfloat16)},
            r"residual bfloat16\[8, 64\]: accepted is bfloat16\[8, 256\]",
        ),
        (
            {"residual": jnp.zeros((8, 256), jnp.bfloat16), "gate_block": 64},
            r"residual bfloat16\[8, 256\]: accepted is bfloat16\[8, 128\]",
        ),
        (
            {"residual": jnp.zeros((8, 256), jnp.bfloat16), "out_dtype": jnp.float32},
            r"residual bfloat16\[8, 256\]: accepted is float32\[8, 256\]",
        ),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
        ({"sms": -1}, "sms=-1: accepted are 1 to 132"),
    ],
)
def test_dense_gemm_names_unsupported_epilogues(wrong, said):
    with pytest.raises(ValueError, match=said):
        dense_gemm(jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((256, 64), jnp.bfloat16), **wrong)

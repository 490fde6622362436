"""The draw under filters: the kernel that counts logits in bins against its reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.sample import by_histogram, reference

INTERPRET = plgpu.InterpretGPUParams()
KERNEL = jax.jit(functools.partial(by_histogram.draw_filtered, interpret=INTERPRET))
TWIN = jax.jit(reference.draw_filtered)


def rows_to_draw(seed, columns):
    """Return rows of every kind of softmax, with the other arguments of draw_filtered."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, columns)).astype(np.float32) * 3
    x[1] = np.round(x[1])  # ties
    x[2, 5:] = -np.inf
    x[3] = -np.inf
    x[4, :100] *= 1e30
    x[5] = 0.25  # more copies than there is room for
    x[6] = rng.permutation(columns) * 1e-30
    x[7, 40:60] += 50  # the limit of top-k lies below all bins
    x[8, 100] = 30
    temperature = np.array([1, 0.5, 1, 1, 2, 0.7, 1, 1e-3, 1, 0, 0.05, 1.3], np.float32)
    keys = rng.integers(2**32, size=(12, 3), dtype=np.uint32)
    min_p = np.where(np.arange(12) % 5 == 1, 0.01, 0).astype(np.float32)
    top_k = np.array([300, 0, 3, 0, 40, 9, columns - 1, 100, 60, 5, 200, 0], np.int32)
    top_p = np.array([0.9, 0.8, 0.5, 0.7, 1, 0.3, 0.6, 1, 0.99, 0.9, 0.999, 0.2], np.float32)
    return x, temperature, keys, min_p, top_k, top_p


@pytest.mark.parametrize("columns", [512, 4612])
def test_the_kernel_draws_the_tokens_of_its_reference(columns):
    """Also with full groups of units, more units, and columns that are no multiple of a unit."""
    rows = rows_to_draw(columns, columns)
    got, want = np.asarray(KERNEL(*rows)), np.asarray(TWIN(*rows))
    assert got.tolist() == want.tolist()


def test_a_row_alone_draws_its_token():
    rows = rows_to_draw(3, 512)
    together = np.asarray(KERNEL(*rows))
    order = np.random.default_rng(0).permutation(12)
    assert np.asarray(KERNEL(*(a[order] for a in rows))).tolist() == together[order].tolist()


def test_short_rows_and_odd_widths_run_the_reference():
    for columns in (130, 514):
        rows = rows_to_draw(columns, columns)
        assert by_histogram.draw_filtered(*map(jnp.asarray, rows)).tolist() == TWIN(*rows).tolist()


def test_token_limits_names_unsupported_arguments():
    row = jnp.zeros(2)
    with pytest.raises(ValueError, match=r"float32\[2, 514\]: accepted is float32 \[R, V\]"):
        by_histogram.token_limits(jnp.zeros((2, 514)), row, row, row, row, row, row == 0)


def test_for_the_h200_it_spills_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    row = jax.ShapeDtypeStruct((2**15,), jnp.float32)
    logits, wanted = (
        jax.ShapeDtypeStruct((2**15, 128256), jnp.float32),
        jax.ShapeDtypeStruct((2**15,), jnp.bool_),
    )  # beyond 2^31 numbers
    compiled = compile_for_h200(
        by_histogram.token_limits, *abstract(h200_mesh(), (logits, row, row, row, row, row, wanted))
    )
    assert compiled.machine_code
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"token_limits*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert "ld.global.v4" in ptx and ".shared.add.u32" in ptx

"""The kernel of draws against its reference."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.draw import api, noise, reference

INTERPRET = plgpu.InterpretGPUParams()
TWIN = jax.jit(reference.draw)


def rows_to_draw(columns, seed=0):
    """Return logits, temperatures and keys of rows of every kind."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, columns)).astype(np.float32) * 2
    temperature = np.array([1, 0, 0, 0.7, 1, 1.3, 1e-30, 100], np.float32)
    x[1] = np.round(x[1])  # many of the largest
    x[2] = -np.inf
    x[3] = -np.inf
    x[3, columns - 1] = 1.0
    x[4] = 0.0
    return x, temperature, rng.integers(2**32, size=(8, 3), dtype=np.uint32)


@pytest.mark.parametrize("columns", [512, 2308, 6148])
def test_the_kernel_draws_the_tokens_of_its_reference(columns, monkeypatch):
    """With one part for each group and with fewer, where the last group overlaps another."""
    rows = rows_to_draw(columns)
    for ctas in (4096, 16):
        monkeypatch.setattr(api, "_CTAS", ctas)
        got = api.draw(*map(jnp.asarray, rows), interpret=INTERPRET)
        assert got.tolist() == TWIN(*rows).tolist()
    assert got[1] == rows[0][1].argmax() and got[2] == 0 and got[3] == columns - 1


def test_limits_exclude_tokens_and_rows():
    x, temperature, keys = rows_to_draw(2308)
    limit = np.array([2, -1, 0, np.inf, 0, 5, -np.inf, np.inf], np.float32)
    args = (*map(jnp.asarray, (x, temperature, keys)), jnp.asarray(limit))
    got = np.asarray(api.draw(*args, interpret=INTERPRET))
    assert got.tolist() == TWIN(*args).tolist()
    assert (got[[2, 3, 7]] == 0).all() and (x[np.arange(8), got] >= limit)[[0, 1, 4, 5, 6]].all()
    assert TWIN(*args[:3], jnp.full(8, jnp.inf)).tolist() == [0] * 8


def test_a_nan_is_found():
    x, temperature, keys = rows_to_draw(2308)
    x[:, 2000] = np.nan
    got = api.draw(*map(jnp.asarray, (x, temperature, keys)), interpret=INTERPRET)
    assert np.isnan(x[np.arange(8), np.asarray(got)]).all()


def test_the_noise_of_the_kernel_is_the_noise_of_the_reference(monkeypatch):
    """Near both ends of the uniform number, and where the series ends."""
    ends = [1.0, 2.0**31, 2.0**29, 2.0**24, 2.0**32 - 2.0**10, 2.0**32 - 1]
    bits = np.unique([min(max(int(end) + i, 0), 2**32 - 1) for end in ends for i in range(-200, 200)])
    bits = jnp.asarray(bits, jnp.uint32)[None]
    monkeypatch.setattr(noise, "hash_bits", lambda words, token: bits)
    want = noise.gumbel(jnp.zeros((1, 3), jnp.uint32), jnp.arange(bits.size))
    got = -np.log(2) * np.asarray(api._log2_exponential(bits), np.float64) - np.log(np.log(2))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_short_rows_and_odd_widths_run_the_reference():
    for columns in (130, 514):
        rows = [jnp.asarray(a) for a in rows_to_draw(columns)]
        assert api.draw(*rows).tolist() == TWIN(*rows).tolist()


@pytest.mark.parametrize("limited", [False, True])
def test_for_the_h200_it_spills_nothing(limited, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    rows = 2**15  # beyond 2^31 numbers
    shapes = [((rows, 128256), jnp.float32), ((rows,), jnp.float32), ((rows, 3), jnp.uint32)]
    shapes += [((rows,), jnp.float32)] * limited
    compiled = compile_for_h200(
        api.draw, *abstract(h200_mesh(), tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    )
    assert compiled.machine_code
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"draw*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert "ld.global.v4" in ptx and "lg2.approx" in ptx

"""Whole pages to their places by one kernel: in Mosaic's interpreter beside the twin, and as compiled for an H200."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import reference
from pallas_kernels.scatter_pages import scatter_pages, takes


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_kernel_is_its_twin(dtype):
    """Bit by bit, of arrays of several sizes; a page that is not there changes nothing."""
    rng, pages = np.random.default_rng(0), 7
    shapes = [(pages, 2, 16, 64), (pages, 2, 16, 64), (pages, 2, 64)]
    arrays = [jnp.asarray(rng.integers(-100, 100, shape)).astype(jnp.float32 if len(shape) == 3 else dtype) for shape in shapes]
    words = sum(a.nbytes // pages // 4 for a in arrays)
    ids, strings = jnp.asarray([5, pages, 0], jnp.int32), jnp.asarray(rng.integers(0, 2**32, (3, words), dtype=np.uint32))
    strings = strings & jnp.uint32(0x3F7F3F7F)  # numbers all of them: NaNs are not equal to themselves
    got = scatter_pages(arrays, ids, strings, interpret=plgpu.InterpretGPUParams())
    for found, wanted in zip(got, reference.scatter_pages(arrays, ids, strings), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert takes(arrays)


def test_it_says_what_it_does_not_take():
    small, ids = jnp.zeros((4, 2, 100)), jnp.zeros(1, jnp.int32)
    assert not takes([small])
    with pytest.raises(ValueError, match="multiples of 128 words"):
        scatter_pages([small], ids, jnp.zeros((1, 200), jnp.uint32))
    with pytest.raises(ValueError, match=r"uint32 \[n, W\]"):
        scatter_pages([jnp.zeros((4, 2, 512))], ids, jnp.zeros((1, 1000), jnp.uint32))


def test_for_the_h200_it_is_one_kernel_that_copies_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    layers = [jax.ShapeDtypeStruct((4096, 8, 64, 128), jnp.bfloat16)] * 8
    words = 8 * 8 * 64 * 128 // 2
    shapes = (layers, jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, words), jnp.uint32))
    compiled = compile_for_h200(scatter_pages, *abstract(h200_mesh(), shapes), donate_argnums=(0,))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    assert compiled.memory.alias_size_in_bytes >= 8 * 4096 * 8 * 64 * 128 * 2
    assert compiled.memory.temp_size_in_bytes < 1 << 16
    logs, ptx = ("".join(p.read_text(errors="replace") for p in tmp_path.glob(f"scatter_pages*{end}")) for end in (".ptxas", ".ptx"))
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx

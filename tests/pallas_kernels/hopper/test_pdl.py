"""Programmatic dependent launch: each kernel waits before it touches other kernels' results, GEMMs after
they request the weight.


"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from h200 import abstract, compile_for_h200, h200_mesh

from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.gemm.api import HopperGemm
from pallas_kernels.gemm.flat.api import flat_gemm
from pallas_kernels.gemm.fp8.flat import fp8_flat_gemm
from pallas_kernels.gemm.tuned_table import Table
from pallas_kernels.kernel_set import REFERENCE
from pallas_kernels.pointwise.norm.api import add_norm
from pallas_kernels.pointwise.quantize.api import quantize_rows
from pallas_kernels.pointwise.rope_append.api import rope_append
from pallas_kernels.quantized import Quantized

D, H, PAGES = 512, 128, 16
WAIT, NEXT, COPY = "griddepcontrol.wait", "griddepcontrol.launch_dependents", "cp.async.bulk.tensor"


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def steps(x, w, w8, norm, pages, table, ints):
    """Run every kernel with programmatic dependent launch once."""
    pdl = {"pdl": True}
    x, h = add_norm(x, x, norm, eps=1e-5, **pdl)
    fused = flat_gemm(h, w, **pdl)
    inv_freq = jnp.ones(H // 2)
    q, k, v = rope_append(fused, pages, pages * 1, ints, ints, head_dim=H, inv_freq=inv_freq, **pdl)
    o = decode_attention(q, k, v, table, ints, scale=1.0, **pdl)
    return fp8_flat_gemm(quantize_rows(o.reshape(8, D), **pdl), w8, out_dtype=jnp.bfloat16, **pdl)


def test_each_kernel_waits_and_launches_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    pages, ints = array(PAGES, 4, 64, H), array(8, dtype=jnp.int32)
    weight8 = Quantized(array(D, D, dtype=jnp.float8_e4m3fn), array(D, dtype=jnp.float32))
    shapes = (array(8, D), array(3 * D, D), weight8, array(D), pages, array(8, 4, dtype=jnp.int32), ints)
    assert compile_for_h200(steps, *abstract(h200_mesh(), shapes)).machine_code
    texts = {
        re.sub(r"_[\dx_]+$", "", path.stem): path.read_text(errors="replace")
        for path in tmp_path.glob("*.ptx")
    }
    assert set(texts) == {
        "add_norm",
        "flat_gemm",
        "rope_append",
        "decode_attention",
        "quantize_rows",
        "fp8_flat_gemm",
    }
    for name, ptx in texts.items():
        places = {
            what: [one.start() for one in re.finditer(re.escape(what), ptx)] for what in (WAIT, NEXT, COPY)
        }
        assert places[WAIT] and places[NEXT], name
        if "gemm" in name:  # copies of the weight precede one wait; all other copies follow a wait
            assert any(min(places[COPY]) < wait for wait in places[WAIT]) and len(places[WAIT]) >= 2, name
        elif places[COPY]:
            assert min(places[WAIT]) < min(places[COPY]), name


def test_a_set_has_one_variant_with_pdl():
    hopper = dataclasses.replace(REFERENCE, add_norm=add_norm, gemm=HopperGemm(Table("")))
    pdl = hopper.with_pdl()
    assert pdl is hopper.with_pdl() and pdl != hopper
    assert pdl.add_norm.keywords == {"pdl": True} and pdl.gemm.pdl
    assert pdl.rope_append is REFERENCE.rope_append
    assert REFERENCE.with_pdl() == REFERENCE and not REFERENCE.supports_pdl

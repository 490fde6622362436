"""Products with a stage left out, as they are timed: an H200 takes them, and each is another kernel than the whole."""

import re

import jax
import jax.numpy as jnp
from h200 import abstract, compile_for_h200, h200_mesh

from pallas_kernels.checks import script, stages


def test_an_h200_takes_products_with_a_stage_left_out(tmp_path, monkeypatch):
    """Some of each kernel, in one program."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    dense, flat = (256, *script.SHAPES["8B"]["qkv"]), (64, *script.SHAPES["70B/tp4"]["out_proj"])
    left_out = [(dense, stages.dense_ways(*dense)[name]) for name in ("nothing stored", "weight in the L2", "parts not added up")]
    left_out += [(flat, stages.flat_ways(*flat)[name]) for name in ("whole", "x not read")]
    args = [tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (n, k))) for (m, n, k), _ in left_out]

    def step(args):
        return [gemm(*each) for (_, gemm), each in zip(left_out, args, strict=True)]

    assert compile_for_h200(step, *abstract(h200_mesh(), (args,))).machine_code
    texts, logs = ([path.read_text(errors="replace") for path in tmp_path.glob(f"*{end}")] for end in (".ptx", ".ptxas"))
    assert len(set(texts)) == len(left_out)
    assert {int(n) for n in re.findall(r"(\d+) bytes spill stores", "".join(logs))} == {0}
    for parts in ("wgmma.mma_async", "cp.async.bulk.tensor.4d.shared", "cp.async.bulk.tensor.4d.global"):
        assert all(parts in ptx for ptx in texts), parts  # what is left out is a place, not an instruction


def test_parts_that_are_not_added_up_are_the_same_work():
    plan = stages.gemm_plan(256, *script.SHAPES["8B"]["qkv"], 132)
    cut, stored = plan.schedule, stages.unsummed(plan).schedule
    assert cut.slots and not stored.slots and (stored.table[:, :, :4] == cut.table[:, :, :4]).all()
    assert (stored.table[:, :, 4:] == [-1, 0, 0]).all()

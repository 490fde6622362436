"""Dense and flat GEMM with a stage left out compile for an H200, each to a different program."""

import re

import jax
import jax.numpy as jnp
import pytest
from h200 import abstract, compile_for_h200, h200_mesh

from pallas_kernels.gemm import model_shapes
from pallas_kernels.gemm.dense import gpu_stages as stages


@pytest.mark.slow
def test_products_without_a_stage_compile_for_an_h200(tmp_path, monkeypatch):
    """One program holds some variants of each kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    dense, flat = (256, *model_shapes.SHAPES["8B"]["qkv"]), (64, *model_shapes.SHAPES["70B/tp4"]["out_proj"])
    left_out = [
        (dense, stages.dense_ways(*dense)[name])
        for name in ("nothing stored", "weight in the L2", "parts not added up")
    ]
    left_out += [(flat, stages.flat_ways(*flat)[name]) for name in ("whole", "x not read")]
    few = (832, *model_shapes.SHAPES["8B"]["qkv"])
    left_out.append((few, stages.dense_ways(*few, sms=stages.FEW_SMS)["parts not added up"]))
    args = [
        tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (n, k)))
        for (m, n, k), _ in left_out
    ]

    def step(args):
        return [gemm(*each) for (_, gemm), each in zip(left_out, args, strict=True)]

    assert compile_for_h200(step, *abstract(h200_mesh(), (args,))).machine_code
    texts, logs = (
        [path.read_text(errors="replace") for path in tmp_path.glob(f"*{end}")] for end in (".ptx", ".ptxas")
    )
    assert len(set(texts)) == len(left_out)
    assert {int(n) for n in re.findall(r"(\d+) bytes spill stores", "".join(logs))} == {0}
    for parts in ("wgmma.mma_async", "cp.async.bulk.tensor.4d.shared", "cp.async.bulk.tensor.4d.global"):
        assert all(parts in ptx for ptx in texts), parts  # a left-out stage keeps its instructions


def test_the_plan_without_sums_has_the_same_work():
    plan = stages.gemm_plan(256, *model_shapes.SHAPES["8B"]["qkv"], 132)
    cut, stored = plan.schedule, stages.unsummed(plan).schedule
    assert cut.slots and not stored.slots and (stored.table[:, :, :4] == cut.table[:, :, :4]).all()
    assert (stored.table[:, :, 4:] == [-1, 0, 0]).all()


@pytest.mark.parametrize(
    ("ways", "cases"), [(stages.dense_ways, stages.DENSE), (stages.flat_ways, stages.FLAT)]
)
def test_every_case_has_a_plan(ways, cases):
    for m, model, op in cases:
        n, k = model_shapes.SHAPES[model][op]
        assert {"whole", "nothing stored", "weight in the L2", "nothing read"} <= set(ways(m, n, k)), (
            m,
            model,
            op,
        )

"""Products and decode attention with a stage left out, as they are timed: an H200 takes them, and each is
another kernel than the whole.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh

from pallas_kernels.attention.decode import gpu_stages as decode_stages
from pallas_kernels.gemm.dense import gpu_stages as stages
from pallas_kernels.measure import script


def test_an_h200_takes_products_with_a_stage_left_out(tmp_path, monkeypatch):
    """Some of each kernel, in one program."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    dense, flat = (256, *script.SHAPES["8B"]["qkv"]), (64, *script.SHAPES["70B/tp4"]["out_proj"])
    left_out = [
        (dense, stages.dense_ways(*dense)[name])
        for name in ("nothing stored", "weight in the L2", "parts not added up")
    ]
    left_out += [(flat, stages.flat_ways(*flat)[name]) for name in ("whole", "x not read")]
    few = (832, *script.SHAPES["8B"]["qkv"])
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
        assert all(parts in ptx for ptx in texts), parts  # what is left out is a place, not an instruction


def test_parts_that_are_not_added_up_are_the_same_work():
    plan = stages.gemm_plan(256, *script.SHAPES["8B"]["qkv"], 132)
    cut, stored = plan.schedule, stages.unsummed(plan).schedule
    assert cut.slots and not stored.slots and (stored.table[:, :, :4] == cut.table[:, :, :4]).all()
    assert (stored.table[:, :, 4:] == [-1, 0, 0]).all()


def test_an_h200_takes_decode_attention_with_a_stage_left_out(tmp_path, monkeypatch):
    """What is left out is not in the program, and everything else is: pages are copied by each. The one that
    serves spills nothing.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shaped = jax.eval_shape(lambda: [each[0] for each in decode_stages.operands([200, 65, 1])])
    made, args = decode_stages.ways(), abstract(h200_mesh(), shaped)
    texts, spilled = {}, {}
    for name, way in made.items():
        assert compile_for_h200(way, *args).machine_code
        (path,), (log,) = tmp_path.glob("*.ptx"), tmp_path.glob("*.ptxas")
        texts[name] = path.read_text()
        spilled[name] = max(
            int(n) for n in re.findall(r"(\d+) bytes spill stores", log.read_text(errors="replace"))
        )
        path.unlink()
        log.unlink()
    assert spilled == dict.fromkeys(made, 0) | {"nothing multiplied": 8}  # outside its loop over pages
    instructions = {
        "wgmma.mma_async": "products",
        "redux.sync": "vote",
        "atom.add": "count",
        "ld.relaxed.gpu": "look",
        "cp.async.bulk.tensor": "copies",
    }
    found = {name: {of for part, of in instructions.items() if part in ptx} for name, ptx in texts.items()}
    assert found == {
        "whole": {"products", "vote", "count", "look", "copies"},
        "nothing multiplied": {"vote", "count", "look", "copies"},
        "scores as weights": {"products", "count", "look", "copies"},
        "every part written and counted": {"products", "vote", "count", "copies"},
        "added up by one worker": {"products", "vote", "count", "look", "copies"},
        "parts not added up": {"products", "vote", "copies"},
        "pages only copied": {"copies"},
    }


def test_pages_in_the_l2_are_few():
    table = np.array([[5, 123, -1], [7, 2**31 - 1, 300]], np.int32)
    ((k, v, few, *beside),) = decode_stages.in_the_l2(
        [("k", "v", jnp.asarray(table), "lengths", "work", "scale")]
    )
    assert (k, v, *beside) == ("k", "v", "lengths", "work", "scale")
    assert few.dtype == jnp.int32 and few.min() >= 0 and few.max() < decode_stages.IN_L2
    assert decode_stages.IN_L2 * decode_stages.PAGE_BYTES <= script.L2_BYTES / 4


@pytest.mark.parametrize(
    ("ways", "cases"), [(stages.dense_ways, stages.DENSE), (stages.flat_ways, stages.FLAT)]
)
def test_every_case_has_a_plan(ways, cases):
    for m, model, op in cases:
        n, k = script.SHAPES[model][op]
        assert {"whole", "nothing stored", "weight in the L2", "nothing read"} <= set(ways(m, n, k)), (
            m,
            model,
            op,
        )

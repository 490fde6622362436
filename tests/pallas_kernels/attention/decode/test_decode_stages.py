"""Decode attention with a stage left out compiles for an H200, each to a different program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh

from pallas_kernels.attention.decode import gpu_stages as decode_stages
from pallas_kernels.measure import script


@pytest.mark.slow
def test_decode_attention_without_a_stage_compiles_for_an_h200(tmp_path, monkeypatch):
    """Only the omitted stage is missing from each program. Only the kernel without products may spill."""
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
    assert {name for name, size in spilled.items() if size} <= {"nothing multiplied"}
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

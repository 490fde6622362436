"""The FLOPs that kernels of experts compute beside those that their rows need."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from pallas_kernels.gemm.grouped.tiles import expected_tiles, tile_rows
from search.profile.modelled import padded_flops
from search.profile.op_times import alone

MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b")
GRAPHS = {
    name: model_graph(open_checkpoint(name, load_format="dummy").model_config)
    for name in (*MIXTURES, "llama-3.1-8b")
}


def padding(name: str, op_name: str, tokens: int) -> float:
    op = next(op for op in GRAPHS[name].layers[0] if op.name == op_name)
    work = op.work(alone(op, tokens, 0))
    return padded_flops(op, work) / work.flops


@given(st.sampled_from(MIXTURES), st.integers(1, 8192))
def test_tiles_hold_all_rows_and_at_most_one_more_tile_an_expert(name, tokens):
    number, chosen = next(op.experts for op in GRAPHS[name].layers[0] if op.experts)
    rows = tile_rows(tokens, chosen, number)
    assert padding(name, "expert_down", tokens) >= 1
    computed = padding(name, "expert_up_gate", tokens) * tokens * chosen
    assert computed < tokens * chosen + rows * number


def test_a_dense_op_computes_its_rows_alone():
    assert padding("llama-3.1-8b", "up_gate", 100) == padding("mixtral-8x7b", "router", 100) == 1.0


@pytest.mark.parametrize(("tokens", "chosen", "number", "rows"), [(2048, 2, 8, 128), (256, 8, 128, 16)])
def test_expected_tiles_are_the_mean_of_drawn_ones(tokens, chosen, number, rows):
    drawn = np.random.default_rng(0).binomial(tokens, chosen / number, 100_000)
    assert expected_tiles(tokens, chosen, number, rows) == pytest.approx(
        np.ceil(drawn / rows).mean(), rel=0.05
    )

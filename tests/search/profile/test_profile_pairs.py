"""Losses of overlapped products and attention on an H200, from committed profiles."""

import statistics

import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import FP8, Widths, model_graph
from search.profile.op_times import Profile, load_profile
from search.profile.share_times import ShareTimes, product_shapes


def profile(name: str) -> Profile:
    return load_profile(paths.ROOT / "search" / "profiles" / f"h200-{name}.json")


@pytest.mark.parametrize(
    ("name", "slowdown"),
    [("llama-3.1-8b", 1.22), ("llama-3-70b-tp2-fp8", 1.09)],
)
def test_slowdown_of_each_committed_profile(name, slowdown):
    found = profile(name)
    tp, model = found.tensor_parallel_size, open_checkpoint(found.model, load_format="dummy").model_config
    graph = model_graph(model, tp, FP8 if found.dtype == "float8_e4m3fn" else Widths())
    times = ShareTimes(found, graph, product_shapes(model, tp))
    assert times.overlap_slowdown == pytest.approx(slowdown, abs=0.005)


@pytest.mark.parametrize(("name", "most"), [("llama-3.1-8b", 1.3), ("llama-3-70b-tp2-fp8", 1.3)])
def test_products_and_decode_attention_keep_more_together_than_one_after_the_other(name, most):
    """The sum R + P of NanoFlow's Table 3 for each split of the SMs."""
    sums: dict[tuple[int, int], list[float]] = {}
    for pair in profile(name).pairs:
        if pair.second == "decode_attention":
            kept = pair.first_performance + pair.second_performance
            sums.setdefault((pair.first_sms, pair.second_sms), []).append(kept)
    assert len(sums) == 4
    assert 1.0 < max(map(statistics.mean, sums.values())) < most, sums

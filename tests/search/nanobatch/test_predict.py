"""A plan's predictions: simulated times at compositions around the plan's target."""

import dataclasses
import itertools

import drawn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_toys import llama_setting

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.handwritten import phased_plan, sequential_plan
from jaxflow.pipeline.plan import NanoOp, Plan
from pallas_kernels.cards import default_card
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.predict import margin, outside_s, predict
from search.nanobatch.simulate import simulate

LAYERS = drawn.config_of("tiny-llama").layers[:1] * 32


def test_predictions_are_the_simulation_of_each_composition():
    setting = llama_setting(2048, 1024, 512)
    config = dataclasses.replace(drawn.config_of("tiny-llama"), layers=LAYERS)
    plan = phased_plan(config, 2048, 384, sms=(40, 92))
    settings = {"device": setting.device, "power": setting.power}
    found = predict(plan, setting.graph, setting.shares, setting.load, **settings)
    made_for = (
        found.decode_tokens.index(setting.load.decode_tokens),
        found.mean_context_tokens.index(round(setting.load.decode_keys)),
    )
    outside = outside_s(setting.graph, setting.load.part(0, 2048), setting.device, "bfloat16")
    for which, table in ((plan, found.step_s), (sequential_plan(config, 2048), found.sequential_s)):
        timeline = simulate(which, setting.graph, setting.shares, setting.load, **settings)
        assert table[made_for[0]][made_for[1]] == pytest.approx(timeline.step_s + outside, rel=1e-3)
    # Without decodes, chunks are cut at whole rows, which moves the keys of a step by less than 1e-4.
    for row in (*found.step_s, *found.sequential_s):
        assert all(b > a * (1 - 1e-4) for a, b in itertools.pairwise(row)), "a longer context takes longer"
    gain = Gain.of(found)
    assert gain.at(0, 500) < gain.at(1.5 * setting.load.decode_tokens, 2 * setting.load.decode_keys)
    assert gain.margin == default_card().plan_margin


def test_the_margin_is_of_the_kind_of_plan():
    config = open_checkpoint("llama-3-70b", load_format="dummy").model_config
    graph, mixture = (
        model_graph(config),
        model_graph(open_checkpoint("mixtral-8x7b", load_format="dummy").model_config),
    )
    kernels, copies = (
        Plan("", 1, (NanoOp("qkv", "qkv", 0, 1),), sums=sums) for sums in ("kernels", "copies")
    )
    aside = Plan(
        "",
        1,
        (NanoOp("qkv", "qkv", 0, 1), NanoOp("decode_attention", "decode_attention", 0, 1, stream=1)),
        sums="copies",
    )
    of = [(2, "float8_e4m3fn"), (2, "bfloat16"), (4, "bfloat16"), (4, "float8_e4m3fn")]
    assert [margin(copies, graph, *kind) for kind in of] == [0.035, 0.035, 0.04, 0.06]
    assert (
        {margin(kernels, graph, *kind) for kind in of}
        == {margin(copies, mixture, *kind) for kind in of}
        == {default_card().plan_margin}
    )
    assert {margin(aside, graph, *kind) for kind in of} == {default_card().plan_margin}


def test_what_is_outside_the_layers_grows_with_the_rows_that_sample():
    setting = llama_setting(2048, 1024, 512)
    few, many = (
        outside_s(setting.graph, Composition(decode_tokens=n, decode_keys=9), setting.device, "bfloat16")
        for n in (8, 1024)
    )
    assert 0 < few < many < 5e-3
    assert outside_s(setting.graph, Composition(decode_tokens=8, decode_keys=9), None, "bfloat16") == 0.0


@given(st.integers(1, 4096), st.floats(0, 1), st.floats(2, 4096), st.floats(0, 1))
def test_prefill_of_a_part_sees_the_keys_that_the_load_says(tokens, share, keys, cut):
    """The number of chunks is the smallest one possible."""
    load = StepShape(tokens, round(share * tokens), 100.0, keys)
    stop = max(1, round(cut * tokens))
    part = load.part(0, stop)
    assert part.decode_tokens + part.chunk_tokens == stop
    if part.chunk_tokens:
        assert part.count("chunk_pairs") / part.chunk_tokens == pytest.approx(keys, rel=0.03, abs=1)
        assert len(part.chunks) <= 1 + part.chunk_tokens / 2 / (keys - 1)

"""The engine counts the tokens at each expert inside its steps: every token once, and no padding."""

import h200
import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from test_goldens import ONE_SIZE, requests

from jaxflow.engine.expert_load import ExpertCounter
from jaxflow.engine.loop import Loop
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.expert_tokens import add_tokens, mixture_layers
from jaxflow.pipeline import plan as plans
from jaxflow.pipeline.handwritten import two_nano_batch_plan

MODEL = "tiny-glm4_moe"  # the first layer is dense
CONFIG = open_checkpoint(str(paths.MODELS / MODEL)).model_config


def counts_of(engine: Loop, golden: dict) -> np.ndarray:
    """Run the golden's requests, and return the tokens at each expert.

    The executor is shared, and has counted before.
    """
    stages = getattr(engine.executor, "stages", [engine.executor])

    def every() -> np.ndarray:
        return np.concatenate([np.asarray(counts) for stage in stages for counts in stage.expert_counts])

    before = every()
    toy.run(engine, requests(golden))
    read = engine.expert_counter.read()
    assert read is not None and read.layers == mixture_layers(CONFIG)
    np.testing.assert_array_equal(read.tokens, every())
    return read.tokens - before


def test_every_token_counts_once_and_padding_never(goldens):
    engine = toy.loop(MODEL, budget=ONE_SIZE)
    found = counts_of(engine, goldens(MODEL))
    tokens = engine.stats(0).prompt_tokens + sum(step.decode_tokens for step in engine.log.steps)
    assert found.shape == (CONFIG.num_layers - 1, CONFIG.num_experts)
    assert found.sum(axis=1).tolist() == [tokens * CONFIG.experts_per_token] * len(found)
    assert len(np.unique(found)) > 3  # the router prefers some experts


@pytest.mark.parametrize(
    "form", ["experts on two devices", "two stages", "nano-batches", "a program a layer"]
)
def test_all_forms_of_a_step_count_alike(form, goldens, tmp_path, monkeypatch):
    golden = goldens(MODEL)
    wanted = counts_of(toy.loop(MODEL, budget=ONE_SIZE), golden)
    if form == "experts on two devices":
        engine = toy.loop(MODEL, budget=ONE_SIZE, tp=2, ep=True)
    elif form == "two stages":
        engine = toy.staged_loop(MODEL, 2)
    elif form == "nano-batches":
        plans.save(two_nano_batch_plan(CONFIG, ONE_SIZE, 6), tmp_path / "plan.json")
        engine = toy.loop(MODEL, budget=ONE_SIZE, plan=str(tmp_path / "plan.json"))
    else:
        config, made = toy._executor.__wrapped__(
            MODEL, 1, ONE_SIZE, 8, 96, "sequential", None, "auto", False, 1
        )
        monkeypatch.setattr(made.lower, "is_layered", lambda layout: True)
        engine = toy.make_loop(config, CONFIG, made)
    np.testing.assert_array_equal(counts_of(engine, golden), wanted)


@given(st.data())
def test_counts_of_a_step_are_those_of_a_loop_over_its_tokens(data):
    experts, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    tokens, chosen = data.draw(st.integers(1, 6)), data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    routed = [
        rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :chosen] for _ in range(layers)
    ]
    untold = data.draw(st.integers(0, layers))  # a layer that is not counted, or none
    is_token = rng.random(tokens) < 0.7
    before = rng.integers(0, 2**32, (layers, experts), dtype=np.uint32)
    wanted = before.copy()
    for layer in range(layers):
        for token in np.flatnonzero(is_token):
            for expert in routed[layer][token]:
                wanted[layer, expert] += layer != untold
    given_layers = [None if layer == untold else jnp.asarray(one) for layer, one in enumerate(routed)]
    found = jax.jit(add_tokens)(jnp.asarray(before), given_layers, jnp.asarray(is_token))
    np.testing.assert_array_equal(np.asarray(found), wanted)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9))
def test_totals_survive_the_wrap_of_the_counts(steps):
    counter, device, total = ExpertCounter([3]), np.zeros((1, 2), np.uint32), 0
    assert counter.read() is None
    for more in steps:
        device, total = device + np.array([more, 1], np.uint32), total + more
        counter.put((jnp.asarray(device),))
        counter.put((jnp.asarray(device),))
        found = counter.read()
        assert found is not None
    assert found.tokens.tolist() == [[total, len(steps)]]
    assert found.imbalance() == [pytest.approx(2 * max(total, len(steps)) / (total + len(steps)))]


def test_a_gpu_counts_all_layers_in_one_kernel():
    """The step of 48 layers has one kernel more, and a copy of 24 KB."""
    mesh = h200.h200_mesh()
    counts, routed, is_token = (
        h200.abstract(mesh, jax.ShapeDtypeStruct(shape, dtype))
        for shape, dtype in (((48, 128), jnp.uint32), ((64, 8), jnp.int32), ((64,), jnp.bool_))
    )
    step = h200.compile_for_h200(jax.jit(add_tokens), counts, [routed] * 48, is_token)
    assert [thunk.kind for thunk in step.thunks] == ["kCopy", "kCustomKernel"]

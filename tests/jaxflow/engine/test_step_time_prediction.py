"""Predicted step times follow the cost model, and held-back batch requests get
their own tokens on a real step.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import toy

from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.step_time_prediction import predict_step_time, roofline_step_time
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, step_timer
from jaxflow.model.graph import model_graph
from jaxflow.request import BATCH_PRIORITY, Request, SamplingParams

BUCKETS = [1, 8, 64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(
    "step",
    [
        Composition(8, 1000),
        Composition(64, 1100),
        Composition(256, 1100),
        Composition(256, 1100, ((256, 0),)),
        Composition(512, 1024, ((1024, 0), (512, 300))),
        Composition(64, 8000, ((448, 8000),)),
    ],
)
def test_the_prediction_is_that_of_the_cost_model(step):
    model = toy.executor("stories260K")[1].programs.context.config
    # The head and the layers of an 8B model: the times of the toy are all launches.
    model = dataclasses.replace(
        model,
        vocab_size=128_256,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        layers=model.layers[:1] * 32,
    )
    rates = DEVICES["H200"].rates
    time = roofline_step_time(model, 1, rates, BUCKETS)
    expected = step_timer(model_graph(model), rates)(step).sequential_s
    keys, pairs = int(step.count("decode_keys")), int(step.count("chunk_pairs"))
    assert time.seconds(int(step.tokens), keys, pairs) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("step", [Composition(chunks=((tokens, 0),)) for tokens in (1024, 2048)])
def test_the_prediction_of_latent_chunks_is_that_of_the_cost_model_in_both_forms(step):
    model = open_checkpoint("deepseek-v3", load_format="dummy").model_config
    model = dataclasses.replace(model, layers=model.layers[:3])
    rates, pairs = DEVICES["H200"].rates, int(step.count("chunk_pairs"))
    step = dataclasses.replace(step, samples=step.tokens)  # a prediction draws a token in each row
    predicted = []
    for by_head in (False, True):
        expected = step_timer(model_graph(model, by_head=by_head), rates)(step).sequential_s
        time = roofline_step_time(model, 1, rates, BUCKETS, by_head=by_head)
        predicted.append(time.seconds(int(step.tokens), 0, pairs))
        assert predicted[-1] == pytest.approx(expected, rel=0.1)
    assert predicted[1] < predicted[0]


@pytest.mark.parametrize("limit_ms", [1e-6, 1e6])
def test_batch_requests_beside_online_ones_get_the_tokens_that_they_get_alone(limit_ms):
    config, executor = toy.executor("stories260K")
    model = executor.programs.context.config
    rng = np.random.default_rng(0)

    def request(name: str, priority: int) -> Request:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
        return Request(name, rng.integers(3, model.vocab_size, 30), sampling, priority)  # type: ignore[arg-type]

    batch = [request(f"b{i}", BATCH_PRIORITY) for i in range(5)]
    online: dict[int, Sequence[Request]] = {4 + 9 * i: [request(f"o{i}", 0)] for i in range(4)}
    alone = {
        one.request_id: toy.run(toy.loop("stories260K"), [one])[one.request_id].tokens
        for one in [*batch, *(one for several in online.values() for one in several)]
    }
    loop = make_loop(dataclasses.replace(config, batch_tpot_ms=limit_ms), model, executor)
    decoded = []
    schedule = loop.scheduler.schedule

    def recorded(now):
        if (work := schedule(now)) is not None:
            decoded.append({seq.is_batch for seq in work.sampled})
        return work

    loop.scheduler.schedule = recorded  # type: ignore[method-assign]
    together = toy.run(loop, batch, at_step=online)
    assert {name: result.tokens for name, result in together.items()} == alone
    assert ({True, False} in decoded) == (limit_ms > 1)


def test_an_unknown_device_is_measured():
    config, executor = toy.executor("stories260K")
    time = predict_step_time(config, executor.programs.context.config, executor)
    small, large = (time.seconds(tokens, 0, 0) for tokens in (1, max(executor.layouts)))
    assert 0 < small <= large

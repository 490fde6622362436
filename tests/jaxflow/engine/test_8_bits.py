"""An 8-bit engine stays near the 16-bit engine, and gives equal tokens in any batch, in chunks, from cached
pages and on two devices.
"""

import numpy as np
import pytest
import toy

from jaxflow.bench.engine.policies import Hybrid
from jaxflow.request import Request, SamplingParams

FP8 = {"quantization": "fp8", "kv": "fp8"}
BUDGET = 16  # tokens of a step: all steps are one program


def loop(name, tp=1, policy=None, **numbers):
    return toy.loop(name, tp=tp, budget=BUDGET, policy=policy, **numbers)


def requests(golden, tokens=1):
    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=5, prompt_logprobs=0
    )
    return [
        Request(f"{i}", prompt, sampling) for i, prompt in enumerate(toy.prompts(golden)) if len(prompt) > 1
    ]


def told(asked, results):
    """The log-probabilities of all prompts' tokens but their first."""
    found = []
    for request in asked:
        entries = results[request.request_id].started.prompt_logprobs[1:]
        found += [
            entry[int(token)].logprob
            for entry, token in zip(entries, request.prompt_token_ids[1:], strict=True)
        ]
    return np.array(found)


def moved(one, other):
    return np.abs(one - other).mean()


@pytest.fixture(scope="module")
def alone(goldens):
    """(requests, their log-probabilities one at a time) of a model in these numbers, run once."""
    known = {}

    def run(name, **numbers):
        key = (name, *numbers.values())
        if key not in known:
            asked, engine = requests(goldens(name)), loop(name, **numbers)
            known[key] = (
                asked,
                told(asked, {k: v for request in asked for k, v in toy.run(engine, [request]).items()}),
            )
        return known[key]

    return run


@pytest.mark.parametrize(
    ("name", "numbers", "most"),
    [
        ("stories260K", {"kv": "int8"}, 0.06),
        ("tiny-llama", {"kv": "int8"}, 0.3),
        ("stories260K", {"kv": "fp8"}, 0.15),
        ("stories260K", FP8, 0.25),
        # Random weights: the scores of tokens are far apart, and move as far; a token that goes to another
        # expert moves further.
        ("tiny-qwen3", FP8, 0.6),
        ("tiny-mixtral", FP8, 1.5),
        ("tiny-opt", FP8, 0.6),
    ],
)
def test_near_the_wide_model(name, numbers, most, alone, goldens):
    wide = np.concatenate([p["prompt_logprobs"] for p in goldens(name)["prompts"]])
    _, found = alone(name, **numbers)
    assert len(found) == len(wide)
    assert 1e-4 < moved(found, wide) < most


@pytest.mark.parametrize("name", ["stories260K"])
def test_in_company_as_alone(name, alone, goldens):
    """Scales belong to a token or a block.

    Only the order of float32 sums differs, and may change a rounding.
    """
    asked, found = alone(name, **FP8)
    together = told(asked, toy.run(loop(name, **FP8), asked))
    assert moved(together, found) < 0.02
    chunked = told(asked, toy.run(loop(name, **FP8, policy=Hybrid(7)), asked))
    assert moved(chunked, found) < 0.02


def test_from_cached_pages():
    """Pages are shared by what tokens they hold; their numbers come with them, whatever the cache's dtype."""
    engine = loop("stories260K", **FP8)
    first, second = (toy.run(engine, [Request(name, list(range(5, 60)), toy.GREEDY)])[name] for name in "ab")
    assert second.finished[0].usage.cached_prompt_tokens == 48
    one, other = (
        np.array([entry[t].logprob for entry, t in zip(r.logprobs[0], r.tokens, strict=True)])
        for r in (first, second)
    )
    assert first.tokens[:8] == second.tokens[:8] and moved(one[:8], other[:8]) < 0.02


@pytest.fixture(scope="module")
def int8_on_two_devices(goldens):
    """(requests, their log-probabilities) of tiny-llama with an int8 cache on two devices."""
    asked = requests(goldens("tiny-llama"))
    return asked, told(asked, toy.run(loop("tiny-llama", tp=2, kv="int8"), asked))


def test_an_int8_cache_on_two_devices_is_near_the_wide_model(int8_on_two_devices, goldens):
    """A wrong scale of a head or of a token moves the log-probabilities further."""
    wide = np.concatenate([p["prompt_logprobs"] for p in goldens("tiny-llama")["prompts"]])
    assert 1e-4 < moved(int8_on_two_devices[1], wide) < 0.3


def test_an_int8_cache_on_two_devices_is_that_of_one(int8_on_two_devices, alone):
    """A token's scale is of one head, and heads are cut between devices: the same numbers."""
    np.testing.assert_allclose(int8_on_two_devices[1], alone("tiny-llama", kv="int8")[1], atol=0.05)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral"])
def test_on_two_devices(name, alone, goldens):
    """A shard's blocks of 128 columns are others where its cut is no multiple of 128: as far from the wide
    model, in another direction.
    """
    asked, found = alone(name, **FP8)
    wide = np.concatenate([p["prompt_logprobs"] for p in goldens(name)["prompts"]])
    spread = told(asked, toy.run(loop(name, tp=2, **FP8), asked))
    assert moved(spread, found) < moved(found, wide)
    assert moved(spread, wide) < 1.25 * moved(found, wide)

"""Bad words and allowed tokens: no answer breaks them, alone, in a batch and after pre-emption."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.model.slot_params import add_recent, adjust, empty_slots, rows_of, set_slot, slot_values
from jaxflow.prompt import bad_words_token_ids, make_request
from jaxflow.request import InvalidRequest, Request, SamplingParams
from jaxflow.text.tokenizer import load_tokenizer

MODEL = "stories260K"
PROMPT = [1, 403, 407, 261, 378]
LENGTH = 40


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_tokenizer(smollm2_gguf)


@functools.cache
def greedy() -> list[int]:
    return run([Request("free", PROMPT, sampling())])["free"]


def sampling(**settings) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "seed": 4}
    return SamplingParams(**(given | settings))


def run(requests, **how) -> dict[str, list[int]]:
    results = toy.run(toy.loop(MODEL), requests, **how)
    return {request.request_id: results[request.request_id].tokens for request in requests}


def forbidding(name: str, runs, **settings) -> Request:
    return Request(
        name, PROMPT, sampling(bad_words=["x"], **settings), bad_words_token_ids=tuple(map(tuple, runs))
    )


def contains(tokens: list[int], run: list[int]) -> bool:
    return any(tokens[i : i + len(run)] == run for i in range(len(tokens)))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_an_answer_leaves_its_free_course_at_the_end_of_a_bad_word(length):
    free = greedy()
    run_ = free[10 : 10 + length]
    first = next(i for i in range(len(free)) if free[i : i + length] == run_)
    tokens = run([forbidding("a", [run_, [511, 510]])])["a"]
    assert tokens[: first + length - 1] == free[: first + length - 1]
    assert tokens[first + length - 1] != run_[-1] and not contains(tokens, run_)


@functools.cache
def bad_words() -> list[list[list[int]]]:
    """Return pairs of runs of tokens, both from the free answer."""
    free = greedy()
    return [[free[i : i + 3], free[i + 5 : i + 7]] for i in (3, 8, 14)]


@functools.cache
def alone() -> tuple[list[Request], dict[str, list[int]]]:
    """Return requests with limits of every kind, and the answer to each by itself."""
    runs, allowed = bad_words(), sorted({*greedy()[:6], 300, 301, 302})
    requests = [
        *(forbidding(f"greedy{i}", pair) for i, pair in enumerate(runs)),
        forbidding("drawn", runs[0], temperature=1.0, repetition_penalty=1.2),
        Request("allowed", PROMPT, sampling(allowed_token_ids=allowed, temperature=1.5)),
        Request(
            "biased",
            PROMPT,
            sampling(allowed_token_ids=[300, 301], logit_bias={301: 9.0, 7: 100.0}, min_tokens=9),
        ),
        Request("free", PROMPT, sampling()),
    ]
    return requests, {name: tokens for request in requests for name, tokens in run([request]).items()}


@pytest.mark.parametrize("preempt_at", [(), range(2, 60, 4)], ids=["undisturbed", "pre-empted"])
def test_answers_are_the_same_in_a_batch(preempt_at):
    requests, expected = alone()
    runs, allowed = bad_words(), requests[4].sampling.allowed_token_ids
    together = run(requests, preempt_at=preempt_at)
    assert together == expected and together["free"] == greedy()
    for name, pair in [*((f"greedy{i}", pair) for i, pair in enumerate(runs)), ("drawn", runs[0])]:
        assert not any(contains(together[name], one) for one in pair)
    assert len(set(together["allowed"])) > 1 and set(together["allowed"]) <= set(allowed)
    assert set(together["biased"]) == {301}


token = st.integers(0, 3)
SET, ADD = jax.jit(set_slot), jax.jit(add_recent)


@jax.jit
def ADJUST(params, counts):
    """The adjusted logits of slot 1, which are 0 before."""
    slots = jnp.array([1])
    return adjust(jnp.zeros((1, 6)), rows_of(params, slots), counts, slots, jnp.array([7]))


@settings(deadline=None, max_examples=50)
@given(
    words=st.lists(st.lists(token, min_size=1, max_size=4), max_size=3),
    output=st.lists(token, max_size=15),
    allowed=st.none() | st.lists(token, min_size=1, max_size=3),
    suppressed=st.lists(token, max_size=2),
)
def test_the_excluded_tokens_are_those_of_the_definition(words, output, allowed, suppressed):
    half = len(output) // 2
    params, counts = empty_slots(2, 6)
    values = slot_values(
        bad_words=words, recent=output[:half], allowed=allowed, suppressed=suppressed, min_position=99
    )
    params, counts = SET(params, counts, jnp.int32(1), values)
    recent = jnp.asarray(params.recent)
    for one in output[half:]:
        recent = ADD(recent, jnp.array([1, 2]), jnp.array([one, 5]))
    found = ADJUST(dataclasses.replace(params, recent=recent), counts)
    completed = {word[-1] for word in words if word[:-1] == output[len(output) - len(word) + 1 :]}
    completed |= {word[-1] for word in words if len(word) == 1}
    excluded = completed | set(suppressed) | (set() if allowed is None else set(range(6)) - set(allowed))
    assert set(np.flatnonzero(np.isneginf(np.asarray(found[0])))) == excluded


def test_a_word_is_excluded_after_a_space_and_without_one(smollm2):
    runs = bad_words_token_ids([" dog", "dog"], smollm2)
    texts = [smollm2.decode(run) for run in runs]
    assert texts == ["dog", " dog"]
    assert bad_words_token_ids((), None) == ()


@pytest.mark.parametrize("word", ["supercalifragilistic" * 9, "\ud800"])
def test_a_word_that_cannot_be_excluded_is_named(word):
    tokenizer = load_tokenizer(paths.MODELS / MODEL)
    with pytest.raises(InvalidRequest) as refused:
        make_request("a", PROMPT, SamplingParams(bad_words=["dog", word]), tokenizer, 512)
    assert refused.value.field == "bad_words"


def test_words_need_a_tokenizer():
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        make_request("a", PROMPT, SamplingParams(bad_words=["dog"]), None, 512)

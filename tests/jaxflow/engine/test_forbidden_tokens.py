"""Bad words and allowed tokens: no answer breaks them, alone, in a batch and after pre-emption."""

import functools

import paths
import pytest
import toy

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


@pytest.mark.parametrize("preempt_at", [(), range(2, 60, 4)], ids=["undisturbed", "pre-empted"])
def test_answers_are_the_same_in_a_batch(preempt_at):
    free = greedy()
    runs = [[free[i : i + 3], free[i + 5 : i + 7]] for i in (3, 8, 14)]
    allowed = sorted({*free[:6], 300, 301, 302})
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
    alone = {name: tokens for request in requests for name, tokens in run([request]).items()}
    together = run(requests, preempt_at=preempt_at)
    assert together == alone and together["free"] == free
    for name, pair in [*((f"greedy{i}", pair) for i, pair in enumerate(runs)), ("drawn", runs[0])]:
        assert not any(contains(together[name], one) for one in pair)
    assert len(set(together["allowed"])) > 1 and set(together["allowed"]) <= set(allowed)
    assert set(together["biased"]) == {301}


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

"""Constrained answers of a small engine: they have their form, and they change no other answer."""

import dataclasses
import json
import re

import paths
import pytest
import toy

from jaxflow.request import FinishReason, Request, SamplingParams, StructuredOutputsParams
from jaxflow.structured.compiler import FormCompiler
from jaxflow.text.tokenizer import load_tokenizer

MODEL = "stories260K"
TOKENIZER = load_tokenizer(paths.MODELS / MODEL)
FORMS = FormCompiler(TOKENIZER, 512, [2])
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["dog", "cat", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "legs", "likes"],
    "additionalProperties": False,
}
ANY = {"regex": r"(?s:.*)"}


def request(name, text, form=None, **settings) -> Request:
    given = {"temperature": 0.0, "max_tokens": 90, "seed": len(text)} | settings
    wanted = None if form is None else StructuredOutputsParams(**form)
    sampling = SamplingParams(structured_outputs=wanted, **given)
    made = None if wanted is None else FORMS.compile(wanted, sampling.stop_token_ids)
    return Request(name, TOKENIZER.encode(text), sampling, make_constraint=made)


def mixed() -> list[Request]:
    """Return constrained requests of many settings, and free ones."""
    return [
        request("json", "Once upon a time", {"json": SCHEMA}),
        request("hot", "There was a dog", {"json": SCHEMA}, temperature=1.5),
        request("filtered", "A cat sat", {"json": SCHEMA}, temperature=1.0, top_p=0.8, top_k=20, logprobs=2),
        request("penalties", "Lily and Tom", {"regex": "[a-z ]{5,30}"}, repetition_penalty=1.3, n=3),
        request("choice", "The bird said", {"choice": ["yes", "no", "no way"]}, min_tokens=1),
        request("biased", "One day", {"regex": "[0-9]{4}"}, logit_bias={300: 50.0, 5: -3.0}),
        request("free", "Once upon a time there was", ignore_eos=True, max_tokens=60),
        request("free hot", "The sun", temperature=0.8, max_tokens=50),
    ]


def tokens_of(results) -> dict:
    return {name: result.token_ids for name, result in results.items()}


@pytest.fixture(scope="module")
def alone() -> dict:
    engine = toy.loop(MODEL)
    return {each.request_id: toy.run(engine, [each])[each.request_id] for each in mixed()}


def test_answers_have_their_form(alone):
    for name in ("json", "hot", "filtered"):
        result = alone[name]
        if result.finished[0].reason is FinishReason.STOP:
            found = json.loads(TOKENIZER.decode(result.tokens))
            assert set(found) == {"name", "legs", "likes"} and found["name"] in ("dog", "cat", "bird")
            assert 0 <= found["legs"] <= 99 and all(isinstance(each, str) for each in found["likes"])
    assert alone["json"].finished[0].reason is FinishReason.STOP
    for tokens in alone["penalties"].token_ids.values():
        assert re.fullmatch("[a-z ]{5,30}", TOKENIZER.decode(tokens))
    assert TOKENIZER.decode(alone["choice"].tokens) in ("yes", "no", "no way")
    assert re.fullmatch("[0-9]{4}", TOKENIZER.decode(alone["biased"].tokens))
    assert len(alone["filtered"].logprobs[0]) == len(alone["filtered"].tokens)


def test_the_same_tokens_in_a_batch(alone):
    assert tokens_of(toy.run(toy.loop(MODEL), mixed())) == tokens_of(alone)


def test_the_same_tokens_after_preemption_and_with_small_chunks(alone):
    engine = toy.loop(MODEL, budget=16)
    results = toy.run(engine, mixed(), preempt_at=range(2, 300, 5))
    assert engine.scheduler.num_preemptions > 10
    assert tokens_of(results) == tokens_of(alone)


def test_the_same_tokens_when_requests_arrive_one_by_one(alone):
    first, *others = mixed()
    late = {3 * step: [each] for step, each in enumerate(others, start=1)}
    assert tokens_of(toy.run(toy.loop(MODEL), [first], at_step=late)) == tokens_of(alone)


def test_a_form_that_allows_every_text_changes_no_token():
    texts = ("Once upon a time", "The dog")
    free = [request(text, text, max_tokens=40) for text in texts]
    same = [request(text, text, ANY, max_tokens=40) for text in texts]
    engines = toy.loop(MODEL), toy.loop(MODEL)
    held, wanted = (toy.run(*each) for each in zip(engines, (same, free), strict=True))
    assert tokens_of(held) == tokens_of(wanted)
    steps = [len(engine.log.steps) for engine in engines]
    assert steps[0] == steps[1]  # constrained answers run ahead as others do


def test_the_forward_is_enqueued_before_the_step_before_is_read():
    engine, calls = toy.loop(MODEL), []
    advance, read = engine.executor.advance, engine.read
    engine.executor.advance = lambda *args: calls.append("forward") or advance(*args)
    engine.read = lambda step: calls.append("read") or read(step)
    try:
        toy.run(engine, [request("held", "A dog", {"regex": "[a-z]{9}"}, max_tokens=9)])
    finally:
        del engine.executor.advance
    assert calls == ["forward", *["forward", "read"] * 8, "read"]


def test_an_answer_that_reaches_its_length_is_cut():
    result = toy.run(toy.loop(MODEL), [request("a", "Once", {"json": SCHEMA}, max_tokens=5)])["a"]
    assert result.finished[0].reason is FinishReason.LENGTH and len(result.tokens) == 5


def test_a_step_without_constraints_has_no_masks():
    engine = toy.loop(MODEL)
    seen, run = [], engine.executor.run

    def watched(*args, **named):
        seen.append("masks" in named)
        return run(*args, **named)

    engine.executor.run = watched
    try:
        toy.run(engine, [request("free", "A dog", max_tokens=6)])
        assert not any(seen)
        toy.run(engine, [request("held", "A dog", {"regex": "[a-z]{6,}"}, max_tokens=6)])
        assert any(seen)
    finally:
        del engine.executor.run


def test_a_constraint_that_breaks_ends_its_request_alone(alone):
    broken = request("broken", "A dog", {"regex": "[a-z]{9}"})

    class Broken:
        complete = False

        def push(self, token):
            raise ValueError("a fault")

        def fill(self, others, masks):
            others = [(each, row) for each, row in others if not isinstance(each, Broken)]
            if others:
                others[0][0].fill(others, masks)

    requests = [dataclasses.replace(broken, make_constraint=Broken), mixed()[0], mixed()[-1]]
    results = toy.run(toy.loop(MODEL), requests)
    end = results.pop("broken").finished[0]
    assert end.reason is FinishReason.ABORT and str(end.error) == "a fault"
    assert tokens_of(results) == {name: alone[name].token_ids for name in results}


@pytest.mark.slow
def test_pipeline_stages_and_ranks_give_the_same_tokens():
    requests = [
        request("digits", "One day", {"regex": "[0-9]{9}"}, temperature=1.0),
        request("free", "The sun", max_tokens=20),
    ]
    want = tokens_of(toy.run(toy.loop("tiny-mixtral"), requests))
    assert re.fullmatch("[0-9]{9}", TOKENIZER.decode(want["digits"][0]))
    for engine in (toy.staged_loop("tiny-mixtral", 2), toy.ranked_loop("tiny-mixtral", 2)):
        assert tokens_of(toy.run(engine, requests)) == want

"""However the engine cuts an answer into steps, and the steps pile up, the caller reads the same text."""

import hypothesis.strategies as st
import paths
import pytest
from hypothesis import given

from jaxflow.request import (
    Delta,
    Finished,
    FinishReason,
    InvalidRequest,
    Logprob,
    QueueFull,
    Request,
    SamplingParams,
    Started,
    Timings,
    Usage,
)
from jaxflow.text.tokenizer import load_tokenizer
from serving.frontend.transcript import MAX_TOKENS_A_DELTA, Transcript
from serving.grpc import convert
from serving.grpc import generate_pb2 as pb

TOKENIZER = load_tokenizer(paths.MODELS / "stories260K")
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("Once upon a time")

token_ids = st.lists(st.integers(3, 511), min_size=1, max_size=40)


def finished(index: int, reason=FinishReason.LENGTH, **more) -> Finished:
    return Finished("engine's", index, reason, Usage(5, 0, 1), Timings(0.0, 0.5, 1.0, 0), **more)


def cut(data, items: list) -> list[list]:
    """`items` in pieces of drawn sizes."""
    pieces = []
    while items:
        size = data.draw(st.integers(1, len(items)))
        pieces.append(items[:size])
        items = items[size:]
    return pieces


class Messages:
    """A transcript as gRPC writes it."""

    def __init__(self, tokenizer, request: Request, end_token_ids):
        self._tokenizer = tokenizer
        self._transcript = Transcript(request, tokenizer, frozenset(end_token_ids))

    @property
    def done(self) -> bool:
        return self._transcript.done

    def messages(self, events) -> list[pb.GenerateResponse]:
        outputs = self._transcript.outputs(events)
        return [convert.message("caller's", output, self._tokenizer) for output in outputs]


def transcript(tokenizer=TOKENIZER, stop_token_ids=(EOS,), **sampling) -> Messages:
    return Messages(tokenizer, Request("engine's", PROMPT, SamplingParams(**sampling)), stop_token_ids)


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    parts = [
        getattr(message, message.WhichOneof("event"))
        for message in messages
        if not message.HasField("started")
    ]
    return "".join(part.text for part in parts if part.index == index)


def ids_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [
        token for message in messages for token in message.delta.token_ids if message.delta.index == index
    ]


def added_text(ids: list[int]) -> str:
    return TOKENIZER.decode(PROMPT + ids).removeprefix(TOKENIZER.decode(PROMPT))


@given(st.data(), st.lists(token_ids, min_size=1, max_size=3))
def test_text_does_not_depend_on_the_cuts(data, answers):
    """Sequences in any interleaving, tokens in any steps, steps in any batches."""
    parts = {
        index: [Delta("engine's", index, tuple(piece)) for piece in cut(data, answer)] + [finished(index)]
        for index, answer in enumerate(answers)
    }
    events = [Started("engine's", len(PROMPT), 0, 7)]
    while any(parts.values()):
        index = data.draw(st.sampled_from([index for index, rest in parts.items() if rest]))
        events.append(parts[index].pop(0))
    subject = transcript(n=len(answers))
    messages = []
    for batch in cut(data, events):
        assert not subject.done
        messages += subject.messages(batch)
    assert subject.done
    assert {message.request_id for message in messages} == {"caller's"}
    assert messages[0].started.seed == 7
    for index, answer in enumerate(answers):
        assert ids_of(messages, index) == answer
        assert text_of(messages, index) == added_text(answer)
        last = [
            message
            for message in messages
            if message.finished.index == index and message.HasField("finished")
        ]
        assert len(last) == 1


@given(st.data(), token_ids)
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(data, answer):
    stop = answer[-1]
    answer = [token for token in answer[:-1] if token != stop]
    events = [Delta("engine's", 0, tuple(piece)) for piece in cut(data, [*answer, stop])]
    events.append(finished(0, FinishReason.STOP, stop_token_id=stop))
    subject = transcript(stop_token_ids=(stop,))
    messages = [message for batch in cut(data, events) for message in subject.messages(batch)]
    assert ids_of(messages) == [*answer, stop]
    assert text_of(messages) == added_text(answer)
    assert messages[-1].finished.WhichOneof("stopped_by") == "stop_token_id"
    assert messages[-1].finished.stop_token_id == stop


def test_a_stop_token_that_did_not_stop_is_text():
    """The end token was the last allowed token: min_tokens, or the engine, did not stop there."""
    word = TOKENIZER.encode("girl", add_special_tokens=False)
    subject = transcript(stop_token_ids=(word[-1],))
    messages = list(subject.messages([Delta("engine's", 0, tuple(word)), finished(0)]))
    assert text_of(messages) == added_text(word)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(include):
    ids = TOKENIZER.encode("there was a little girl", add_special_tokens=False)
    before, stop, _ = added_text(ids).partition(" a l")
    assert stop
    subject = transcript(stop=(" a l",), include_stop_str_in_output=include)
    messages = [message for token in ids for message in subject.messages([Delta("engine's", 0, (token,))])]
    messages += subject.messages([finished(0, FinishReason.STOP, stop_string=" a l")])
    assert text_of(messages) == (before + stop if include else before)
    assert messages[-1].finished.stop_string == " a l"


def test_part_of_a_character_is_held_back():
    snowman = TOKENIZER.encode("\N{SNOWMAN}", add_special_tokens=False)[-3:]
    assert [TOKENIZER.token_text(token) for token in snowman] == ["\ufffd"] * 3, (
        "this vocabulary writes it in three bytes"
    )
    subject = transcript()
    messages = [
        message for token in snowman for message in subject.messages([Delta("engine's", 0, (token,))])
    ]
    assert [(message.delta.token_ids, message.delta.text) for message in messages] == [
        ([snowman[0]], ""),
        ([snowman[1]], ""),
        ([snowman[2]], "\N{SNOWMAN}"),
    ]
    # An incomplete stop string is emitted at the end.
    subject = transcript()
    messages = [*subject.messages([Delta("engine's", 0, (snowman[0],))]), *subject.messages([finished(0)])]
    assert messages[-1].finished.text == "\ufffd"


def test_a_long_wait_comes_in_messages_of_bounded_size():
    subject = transcript()
    events = [Delta("engine's", 0, (5,), ({5: Logprob(-1.0, 1)},)) for _ in range(MAX_TOKENS_A_DELTA * 2 + 1)]
    messages = list(subject.messages(events))
    assert [len(message.delta.token_ids) for message in messages] == [
        MAX_TOKENS_A_DELTA,
        MAX_TOKENS_A_DELTA,
        1,
    ]
    assert all(len(message.delta.logprobs) == len(message.delta.token_ids) for message in messages)


def test_logprobs_carry_the_text_of_their_tokens():
    subject = transcript()
    prompt = (None, {5: Logprob(-1.5, 3), 6: Logprob(-0.5, 1)})
    delta = Delta("engine's", 0, (EOS,), ({EOS: Logprob(-0.25, 2), 6: Logprob(-0.125, 1, "given")},))
    started, told = subject.messages([Started("engine's", 5, 2, 7, prompt), delta])
    assert [[c.token_id for c in entry.candidates] for entry in started.started.prompt_logprobs] == [
        [],
        [5, 6],
    ]
    assert (started.started.prompt_tokens, started.started.cached_prompt_tokens) == (5, 2)
    chosen, other = told.delta.logprobs[0].candidates
    assert (chosen.token_id, chosen.logprob, chosen.rank, chosen.text) == (
        EOS,
        -0.25,
        2,
        TOKENIZER.token_text(EOS),
    )
    assert other.text == "given"


def test_without_a_tokenizer_there_are_ids_and_no_text():
    subject = transcript(tokenizer=None)
    delta, end = subject.messages(
        [
            Delta("engine's", 0, (9, EOS), ({9: Logprob(-1.0, 1)}, {})),
            finished(0, FinishReason.STOP, stop_token_id=EOS),
        ]
    )
    assert (delta.delta.token_ids, delta.delta.text, end.finished.text) == ([9, EOS], "", "")
    assert delta.delta.logprobs[0].candidates[0].text == ""


def test_a_fault_of_the_engine_is_raised_with_its_cause():
    fault = ZeroDivisionError()
    with pytest.raises(RuntimeError, match="engine's") as raised:
        list(transcript().messages([finished(0, FinishReason.ABORT, error=fault)]))
    assert raised.value.__cause__ is fault


@pytest.mark.parametrize("refusal", [QueueFull(3, 1.0), InvalidRequest("prompt", 1, "2")])
def test_a_late_refusal_is_a_refusal(refusal):
    with pytest.raises(type(refusal)) as raised:
        list(transcript().messages([finished(0, FinishReason.ABORT, error=refusal)]))
    assert raised.value is refusal

"""The compiler of forms, and constraints without an engine."""

import json
import pickle

import llguidance
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.request import InvalidRequest, Reasoning, SamplingParams, StructuredOutputsParams
from jaxflow.structured import compiler
from jaxflow.structured.compiler import CACHED_FORMS, FormCompiler
from jaxflow.structured.constraint import FormBroken, TokenConstraint
from jaxflow.text.tokenizer import load_tokenizer

VOCABULARY, EOS = 512, 2
TOKENIZER = load_tokenizer(paths.MODELS / "stories260K")
FORMS = FormCompiler(TOKENIZER, VOCABULARY, [EOS])


def constraint(stops=(), **form):
    return FORMS.compile(StructuredOutputsParams(**form), stops)()


def allowed(*constraints):
    """Return the tokens that may follow in each of the constraints."""
    masks = np.full((len(constraints), VOCABULARY // 32), -1, np.int32)
    constraints[0].fill([(each, row) for row, each in enumerate(constraints)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    found = [set(np.flatnonzero(row).tolist()) for row in bits]
    return found[0] if len(found) == 1 else found


def written(each, draw, most=400):
    """Return the text that a writer makes of drawn tokens, until nothing may follow or an end is drawn."""
    tokens = []
    while not each.complete and len(tokens) < most:
        may = sorted(allowed(each))
        assert may
        token = draw(st.sampled_from(may))
        if token == EOS:
            break
        each.push(token)
        tokens.append(token)
    return TOKENIZER.decode([13, *tokens])[1:], len(tokens) < most  # after a line end, a space is kept


def matches(schema, value):
    """Check a value against the few keywords that are drawn below."""
    kinds = {"integer": int, "boolean": bool, "null": type(None), "object": dict, "array": list}
    if "enum" in schema:
        return value in schema["enum"]
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if schema["type"] == "array":
        few = schema["minItems"] <= len(value) <= schema["maxItems"]
        return few and all(matches(schema["items"], each) for each in value)
    if schema["type"] == "object":
        known = schema["properties"]
        keys = set(schema["required"]) <= set(value) <= set(known)
        return keys and all(matches(known[key], each) for key, each in value.items())
    return schema["type"] != "integer" or schema["minimum"] <= value <= schema["maximum"]


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["dog", "a cat", 7]},
    ]
)


def nested(inner):
    arrays = st.builds(
        lambda item, least: {"type": "array", "items": item, "minItems": least, "maxItems": 3},
        inner,
        st.integers(0, 2),
    )
    objects = st.builds(
        lambda known: {
            "type": "object",
            "properties": known,
            "required": list(known)[1:],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "b", "name"]), inner, max_size=3),
    )
    return arrays | objects


@given(st.recursive(LEAVES, nested, max_leaves=5), st.data())
def test_what_ends_is_json_of_its_schema(schema, data):
    text, ended = written(constraint(json=schema), data.draw)
    if ended:
        assert matches(schema, json.loads(text)), text


@given(st.lists(st.text("abc, é", min_size=1, max_size=5), min_size=1, max_size=5, unique=True), st.data())
def test_an_answer_is_one_of_the_choices(choices, data):
    text, ended = written(constraint(choice=choices), data.draw)
    assert ended and text in choices


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(ab){3}"},
        {"grammar": 'start: "ab" "ab" "ab"'},
        {"grammar": 'root ::= ("ab" "ab" "ab")'},
        {"choice": ("ababab",)},
    ],
)
def test_forms_of_one_text(form):
    each = constraint(**form)
    for token in TOKENIZER.encode("\nababab", add_special_tokens=False)[2:]:  # after a space and a line end
        assert not each.complete and EOS not in allowed(each)
        each.push(token)
    assert each.complete


def test_masks_of_many_constraints_are_those_of_each():
    forms = [{"regex": "[0-9]+"}, {"choice": ["x", "yes"]}, {"json_object": True}, {"regex": "a?"}]
    many = [constraint(**form) for form in forms]
    assert allowed(*many) == [allowed(each) for each in many]


def test_an_end_may_follow_where_the_form_may_end():
    each, stop = constraint([300], regex="a|ab"), 300
    a, b = (TOKENIZER.encode(f"x{letter}", add_special_tokens=False)[-1] for letter in "ab")
    assert not {EOS, stop} & allowed(each)
    each.push(a)
    assert {EOS, stop, b} <= allowed(each)
    each.push(b)
    assert each.complete


def test_a_token_that_the_form_forbids_is_an_error():
    each = constraint(regex="[0-9]")
    with pytest.raises(FormBroken):
        each.push(EOS - 1)
    assert not each.complete


def test_a_form_of_too_much_work_is_refused_or_ends_its_answer(monkeypatch):
    few = llguidance.LLParserLimits(max_lexer_states=3, verbose_errors=False)
    wanted = StructuredOutputsParams(regex="(a|b|c){1,200}(x|y)*")
    matcher = llguidance.LLMatcher(FORMS._vocabulary, compiler._grammar_of(wanted), limits=few, log_level=0)
    monkeypatch.setattr(compiler, "_limits", lambda: few)
    with pytest.raises(InvalidRequest, match="too many states"):
        FormCompiler(TOKENIZER, VOCABULARY, [EOS]).compile(wanted)
    late, other = TokenConstraint(matcher, (), None, TOKENIZER), constraint(choice=["x"])
    of_late, of_other = allowed(late, other)
    assert len(of_late) == VOCABULARY and of_other == allowed(other)
    with pytest.raises(FormBroken, match="too many states"):
        late.push(5)
    assert not late.complete


def test_the_form_begins_after_the_reasoning():
    tokens = TOKENIZER.encode("a long thought", add_special_tokens=False)
    closing = TOKENIZER.encode("</think>", add_special_tokens=False)
    for begun in (True, False):
        each = constraint(choice=["7"], reasoning=Reasoning("a", "</think>", begun))
        if not begun:
            (opening,) = TOKENIZER.encode("a", add_special_tokens=False)
            assert opening in allowed(each)
            each.push(opening)
        for token in (*tokens, *closing):
            assert len(allowed(each)) == VOCABULARY and not each.complete
            each.push(token)
        assert len(allowed(each)) < 5
    direct = constraint(choice=["7"], reasoning=Reasoning("a", "</think>", False))
    direct.push(TOKENIZER.encode("x7", add_special_tokens=False)[-1])
    assert direct.complete


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "strange"}}, "strange"),
        ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
        ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"regex": "a(b"}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": 'start: "a" b'}, "b"),
        ({"grammar": "%%%"}, "line 1"),
    ],
)
def test_a_form_that_is_not_supported_is_refused_with_its_reason(form, word):
    with pytest.raises(InvalidRequest, match=word) as caught:
        constraint(**form)
    assert caught.value.field == f"structured_outputs.{next(iter(form))}"


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": "[]"},
        {"json": "{"},
        {"json": {"x": float("nan")}},
        {"json": {"x": object()}},
        {"json": json.loads('{"a":' * 70 + "1" + "}" * 70)},
        {"json": {"description": "x" * 2**18}},
        {"json": '{"a":' * 9999},
        {"regex": ""},
        {"regex": "x" * (2**18 + 1)},
        {"regex": "\ud800"},
        {"regex": 7},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a", "a"]},
        {"choice": list(map(str, range(5000)))},
        {"choice": "abc"},
        {"json_object": False},
        {"json_object": 1},
    ],
)
def test_a_form_beyond_the_limits_is_refused(form):
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize("settings", [{"ignore_eos": True}, {"allowed_token_ids": [5]}])
def test_settings_that_contradict_a_form_are_refused(settings):
    with pytest.raises(InvalidRequest, match=next(iter(settings))):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **settings)


def test_a_model_without_tokenizer_or_end_token_has_no_forms():
    wanted = StructuredOutputsParams(regex="a")
    for forms in (FormCompiler(None, VOCABULARY, [EOS]), FormCompiler(TOKENIZER, VOCABULARY, [])):
        with pytest.raises(InvalidRequest, match="structured_outputs"):
            forms.compile(wanted)


def test_the_compiled_forms_are_bounded():
    for number in range(CACHED_FORMS + 5):
        constraint(regex=f"a{{{number + 1}}}")
    assert len(FORMS._matchers) == CACHED_FORMS


def test_a_form_can_be_sent_to_another_process():
    wanted = StructuredOutputsParams(json={"b": 1, "a": []}, reasoning=Reasoning("<", ">", True))
    assert pickle.loads(pickle.dumps(wanted)) == wanted and hash(wanted)
    assert json.loads(wanted.text) == {"b": 1, "a": []}

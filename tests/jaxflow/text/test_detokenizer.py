"""The law of the detokeniser: however ids are pushed, the text is that of all of them, cut at the first stop
string.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stop_strings import could_begin, first_stop

from jaxflow.text.detokenizer import Detokenizer
from jaxflow.text.tokenizer import load_tokenizer
from jaxflow.text.vocabulary import TextStream

# Biased to hard cases: parts of characters, special tokens, ids outside the vocabulary.
STORIES_IDS = st.one_of(
    st.integers(0, 520),
    st.integers(131, 258),
    st.sampled_from([0, 1, 2, 13, 35, 229, 155, 134, 243, 259, 410]),
)


@pytest.fixture(scope="module")
def stories(models_dir):
    return load_tokenizer(models_dir / "stories260K")


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def partial_ids(smollm2):
    """Tokens of SmolLM2 that are parts of characters."""
    return [i for i in range(49152) if isinstance(smollm2.pieces(False)[i], bytes)]


@st.composite
def cases(draw, ids):
    """Prompt ids, an answer cut into pushes, and settings; most stop strings
    are taken from the text itself.
    """
    prompt, answer = draw(st.lists(ids, max_size=6)), draw(st.lists(ids, max_size=24))
    borders = sorted(draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pushes = [answer[a:b] for a, b in zip([0, *borders], [*borders, len(answer)], strict=True)]
    skip, include = draw(st.booleans()), draw(st.booleans())
    spans = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=3))
    others = draw(st.lists(st.text("ae \n�<", min_size=1, max_size=3), max_size=2))
    return prompt, pushes, skip, include, spans, others


def settled(tokenizer, ids, skip):
    """The text of ids that no further id can change."""
    return TextStream(tokenizer.pieces(skip)).push(ids)


def check_the_law(tokenizer, case):
    prompt, pushes, skip, include, spans, others = case
    answer = [i for push in pushes for i in push]
    before = settled(tokenizer, prompt, skip)
    whole = tokenizer.decode(prompt + answer, skip_special_tokens=skip)
    assert whole.startswith(before)
    text = whole[len(before) :]
    stops = [text[at : at + length] for at, length in spans if text[at : at + length]] + others
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip, stop=stops, include_stop=include)
    ids, told = list(prompt), ""
    for push in pushes:
        ids += push
        told += detokenizer.push(push)
        certain = settled(tokenizer, ids, skip)[len(before) :]
        if detokenizer.stopped_by is None:
            assert told == certain[: len(certain) - could_begin(certain, stops)] if stops else told == certain
    told += detokenizer.finish()
    end, stop = first_stop(text, stops) or (len(text), None)
    assert (told, detokenizer.stopped_by) == (text[: end - len(stop) if stop and not include else end], stop)
    assert detokenizer.push([300]) + detokenizer.finish() == "" or stop is None


@given(case=cases(STORIES_IDS))
def test_pushes_join_to_the_full_text_for_sentencepiece(stories, case):
    check_the_law(stories, case)


@given(data=st.data())
def test_pushes_join_to_the_full_text_for_byte_level_bpe(smollm2, partial_ids, data):
    ids = st.one_of(st.integers(0, 49200), st.sampled_from(partial_ids), st.integers(0, 20))
    check_the_law(smollm2, data.draw(cases(ids)))


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF), max_size=40), data=st.data()
)
def test_no_push_ends_within_a_character(stories, text, data):
    ids = stories.encode(text.replace("\ufffd", ""))
    detokenizer = Detokenizer(stories)
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        assert "\ufffd" not in detokenizer.push(ids[:count])
        ids = ids[count:]
    assert detokenizer.finish() == ""


@given(case=cases(STORIES_IDS))
def test_stop_strings_are_reported_at_the_token_that_completes_them(stories, case):
    prompt, pushes, skip, _, spans, others = case
    answer = [i for push in pushes for i in push]
    before = settled(stories, prompt, skip)
    text = settled(stories, prompt + answer, skip)[len(before) :]
    stops = [text[at : at + length] for at, length in spans if text[at : at + length]] + others or ["a"]
    detokenizer, ids = Detokenizer(stories, prompt, stop=stops, skip_special_tokens=skip), list(prompt)
    for token_id in answer:
        ids.append(token_id)
        found = first_stop(settled(stories, ids, skip)[len(before) :], stops)
        detokenizer.push([token_id])
        assert detokenizer.stopped_by == (found[1] if found else None)


def test_goldens(stories, smollm2, goldens):
    for name, tokenizer, skip in (("stories260K", stories, True), ("smollm2-135m-q4", smollm2, False)):
        for prompt in goldens(name)["prompts"]:
            detokenizer = Detokenizer(tokenizer, prompt["prompt_ids"], skip_special_tokens=skip)
            told = [detokenizer.push([i]) for i in prompt["greedy_ids"]]
            assert "".join(told) + detokenizer.finish() == prompt["greedy_text"], prompt["name"]


def test_a_leading_space_stays_after_a_prompt_and_goes_without_one(stories):
    assert Detokenizer(stories).push([403]) == "Once"
    assert Detokenizer(stories, [1]).push([403]) == "Once"  # a special token is no text
    assert Detokenizer(stories, [1, 403]).push([403]) == " Once"
    assert Detokenizer(stories, [1], skip_special_tokens=False).push([403]) == " Once"


def test_a_character_the_prompt_began_is_completed(stories):
    snowman = stories.encode("☃")[-3:]
    detokenizer = Detokenizer(stories, snowman[:1])
    assert [detokenizer.push([i]) for i in snowman[1:]] == ["", "☃"]
    assert Detokenizer(stories, snowman).push([13]) == "\n"


def test_characters_of_byte_tokens_do_not_wait_for_the_run_to_end(stories):
    ids = stories.encode("é☃\n\n😀")
    detokenizer = Detokenizer(stories, stop=["\n\n"])
    told = [detokenizer.push([i]) for i in ids]
    assert "".join(told) == "é☃"
    assert detokenizer.stopped_by == "\n\n"
    assert told[-6:] == [""] * 6  # both newlines, and what came after


def test_a_character_that_is_never_completed(stories, smollm2):
    first_two = stories.encode("☃")[-3:-1]
    detokenizer = Detokenizer(stories)
    assert (detokenizer.push(first_two), detokenizer.finish(), detokenizer.finish()) == (
        "",
        "\ufffd\ufffd",
        "",
    )
    begun = smollm2.encode("☃")[:1]
    detokenizer = Detokenizer(smollm2)
    assert (detokenizer.push(begun), detokenizer.finish()) == ("", "\ufffd")


def test_special_tokens_are_left_out_or_shown(smollm2):
    ids = [504, 2, 1, 7042]
    assert Detokenizer(smollm2).push(ids) == "The Paris"
    assert Detokenizer(smollm2, skip_special_tokens=False).push(ids) == "The<|im_end|><|im_start|> Paris"
    shown = Detokenizer(smollm2, skip_special_tokens=False, stop=["<|im_end|>"])
    assert (shown.push(ids), shown.stopped_by) == ("The", "<|im_end|>")


@given(
    ids=st.lists(st.integers(259, 511), min_size=1, max_size=20),
    min_tokens=st.integers(0, 22),
    data=st.data(),
)
def test_stop_strings_count_only_after_the_first_tokens(stories, ids, min_tokens, data):
    before = settled(stories, ids[:min_tokens], True)
    after = stories.decode(ids)[len(before) :]
    at = data.draw(st.integers(0, max(0, len(after) - 1)))
    stops = [after[at : at + 2] or "x", "e"]
    detokenizer = Detokenizer(stories, stop=stops, min_tokens=min_tokens)
    cut = data.draw(st.integers(0, len(ids)))
    told = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.finish()
    found = first_stop(after, stops)
    assert told == before + (after[: found[0] - len(found[1])] if found else after)


def test_only_the_end_of_a_prompt_is_looked_at(stories):
    class Counted(dict):
        lookups = 0
        strips_space, errors = stories.pieces(True).strips_space, stories.pieces(True).errors

        def __getitem__(self, token_id):
            Counted.lookups += 1
            return stories.pieces(True)[token_id]

    stream = TextStream(Counted())
    stream.skip([403] * 100_000 + stories.encode("☃")[-3:-1])
    assert Counted.lookups < 10
    assert stream.push(stories.encode("☃")[-1:]) == "☃"

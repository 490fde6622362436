"""The default chat model, from its GGUF file: its golden through the Python API, and its perplexity through
prompt log-probabilities.
"""

import json

import numpy as np
import paths
import pytest
from hurry import OFTEN, compiled_with

from jaxflow import LLM, SamplingParams

FEW = 12  # tokens of an answer where the test is of its text
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    """Compiled with some care: here running takes the time, nearly all of it in products that XLA has from a
    library.
    """
    with compiled_with(OFTEN):
        made = LLM(
            str(smollm2_gguf),
            max_model_len=1152,
            max_num_batched_tokens=32,
            step_sizes="32",
            max_num_seqs=8,
            progress=False,
        )
    with made as llm:
        yield llm
        assert llm.driver.stats().compilations_after_warmup == 0


@pytest.fixture(scope="module")
def golden(goldens):
    return goldens("smollm2-135m-q4")["prompts"]


@pytest.mark.parametrize("tokens", [16, pytest.param(48, marks=pytest.mark.slow)])
def test_golden_from_text(llm, golden, tokens):
    """The ids of the prompt, and the ids, the log-probabilities and the text of the answer."""
    greedy = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=5, skip_special_tokens=False
    )
    outputs = llm.generate([p["text"] for p in golden], greedy, use_tqdm=False)
    for prompt, output in zip(golden, outputs, strict=True):
        assert (output.prompt, output.prompt_token_ids) == (prompt["text"], prompt["prompt_ids"])
        (answer,) = output.outputs
        ids, best, wanted = (prompt[name][:tokens] for name in ("greedy_ids", "top_ids", "top_logits"))
        assert answer.token_ids == ids, prompt["name"]
        assert len(answer.text) > FEW and prompt["greedy_text"].startswith(answer.text)
        for found, top, logits in zip(answer.logprobs, best, wanted, strict=True):
            ours = np.array([found[token].logprob for token in top])
            np.testing.assert_allclose(ours - ours[0], np.array(logits) - logits[0], atol=1e-3)


def test_a_chat_is_its_template_as_a_prompt(llm, golden):
    (prompt,) = (p for p in golden if p["name"] == "chat_gravity")
    messages = []
    for turn in prompt["text"].split("<|im_start|>")[1:-1]:
        role, content = turn.removesuffix("<|im_end|>\n").split("\n", 1)
        messages.append({"role": role, "content": content})
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=FEW), use_tqdm=False)
    assert output.prompt_token_ids == prompt["prompt_ids"]
    ids = prompt["greedy_ids"][:FEW]
    ends = [i for i, token in enumerate(ids) if token in llm.model_config.eos_token_ids]
    assert output.outputs[0].token_ids == ids[: ends[0] + 1 if ends else None]
    assert output.outputs[0].finish_reason == ("stop" if ends else "length")
    assert "<|im_end|>" not in output.outputs[0].text


def test_the_first_tokens_of_a_window_are_scored(llm):
    reference = json.loads((paths.PPL / "smollm2_ppl.json").read_text())
    scored = reference["windows"][0]["first_logprobs"]
    window = np.load(paths.PPL.parent / reference["tokens_file"])[0, : len(scored) + 1].tolist()
    (output,) = llm.generate([window], SCORED, use_tqdm=False)
    found = [
        entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)
    ]
    np.testing.assert_allclose(found, scored, atol=1e-3)


@pytest.mark.parametrize("name, number", [("smollm2_ppl", 8), ("smollm2_ppl_rawtext", 2)])
def test_perplexity(llm, name, number):
    """Compare windows of the text, and of the text with its blank lines, with their references."""
    reference = json.loads((paths.PPL / f"{name}.json").read_text())
    windows = np.load(paths.PPL.parent / reference["tokens_file"])[:number]
    outputs = llm.generate(windows.tolist(), SCORED, use_tqdm=False)
    found = np.array(
        [
            [
                entry[token].logprob
                for entry, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)
            ]
            for output, window in zip(outputs, windows.tolist(), strict=True)
        ]
    )
    assert all(output.prompt_logprobs[0] is None for output in outputs)
    for ours, window in zip(found, reference["windows"][:number], strict=True):
        np.testing.assert_allclose(ours[:16], window["first_logprobs"], atol=1e-3)
        np.testing.assert_allclose(-ours.sum(), window["nll_all"], rtol=1e-5)
        np.testing.assert_allclose(-ours[511:].sum(), window["nll_second_half"], rtol=1e-5)
    if number == len(reference["windows"]):
        assert np.exp(-found.mean()) == pytest.approx(reference["ppl_all_positions"], abs=1e-3)
        assert np.exp(-found[:, 511:].mean()) == pytest.approx(reference["ppl_second_half"], abs=1e-3)

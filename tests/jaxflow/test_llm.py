"""The Python API over a small real model: text in and out, many prompts, streams, and stop rules."""

import asyncio
import concurrent.futures
import gc
import itertools
import json
import queue
import shutil
import threading
import time
import types

import numpy as np
import paths
import pytest
from hurry import OFTEN, compiled_with

import jaxflow.llm
from jaxflow import LLM, SamplingParams, StructuredOutputsParams
from jaxflow.engine.driver import EngineDead
from jaxflow.llm import RequestFailed
from jaxflow.request import Draining, Finished, InvalidRequest
from jaxflow.text.chat import ChatTemplateError
from pallas_kernels.kernel_set import REFERENCE

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}bot:{% endif %}"
)
# The settings of `toy.executor`, whose compiled programs the cache often has.
SMALL = {
    "max_num_batched_tokens": 64,
    "step_sizes": "16",
    "plan": "sequential",
    "max_num_seqs": 8,
    "block_size": 16,
    "num_kv_pages": 96,
    "progress": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """stories260K with a chat template of its own."""
    folder = tmp_path_factory.mktemp("model") / "stories"
    shutil.copytree(paths.MODELS / "stories260K", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    before = set(threading.enumerate())
    with compiled_with(OFTEN):
        llm = LLM(str(folder), max_waiting=16, **SMALL)
    yield llm
    assert llm.driver.drain(60.0) == 0
    assert free_pages(llm) == 96
    llm.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "jaxflow-engine"]


def free_pages(llm):
    return llm.driver.stats().kv_pages_free


def story(llm, tokens=64):
    """Return the greedy continuation of "Once", past every end token."""
    [out] = llm.generate(
        "Once", SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False
    )
    return out


class TestGenerate:
    def test_text_ids_and_lists_of_either(self, llm):
        [from_text] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
        ids = llm.tokenizer.encode("Once upon a time")
        assert ids[0] == llm.tokenizer.bos_token_id
        assert (from_text.prompt, from_text.prompt_token_ids) == ("Once upon a time", ids)
        for prompts in (ids, np.array(ids), [ids], [np.array(ids, np.uint16)], (tuple(ids),)):
            [from_ids] = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert (from_ids.prompt, from_ids.prompt_token_ids) == (None, ids)
            assert from_ids.outputs == from_text.outputs
        mixed = llm.generate(["Once upon a time", ids], GREEDY, use_tqdm=False)
        assert [out.outputs for out in mixed] == [from_text.outputs] * 2
        assert llm.generate([], GREEDY, use_tqdm=False) == []

    def test_the_golden_as_text(self, llm, goldens):
        prompts = [p for p in goldens("stories260K")["prompts"] if p.get("text")]
        params = [
            SamplingParams(temperature=0.0, max_tokens=len(p["greedy_ids"]), ignore_eos=True) for p in prompts
        ]
        outputs = llm.generate([p["text"] for p in prompts], params, use_tqdm=False)
        for out, prompt in zip(outputs, prompts, strict=True):
            assert out.outputs[0].token_ids == prompt["greedy_ids"]
            whole = llm.tokenizer.decode([*out.prompt_token_ids, *out.outputs[0].token_ids])
            assert whole == llm.tokenizer.decode(out.prompt_token_ids) + out.outputs[0].text

    def test_more_prompts_than_may_wait_come_back_in_order(self, llm):
        """60 prompts and a queue of 16: each prompt gets the answer of a run by itself, with its own
        parameters.
        """
        prompts = [[1, 3 + i] for i in range(60)]
        params = [SamplingParams(seed=i, max_tokens=1 + i % 7) for i in range(60)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [out.prompt_token_ids for out in outputs] == prompts
        for i in (0, 17, 59):
            [alone] = llm.generate([prompts[i]], params[i], use_tqdm=False)
            assert alone.outputs == outputs[i].outputs

    def test_many_threads_whose_requests_fill_the_queue(self, llm):
        prompts = [[1, 3 + i] for i in range(40)]
        params = SamplingParams(temperature=0.0, max_tokens=6)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            every = list(pool.map(lambda _: llm.generate(prompts, params, use_tqdm=False), range(4)))
        ids = [[out.outputs[0].token_ids for out in outputs] for outputs in every]
        assert ids == [ids[0]] * 4

    def test_n_answers(self, llm):
        [out] = llm.generate(
            "One day", SamplingParams(n=4, seed=3, max_tokens=12, logprobs=1), use_tqdm=False
        )
        assert [answer.index for answer in out.outputs] == [0, 1, 2, 3]
        assert len({tuple(answer.token_ids) for answer in out.outputs}) == 4
        [first] = llm.generate("One day", SamplingParams(seed=3, max_tokens=12, logprobs=1), use_tqdm=False)
        assert first.outputs[0].token_ids == out.outputs[0].token_ids
        assert out.usage.completion_tokens == sum(len(answer.token_ids) for answer in out.outputs)
        assert out.usage.prompt_tokens == len(out.prompt_token_ids)

    def test_a_prompt_seen_before_is_cached(self, llm):
        prompt = [1, *range(100, 139)]
        first, again = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
        assert again.usage.cached_prompt_tokens == 32
        assert (again.usage.prompt_tokens, again.usage.completion_tokens) == (
            40,
            len(again.outputs[0].token_ids),
        )
        assert first.outputs == again.outputs

    def test_the_bar(self, llm, monkeypatch):
        bars = []

        class Bar:
            def __init__(self, total, disable, **_):
                self.total, self.disable, self.n, self.closed = total, disable, 0, False
                bars.append(self)

            def update(self, n=1):
                self.n += n

            def close(self):
                self.closed = True

        monkeypatch.setattr(jaxflow.llm, "tqdm", Bar)
        llm.generate(["a", "b", "c"], GREEDY)
        llm.generate(["a"], GREEDY, use_tqdm=False)
        assert [(bar.total, bar.n, bar.disable, bar.closed) for bar in bars] == [
            (3, 3, False, True),
            (1, 1, True, True),
        ]


class TestEnds:
    def test_the_end_token_is_in_the_ids_and_not_in_the_text(self, llm):
        eos = llm.model_config.eos_token_ids[0]
        forced = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={eos: 100.0})
        [out] = llm.generate("Once", forced, use_tqdm=False)
        [answer] = out.outputs
        assert (answer.token_ids, answer.text) == ([eos], "")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        [out] = llm.generate(
            "Once",
            SamplingParams(temperature=0.0, max_tokens=5, logit_bias={eos: 100.0}, ignore_eos=True),
            use_tqdm=False,
        )
        assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == ([eos] * 5, "length")
        later = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={eos: 100.0}, min_tokens=3)
        [out] = llm.generate("Once", later, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 4
        assert out.outputs[0].token_ids[3] == eos

    def test_special_tokens_are_shown_when_asked_for(self, llm):
        eos = llm.model_config.eos_token_ids[-1]
        for skip, text in ((True, ""), (False, llm.tokenizer.token_text(eos) * 2)):
            params = SamplingParams(
                max_tokens=2, logit_bias={eos: 100.0}, ignore_eos=True, skip_special_tokens=skip
            )
            assert llm.generate("Once", params, use_tqdm=False)[0].outputs[0].text == text

    def test_a_stop_token_is_in_the_ids_and_not_in_the_text(self, llm):
        whole = story(llm).outputs[0]
        stop = whole.token_ids[9]
        at = whole.token_ids.index(stop)
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, stop_token_ids=[stop])
        [answer] = llm.generate("Once", params, use_tqdm=False)[0].outputs
        assert answer.token_ids == whole.token_ids[: at + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert whole.text.startswith(answer.text)
        assert answer.text == text_of(llm, whole.token_ids[:at])

    @pytest.mark.parametrize("include", [False, True])
    def test_a_stop_string_across_tokens_is_cut_from_the_text(self, llm, include):
        whole = story(llm).outputs[0]
        borders = [len(text_of(llm, whole.token_ids[:i])) for i in range(64)]
        at = next(
            i for i in range(12, 60) if borders[i] - borders[i - 1] > 1 and borders[i + 1] - borders[i] > 1
        )
        stop = whole.text[
            borders[at] - 1 : borders[at] + 1
        ]  # the end of one token and the beginning of the next
        first = whole.text.index(stop)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=64,
            ignore_eos=True,
            stop=["@@", stop],
            include_stop_str_in_output=include,
        )
        [answer] = llm.generate("Once", params, use_tqdm=False)[0].outputs
        assert answer.text == whole.text[: first + (len(stop) if include else 0)]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        # The ids keep the tokens of the stop string, as in vLLM and over gRPC.
        stops = next(i for i in range(65) if stop in text_of(llm, whole.token_ids[:i]))
        assert len(answer.token_ids) == stops

    def test_what_only_began_like_a_stop_string_is_shown_in_the_end(self, llm):
        whole = story(llm, 20).outputs[0]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=whole.text[-3:] + "@@@")
        [answer] = llm.generate("Once", params, use_tqdm=False)[0].outputs
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole.text, "length", None)

    def test_logprobs_name_their_tokens(self, llm):
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2)
        [out] = llm.generate("One day", params, use_tqdm=False)
        assert out.prompt_logprobs[0] is None
        for token, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True):
            assert 2 <= len(entry) <= 3
            assert token in entry
        [answer] = out.outputs
        for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            assert len(entry) == 3
            assert entry[token].rank == 1
            assert all(
                found.decoded_token == llm.tokenizer.token_text(other) for other, found in entry.items()
            )
        [plain] = llm.generate("One day", SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
        assert (plain.prompt_logprobs, plain.outputs[0].logprobs) == (None, None)
        assert plain.outputs[0].token_ids == answer.token_ids


def text_of(llm, ids):
    """The text that ids add to the prompt of `story`."""
    prompt = llm.tokenizer.encode("Once")
    return llm.tokenizer.decode([*prompt, *ids])[len(llm.tokenizer.decode(prompt)) :]


class TestChat:
    MESSAGES = (
        {"role": "user", "content": "Tell me a story"},
        {"role": "bot", "content": "No"},
        {"role": "user", "content": "Please"},
    )

    def test_one_conversation_or_several(self, llm):
        [one] = llm.chat(self.MESSAGES, GREEDY, use_tqdm=False)
        text = "user: Tell me a story\nbot: No\nuser: Please\nbot:"
        assert one.prompt_token_ids == llm.tokenizer.encode(text)
        [plain] = llm.generate(text, GREEDY, use_tqdm=False)
        assert one.outputs == plain.outputs
        several = llm.chat([self.MESSAGES, self.MESSAGES[:1]], GREEDY, use_tqdm=False)
        assert [out.outputs for out in several] == [
            one.outputs,
            llm.chat(self.MESSAGES[:1], GREEDY, use_tqdm=False)[0].outputs,
        ]

    def test_parameters_of_each_conversation(self, llm):
        both, lengths = [self.MESSAGES, self.MESSAGES[:1]], (3, 5)
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
        found = llm.chat(both, params, use_tqdm=False)
        assert tuple(len(out.outputs[0].token_ids) for out in found) == lengths
        with pytest.raises(InvalidRequest, match="sampling_params"):
            llm.chat(both, params[:1], use_tqdm=False)

    def test_what_is_no_conversation(self, llm):
        with pytest.raises(ChatTemplateError):
            llm.chat([{"role": "user"}], GREEDY, use_tqdm=False)
        with pytest.raises(ChatTemplateError):
            llm.chat([[]], GREEDY, use_tqdm=False)


class TestStream:
    def test_outputs_do_not_change_after_they_were_yielded(self, llm):
        async def collect():
            return [out async for out in llm.stream("Once", GREEDY)]

        outputs = asyncio.run(collect())
        lengths = [len(out.outputs[0].token_ids) for out in outputs]
        assert lengths == sorted(set(lengths)) and len(lengths) > 10
        assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(len(out.outputs[0].text) <= len(outputs[-1].outputs[0].text) for out in outputs)
        with pytest.raises(AttributeError):
            outputs[0].finished = True

    def test_grows_to_what_generate_gives(self, llm):
        async def collect():
            return [
                (out.outputs[0].text, list(out.outputs[0].token_ids), out.finished)
                async for out in llm.stream("Once", GREEDY)
            ]

        steps = asyncio.run(collect())
        [whole] = llm.generate("Once", GREEDY, use_tqdm=False)
        assert steps[-1] == (whole.outputs[0].text, whole.outputs[0].token_ids, True)
        assert len(steps) > 10
        for (text, ids, finished), (more_text, more_ids, _) in itertools.pairwise(steps):
            assert not finished
            assert more_text.startswith(text)
            assert more_ids[: len(ids)] == ids

    def test_closing_it_frees_its_pages(self, llm):
        async def a_little():
            stream = llm.stream([1, *range(50, 120)], SamplingParams(max_tokens=300, ignore_eos=True))
            async for out in stream:
                if len(out.outputs[0].token_ids) >= 3:
                    break
            held = free_pages(llm)
            await stream.aclose()
            return held

        assert asyncio.run(a_little()) < 96
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)  # the abort comes first
        assert free_pages(llm) == 96

    def test_a_task_that_is_cancelled_frees_its_pages(self, llm):
        async def read(began):
            async for _ in llm.stream("Once", SamplingParams(max_tokens=400, ignore_eos=True)):
                began.set()

        async def cancel():
            began = asyncio.Event()
            task = asyncio.create_task(read(began))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
        assert free_pages(llm) == 96

    def test_many_at_once(self, llm):
        async def one(i):
            params = SamplingParams(seed=i, max_tokens=10, ignore_eos=True)
            return [list(out.outputs[0].token_ids) async for out in llm.stream([1, 5 + i], params)][-1]

        async def every():
            return await asyncio.gather(*(one(i) for i in range(12)))

        found = asyncio.run(every())
        params = [SamplingParams(seed=i, max_tokens=10, ignore_eos=True) for i in range(12)]
        outputs = llm.generate([[1, 5 + i] for i in range(12)], params, use_tqdm=False)
        assert found == [out.outputs[0].token_ids for out in outputs]

    def test_a_name_in_use(self, llm):
        async def twice():
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            first = llm.stream("a", params, request_id="mine")
            await anext(first)
            with pytest.raises(InvalidRequest, match="request_id='mine'"):
                await anext(llm.stream("b", params, request_id="mine"))
            await anext(first)
            await first.aclose()

        asyncio.run(twice())


@pytest.mark.parametrize("kernels", ["reference", REFERENCE])
def test_kernels_are_a_setting_or_a_set(folder, kernels, monkeypatch):
    def started(config, checkpoint, *, kernels, **_):
        raise Draining(f"{config.kernels} {kernels and kernels.name}")

    monkeypatch.setattr(jaxflow.llm, "start_engine", started)
    with pytest.raises(Draining, match="reference None" if isinstance(kernels, str) else "auto reference"):
        LLM(str(folder), kernels=kernels, **SMALL)


class TestItsEnd:
    """Over an engine of its own, which each test ends; programs come from the compilation cache."""

    @pytest.fixture
    def ending(self, folder):
        with compiled_with(OFTEN), LLM(str(folder), **SMALL) as llm:
            yield llm

    def test_a_model_that_nobody_closed_ends_with_its_last_reference(self, folder):
        """Its stream was left halfway, and one of its requests still ran."""
        before = set(threading.enumerate())
        with compiled_with(OFTEN):
            llm = LLM(str(folder), **SMALL)
        [engine] = [t for t in set(threading.enumerate()) - before if t.name == "jaxflow-engine"]
        params = SamplingParams(max_tokens=400, ignore_eos=True)

        async def leave():
            async for _ in llm.stream("Once", params):
                break

        asyncio.run(leave())
        ended = queue.SimpleQueue()
        llm.driver.submit(llm.request("Once", params), types.SimpleNamespace(post=ended.put))
        del llm
        gc.collect()
        engine.join(60)
        assert not engine.is_alive()
        events = [event for _ in range(ended.qsize()) for event in ended.get()]
        assert [event.reason.value for event in events if isinstance(event, Finished)] == ["abort"]

    def test_close_aborts_and_refuses(self, ending):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(ending.generate, "Once", params, use_tqdm=False)
            while not ending.driver.stats().completion_tokens:
                time.sleep(0.01)
            ending.close()
            [out] = running.result(60)
        assert (out.outputs[0].finish_reason, out.finished) == ("abort", True)
        assert len(out.outputs[0].token_ids) < 400
        with pytest.raises(Draining):
            ending.generate("Once", GREEDY, use_tqdm=False)

    def test_a_fault_is_told_to_every_caller(self, ending, monkeypatch):
        submitted, submit = threading.Semaphore(0), ending.driver.submit

        def count(*args):
            result = submit(*args)
            submitted.release()
            return result

        def broken(*args, **kwargs):
            assert submitted.acquire(timeout=60) and submitted.acquire(timeout=60)  # the engine has both
            raise RuntimeError("the device fell off the bus")

        monkeypatch.setattr(ending.driver, "submit", count)
        monkeypatch.setattr(ending.executor, "run", broken)
        with pytest.raises(RequestFailed) as caught:
            ending.generate(["Once", "One day"], GREEDY, use_tqdm=False)
        assert "fell off the bus" in str(caught.value.__cause__)

        async def stream():
            return [out async for out in ending.stream("Once")]

        with pytest.raises(EngineDead):
            asyncio.run(stream())


def test_structured_outputs_and_free_ones_run_together_and_compile_nothing_while_they_run(llm):
    wanted = StructuredOutputsParams(json={"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3})
    held = SamplingParams(n=2, seed=1, max_tokens=24, structured_outputs=wanted)
    with compiled_with(OFTEN):
        llm.driver.prepare_masks()
    compiled = llm.driver.stats().compilations_after_warmup
    given = ["Once upon a time", "There was a dog"]
    answer, free = llm.generate(given, [held, GREEDY], use_tqdm=False)
    for output in answer.outputs:
        assert output.finish_reason == "stop" and set(json.loads(output.text)) <= {1, 2}
    assert free.outputs[0].text == llm.generate(given[1:], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert llm.driver.stats().compilations_after_warmup == compiled
    with pytest.raises(InvalidRequest, match="strange"):
        llm.generate(
            given, SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "strange"}))
        )

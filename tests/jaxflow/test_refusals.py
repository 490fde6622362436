"""Every refusal of the Python API, and the field that its error names."""

import asyncio
import dataclasses
import json
import math
import shutil
from typing import Any

import paths
import pytest
from hurry import OFTEN, compiled_with

from jaxflow import LLM, SamplingParams
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine import settings
from jaxflow.engine.settings import resolve
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.source import CheckpointError
from jaxflow.pipeline.plan import PlanError
from jaxflow.prompt import as_list
from jaxflow.request import InvalidRequest
from jaxflow.text.vocabulary import TokenizerError

CONTEXT, VOCAB = 512, 512
STORIES = str(paths.MODELS / "stories260K")
# The settings of `toy.executor`. The cache often has its compiled programs, of stories260K and of tiny-llama.
SMALL = {
    "max_num_batched_tokens": 64,
    "step_sizes": "16",
    "max_num_seqs": 8,
    "block_size": 16,
    "num_kv_pages": 96,
    "progress": False,
}
TINY = SMALL | {"max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def llm():
    with compiled_with(OFTEN), LLM(STORIES, **SMALL) as llm:
        yield llm
        stats = llm.driver.stats()
        assert (stats.steps, stats.prompt_tokens) == (0, 0), "a refused request ran"


NUMBERS = {
    field.name for field in dataclasses.fields(SamplingParams) if field.type in ("int", int, "float", float)
}
LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt with settings, and the field that is refused."""

    name: str
    field: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: Any = "Once"
    says: str = ""


CASES = (
    Case("an empty prompt", "prompt", prompt=[[]], says="at least one token"),
    Case("a negative id", "prompt", prompt=[5, -1], says="-1"),
    Case("an id past the vocabulary", "prompt", prompt=[5, VOCAB], says="0 to 511"),
    Case("a huge id", "prompt", prompt=[2**63], says="0 to 511"),
    Case("ids that are no integers", "prompt", prompt=[[1, 2.5]], says="list of token ids"),
    Case("ids that are text", "prompt", prompt=[[1, "a"]], says="list of token ids"),
    Case("something else", "prompt", prompt=[None], says="list of token ids"),
    Case("text that cannot be encoded", "prompt", prompt="a lone surrogate \ud800"),
    Case("a prompt that fills the context", "prompt", prompt=[5] * CONTEXT, says="at most 511 tokens"),
    Case(
        "prompt and output over the context",
        "max_tokens",
        {"max_tokens": CONTEXT - 99},
        [5] * 100,
        "at most 412",
    ),
    Case("more tokens than there are", "max_tokens", {"max_tokens": 2**31}),
    Case("no tokens", "max_tokens", {"max_tokens": 0}),
    Case("a negative number of tokens", "max_tokens", {"max_tokens": -1}),
    Case("min_tokens over max_tokens", "min_tokens", {"min_tokens": 17}, says="0 to max_tokens"),
    Case("min_tokens over the context", "min_tokens", {"min_tokens": CONTEXT, "max_tokens": None}),
    Case("negative min_tokens", "min_tokens", {"min_tokens": -1}),
    Case("a tiny penalty", "repetition_penalty", {"repetition_penalty": 1e-40}, says="0.01 to 100"),
    Case("n 0", "n", {"n": 0}),
    Case("a huge n", "n", {"n": 10**9}),
    Case("a negative temperature", "temperature", {"temperature": -0.1}),
    *(
        Case(f"{field} {value}", field, {field: value})
        for field in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        for value in (math.nan, math.inf, -math.inf, 1e30)
    ),
    Case("top_p 0", "top_p", {"top_p": 0.0}),
    Case("top_p over 1", "top_p", {"top_p": 1.01}),
    Case("top_k -2", "top_k", {"top_k": -2}),
    Case("a huge top_k", "top_k", {"top_k": 2**31}),
    Case("a negative min_p", "min_p", {"min_p": -0.1}),
    Case("no repetition penalty", "repetition_penalty", {"repetition_penalty": 0.0}),
    Case("a seed of 65 bits", "seed", {"seed": 2**63}),
    Case("10,000 stop strings", "stop", {"stop": [str(i) for i in range(10_000)]}, says="at most 64"),
    Case("an empty stop string", "stop", {"stop": ["a", ""]}),
    Case("a stop string of a megabyte", "stop", {"stop": "x" * 2**20}),
    Case("a stop string that is none", "stop", {"stop": [5]}),
    Case("10,000 stop tokens", "stop_token_ids", {"stop_token_ids": list(range(10_000))}, says="at most 64"),
    Case(
        "a stop token past the vocabulary", "stop_token_ids", {"stop_token_ids": [5, VOCAB]}, says="0 to 511"
    ),
    Case("a negative stop token", "stop_token_ids", {"stop_token_ids": [-1]}),
    Case("21 logprobs", "logprobs", {"logprobs": 21}, says="0 to 20"),
    Case("-1 prompt logprobs", "prompt_logprobs", {"prompt_logprobs": -1}),
    Case("a bias past the vocabulary", "logit_bias", {"logit_bias": {VOCAB: 1.0}}),
    Case("a bias that is no number", "logit_bias[5]", {"logit_bias": {5: math.nan}}),
    Case("a bias over 100", "logit_bias[5]", {"logit_bias": {5: 101.0}}),
    Case("no allowed token", "allowed_token_ids", {"allowed_token_ids": []}, says="1 to 300"),
    Case("301 allowed tokens", "allowed_token_ids", {"allowed_token_ids": range(301)}, says="1 to 300"),
    Case("an allowed token past the vocabulary", "allowed_token_ids", {"allowed_token_ids": [VOCAB]}),
    Case("65 bad words", "bad_words", {"bad_words": [f"w{i}" for i in range(65)]}, says="at most 64"),
    Case("a bad word of spaces", "bad_words", {"bad_words": ["dog", "  "]}),
    Case("a bad word that is none", "bad_words", {"bad_words": [5]}),
    Case("a bad word of many tokens", "bad_words", {"bad_words": ["xyz" * 20]}, says="1 to 12 tokens"),
    *(Case(f"a text as {field}", field, {field: "x"}) for field in sorted(NUMBERS)),
    *(
        Case(f"{field} 1.5", field, {field: 1.5})
        for field in ("n", "max_tokens", "seed", "top_k", "logprobs")
    ),
    *(Case(f"{field} True", field, {field: True}) for field in ("n", "temperature", "prompt_logprobs")),
    *(Case(f"5 as {field}", field, {field: 5}) for field in LISTS),
    *(Case(f"a text in {field}", field, {field: ["x"]}) for field in LISTS if field.endswith("ids")),
    Case("a text as a bias", "logit_bias", {"logit_bias": {5: "x"}}),
    Case("a bias of a text", "logit_bias", {"logit_bias": {"x": 1.0}}),
    Case("ignore_eos yes", "ignore_eos", {"ignore_eos": "yes"}, says="True or False"),
    Case("bytes", "prompt", prompt=b"Once"),
    Case("a number", "prompt", prompt=5),
    Case("a mapping without a prompt", "prompt", prompt={"text": "Once"}, says="prompt_token_ids"),
    Case("a prompt with an image", "prompt", prompt={"prompt": "Once", "multi_modal_data": {}}),
    Case("301 biases", "logit_bias", {"logit_bias": dict.fromkeys(range(301), 1.0)}, says="at most 300"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_that_cannot_be_served(llm, case):
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(case.prompt, SamplingParams(**case.settings), use_tqdm=False)
    assert caught.value.field == case.field
    assert case.says in str(caught.value)
    assert len(str(caught.value)) < 400

    async def stream():
        prompt = (
            case.prompt[0]
            if isinstance(case.prompt, list) and not isinstance(case.prompt[0], int)
            else case.prompt
        )
        return [out async for out in llm.stream(prompt, SamplingParams(**case.settings))]

    with pytest.raises(InvalidRequest):
        asyncio.run(stream())


def test_one_bad_prompt_among_good_ones_is_refused_before_any_runs(llm):
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate([[5], [6], [VOCAB]], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="sampling_params"):
        llm.generate([[5], [6]], [SamplingParams()], use_tqdm=False)
    for wrong in ({"max_tokens": 3}, "greedy"):
        with pytest.raises(InvalidRequest, match="sampling_params"):
            llm.generate([5], wrong, use_tqdm=False)


@pytest.mark.parametrize(
    "prompts", [{"prompt": "Once"}, {"prompt_token_ids": [5, 6]}, (x for x in ("Once",))]
)
def test_prompts_have_the_forms_of_vllm(prompts):
    (prompt,) = as_list(prompts)
    assert prompt in ("Once", [5, 6])


def test_lists_of_sampling_may_be_none():
    none = dict.fromkeys(LISTS)
    assert SamplingParams(**none) == SamplingParams()


def test_the_limits_themselves_are_taken(llm):
    params = SamplingParams(
        temperature=100.0, top_p=1.0, top_k=-1, min_p=1.0, seed=-(2**63), stop=["x" * 1024] * 64,
        stop_token_ids=range(64), n=64, logprobs=20, prompt_logprobs=0, repetition_penalty=100.0,
        presence_penalty=-2.0, frequency_penalty=2.0, logit_bias=dict.fromkeys(range(300), -100.0),
        max_tokens=CONTEXT - 1, min_tokens=CONTEXT - 1,
    )  # fmt: skip
    request = llm.request([VOCAB - 1], params)
    assert list(request.prompt_token_ids) == [VOCAB - 1]
    assert llm.request([5] * (CONTEXT - 1), SamplingParams(max_tokens=1)).sampling.max_tokens == 1


HOST = {"kv_offloading_size": 0.01}
# `LLM` itself has the arguments model and kernels.
TYPED = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "kernels"}
SETTINGS = (
    *((name, {name: ["x"]}) for name in sorted(TYPED)),
    ("model", {"model": 5}),
    *((name, {name: "4"}) for name in ("max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size")),
    ("max_num_seqs", {"max_num_seqs": 4.5}),
    ("block_size", {"block_size": None}),
    ("enable_prefix_caching", {"enable_prefix_caching": 1}),
    ("trust_remote_code", {"trust_remote_code": True}),
    ("max_num_seq", {"max_num_seq": 4}),
    ("model", {"model": ""}),
    ("kv_disk_path", {"kv_disk_path": "/tmp", "kv_disk_size": 1.0}),
    ("kv_disk_size", {**HOST, "kv_disk_path": "/tmp"}),
    ("kv_disk_size", {**HOST, "kv_disk_size": 1.0}),
    ("kv_disk_size", {**HOST, "kv_disk_path": "/tmp", "kv_disk_size": 0.0}),
    ("kv_disk_size", {**HOST, "kv_disk_path": "/tmp", "kv_disk_size": math.inf}),
    ("kv_disk_size", {**HOST, "kv_disk_path": "/tmp", "kv_disk_size": 1e-9}),
    ("kv_disk_path", {**HOST, "kv_disk_path": "", "kv_disk_size": 1.0}),
    ("kv_disk_path", {**HOST, "kv_disk_path": "/no/such/folder", "kv_disk_size": 1.0}),
    ("kv_disk_path", {**HOST, "kv_disk_path": "/proc", "kv_disk_size": 1.0}),
    ("quantization", {"quantization": "int3"}),
    ("quantization", {"quantization": "FP8"}),
    ("kv_cache_dtype", {"kv_cache_dtype": "fp8_e5m2"}),
    ("kv_cache_dtype", {"kv_cache_dtype": "int4"}),
    ("dtype", {"dtype": "float16"}),
    ("load_format", {"load_format": "pickle"}),
    ("kernels", {"kernels": "cutlass"}),
    ("block_size", {"block_size": 0}),
    ("tensor_parallel_size", {"tensor_parallel_size": 0}),
    ("tensor_parallel_size", {"tensor_parallel_size": 1000}),
    ("max_model_len", {"max_model_len": 0}),
    ("max_model_len", {"max_model_len": 513}),
    ("max_num_batched_tokens", {"max_num_batched_tokens": -5}),
    ("max_num_batched_tokens", {"max_num_batched_tokens": 4, "max_num_seqs": 5}),
    ("step_sizes", {"step_sizes": "16;32"}),
    ("step_sizes", {"step_sizes": "²"}),
    ("step_sizes", {"step_sizes": "0"}),
    ("step_sizes", {"step_sizes": "8,100000"}),
    ("step_sizes", {"step_sizes": (8, 100_000)}),
    ("step_sizes", {"step_sizes": (8, 0.5)}),
    ("step_sizes", {"step_sizes": ()}),
    ("step_sizes", {"step_sizes": 8}),
    ("max_num_seqs", {"max_num_seqs": 100_000}),
    ("max_waiting", {"max_waiting": 0}),
    ("gpu_memory_utilization", {"gpu_memory_utilization": 0.0}),
    ("gpu_memory_utilization", {"gpu_memory_utilization": math.nan}),
    ("num_kv_pages", {"num_kv_pages": 0}),
    ("num_kv_pages", {"num_kv_pages": 10**9}),
    ("num_kv_pages", {"num_kv_pages": 10**15}),
    ("max_num_batched_tokens", {"max_num_batched_tokens": 10**9}),
    ("tokenizer", {"tokenizer": "/nope"}),
    ("plan", {"plan": "/nope"}),
    ("plan", {"plan": "searched"}),
)


@pytest.mark.parametrize(
    ("field", "settings"), SETTINGS, ids=lambda v: v if isinstance(v, str) else ",".join(map(str, v.values()))
)
def test_a_setting_that_cannot_work(field, settings):
    with pytest.raises(ConfigError) as caught:
        LLM(**(SMALL | {"model": STORIES} | settings))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}=")


def test_a_plan_that_is_not_there_or_no_plan(tmp_path):
    missing = str(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"plan='.*missing\.json'"):
        LLM(STORIES, plan=missing, **SMALL)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PlanError, match=r"broken\.json"):
        LLM(STORIES, plan=str(tmp_path / "broken.json"), **SMALL)


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder", "no-such-file.gguf", "llama-3.1-8b"])
def test_a_model_that_is_not_there(model):
    with pytest.raises(CheckpointError, match=model):
        LLM(model, **SMALL)


def test_a_checkpoint_that_is_broken(tmp_path):
    def copy(name):
        shutil.copytree(STORIES, tmp_path / name)
        return tmp_path / name

    cut = copy("cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=r"cut/model\.safetensors"):
        LLM(str(cut), **SMALL)
    unknown = copy("unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type='mamba'"):
        LLM(str(unknown), **SMALL)
    wordless = copy("wordless")
    (wordless / "tokenizer.json").write_text("not json")
    with pytest.raises(TokenizerError, match="wordless"):
        LLM(str(wordless), **SMALL)


def test_the_memory_bounds_the_tokens_of_a_step(monkeypatch):
    config = EngineConfig(model=STORIES, max_num_batched_tokens=2**16, max_num_seqs=4)
    model = open_checkpoint(STORIES).model_config
    monkeypatch.setattr(settings, "_machine_bytes", lambda: 10**8)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=65536") as caught:
        resolve(config, model)
    assert "at most" in caught.value.accepted


def test_a_tokenizer_of_another_model_names_both_sizes(tmp_path):
    copy = tmp_path / "small"
    shutil.copytree(STORIES, copy)
    words = json.loads((copy / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {f"<{i}>": 512 + i for i in range(88)}
    (copy / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"at most 512 tokens.* has 600") as caught:
        LLM(STORIES, tokenizer=str(copy), **SMALL)
    assert caught.value.field == "tokenizer"


def test_an_end_token_outside_the_vocabulary(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(STORIES, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 10**6]}))
    with pytest.raises(ConfigError, match="eos_token_id=1000000 is not supported: below vocab_size=512"):
        LLM(str(copy), **SMALL)


def test_a_size_beyond_32_bits_names_the_range(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(STORIES, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 2**31}))
    with pytest.raises(ConfigError, match=r"vocab_size=2147483648 .* from 1 to 2147483647"):
        LLM(str(copy), **SMALL)


def test_a_model_without_a_tokenizer(tmp_path):
    """Tiny checkpoints have no tokenizer: token ids are accepted, text is refused."""
    with LLM(str(paths.MODELS / "tiny-llama"), **TINY) as llm:
        assert llm.tokenizer is None
        [out] = llm.generate(
            [5, 6], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1), use_tqdm=False
        )
        assert len(out.outputs[0].token_ids) == 3
        assert out.outputs[0].text == ""
        for field, prompt, settings in (("prompt", "words", {}), ("stop", [5], {"stop": "words"})):
            with pytest.raises(InvalidRequest) as caught:
                llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)
            assert caught.value.field == field
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.chat([{"role": "user", "content": "words"}], use_tqdm=False)


def test_a_request_larger_than_the_kv_pages_is_refused():
    """The prompt fits the context, and does not fit two pages of KV."""
    with LLM(str(paths.MODELS / "tiny-llama"), **(TINY | {"num_kv_pages": 2})) as llm:
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([[5], [5] * 20], SamplingParams(max_tokens=20), use_tqdm=False)
        assert caught.value.field == "max_tokens"
        assert llm.driver.stats().steps == 0
        [out] = llm.generate([5] * 20, SamplingParams(max_tokens=13, ignore_eos=True), use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 13

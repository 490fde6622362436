"""Measure the offline throughput of vLLM's engine on one GPU, and write a report that `benchmarks.in_turns`
reads.

    python -m benchmarks.vllm_bench --model qwen3-30b-a3b --precision fp8 --kv_cache_dtype fp8
        --max_num_seqs 1024 --max_num_batched_tokens 8192 --output_json REPORT.json

All requests are handed over at once, with the lengths and token ids of `bench throughput`. The engine draws
greedily, ignores end tokens and has no prefix cache. The weights of a shipped config are random, as
`benchmarks.vllm_weights` says. `fp8` means that vLLM quantizes them at the start. `mxfp4` is the format of
gpt-oss's config. vLLM 0.24 to 0.26 must be installed. The committed reports are of vLLM 0.26 without
DeepGEMM, FlashInfer and FlashAttention 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import offline_rival, vllm_weights
from benchmarks.offline_rival import Ask, module
from jaxflow.bench.workload.lengths import Item
from jaxflow.model.checkpoints.model_names import CONFIGS, shipped_configs

# The engine needs no network. A greedy choice needs no sampler of FlashInfer, which may be missing.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

FOLDER = Path(".cache/vllm")  # the name of a model's folder is a part of the key of vLLM's compiled programs


def hugging_face_config(model: str, precision: str) -> dict[str, Any]:
    """Return the `config.json` of a shipped config for weights of a precision.

    Raises: ValueError for mxfp4 where the config's weights are in another format.
    """
    found = json.loads((CONFIGS / f"{model}.json").read_text("utf-8"))
    own = found.pop("quantization_config", None)
    if precision != "mxfp4":
        return found
    if (own or {}).get("quant_method") != precision:
        raise ValueError(f"--precision {precision}: accepted for a config of weights in {precision}")
    return found | {"quantization_config": own}


def settings(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    By default vLLM captures CUDA graphs of up to 512 tokens, and launches the kernels of larger decode steps
    one by one. The engine is measured with graphs for all its decode steps.
    """
    return {
        "model": str(folder.resolve()),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "quantization": "fp8" if given.precision == "fp8" else None,
        "kv_cache_dtype": given.kv_cache_dtype,
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "gpu_memory_utilization": given.gpu_memory_utilization,
        "compilation_config": {"max_cudagraph_capture_size": max(512, given.max_num_seqs)},
        "enable_prefix_caching": False,
        "seed": 0,
    }


def start(folder: Path, given: argparse.Namespace) -> Ask:
    """Start the engine and return what asks it. folder: has the model's config.json."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm_weights.announce(FOLDER / "plugins")
    vllm = module("vllm")
    engine = vllm.LLM(**settings(folder, given))

    def ask(items: Sequence[Item], prompts: Sequence[list[int]]) -> Callable[[], Sequence[int]]:
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            vllm.SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=item.output_tokens, detokenize=False
            )
            for item in items
        ]

        def answers() -> list[int]:
            done = engine.generate(texts, params, use_tqdm=False)
            return [len(one.outputs[0].token_ids) for one in done]

        return answers

    return ask


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags. Flags of the engine have vLLM's names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=shipped_configs(), metavar="NAME", required=True)
    parser.add_argument(
        "--precision", choices=("bf16", "fp8", "mxfp4"), default="bf16", help="of the weights"
    )
    parser.add_argument("--kv_cache_dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--max_num_batched_tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.9)
    offline_rival.add_workload_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Start the engine, run the requests and write the report. Return the exit status."""
    parser = flag_parser()
    given = parser.parse_args(arguments)
    try:
        config = hugging_face_config(given.model, given.precision)
    except ValueError as error:
        parser.error(str(error))
    folder = FOLDER / f"{given.model}-{given.precision}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    offline_rival.run(
        "vllm_bench",
        ("vllm", "torch"),
        arguments,
        given,
        config["vocab_size"],
        lambda: start(folder, given),
    )
    return 0


if __name__ == "__main__":
    # The engine has a process of its own, which ends with a regular end of this process.
    sys.exit(main(sys.argv[1:]))

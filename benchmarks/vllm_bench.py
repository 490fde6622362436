"""Measure the offline throughput of vLLM's engine on one GPU, and write a report that `benchmarks.in_turns`
reads.

    python -m benchmarks.vllm_bench --model qwen3-30b-a3b --precision fp8 --kv_cache_dtype fp8
        --max_num_seqs 1024 --max_num_batched_tokens 8192 --output_json REPORT.json

All requests are handed over at once, with the lengths and token ids of `bench throughput`. The engine draws
greedily, ignores end tokens and has no prefix cache. The weights of a shipped config are random, as
`benchmarks.vllm_weights` says. `fp8` means that vLLM quantizes them at the start. `mxfp4` is the format of
gpt-oss's config. vLLM 0.24 to 0.26 must be installed. The committed reports are of vLLM 0.26 without
DeepGEMM, FlashInfer and FlashAttention 2.

    python -m benchmarks.vllm_bench --checkpoint FOLDER --num_requests 8 --output_json REPORT.json

`--checkpoint` reads the weights of a folder of safetensors files, as `benchmarks.random_checkpoint` writes
them. The report then holds the size of these files, and vLLM's own time to load them and its rate, unless
this vLLM does not tell its time. `start_s` has all of the start, with a few requests to warm up.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import offline_rival, vllm_loading, vllm_weights
from benchmarks.offline_rival import Ask, module
from benchmarks.vllm_plugin import announce
from jaxflow.bench.workload.lengths import Item
from jaxflow.model.checkpoints.model_names import CONFIGS, shipped_configs

# The engine needs no network. A greedy choice needs no sampler of FlashInfer, which may be missing.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

FOLDER = Path(".cache/vllm")  # the name of a model's folder is a part of the key of vLLM's compiled programs


def hugging_face_config(path: Path, precision: str) -> dict[str, Any]:
    """Return a model's `config.json` for weights of a precision.

    Raises: ValueError for mxfp4 where the config's weights are in another format.
    """
    found = json.loads(path.read_text("utf-8"))
    own = found.pop("quantization_config", None)
    if precision != "mxfp4":
        return found
    if (own or {}).get("quant_method") != precision:
        raise ValueError(f"--precision {precision}: accepted for a config of weights in {precision}")
    return found | {"quantization_config": own}


def random_weights_folder(model: str, precision: str) -> Path:
    """Return a folder with the config of a shipped model, without weights. Raises: ValueError."""
    config = hugging_face_config(CONFIGS / f"{model}.json", precision)
    folder = FOLDER / f"{model}-{precision}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def checkpoint_folder(folder: Path, precision: str) -> Path:
    """Return the folder of a checkpoint.

    Raises: ValueError for a folder without a config or weights, and for weights in another format.
    """
    path = folder / "config.json"
    if not path.is_file() or not checkpoint_bytes(folder):
        raise ValueError(f"--checkpoint {folder}: a folder with config.json and *.safetensors is accepted")
    if hugging_face_config(path, precision) != json.loads(path.read_text("utf-8")):
        raise ValueError(
            f"--precision {precision}: the weights of --checkpoint {folder} are in a format of their own"
        )
    return folder


def checkpoint_bytes(folder: Path) -> int:
    """Return the bytes of a folder's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def loading(folder: Path, clock: Path) -> dict[str, float]:
    """Return the size of a checkpoint in GB, and the seconds and GB/s of its loading if vLLM told them.

    clock: the file that `vllm_loading` writes.
    """
    size = checkpoint_bytes(folder) / 1e9
    seconds = vllm_loading.seconds(clock)
    told = {"weights_s": seconds, "weights_gb_per_s": size / seconds} if seconds else {}
    return {"weights_gb": size, **told}


def settings(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    By default vLLM captures CUDA graphs of up to 512 tokens, and launches the kernels of larger decode steps
    one by one. The engine is measured with graphs for all its decode steps.
    """
    return {
        "model": str(folder.resolve()),
        "load_format": "auto" if given.checkpoint else "dummy",
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
    announce(FOLDER / "plugins", vllm_loading if given.checkpoint else vllm_weights)
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
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--model", choices=shipped_configs(), metavar="NAME", help="a shipped config, for random weights"
    )
    weights.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="config.json and safetensors files, read at the start",
    )
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
        folder = (
            checkpoint_folder(given.checkpoint, given.precision)
            if given.checkpoint
            else random_weights_folder(given.model, given.precision)
        )
    except ValueError as error:
        parser.error(str(error))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    with vllm_loading.clock() as clock:
        offline_rival.run(
            "vllm_bench",
            ("vllm", "torch"),
            arguments,
            given,
            config["vocab_size"],
            lambda: start(folder, given),
            (lambda: loading(folder, clock)) if given.checkpoint else dict,
        )
    return 0


if __name__ == "__main__":
    # The engine has a process of its own, which ends with a regular end of this process.
    sys.exit(main(sys.argv[1:]))

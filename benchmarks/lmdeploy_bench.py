"""Measure the offline throughput of LMDeploy's TurboMind engine on one GPU, and write a report that
`benchmarks.in_turns` reads.

    python -m benchmarks.lmdeploy_bench --precision bf16 --input_len 1024 --output_len 512 --num_requests 600
        --max_num_seqs 512 --output_json REPORT.json

All requests are handed over at once, with the lengths and token ids of `bench throughput`. The engine draws
greedily, ignores end tokens and has no prefix cache. The weights are random tensors of the shapes of a Llama
config. `fp8` means e4m3 weights with a scale of each 128 x 128 block. LMDeploy and PyTorch must be installed.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import offline_rival
from benchmarks.offline_rival import Ask, module
from jaxflow.bench.workload.lengths import Item
from jaxflow.config import ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

BLOCK = 128  # rows and columns of a weight that share a scale
PREFILL_TOKENS = 8192  # of a step; LMDeploy's default
SESSION_TOKENS = 16384  # TurboMind limits the context tokens of one prefill step to the length of a session
WEIGHT_SIZE = 0.02  # standard deviation of the weights, or the scale of a block of standard normal ones


def hugging_face_config(model: ModelConfig, precision: str) -> dict[str, Any]:
    """Return the `config.json` of a Llama model. precision: bf16 or fp8."""
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rope_theta": 500000.0,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if precision == "fp8":
        found["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return found


def tensors(model: ModelConfig, precision: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the kind of each tensor of the checkpoint, by name.

    A kind is `norm`, `weight` in bfloat16, `e4m3`, or `scale` of the blocks of an e4m3 weight.
    """
    width, inner = model.hidden_size, model.intermediate_size
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "model.embed_tokens.weight": ((model.vocab_size, width), "weight"),
        "lm_head.weight": ((model.vocab_size, width), "weight"),
        "model.norm.weight": ((width,), "norm"),
    }
    for layer in range(model.num_layers):
        head = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{head}{norm}.weight"] = ((width,), "norm")
        for name, shape in products.items():
            found[f"{head}{name}.weight"] = (shape, "e4m3" if precision == "fp8" else "weight")
            if precision == "fp8":
                blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
                found[f"{head}{name}.weight_scale_inv"] = (blocks, "scale")
    return found


def _made(shape: tuple[int, ...], kind: str) -> Any:
    """Return a tensor of a kind of `tensors` on the GPU."""
    torch = module("torch")
    if kind == "norm":
        return torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    if kind == "scale":
        return torch.full(shape, WEIGHT_SIZE, dtype=torch.float32, device="cuda")
    normal = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return normal.to(torch.float8_e4m3fn) if kind == "e4m3" else normal * WEIGHT_SIZE


def start(model: ModelConfig, given: argparse.Namespace) -> Any:
    """Return a TurboMind engine with random weights."""
    torch, messages = module("torch"), module("lmdeploy.messages")
    loader, turbomind = module("lmdeploy.turbomind.model_loader"), module("lmdeploy.turbomind.turbomind")
    checkpoint = module("lmdeploy.turbomind.checkpoint")
    table = tensors(model, given.precision)

    class Random(checkpoint.Checkpoint):
        """A checkpoint without a file."""

        def get(self, key: str, index: Any = None) -> Any:
            found = _made(*table[key])
            return found if index is None else found[index]

        pop = get

        def has(self, key: str) -> bool:
            return key in table

        def keys(self) -> Iterator[str]:
            return iter(table)

    logging.getLogger("lmdeploy").setLevel(logging.WARNING)  # else two lines a request
    torch.manual_seed(0)
    loader.create_checkpoint = lambda *_, **__: Random()
    turbomind.Tokenizer = lambda *_, **__: None  # requests have token ids
    torch.zeros(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hugging_face_config(model, given.precision)))
        return turbomind.TurboMind.from_pretrained(
            folder,
            engine_config=messages.TurbomindEngineConfig(
                dtype="bfloat16",
                session_len=SESSION_TOKENS,
                max_batch_size=given.max_num_seqs,
                max_prefill_token_num=PREFILL_TOKENS,
                cache_max_entry_count=given.memory_share,
                quant_policy=8 if given.kv_cache_dtype == "int8" else 0,
                enable_prefix_caching=False,
                enable_metrics=False,
            ),
        )


async def _answers(
    instances: Sequence[Any], items: Sequence[Item], prompts: Sequence[list[int]]
) -> list[int]:
    """Hand all requests over at once, each to an instance of its own. Return the tokens of each answer."""
    messages = module("lmdeploy.messages")

    async def one(number: int, instance: Any, item: Item, prompt: list[int]) -> int:
        config = messages.GenerationConfig(max_new_tokens=item.output_tokens, ignore_eos=True, top_k=1)
        stream = instance.async_stream_infer(number, input_ids=prompt, gen_config=config, stream_output=False)
        return sum([len(part.token_ids) async for part in stream])

    every = zip(range(1, len(items) + 1), instances, items, prompts, strict=True)
    return await asyncio.gather(*(one(*each) for each in every))


def asker(engine: Any) -> Ask:
    """Return what asks the engine."""

    def ask(items: Sequence[Item], prompts: Sequence[list[int]]) -> Callable[[], Sequence[int]]:
        instances = [engine.create_instance() for _ in items]
        return lambda: asyncio.run(_answers(instances, items, prompts))

    return ask


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="name of a shipped config of a Llama model")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="of the weights")
    parser.add_argument("--kv_cache_dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument(
        "--memory_share", type=float, default=0.88, help="share of the free memory for the KV cache"
    )
    offline_rival.add_workload_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Start the engine, run the requests and write the report. Return the exit status."""
    parser = flag_parser()
    given = parser.parse_args(arguments)
    model = open_checkpoint(given.model, load_format="dummy").model_config
    if model.architecture != "llama":
        parser.error(f"--model {given.model}: accepted is a Llama model")
    offline_rival.run(
        "lmdeploy_bench",
        ("lmdeploy", "torch"),
        arguments,
        given,
        model.vocab_size,
        lambda: asker(start(model, given)),
    )
    return 0


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    os._exit(exit_status)  # TurboMind's threads can keep the interpreter from its end

"""What the programs of a step need of a device's memory beside weights and cache, and what that leaves for
KV.

python -m jaxflow.bench memory --model llama-3.1-8b --load_format dummy --target_config
tests/data/xla/h200.txtpb

By XLA's own account of the compiled programs. With --target_config they are compiled for a GPU that need not
be there; without, for this machine's, on which the engine is then started too: how much it took at most
stands beside what was reserved.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from jaxflow.bench import machine, options, report
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.build import prepare_process, resolve
from jaxflow.engine.executor import Executor
from jaxflow.engine.plans import make_layouts, on_gpu
from jaxflow.engine.programs import Programs
from jaxflow.engine.start_kernels import asked_of_kernels, choose_kernels
from jaxflow.engine.temporary import IN_FLIGHT, Need, together
from jaxflow.flags import engine_config_from_flags
from jaxflow.llm import LLM
from jaxflow.memory.kv_cache import page_bytes
from jaxflow.mesh import TP, axis_of, make_mesh
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.ops import Context
from jaxflow.model.weights import shapes, shardings
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handmade import sequential_plan
from pallas_kernels.kernel_set import KernelSet, kernel_set_for

MIB, GIB = 2**20, 2**30
SPARE = 0.02  # of the memory, as the engine leaves it
SEQUENCE = 1536  # tokens of the sequences that a batch is counted in: 1024 in, 512 out


def define_flags() -> None:
    options.define_engine(max_num_batched_tokens=2048, max_num_seqs=512, dtype="bfloat16")
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string(
        "target_config",
        None,
        "Compile for the GPU of this XLA target config (text proto) instead of this machine's.",
    )
    flags.DEFINE_list(
        "buckets", ["64", "512"], "Tokens of the steps to look at, beside --max_num_batched_tokens."
    )
    flags.DEFINE_integer(
        "layers", 2, "Compile so many layers: buffers are reused from layer to layer.", lower_bound=1
    )
    flags.DEFINE_list("memory_gib", ["24", "80", "140"], "Sizes of devices whose room for KV is told.")


def abstract_executor(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, kernels: KernelSet, tokens: int
) -> Executor:
    """An executor of one bucket to compile with: shapes for weights. config: resolved."""
    tp = mesh.shape[TP]
    plan = sequential_plan(model, tokens, tp)
    chosen: dict[str, Any] = {
        "quantization": config.quantization,
        "kv_scales": config.kv_cache_dtype == "float8_e4m3fn",
    }
    specs = shardings(model, mesh, **chosen)
    weights = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes(model, tp, config.dtype, **chosen),
        specs,
    )
    forward = compile_plan(plan, model, tp, quantized=config.quantization == "fp8")
    assert config.max_model_len is not None
    return Executor(
        Programs(Context(model, kernels, axis_of(mesh)), mesh, specs),
        weights,
        make_layouts(config, model, [plan], decodes_alone=False),
        lambda _: forward,
        kv_dtype=jnp.dtype(config.kv_cache_dtype),
        max_model_len=config.max_model_len,
    )


def three_buffers(model: ModelConfig, tokens: int, dtype: str, tp: int = 1) -> int:
    """Bytes of FlashDecoding++Next's three activation buffers (§5): [T, D], [T, D], [T, F / tp]."""
    return tokens * (2 * model.hidden_size + model.intermediate_size // tp) * jnp.dtype(dtype).itemsize


def room(
    memory_bytes: int,
    fixed_bytes: int,
    token_bytes: float,
    activation_bytes: float,
    largest: Mapping[str, Need],
    smallest: Mapping[str, Need],
) -> dict[str, int]:
    """Tokens of KV that one device of `memory_bytes` holds, by what is kept free for temporary space.

    Args:
      fixed_bytes: weights, per-slot state and spare. token_bytes: of a token's KV. activation_bytes: a
      token's three buffers. largest, smallest: what the programs of the largest and of a decode-only bucket
      need.
    Returns:
      whole_prompt: of one sequence prefilled at once, whose activations stand beside its KV; summed: a step's
      and a sampler's space; largest: the largest program's; lent: while only small steps run, if all that
      larger ones need were lent; none: without any.
    """
    free = memory_bytes - fixed_bytes
    summed = sum(need.temporary for need in largest.values()) - min(
        largest["plain"].temporary, largest["full"].temporary
    )
    summed += IN_FLIGHT * sum(need.results for need in largest.values())
    reserved = {
        "summed": summed,
        "largest": together(largest.values()),
        "lent": together(smallest.values()),
        "none": 0,
    }
    found = {"whole_prompt": free / (token_bytes + activation_bytes)} | {
        k: (free - bytes_) / token_bytes for k, bytes_ in reserved.items()
    }
    return {name: max(0, int(tokens)) for name, tokens in found.items()}


def analyse(
    config: EngineConfig,
    model: ModelConfig,
    mesh: Mesh,
    kernels: KernelSet,
    buckets: Sequence[int],
    layers: int,
) -> dict[str, Any]:
    """Of each bucket what its programs need, and of the whole model what is on a device anyway. config:
    resolved.
    """
    few, tp = dataclasses.replace(model, layers=model.layers[:layers]), mesh.shape[TP]
    found, state = [], 0
    for tokens in buckets:
        executor = abstract_executor(config, few, mesh, kernels, tokens)
        needs, state = executor.temporary_needs(tokens), executor.state_bytes()
        three = three_buffers(model, tokens, config.dtype, tp)
        found.append(
            {"tokens": tokens, "three_buffers": three, "together": together(needs.values())} | _plain(needs)
        )
        told = ", ".join(f"{name} {need.temporary / MIB:.1f}" for name, need in needs.items())
        print(report.line(f"{tokens} tokens, MiB:", f"{told}; three buffers {three / MIB:.1f}"), flush=True)
    whole = abstract_executor(config, model, mesh, kernels, buckets[0])
    local = [(a.sharding.shard_shape(a.shape), a.dtype.itemsize) for a in jax.tree.leaves(whole.weights)]
    weights = sum(_size(shape) * itemsize for shape, itemsize in local)
    pages = page_bytes(model, config.block_size, jnp.dtype(config.kv_cache_dtype), tp)
    return {
        "programs": found,
        "weight_bytes": weights,
        "state_bytes": state,
        "kv_bytes_per_token": sum(pages) / config.block_size,
    }


def _plain(needs: Mapping[str, Need]) -> dict[str, Any]:
    return {"needs": {name: dataclasses.asdict(need) for name, need in needs.items()}}


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def rooms(
    found: Mapping[str, Any], model: ModelConfig, config: EngineConfig, gib: Sequence[float]
) -> list[dict[str, Any]]:
    """`room` of devices of these sizes, and how many sequences of 1536 tokens that is."""
    needs = [{name: Need(**need) for name, need in one["needs"].items()} for one in found["programs"]]
    rows = []
    for size in gib:
        memory = int(size * GIB * config.gpu_memory_utilization)
        fixed = found["weight_bytes"] + found["state_bytes"] + int(SPARE * memory)
        one = three_buffers(model, 1, config.dtype, config.tensor_parallel_size)
        tokens = room(memory, fixed, found["kv_bytes_per_token"], one, needs[-1], needs[-2])
        rows.append(
            {
                "memory_gib": size,
                "tokens": tokens,
                "sequences": {name: count // SEQUENCE for name, count in tokens.items()},
            }
        )
        print(
            report.line(
                f"{size:g} GiB, tokens of KV:",
                ", ".join(f"{name} {count:,}" for name, count in tokens.items()),
            )
        )
    return rows


def run() -> dict[str, Any]:
    """The command. Raises: ConfigError, OSError, ValueError for flags that do not work."""
    f, config = flags.FLAGS, engine_config_from_flags()
    if not f.target_config:  # the share of memory that the engine may take stands when JAX begins
        prepare_process(config)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    model = checkpoint.model_config
    config = resolve(
        dataclasses.replace(config, quantization=config.quantization or checkpoint.quantization), model
    )
    largest = config.max_num_batched_tokens
    assert largest is not None
    buckets = sorted({*map(int, f.buckets), largest})
    if buckets[-1] > largest or len(buckets) < 2:
        raise ConfigError("buckets", f.buckets, f"steps of fewer than max_num_batched_tokens={largest}")
    if f.target_config:
        tp, text = config.tensor_parallel_size, Path(f.target_config).read_text("utf-8")
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=text, topology=f"1x1x{tp}"
        ).devices
        mesh, kernels = Mesh(np.array(devices), (TP,)), _hopper(config, model, devices[0].device_kind)
    else:
        mesh, kernels = make_mesh(config.tensor_parallel_size), choose_kernels(config, model)
    found = analyse(config, model, mesh, kernels, buckets, f.layers)
    result = {
        "command_name": "memory",
        "model": checkpoint.name,
        "engine_config": dataclasses.asdict(config),
        **machine.describe(),
    }
    result |= {
        "compiled_for": mesh.devices.flat[0].device_kind,
        "kernels": kernels.name,
        "layers": f.layers,
        **found,
    }
    result |= {"room": rooms(found, model, config, [float(size) for size in f.memory_gib])}
    if on_gpu() and not f.target_config:
        with LLM.from_config(config) as llm:  # its warm-up has run every program
            stats = jax.local_devices()[0].memory_stats() or {}
            result["observed"] = {
                name: stats.get(name) for name in ("bytes_limit", "bytes_in_use", "peak_bytes_in_use")
            }
            result["observed"] |= {
                "reserved": llm.executor.temporary_bytes(),
                "num_kv_pages": llm.executor.num_pages,
            }
    return result


def _hopper(config: EngineConfig, model: ModelConfig, device: str) -> KernelSet:
    """device: a target config's name, which ends in the memory ("NVIDIA H200 141GB HBM3e"), as a driver's, by
    which tables go, does not.
    """
    return kernel_set_for(
        "gpu", "9.0", device=re.sub(r" \d+GB.*", "", device), **asked_of_kernels(config, model)
    )

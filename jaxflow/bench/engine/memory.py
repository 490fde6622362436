"""Temporary device memory of a step's programs, and the memory left for KV after weights and cache.

  python -m jaxflow.bench memory --model llama-3.1-8b --load_format dummy
      --target_config tests/data/xla/h200.txtpb

XLA reports the memory of each compiled program. With --target_config the programs are compiled for a GPU that
need not be present. Without it they are compiled for this machine's GPU. The engine then starts on this GPU,
and the report compares its peak memory with its reserved memory.
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

from jaxflow.bench.report import machine
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.executor import Executor
from jaxflow.engine.kernel_choice import asked_of_kernels, choose_kernels
from jaxflow.engine.program_memory import IN_FLIGHT, Need, together
from jaxflow.engine.programs import Programs
from jaxflow.engine.settings import resolve
from jaxflow.engine.stage_programs import make_context
from jaxflow.engine.stage_weights import weight_options
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import make_layouts
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import TP, make_mesh, on_gpu
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import sequential_plan
from pallas_kernels.kernel_set import KernelSet, kernel_set_for

MIB, GIB = 2**20, 2**30
SPARE = 0.02  # share of the memory, as the engine leaves free
SEQUENCE = 1536  # tokens of a sequence: 1024 prompt tokens and 512 output tokens


def define_flags() -> None:
    options.define_engine(max_num_batched_tokens=2048, max_num_seqs=512, dtype="bfloat16")
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string(
        "target_config",
        None,
        "XLA target config (text proto) of the GPU to compile for. Default: this machine's GPU.",
    )
    flags.DEFINE_list(
        "buckets", ["64", "512"], "Tokens of the steps to analyze, in addition to --max_num_batched_tokens."
    )
    flags.DEFINE_integer("layers", 2, "Number of layers to compile; layers reuse buffers.", lower_bound=1)
    flags.DEFINE_list("memory_gib", ["24", "80", "140"], "Device memory sizes in GiB for the KV report.")


def abstract_executor(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, kernels: KernelSet, tokens: int
) -> Executor:
    """Return an executor of one bucket for compilation, with shapes instead of weights. config: resolved."""
    tp = mesh.shape[TP]
    plan = sequential_plan(model, tokens, tp)
    chosen = weight_options(config)
    specs = shardings(model, mesh, **chosen)
    weights = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes(model, tp, config.dtype, **chosen),
        specs,
    )
    forward = compile_plan(plan, model, tp, quantized=config.quantization == "fp8")
    assert config.max_model_len is not None
    return Executor(
        Programs(make_context(config, model, kernels, mesh), mesh, specs),
        weights,
        make_layouts(config, model, [plan], decodes_alone=False),
        lambda _: forward,
        kv_dtype=jnp.dtype(config.kv_cache_dtype),
        max_model_len=config.max_model_len,
    )


def three_buffers(model: ModelConfig, tokens: int, dtype: str, tp: int = 1) -> int:
    """Return the bytes of FlashDecoding++Next's three activation buffers
    (§5): [T, D], [T, D], [T, F / tp].
    """
    return tokens * (2 * model.hidden_size + model.widest_mlp // tp) * jnp.dtype(dtype).itemsize


def room(
    memory_bytes: int,
    fixed_bytes: int,
    token_bytes: float,
    activation_bytes: float,
    largest: Mapping[str, Need],
    smallest: Mapping[str, Need],
) -> dict[str, int]:
    """Return the tokens of KV that one device of `memory_bytes` holds, by the reserved temporary space.

    Args:
      fixed_bytes: weights, per-slot state and spare memory.
      token_bytes: KV bytes of a token.
      activation_bytes: bytes of a token in the three buffers.
      largest, smallest: memory needs of the programs of the largest bucket, and of a decode-only bucket.

    Returns:
      Tokens by reservation. whole_prompt: one sequence with its activations and KV, prefilled at once.
      summed: a step and a sampler. largest: the largest program. lent: the capacity while only small steps
      run, with the space of larger programs given to KV. none: no reservation.
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
    """Return the memory needs of each bucket's programs, and the fixed memory of the full model. config:
    resolved."""
    few, tp = dataclasses.replace(model, layers=model.layers[:layers]), mesh.shape[TP]
    found, state = [], 0
    for tokens in buckets:
        executor = abstract_executor(config, few, mesh, kernels, tokens)
        needs, state = executor.compiler.temporary_needs(tokens), executor.state_bytes()
        three = three_buffers(model, tokens, config.dtype, tp)
        found.append(
            {"tokens": tokens, "three_buffers": three, "together": together(needs.values())} | _plain(needs)
        )
        temporaries = ", ".join(f"{name} {need.temporary / MIB:.1f}" for name, need in needs.items())
        print(
            report.line(f"{tokens} tokens, MiB:", f"{temporaries}; three buffers {three / MIB:.1f}"),
            flush=True,
        )
    whole = abstract_executor(config, model, mesh, kernels, buckets[0])
    local = [(a.sharding.shard_shape(a.shape), a.dtype.itemsize) for a in jax.tree.leaves(whole.weights)]
    weights = sum(_size(shape) * itemsize for shape, itemsize in local)
    pages = page_bytes(page_groups(model, config.kv_cache_dtype, tp), config.block_size, tp)
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
    """Return `room` for devices of these sizes in GiB, and the number of 1536-token sequences."""
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
    """Run the command and return its report. Raises: ConfigError, CheckpointError, OSError."""
    f, config = flags.FLAGS, engine_config_from_flags()
    if not f.target_config:  # the engine's share of memory is fixed when JAX starts
        prepare_process(config)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    model = checkpoint.model_config
    config = resolve(with_stored_format(config, checkpoint), model)
    largest = config.max_num_batched_tokens
    assert largest is not None
    buckets = sorted({*map(int, f.buckets), largest})
    if buckets[-1] > largest or len(buckets) < 2:
        raise ConfigError(
            "buckets", f.buckets, f"steps of fewer tokens than max_num_batched_tokens={largest}"
        )
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
        with LLM.from_config(config) as llm:
            wait_until_compiled()  # then every program has run
            stats = jax.local_devices()[0].memory_stats() or {}
            result["observed"] = {
                name: stats.get(name) for name in ("bytes_limit", "bytes_in_use", "peak_bytes_in_use")
            }
            made = llm.executor
            stages = made.stages if isinstance(made, StagedExecutor) else (made,)
            result["observed"] |= {
                "reserved": max(stage.compiler.temporary_bytes() for stage in stages),
                "num_kv_pages": llm.executor.num_pages,
            }
    return result


def _hopper(config: EngineConfig, model: ModelConfig, device: str) -> KernelSet:
    """Return the kernel set of a Hopper device.

    device: the name in a target config, which ends in the memory type ("NVIDIA H200 141GB HBM3e"). A driver's
    name, which the device tables use, has no memory type.
    """
    return kernel_set_for(
        "gpu", "9.0", device=re.sub(r" \d+GB.*", "", device), **asked_of_kernels(config, model)
    )

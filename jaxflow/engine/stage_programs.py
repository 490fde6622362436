"""The executor of a pipeline stage: its programs, from settings and the shapes of weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxflow.config import EngineConfig, ModelConfig, Window
from jaxflow.engine.ahead_of_time import is_timed, untimed
from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.lowered_cache import open_lowered_programs
from jaxflow.engine.programs import Programs
from jaxflow.engine.start_times import StartTimes
from jaxflow.engine.step_plans import make_layouts, read_while_launched, stage_plan, uses_pdl
from jaxflow.model.op_registry import Context
from jaxflow.model.sampling import rows_at_once
from jaxflow.model.stage import Stage
from jaxflow.model.weights import Weights
from jaxflow.parallel.mesh import axis_of, expert_axis_of, of_several_processes, on_gpu, ranks_of
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import Plan
from pallas_kernels.kernel_set import HOPPER, KernelSet
from pallas_kernels.this_device import this_device

FEWEST_LAYERED = 8  # fewest layers of a model that runs one program a layer on a CPU
# XLA uses vectors of 256 bits by default. With 512 bits, the products of one row with bfloat16 or e4m3
# weights take about a fifth less CPU time. A CPU without such vectors runs two instructions for one.
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
# The settings that a step's programs depend on, the key of the cache of lowered programs. The others say
# where files are, or concern the weights' values and the host only.
PROGRAM_FIELDS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "num_redundant_experts",
    "max_model_len",
    "max_num_batched_tokens",
    "step_sizes",
    "max_num_seqs",
    "gpu_memory_utilization",
    "num_kv_pages",
    "kv_offloading_size",
    "plan",
    "kernels",
    "enforce_eager",
)


def program_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that a step's programs depend on. config: resolved."""
    return {name: getattr(config, name) for name in PROGRAM_FIELDS}


def make_context(
    config: EngineConfig,
    layers: ModelConfig,
    kernels: KernelSet,
    mesh: Mesh,
    windows: tuple[Window, ...] | None = None,
) -> Context:
    """Return the constants of the steps of a model, or of one pipeline stage. windows: see `Context`."""
    spread = expert_axis_of(mesh) if config.enable_expert_parallel else None
    return Context(layers, kernels, axis_of(mesh), windows=windows, expert_axis=spread)


def stage_names(model: ModelConfig, stages: Sequence[Stage], weights: Sequence[Any]) -> list[str]:
    """Return the name of each stage's programs. Stages whose programs differ in their devices only have one
    name, and so each program of them is lowered and compiled once.

    weights: the shapes of each stage, from `to_values`.
    """
    names: dict[str, str] = {}

    def name(stage: Stage, values: Any) -> str:
        made_of = repr((stage.embeds, stage.samples, stage.config(model).layers, values))
        return names.setdefault(made_of, f" of layers {stage.first} to {stage.stop}")

    if len(stages) == 1:
        return [""]
    return [name(stage, values) for stage, values in zip(stages, weights, strict=True)]


def make_stage(
    config: EngineConfig,
    model: ModelConfig,
    plans: Mapping[int, Sequence[Plan]],
    stage: Stage,
    mesh: Mesh,
    weights: Weights,
    kernels: KernelSet,
    is_own: bool,
    one: bool,
    graphs: Mapping[str, str] | None,
    memory: int,
    times: StartTimes,
    folder: Path | None = None,
    name: str = "",
) -> Executor:
    """Return the executor of one stage, without its KV cache.

    Args:
      is_own: `kernels` are the device's.
      one: a single decode has its own step.
      graphs: see `make_executor`.
      memory: bytes of a device; 0 if unknown.
      folder: of the lowered programs; None for the one in XLA's cache.
      name: of `stage_names`.
    """
    tp, ranks, layers = config.tensor_parallel_size, config.data_parallel_size, stage.config(model)
    assert config.max_num_seqs is not None and config.max_model_len is not None
    quantization = config.quantization
    hidden_bytes = jnp.dtype(config.dtype).itemsize * model.hidden_size
    named = {(tokens, plan.name): plan for tokens, several in plans.items() for plan in several}

    def plan_of(layout: StepLayout) -> Plan:
        # The step of a single decode is in no bucket.
        found = named.get((layout.tokens, layout.plan)) or sequential_plan(
            model, layout.tokens, tp, ranks=ranks
        )
        return found if stage.is_model else stage_plan(found, layers, tp)

    def early(layout: StepLayout) -> bool:
        read = read_while_launched(weights["layers"], model, layout.tokens)
        return layout.plan not in (graphs or {}) and uses_pdl(layout, kernels, mesh.size, read)

    def options_of(layout: StepLayout) -> dict[str, Any]:
        if not on_gpu():
            return CPU_OPTIONS
        alone = early(layout) or config.enforce_eager
        launched, plan = "streams" if alone else (graphs or {}).get(layout.plan), plan_of(layout)
        flags = xla_options(plan, tp, launched, hidden_bytes=hidden_bytes)
        return ({} if is_timed(plan, tp) else untimed_options(config)) | flags

    specs = jax.tree.map(lambda array: array.sharding.spec, weights)
    layouts = make_layouts(
        config, model, named.values(), decodes_alone=on_gpu() or config.enforce_eager, one=one
    )
    lowered = None
    if is_own:
        pdl = [layout.key for layout in layouts if early(layout)]
        made_of = program_settings(config), model, plans, graphs, memory, pdl, of_several_processes(mesh)
        lowered = open_lowered_programs(made_of, folder)
    return Executor(
        Programs(
            make_context(config, layers, kernels, mesh, None if stage.is_model else model.windows),
            mesh,
            specs,
            rows_at_once(memory, model.vocab_size),
            embeds=stage.embeds,
            samples=stage.samples,
        ),
        weights,
        layouts,
        lambda layout: compile_plan(
            plan_of(layout), layers, tp, ranks=ranks, quantized=quantization == "fp8", pdl=early(layout)
        ),
        options_of=options_of,
        options=untimed_options(config) if on_gpu() else CPU_OPTIONS,
        lowered=lowered,
        kv_dtype=jnp.dtype(config.kv_cache_dtype),
        max_model_len=config.max_model_len,
        defers=not on_gpu(),  # a GPU times kernels while it compiles, in memory that steps need
        is_layered=lambda layout: (
            ranks_of(mesh) == 1 and (config.enforce_eager or has_program_a_layer(plan_of(layout), layers))
        ),
        eager=config.enforce_eager,
        times=times,
        name=name,
    )


def untimed_options(config: EngineConfig) -> dict[str, Any]:
    """Return `untimed` of this process's GPU. With `enforce_eager`, GPUs without
    Mosaic kernels compile without timing, too.
    """
    return untimed(config.quantization, HOPPER if config.enforce_eager else this_device().capability)


def has_program_a_layer(plan: Plan, layers: ModelConfig) -> bool:
    """Return True if a step is compiled as one program a layer by default: on a CPU, for a model of many
    layers.

    A GPU replays the launches of a whole step, and other plans overlap operations of different layers.
    """
    return not on_gpu() and layers.num_layers >= FEWEST_LAYERED and is_sequential(plan)

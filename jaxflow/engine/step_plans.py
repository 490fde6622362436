"""The steps that an engine compiles: its token buckets, and the plans of each bucket."""

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path

import jax
import msgspec

from jaxflow.config import ConfigError, EngineConfig, ModelConfig, check_has_own_inputs
from jaxflow.engine.layout import StepLayout
from jaxflow.model.checkpoints.checkpoint import open_checkpoint, shipped_configs
from jaxflow.model.cost import DEVICES, Device, find_device
from jaxflow.model.op_registry import Weights
from jaxflow.model.stage_split import split_layers
from jaxflow.model.weights import EXPERT_LEAVES
from jaxflow.parallel.mesh import on_gpu
from jaxflow.pipeline.choice import Gain, is_sequential, portfolio
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import SHIPPED, Plan, PlanError, borders, fitting, load
from jaxflow.pipeline.program import graph_of
from pallas_kernels.cards import this_card
from pallas_kernels.gemm.api import HopperGemm, Product
from pallas_kernels.kernel_set import KernelSet
from pallas_kernels.this_device import this_device

log = logging.getLogger(__name__)
DENSE_LAUNCHES, MIXTURE_LAUNCHES = 8, 14  # kernels of a layer of a decode step
SHAPES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_experts",
)


def token_buckets(budget: int, *, sparse: bool, seqs: int = 0) -> tuple[int, ...]:
    """Return the token counts of the compiled steps, ascending; the last is the budget.

    They are the powers of two from 8, the sizes halfway between from 256, and `seqs` rounded up to a tile if
    it exceeds 512. Each size adds seconds to a first start and a tenth of a second to later ones. With a full
    waiting queue all steps have the budget's size; below saturation they have any size, and padding delays
    them.

    Args:
      sparse: only 1, 8, 64 and the budget, for a CPU, where compiling costs more than padding.
      seqs: maximum number of sequences. A step in which all of them decode is frequent, and powers of two
        would pad it by up to half: 560 decodes by 40 % of the GEMM rows.
    """
    sizes = (
        {1, 8, 64}
        if sparse
        else {2**i for i in range(3, budget.bit_length())} | {3 * 2**i for i in range(7, budget.bit_length())}
    )
    sizes |= {seqs + -seqs % 64} if seqs > 512 and not sparse else set()
    return (*sorted(size for size in sizes if size < budget), budget)


def step_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Return the configured step sizes and the budget, or `token_buckets`. config: resolved.

    With `enforce_eager` there is the budget only, and `make_layouts` adds two sizes for decodes.

    Raises:
      ConfigError: for a size over the budget.
    """
    budget = config.max_num_batched_tokens
    assert budget is not None
    if config.enforce_eager:
        return (budget,)
    if config.step_sizes is None:
        return token_buckets(budget, sparse=not on_gpu(), seqs=config.max_num_seqs or 0)
    sizes = {int(size) for size in config.step_sizes.split(",")}
    if max(sizes) > budget:
        raise ConfigError("step_sizes", config.step_sizes, f"at most max_num_batched_tokens={budget}")
    return tuple(sorted(sizes | {budget}))


def products_dtype(config: EngineConfig) -> str:
    """Return the dtype of the engine's GEMMs. config: resolved."""
    return "float8_e4m3fn" if config.quantization == "fp8" else config.dtype


def named_plans(config: EngineConfig, model: ModelConfig) -> tuple[Plan, ...]:
    """Return the plans that `--plan` names: shipped plans, those of a folder, or the plan of a file.

    From a folder come the plans of this model, device, parallelism and dtypes. config: its dtypes are
    resolved. With plan=auto there are none.

    Raises:
      ConfigError: there is no plan.
      PlanError: a file is damaged, or its plan is for another model.
    """
    if config.plan in ("auto", "sequential"):
        return ()
    folder = SHIPPED if config.plan == "searched" else Path(config.plan)
    if not folder.exists():
        raise ConfigError(
            "plan", config.plan, "auto, sequential, searched, or an existing plan file or folder of plans"
        )
    single = config.plan != "searched" and not folder.is_dir()
    found = (load(folder),) if single else _made_for(folder, config, model)
    for plan in found:
        _check(plan, config, model)
        if plan.name == "sequential" and not is_sequential(plan):
            raise PlanError(
                plan.name, "a name of its own: this plan cuts its steps, or has streams or sums of its own"
            )
    if not found:
        device, tp, ranks = this_device().name, config.tensor_parallel_size, config.data_parallel_size
        devices = f"{tp} x {device}" if ranks == 1 else f"{ranks} ranks of {tp} x {device}"
        kind = f"{config.model} on {devices}, {products_dtype(config)} over a {config.kv_cache_dtype} cache"
        where = "is shipped" if config.plan == "searched" else "is in that folder"
        raise ConfigError(
            "plan",
            config.plan,
            f"auto, sequential, a plan file or a folder of plans: no plan for {kind} {where}",
        )
    return found


def _check(plan: Plan, config: EngineConfig, model: ModelConfig) -> None:
    """Compile a plan, so that a wrong plan is refused before the weights are read, even an unused one.

    Raises:
      PlanError: naming the plan, and its nano-op or its stages.
    """
    number = config.pipeline_parallel_size
    if len(plan.stages or (model.num_layers,)) != number:
        raise PlanError(
            plan.name,
            f"stages={list(plan.stages)}: a plan of pipeline_parallel_size={number} is accepted "
            f"(`python -m search plan --pipeline_parallel_size {number}`)",
        )
    if plan.stages and (min(plan.stages) < 1 or sum(plan.stages) != model.num_layers):
        accepted = f"numbers above 0 with the sum {model.num_layers}, the model's layers, are accepted"
        raise PlanError(plan.name, f"stages={list(plan.stages)}: {accepted}")
    tp, ranks = config.tensor_parallel_size, config.data_parallel_size
    is_ranked = any(nano.op == "expert_dispatch" for nano in plan.nano_ops)
    if is_ranked != (ranks > 1):
        accepted = "a plan with expert_dispatch" if ranks > 1 else "a plan without expert_dispatch"
        raise PlanError(plan.name, f"data_parallel_size={ranks}: {accepted} is accepted")
    try:
        compile_plan(plan, model, tp, ranks=ranks, quantized=config.quantization == "fp8")
    except PlanError as error:
        if error.entry == plan.name:
            raise
        raise PlanError(plan.name, str(error)) from error


def _made_for(folder: Path, config: EngineConfig, model: ModelConfig) -> tuple[Plan, ...]:
    """Return a folder's plans for the model's name, or without those for a shipped model of equal shapes."""
    kind = (
        this_device().name,
        config.parallel,
        products_dtype(config),
        config.kv_cache_dtype,
    )
    of_kind = [(plan.target.model, plan) for plan in fitting(folder, None, *kind) if plan.target]
    by_name = tuple(plan for name, plan in of_kind if Path(name).name == Path(config.model).name)
    if by_name or not of_kind:
        return by_name
    names = {name for name, _ in of_kind} & set(shipped_configs())
    alike = next((name for name in sorted(names) if same_shapes(name, model)), None)
    return tuple(plan for name, plan in of_kind if name == alike)


def same_shapes(name: str, model: ModelConfig) -> bool:
    """Return True if a shipped config has the shapes of a model."""
    config = open_checkpoint(name, load_format="dummy").model_config
    return all(getattr(config, field) == getattr(model, field) for field in SHAPES)


def default_plan(config: EngineConfig, model: ModelConfig) -> str:
    """Return the plan setting of plan=auto: searched if a shipped plan is sure to gain, else sequential.

    No shipped plan was measured with attention spans or data-parallel ranks.
    config: resolved except for the plan.
    """
    if model.span_classes or config.data_parallel_size > 1 or config.enforce_eager:
        return "sequential"
    budget = config.max_num_batched_tokens or 0
    return "searched" if any(plan.tokens <= budget for plan in _sure_plans(config, model)) else "sequential"


def _sure_plans(config: EngineConfig, model: ModelConfig) -> tuple[Plan, ...]:
    """Return the shipped plans that are sure to gain in some step."""
    shipped = _made_for(SHIPPED, config, model)
    return tuple(plan for plan in shipped if plan.predictions and Gain.of(plan.predictions).ever)


def stage_plan(plan: Plan, layers: ModelConfig, tp: int) -> Plan:
    """Return a plan without the nano-ops that no layer of a pipeline stage has.

    layers: the model's config with the layers of the stage only.
    """
    known = {op.name for ops in graph_of(plan, layers, tp).layers for op in ops}
    return msgspec.structs.replace(plan, nano_ops=tuple(n for n in plan.nano_ops if n.op in known))


def stage_layers(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage. config: resolved.

    The named plans' stages are used. Without a named plan the stages take equal time by the cost model.

    Raises:
      ConfigError: for more stages than layers, and for plans with different stages.
    """
    if config.pipeline_parallel_size == 1:
        return (model.num_layers,)
    stages = config.pipeline_parallel_size
    check_has_own_inputs(model, "pipeline_parallel_size", stages, "a pipeline stage")
    named = {plan.stages for plan in named_plans(config, model)}
    if len(named) > 1:
        raise ConfigError("plan", config.plan, f"plans with the same stages: these have {sorted(named)}")
    if named:
        return named.pop()
    tokens = config.max_num_batched_tokens or 1
    return split_layers(
        model, config.pipeline_parallel_size, config.tensor_parallel_size, cost_device().rates, tokens
    )


def cost_device() -> Device:
    """Return the cost model's device for this machine: an H200 where the device has no card.

    The split of a model into stages needs only the ratios of the rates.
    """
    return find_device(this_device().name) or DEVICES["H200"]


def largest_step(config: EngineConfig, model: ModelConfig) -> int | None:
    """Return the tokens of the largest plan that decides the step size; None without one.

    Named plans do, and the shipped sequential plan, which is for the best step size of the device. With
    plan=auto, so do shipped plans that are sure to gain, because they gain only in steps of their size. A
    sequential plan does not count if it has fewer tokens than there are sequences. Without max_num_seqs, the
    step decides the number of sequences. config: its dtypes are resolved.

    Raises:
      ConfigError, PlanError: as `named_plans`.
    """
    plans, seqs = named_plans(config, model), config.max_num_seqs or 0
    if config.plan in ("auto", "sequential"):
        plans = tuple(plan for plan in _made_for(SHIPPED, config, model) if is_sequential(plan))
    if config.plan == "auto" and not (model.span_classes or config.enforce_eager):
        plans += _sure_plans(config, model)
    return max(
        (plan.tokens for plan in plans if plan.tokens >= seqs or not is_sequential(plan)), default=None
    )


def choose_plans(config: EngineConfig, model: ModelConfig) -> dict[int, tuple[Plan, ...]]:
    """Return the plans of each bucket. config: resolved.

    A bucket has the named plans of its size. It also has the sequential plan, unless a named plan has no
    prediction to compare (`jaxflow.pipeline.choice`). A named sequential plan means that no other is faster.

    Raises:
      ConfigError: for plans that do not exist or do not fit.
      PlanError: for plans that cannot be read, and for two plans of one name.
    """
    budget, tp = config.max_num_batched_tokens, config.tensor_parallel_size
    assert budget is not None
    named = named_plans(config, model)
    given = tuple(plan for plan in named if not is_sequential(plan))
    if named and not given:
        log.info(
            "plan: of the plans tried for this model on this device none is faster than the "
            "sequential step, which runs"
        )
    too_large = [plan for plan in given if plan.tokens > budget]
    if config.plan == "searched" and len(too_large) < len(given):  # one of those shipped will do
        given, too_large = tuple(plan for plan in given if plan.tokens <= budget), []
    if too_large:
        raise ConfigError(
            "max_num_batched_tokens",
            budget,
            f"at least {too_large[0].tokens}, which plan {too_large[0].name!r} is for",
        )
    ranks = config.data_parallel_size
    found = portfolio(
        given, step_sizes(config), lambda tokens: sequential_plan(model, tokens, tp, ranks=ranks)
    )
    for tokens, several in found.items():
        for plan in (plan for plan in several if not is_sequential(plan)):
            when = "always" if plan.predictions is None else "where it is sure to gain"
            log.info(
                "plan: steps of %d tokens run %r, %s (--plan sequential: never)", tokens, plan.name, when
            )
    for plan in (plan for plan in given if plan not in found[plan.tokens]):
        log.info(
            "plan: %r is sure to gain nowhere: steps of %d tokens are sequential", plan.name, plan.tokens
        )
    return found


def uses_pdl(layout: StepLayout, kernels: KernelSet, tp: int, layer_bytes: float) -> bool:
    """Return True if a step uses programmatic dependent launch instead of a CUDA graph.

    Steps of a few decodes on one device do: their GEMMs read weights, and the reads begin while the kernel
    before ends. layer_bytes: `read_while_launched`.
    """
    card = this_card()
    return (
        layout.decodes
        and layout.tokens <= card.pdl_max_decodes
        and tp == 1
        and layer_bytes >= card.pdl_min_layer_bytes
        and kernels.supports_pdl
    )


def read_while_launched(layers: Iterable[Weights], config: ModelConfig, tokens: int) -> float:
    """Return the bytes of weights that a step reads while the host launches the kernels of a dense layer.

    The layer with the fewest bytes counts. A mixture's step reads only the experts that its tokens choose.
    Its layer also has `MIXTURE_LAUNCHES` kernels in place of `DENSE_LAUNCHES`.

    Args:
      layers: the weights of each layer, as arrays or as their shapes.
      tokens: of the step; they choose experts evenly.
    """

    def read(layer: Weights) -> float:
        size = {name: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(w)) for name, w in layer.items()}
        experts = sum(size.get(name, 0) for name in EXPERT_LEAVES)
        if not experts:
            return sum(size.values())
        touched = 1 - (1 - config.experts_per_token / config.num_experts) ** tokens
        return (sum(size.values()) - experts * (1 - touched)) * DENSE_LAUNCHES / MIXTURE_LAUNCHES

    return min(read(layer) for layer in layers)


def one_alone(products: Iterable[Product], kernels: KernelSet) -> bool:
    """Return True if a single decode has its own step, because its GEMMs are faster without tensor cores."""
    gemm = kernels.gemm
    return isinstance(gemm, HopperGemm) and any(
        gemm.choose(dataclasses.replace(p, rows=1)).kernel == "fma" for p in products
    )


def eager_decodes(seqs: int, budget: int) -> tuple[int, ...]:
    """Return the sizes of the steps of decodes alone with `enforce_eager`, ascending: a small one, and one
    that holds all sequences.

    On a GPU a step of 64 decodes reads the weights about as fast as a step of one.
    budget: most tokens of a step.
    """
    every = min(seqs + -seqs % 64, budget)
    return tuple(sorted({min(64 if on_gpu() else 1, every), every}))


def make_layouts(
    config: EngineConfig, model: ModelConfig, plans: Iterable[Plan], *, decodes_alone: bool, one: bool = False
) -> list[StepLayout]:
    """Return the layouts of the plans' steps. config: resolved.

    Args:
      decodes_alone: add layouts without chunks for small sequential steps, where an idle chunk kernel costs
        1.5 to 3 %. In larger steps it costs less than the start-up time of their programs.
      one: with `decodes_alone`, also add a layout of a single decode.
    """
    seqs = config.max_num_seqs
    assert seqs is not None
    layouts = []
    for plan in plans:
        gain = None if plan.predictions is None else Gain.of(plan.predictions)
        shape = (
            plan.tokens,
            min(plan.tokens, seqs),
            seqs,
            config.block_size,
            borders(plan),
            len(model.windows),
        )
        layouts.append(StepLayout(*shape, plan=plan.name, gain=gain))
    sequential = sorted(
        (layout for layout in layouts if layout.plan == "sequential"), key=lambda layout: layout.tokens
    )
    if config.enforce_eager:
        (largest,) = layouts
        sizes = eager_decodes(seqs, largest.tokens)
        return layouts + [
            dataclasses.replace(
                largest, tokens=size, rows=min(size, seqs), decodes=True, full=size == max(sizes)
            )
            for size in sizes
        ]
    smaller = [0, *(layout.tokens for layout in sequential)]
    few = [
        layout
        for layout, below in zip(sequential, smaller, strict=False)
        if below < min(seqs, this_card().decode_only_max_decodes)
    ]
    if one and sequential and sequential[0].tokens > 1:
        few.insert(0, dataclasses.replace(sequential[0], tokens=1, rows=1))
    return (
        layouts + [dataclasses.replace(layout, decodes=True) for layout in few] if decodes_alone else layouts
    )

"""Which steps an engine compiles: its token buckets, and the plans of each."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.layout import StepLayout
from jaxflow.pipeline.choice import Gain, portfolio
from jaxflow.pipeline.handmade import sequential_plan
from jaxflow.pipeline.plan import SHIPPED, Plan, borders, fitting, load

FEW = 16  # decodes of a step that has a program without chunks


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def token_buckets(budget: int, *, few: bool, seqs: int = 0) -> tuple[int, ...]:
    """Sizes of a step that are compiled: powers of two from 8 on, 384, and the budget; and `seqs`, if over 512, in whole tiles.

    Each costs seconds of start-up, since kernels are lowered and compiled one at a time. Under load steps are filled to the
    budget; those between 512 and it hold chunks, which the scheduler cuts to a size if little is over.
    `few`: only 8 and 64 and the budget, where compiling costs more than padding (CPU). `seqs`: the most sequences of a step. All
    of them decoding alone is a usual step, which above 512 would be padded by up to half: of 560 decodes, 40 % of the products.
    """
    sizes = {8, 64} if few else {2**i for i in range(3, budget.bit_length())} | {384}
    sizes |= {seqs + -seqs % 64} if seqs > 512 and not few else set()
    return (*sorted(size for size in sizes if size < budget), budget)


def products_dtype(config: EngineConfig) -> str:
    """What the engine's products are of. config: resolved."""
    return "float8_e4m3fn" if config.quantization == "fp8" else config.dtype


def named_plans(config: EngineConfig) -> tuple[Plan, ...]:
    """The plans that `--plan` names, the sequential one not among them: those shipped, of a folder, or of one file.

    Of a folder, those that were searched for this model, device, parallelism and dtypes. config: resolved, at least its dtypes.

    Raises: ConfigError where there is none. PlanError for a file that cannot be read.
    """
    if config.plan == "sequential":
        return ()
    folder = SHIPPED if config.plan == "searched" else Path(config.plan)
    if config.plan != "searched" and not folder.is_dir():
        return (load(folder),)
    device, tp = jax.devices()[0].device_kind, config.tensor_parallel_size
    found = fitting(folder, config.model, device, tp, products_dtype(config), config.kv_cache_dtype)
    if not found:
        kind = f"{config.model} on {tp} x {device}, {products_dtype(config)} over a {config.kv_cache_dtype} cache"
        where = "is shipped" if config.plan == "searched" else "is in that folder"
        raise ConfigError("plan", config.plan, f"sequential, a plan file or a folder of plans: no plan for {kind} {where}")
    return found


def largest_step(config: EngineConfig) -> int | None:
    """Tokens of the largest step that the named plans are for; None without any. Raises: as `named_plans`."""
    return max((plan.tokens for plan in named_plans(config)), default=None)


def choose_plans(config: EngineConfig, model: ModelConfig) -> dict[int, tuple[Plan, ...]]:
    """The plans of each bucket: the named ones at the tokens they are for, the sequential one everywhere else and beside those
    that can be compared with it (`jaxflow.pipeline.choice`). config: resolved.

    Raises: ConfigError for plans that do not exist or do not fit. PlanError for those that cannot be read or told apart.
    """
    budget, tp = config.max_num_batched_tokens, config.tensor_parallel_size
    assert budget is not None
    given = named_plans(config)
    too_large = [plan for plan in given if plan.tokens > budget]
    if too_large:
        raise ConfigError("max_num_batched_tokens", budget, f"at least {too_large[0].tokens}, which plan {too_large[0].name!r} is for")
    sizes = token_buckets(budget, few=not on_gpu(), seqs=config.max_num_seqs or 0)
    return portfolio(given, sizes, lambda tokens: sequential_plan(model, tokens, tp))


def make_layouts(config: EngineConfig, model: ModelConfig, plans: Iterable[Plan], *, decodes_alone: bool) -> list[StepLayout]:
    """The fixed shapes of the plans' steps. config: resolved.

    decodes_alone: also those of the sequential plan's steps of few decodes alone: there the kernel that would find no chunk costs
    most, and in larger ones less than its programs' start-up is worth.
    """
    seqs = config.max_num_seqs
    assert seqs is not None
    layouts = []
    for plan in plans:
        gain = None if plan.predictions is None else Gain.of(plan.predictions)
        shape = (plan.tokens, min(plan.tokens, seqs), seqs, config.block_size, borders(plan), len(model.windows))
        layouts.append(StepLayout(*shape, plan=plan.name, gain=gain))
    sequential = sorted((layout for layout in layouts if layout.plan == "sequential"), key=lambda layout: layout.tokens)
    smaller = [0, *(layout.tokens for layout in sequential)]
    few = [layout for layout, below in zip(sequential, smaller, strict=False) if below < min(seqs, FEW)]
    return layouts + [dataclasses.replace(layout, decodes=True) for layout in few] if decodes_alone else layouts

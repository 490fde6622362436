"""The test bed of plans: an executor with several plans compiled, and the steps of workloads on it."""

import dataclasses
import itertools
import sys
from collections.abc import Collection, Iterable, Sequence

import msgspec
from absl import flags

from jaxflow.bench.plans.steady import (
    SteadyStep,
    StepWorkload,
    average_step,
    fill_cache,
    fitting_step,
    page_appends,
    rows_of,
    step_work,
)
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.loop_start import check_one_rank
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import named_plans
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import Plan, digest
from jaxflow.pipeline.streams import GRAPHS

USUAL = "usual"  # value of --graphs: the engine's own choice


@dataclasses.dataclass(frozen=True)
class Bed:
    """The executor, plans and settings that every measurement shares."""

    config: EngineConfig  # resolved
    model: ModelConfig
    executor: Executor
    variants: dict[str, tuple[Plan, str | None]]  # by name: a plan and its launch method
    full_sizes: frozenset[int]  # sizes of steps filled with prefill; decode-only steps have separate sizes

    def step(self, workload: StepWorkload, tokens: int) -> Composition:
        """Return the workload's step of at most `tokens` tokens, as large as the cache permits.

        Raises: ConfigError for a cache too small for any step.
        """
        whole = [
            pages
            for pages, window in zip(self.executor.num_pages, self.model.windows, strict=True)
            if window is None
        ]
        pages = min(whole or self.executor.num_pages)
        return fitting_step(
            workload, tokens, rows=self.executor.slots, pages=pages, page_size=self.config.block_size
        )

    def names(self, workload: StepWorkload) -> list[str]:
        """Return the names of the plan variants that run the workload."""
        wanted = sizes_of(workload, self.full_sizes, {plan.tokens for plan, _ in self.variants.values()})
        return [name for name, (plan, _) in self.variants.items() if plan.tokens in wanted]

    def ready(self, workload: StepWorkload) -> dict[str, tuple[SteadyStep, Composition]]:
        """Return the workload's step under each plan, with its pages in the page table.

        All steps use the pages of the largest step. Raises: ConfigError for a cache that is too small.
        """
        found, most = {}, None
        for name in self.names(workload):
            tokens = self.variants[name][0].tokens
            (layout,) = (layout for layout in self.executor.layouts[tokens] if layout.plan == name)
            step = self.step(workload, tokens)
            work = step_work(workload, step, layout, self.model.vocab_size)
            found[name] = SteadyStep.of(self.executor, layout, work), step
            if most is None or work.num_tokens > most[0].num_tokens:
                most = work, found[name][0]
        assert most is not None
        most[1].place(
            page_appends(most[0], self.executor.num_pages, self.model.windows, self.config.block_size)
        )
        return found


def bed_of_flags(workloads: Sequence[StepWorkload], graphs: Sequence[str], flag: str = "workloads") -> Bed:
    """Return the bed for the flags of `options.define_bed`.

    flag: the name of the workloads' flag, for errors. Raises: ConfigError, PlanError, CheckpointError.
    """
    f = flags.FLAGS
    if not all(text.isdecimal() and int(text) for text in f.tokens):
        raise ConfigError("tokens", ",".join(f.tokens), "comma-separated numbers of tokens")
    config = engine_config_from_flags()
    plans = [*f.plans, *([config.plan] if config.plan not in ("auto", "sequential") else [])]
    return make_bed(
        dataclasses.replace(config, plan="sequential"),
        plans,
        [int(text) for text in f.tokens],
        workloads,
        graphs,
        flag,
    )


def make_bed(
    config: EngineConfig,
    plans: Sequence[str],
    tokens: Sequence[int],
    workloads: Sequence[StepWorkload],
    graphs: Sequence[str],
    flag: str = "workloads",
) -> Bed:
    """Load the model, compile every plan once, and fill the cache.

    flag: the name of the workloads' flag, for errors. Raises: ConfigError, PlanError, CheckpointError.
    """
    check_one_rank(config)
    prepare_process(config)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    model, tp = checkpoint.model_config, config.tensor_parallel_size
    check_lengths(workloads, flag, config, model)
    config = with_stored_format(config, checkpoint)
    given = given_plans(plans, resolve(dataclasses.replace(config, max_num_seqs=1), model), model)
    full = {*tokens, *(plan.tokens for plan in given)}
    if not full and any(workload.decodes is None for workload in workloads):
        full = {resolve(dataclasses.replace(config, max_num_seqs=1), model).max_num_batched_tokens or 0}
    every = sorted(full | {max(8, workload.decodes) for workload in workloads if workload.decodes})
    longest = max(workload.keys for workload in workloads) + 1
    rows = max(1, *(_rows(workload, max(every), config) for workload in workloads))
    config = dataclasses.replace(
        config,
        max_num_batched_tokens=max(every),
        max_num_seqs=min(config.max_num_seqs or rows, max(every)),
        max_model_len=config.max_model_len or min(longest, model.max_position),
    )
    config = resolve(config, model)
    assert config.max_num_seqs is not None
    for workload in workloads:  # rejects limits that are known to be too small before the weights are read
        for size in sizes_of(workload, full, every):
            fitting_step(
                workload,
                size,
                rows=config.max_num_seqs,
                pages=config.num_kv_pages or sys.maxsize,
                page_size=config.block_size,
            )
    variants = plan_variants([*(sequential_plan(model, size, tp) for size in every), *given], graphs)
    named: dict[int, list[Plan]] = {}
    for name, (plan, _) in variants.items():
        named.setdefault(plan.tokens, []).append(msgspec.structs.replace(plan, name=name))
    launched = {name: launch for name, (_, launch) in variants.items() if launch}
    executor = make_executor(config, checkpoint, named, graphs=launched, progress=sys.stderr.isatty())
    executor.warm_up()
    fill_cache(executor)
    return Bed(config, model, executor, variants, frozenset(full))


def given_plans(paths: Iterable[str], config: EngineConfig, model: ModelConfig) -> list[Plan]:
    """Return the plans of files and folders, each once and with a distinct name, without sequential plans.

    Sequential plans always run. From folders, only plans for this model, device, parallelism and dtypes are
    taken.

    Raises: ConfigError, also for two plans with the same name and size, which a report could not distinguish;
    PlanError.
    """
    found: dict[tuple[str, int], Plan] = {}
    for path in paths:
        for plan in named_plans(dataclasses.replace(config, plan=path), model):
            if not is_sequential(plan):
                same = found.setdefault((plan.name, plan.tokens), plan)
                if digest(same) != digest(plan):
                    raise ConfigError(
                        "plans",
                        path,
                        f"plans with distinct names; another plan also has the name {plan.name!r}",
                    )
    return list(found.values())


def plan_variants(plans: Sequence[Plan], graphs: Sequence[str]) -> dict[str, tuple[Plan, str | None]]:
    """Return, by name, each plan with each launch method.

    Raises: ConfigError for no launch method, and for an unknown launch method.
    """
    if (unknown := [launch for launch in graphs if launch not in (USUAL, *GRAPHS)]) or not graphs:
        raise ConfigError("graphs", ",".join(unknown), f"one or more of {', '.join((USUAL, *GRAPHS))}")
    several = len(graphs) > 1
    return {
        f"{plan.name}, {plan.tokens} tokens" + (f" [{launch}]" if several else ""): (
            plan,
            None if launch == USUAL else launch,
        )
        for plan, launch in itertools.product(plans, graphs)
    }


def check_lengths(
    workloads: Sequence[StepWorkload], flag: str, config: EngineConfig, model: ModelConfig
) -> None:
    """Check that every workload fits the page table.

    The page table drops entries beyond its end, so a longer step would read other keys than the report names.

    Raises: ConfigError.
    """
    for workload in workloads:
        if workload.keys > model.max_position:
            raise ConfigError(
                flag,
                workload.name,
                f"at most {model.max_position} tokens per sequence, the maximum of {config.model}",
            )
        if config.max_model_len and workload.keys > config.max_model_len:
            raise ConfigError(
                "max_model_len",
                config.max_model_len,
                f"at least {workload.keys}, for {flag}={workload.name}",
            )


def sizes_of(workload: StepWorkload, full: Collection[int], known: Collection[int]) -> set[int]:
    """Return the step sizes for the workload. Decode-only workloads use the smallest size that holds the
    decodes."""
    return (
        set(full) if workload.decodes is None else {min(size for size in known if size >= workload.decodes)}
    )


def _rows(workload: StepWorkload, tokens: int, config: EngineConfig) -> int:
    """Return the number of rows of a full step."""
    return rows_of(
        average_step(workload, tokens, most_rows=tokens, kv_tokens=sys.maxsize, page_size=config.block_size)
    )

r"""Replace a plan's predicted gains with gains measured on a GPU.

  python -m jaxflow.bench plans --model llama-3.1-8b --plans plans --workloads 1024/512,512/1024 \
      --output_json report.json
  python -m search correct --plan plans/1024-512.json --report report.json --out corrected.json

Plan names repeat. A report's row belongs to the plan if the row's digest equals the plan's
(`jaxflow.pipeline.plan.digest`). A row with the plan's name and another digest is refused. A row without a
digest, from an old report, is refused unless --by_name is given.

A plan without predictions, or any plan with --measured_only, gets a table of measured times. Between two
measured step shapes the engine interpolates; beyond them it takes the nearest. The plan's target becomes the
reports' model, device, parallelism and dtypes, which must agree (--model: another model of the same shapes).

A plan with predictions is corrected only by reports of its target, and never by a report of a model with
fewer layers (`num_layers`). Its predicted gains over the sequential step are multiplied by the geometric
mean of measured over predicted gain, since similar steps have similar errors. The new margin is the largest
excess of a corrected gain over a measured one, plus the spread of the measurements.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from absl import flags

from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, EngineConfig, ParallelConfig
from jaxflow.engine.step_plans import SHAPES, products_dtype
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint, shipped_configs
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.plan import Plan, Predictions, Target, digest, load, save
from pallas_kernels.cards import card_of


class MeasuredGain(msgspec.Struct, frozen=True):
    """A step shape at which a plan was measured in turns with the sequential plan: the gain, and its spread.

    sequential_s: the time of the sequential step. prefill_tokens: the prefill next to the decodes.
    """

    decode_tokens: int
    mean_context_tokens: float
    gain: float
    spread: float
    sequential_s: float = 1.0
    prefill_tokens: int = 0


class PlansReportRow(msgspec.Struct, frozen=True):
    """The fields that `correct` reads of a row of `bench plans`: one plan's steps of one workload.

    step_ms: the time of a step; spread: its relative spread. digest: of the plan; None in an old report.
    """

    workload: str
    plan: str
    tokens: int
    sequential: bool
    decode_tokens: int
    prefill_tokens: int
    mean_context_tokens: float
    step_ms: Annotated[float, msgspec.Meta(gt=0)]
    spread: Annotated[float, msgspec.Meta(ge=0)]
    graphs: str | None = None
    digest: str | None = None


class MeasuredEngine(msgspec.Struct, frozen=True):
    """The resolved engine settings that identify a measurement."""

    model: str
    tensor_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    quantization: str | None = None
    enable_expert_parallel: bool = False


class PlansReportFile(msgspec.Struct, frozen=True):
    """The fields that `correct` reads of a report.

    num_layers: the layers measured; None: not recorded, all assumed.
    """

    plans: tuple[PlansReportRow, ...]
    device: str
    engine_config: MeasuredEngine
    num_layers: int | None = None

    @property
    def kind(self) -> tuple[str, str, ParallelConfig, str, str]:
        """Return the arguments of `Target.fits`."""
        ran = self.engine_config
        config = EngineConfig(
            ran.model,
            dtype=ran.dtype,
            quantization=ran.quantization,
            tensor_parallel_size=ran.tensor_parallel_size,
            enable_expert_parallel=ran.enable_expert_parallel,
        )
        products = products_dtype(config)
        return Path(ran.model).name, self.device, config.parallel, products, ran.kv_cache_dtype


def define_flags() -> None:
    flags.DEFINE_string("plan", None, "A plan's file.")
    flags.DEFINE_list("report", [], "Reports of `bench plans` with measurements of the plan.")
    flags.DEFINE_string(
        "model", None, "The model that a plan without predictions is offered to; default: the reports'."
    )
    flags.DEFINE_boolean("measured_only", False, "Write measured times only, without the predictions.")
    flags.DEFINE_boolean(
        "by_name",
        False,
        "Match rows without digests by the plan's name and tokens. Use this only if the measured plan of "
        "that name equals the file: the name defines the plan, or the file has not changed since the "
        "measurement.",
    )
    flags.DEFINE_string("out", None, "Output file of the corrected plan.")


def run() -> None:
    """Run the command."""
    f = flags.FLAGS
    for name in ("plan", "report", "out"):
        if not getattr(f, name):
            raise ConfigError(name, getattr(f, name), "a file")
    check_outputs("out")
    plan = load(f.plan)
    if f.measured_only:
        plan = msgspec.structs.replace(plan, predictions=None)
    reports = {path: read_report(path) for path in f.report}
    check_kind(plan, reports, f.model)
    found = [
        point for path, report in reports.items() for point in points(plan, report, path, by_name=f.by_name)
    ]
    if not found:
        raise ConfigError(
            "report",
            ",".join(f.report),
            f"a report of plan {plan.name!r} for {plan.tokens} tokens and of the sequential plan",
        )
    first = next(iter(reports.values()))
    made = (
        corrected(plan, found)
        if plan.predictions
        else as_measured(plan, found, target(first, f.model, found))
    )
    save(made, f.out)
    assert made.predictions is not None
    after = Gain.of(made.predictions)
    for point in found:
        at = point.decode_tokens, point.mean_context_tokens
        before = f"{Gain.of(plan.predictions).at(*at):.3f}" if plan.predictions else "nothing"
        gains = (
            f"measured {point.gain:.3f}, predicted {before}, corrected {after.at(*at):.3f}, sure "
            f"{after.sure(*at):.3f}"
        )
        print(f"{point.decode_tokens} decodes of {point.mean_context_tokens:.0f} keys: {gains}")
    print(f"{f.out}: margin {made.predictions.margin:.3f}")


def read_report(path: str) -> PlansReportFile:
    """Read a report.

    Raises: ConfigError with the file, and the field that `bench plans` writes differently.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=PlansReportFile)
    except OSError as error:
        raise ConfigError("report", path, f"a file of `bench plans`: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("report", path, f"what `bench plans` writes: {error}") from error


def check_kind(plan: Plan, reports: Mapping[str, PlansReportFile], model: str | None) -> None:
    """Check that reports, by file, match the target of a plan with predictions, or else the first report.

    model: the value of --model; a plan with predictions keeps its model.

    Raises: ConfigError for a report of another model, device, parallelism or dtype or of fewer layers, and
    for another model. CheckpointError for a missing model.
    """
    wanted = (plan.predictions and plan.target) or Target(*next(iter(reports.values())).kind, 0, 0, 0)
    name = Path(wanted.model).name
    if plan.predictions and model is not None:
        open_checkpoint(model, load_format="dummy")
        if Path(model).name != name:
            raise ConfigError(
                "model",
                model,
                f"{name}, the model of the search; with --measured_only, another model of equal shapes",
            )
    for path, report in reports.items():
        if not wanted.fits(*report.kind):
            kind = (
                wanted.model,
                wanted.device,
                wanted.parallel,
                wanted.dtype,
                wanted.kv_cache_dtype,
            )
            raise ConfigError(
                "report", path, f"a report of {_kind_text(*kind)}: this one is of {_kind_text(*report.kind)}"
            )
        if report.num_layers is not None:
            whole = _layers(name, model or report.engine_config.model)
            if report.num_layers != whole:
                raise ConfigError(
                    "report",
                    path,
                    f"a report of all {whole} layers of {name}: this one's num_layers is {report.num_layers}",
                )


def _layers(name: str, place: str) -> int:
    """Return the layers of a model that is shipped, or found here.

    Raises: ConfigError for any other model.
    """
    try:
        return open_checkpoint(
            name if name in shipped_configs() else place, load_format="dummy"
        ).model_config.num_layers
    except CheckpointError as error:
        raise ConfigError(
            "model", place, f"where {name} is, whose layers the report's are compared with: {error}"
        ) from error


def _kind_text(model: str, device: str, parallel: ParallelConfig, dtype: str, kv_cache_dtype: str) -> str:
    experts = ", experts spread whole" if parallel.ep > 1 else ""
    return f"{model} on {parallel.tp} x {device}{experts}, {dtype} over a {kv_cache_dtype} cache"


def points(
    plan: Plan, report: PlansReportFile, path: str = "", *, by_name: bool = False
) -> list[MeasuredGain]:
    """Return the measured gains of a plan in a report of `bench plans`, from the file `path`.

    A gain compares the plan with the sequential plan of as many tokens, both launched as usual.

    Raises: ConfigError for rows with the plan's name that belong to another plan, or have no digest without
    `by_name`.
    """
    rows = [row for row in report.plans if row.tokens == plan.tokens and row.graphs in (None, "usual")]
    alone = {row.workload: row for row in rows if row.sequential}
    pairs = [
        (row, alone[row.workload]) for row in _rows_of(plan, rows, path, by_name) if row.workload in alone
    ]
    return [
        MeasuredGain(
            row.decode_tokens,
            row.mean_context_tokens,
            sequential.step_ms / row.step_ms,
            row.spread + sequential.spread,
            sequential.step_ms / 1e3,
            row.prefill_tokens,
        )
        for row, sequential in pairs
    ]


def _rows_of(plan: Plan, rows: Sequence[PlansReportRow], path: str, by_name: bool) -> list[PlansReportRow]:
    """Return the rows of the plan: by digest, or by name where no row has its digest."""
    own, name = digest(plan), f"{plan.name}, {plan.tokens} tokens"
    if same := [row for row in rows if row.digest == own]:
        return same
    named = [row for row in rows if row.plan.partition(" [")[0] == name]
    for row in named:
        if row.digest is not None:
            accepted = (
                f"a report of this plan, {plan.name!r} of digest {own}: the one measured as {row.plan!r} "
                f"has digest {row.digest}"
            )
            raise ConfigError("report", path, accepted)
        if not by_name:
            accepted = (
                f"a report whose rows have digests, or --by_name: its {row.plan!r} may be another plan "
                f"than this, of digest {own}"
            )
            raise ConfigError("report", path, accepted)
    return named


def corrected(plan: Plan, measured: Iterable[MeasuredGain]) -> Plan:
    """Return the plan with its predictions scaled to the measured gains.

    Raises: ConfigError for a plan without predictions.
    """
    if plan.predictions is None:
        raise ConfigError("plan", plan.name, "a plan with predictions, as `search plan` writes it")
    measured, before = tuple(measured), Gain.of(plan.predictions)
    ratios = [point.gain / before.at(point.decode_tokens, point.mean_context_tokens) for point in measured]
    factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
    too_good = max(factor / ratio - 1 for ratio in ratios)
    margin = max(0.0, too_good) + max(point.spread for point in measured)
    steps = tuple(tuple(seconds / factor for seconds in row) for row in plan.predictions.step_s)
    return msgspec.structs.replace(
        plan, predictions=msgspec.structs.replace(plan.predictions, step_s=steps, margin=margin)
    )


def as_measured(plan: Plan, measured: Iterable[MeasuredGain], offered: Target) -> Plan:
    """Return the plan with a table of measured times. At an unmeasured shape, the nearest context stands.

    Of several measurements at one shape the least gain stands. The margin is the largest spread, plus the
    difference that another start of the machine made.
    """
    points = tuple(measured)
    decodes, contexts = (
        sorted({p.decode_tokens for p in points}),
        sorted({round(p.mean_context_tokens) for p in points}),
    )

    def nearest(tokens: int, keys: int) -> MeasuredGain:
        return min(
            (p for p in points if p.decode_tokens == tokens),
            key=lambda p: (abs(p.mean_context_tokens - keys), p.gain),
        )

    grid = [[nearest(tokens, keys) for keys in contexts] for tokens in decodes]
    predictions = Predictions(
        tuple(decodes),
        tuple(contexts),
        tuple(tuple(p.sequential_s / p.gain for p in row) for row in grid),
        tuple(tuple(p.sequential_s for p in row) for row in grid),
        margin=max(p.spread for p in points) + card_of(offered.device).restart_margin[plan.sums],
    )
    return msgspec.structs.replace(plan, predictions=predictions, target=offered)


def target(report: PlansReportFile, model: str | None, measured: Sequence[MeasuredGain]) -> Target:
    """Return the target of a plan measured in such reports, at the shape with the most decodes.

    Raises: ConfigError if the model's shapes differ from the shapes of the report's model.
    """
    theirs, most = report.engine_config.model, max(measured, key=lambda point: point.decode_tokens)
    if model is not None:
        one, other = (open_checkpoint(name, load_format="dummy").model_config for name in (theirs, model))
        if different := [name for name in SHAPES if getattr(one, name) != getattr(other, name)]:
            raise ConfigError(
                "model", model, f"a model of {theirs}'s shapes: they differ in {', '.join(different)}"
            )
    name, device, parallel, dtype, kv_dtype = report.kind
    offered = Path(model).name if model else name
    return Target(
        offered,
        device,
        parallel,
        dtype,
        kv_dtype,
        most.decode_tokens,
        most.prefill_tokens,
        mean_context_tokens=round(most.mean_context_tokens),
    )

"""SARATHI's tables and figures of one device: decode cost, throughput by P : D, chunk sizes.

  python -m jaxflow.bench sarathi --engine --model llama-3.1-8b --load_format dummy --output_json sarathi.json
  python -m jaxflow.bench sarathi --model llama-13b --device "RTX A6000" --plot sarathi.png

With --engine the steps and the runs are those of this machine's engine. A step is timed back to back, as in
`bench plans`. A run goes through the scheduler and the loop. Every figure is the median of at least three
measurements. Without --engine the cost model gives the times, and no model is loaded. The paper's figures
stand beside.

--figures selects tables and figures. Each one prints as it ends and is written to --output_json at once.
The engine compiles only the step sizes that the selected figures need.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
from absl import flags
from matplotlib.ticker import ScalarFormatter

from jaxflow.bench.report import machine
from jaxflow.bench.sarathi.clock import Clock, PredictedClock
from jaxflow.bench.sarathi.engine_clock import EngineClock, start_clock
from jaxflow.bench.sarathi.figures import FIGURES, Row, Setting
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.step_plans import cost_device, products_dtype
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES


def define_flags() -> None:
    """Define the flags of `bench sarathi`."""
    options.define_engine("llama-13b")
    flags.DEFINE_bool("engine", False, "Measure on the engine of this machine instead of the cost model.")
    flags.DEFINE_enum("device", "RTX A6000", sorted(DEVICES), "Without --engine: device of the cost model.")
    flags.DEFINE_list("figures", list(FIGURES), "Tables and figures to make, in this order.")
    flags.DEFINE_integer("length", 1024, "Prompt plus output tokens of a request.", lower_bound=8)
    flags.DEFINE_integer(
        "slots",
        18,
        "Sequences that run together. Of sequences two and three times as long, 10/18 and 6/18 as many run.",
        2,
    )
    flags.DEFINE_integer("requests", 3, "Requests of a run, as a multiple of --slots.", lower_bound=1)
    flags.DEFINE_integer(
        "prefill_tokens", 2048, "Tokens of the baseline's prefill-only steps.", lower_bound=8
    )
    flags.DEFINE_list(
        "batches",
        ["1", "2", "4", "8", "18", "32", "64", "128", "256"],
        "Batch sizes of the figures over the batch size.",
    )
    flags.DEFINE_list(
        "chunk_sizes",
        ["256", "512"],
        "Chunk sizes: tokens of a step that holds a prefill chunk. Table 4 uses the first.",
    )
    flags.DEFINE_list(
        "ablation", ["64", "128", "256", "320", "512"], "Chunk sizes in tokens that figure13 compares."
    )
    flags.DEFINE_list("ratios", ["4", "7", "14", "28", "56"], "Ratios of prompt to output tokens in figure9.")
    flags.DEFINE_float("seconds", 0.3, "Seconds of measurement of a step, in three windows.", 0.0)
    flags.DEFINE_integer("repeats", 3, "Measurements of a run, for the median.", lower_bound=1)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string("plot", None, "Draw the charts into this file.")


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises:
      ConfigError, CheckpointError
    """
    f = flags.FLAGS
    names = list(dict.fromkeys(f.figures))
    if unknown := [name for name in names if name not in FIGURES] or not names:
        raise ConfigError("figures", unknown, f"one or more of {', '.join(FIGURES)}")
    config = engine_config_from_flags()
    setting = _setting(config)
    predicted = _predicted(config, setting, None if f.engine else f.device)
    head: dict[str, Any] = {
        "command_name": "sarathi",
        "model": Path(config.model).name,
        "engine": f.engine,
        **machine.describe(),
        "setting": _plain(setting),
    }
    clock: Clock = predicted
    if f.engine:
        expected = {name: FIGURES[name].rows(predicted, setting) for name in names}
        began = time.monotonic()
        clock = start_clock(config, predicted.steps, predicted.runs, seconds=f.seconds, repeats=f.repeats)
        head |= _engine_head(clock, time.monotonic() - began)
    else:
        expected, head["cost_model_of"] = {}, f.device
    figures: dict[str, Any] = {}
    report = head | {"figures": figures}
    for name in names:
        began = time.monotonic()
        with machine.watch(config.parallel.devices) as readings:
            rows = FIGURES[name].rows(clock, setting)
        figures[name] = {"title": FIGURES[name].title, "paper": FIGURES[name].paper, "rows": rows}
        figures[name] |= {"seconds": time.monotonic() - began, "power": machine.power_summary(readings)}
        if name in expected:
            figures[name]["cost_model"] = expected[name]
        if isinstance(clock, EngineClock) and clock.spreads:
            report["largest_spread"] = max(clock.spreads)
        print("\n".join(text(name, figures[name])), flush=True)
        machine.keep(f.output_json, report)
    if f.plot:
        Path(f.plot).parent.mkdir(parents=True, exist_ok=True)
        draw(report).savefig(f.plot, dpi=130)
    return report


def _setting(config: EngineConfig) -> Setting:
    """Return the setting of the flags. Raises: ConfigError, CheckpointError."""
    f = flags.FLAGS

    def numbers(name: str) -> tuple[int, ...]:
        texts: list[str] = f[name].value or []
        if not all(text.isdecimal() and int(text) for text in texts):
            raise ConfigError(name, ",".join(texts), "comma-separated positive whole numbers")
        return tuple(int(text) for text in texts)

    model = open_checkpoint(config.model, load_format=config.load_format).model_config
    return Setting(
        model,
        config.tensor_parallel_size,
        f.length,
        f.slots,
        f.requests,
        f.prefill_tokens,
        numbers("batches"),
        numbers("chunk_sizes"),
        numbers("ablation"),
        numbers("ratios"),
    )


def _predicted(config: EngineConfig, setting: Setting, device: str | None) -> PredictedClock:
    """Return the cost model's clock. device: None for this machine's."""
    rates = (DEVICES[device] if device else cost_device()).rates
    dtype = products_dtype(dataclasses.replace(config, dtype="bfloat16"))
    return PredictedClock.of_model(setting.model, rates, tp=setting.tp, dtype=dtype)


def _engine_head(clock: EngineClock, start_s: float) -> dict[str, Any]:
    print(f"{clock.programs} compiled steps, ready after {start_s:.0f} s", flush=True)
    return {
        "engine_config": dataclasses.asdict(clock.config),
        "programs": clock.programs,
        "kv_pages": list(clock.executor.num_pages),
        "start_s": start_s,
        "cost_model_of": cost_device().name,
    }


def _plain(setting: Setting) -> dict[str, Any]:
    return {
        field.name: getattr(setting, field.name)
        for field in dataclasses.fields(setting)
        if field.name != "model"
    }


# ---- text and charts


def text(name: str, figure: Mapping[str, Any]) -> list[str]:
    """Return a figure as lines of text."""
    rows: Sequence[Row] = figure["rows"]
    lines = [f"\n{name} - {figure['title']}", f"paper: {figure['paper']}"]
    if not rows:
        return [*lines, "no row fits the memory and the longest sequence of the model"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return lines + [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(report: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Return the charts of a report, one for each figure that has rows."""
    names = [name for name, figure in report["figures"].items() if figure["rows"]]
    wide = min(3, max(1, len(names)))
    high = max(1, -(-len(names) // wide))
    page = matplotlib.figure.Figure(figsize=(5 * wide, 3.6 * high), layout="constrained")
    for i, name in enumerate(names):
        shape, rows = FIGURES[name], report["figures"][name]["rows"]
        axes = page.add_subplot(high, wide, i + 1)
        for of in dict.fromkeys(tuple(row[column] for column in shape.by) for row in rows):
            line = [row for row in rows if tuple(row[column] for column in shape.by) == of]
            points = [(row[shape.x], row[shape.y]) for row in line if row[shape.y] is not None]
            label = ", ".join(f"{column} {value}" for column, value in zip(shape.by, of, strict=True))
            if shape.log:
                axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=label)
            else:
                axes.bar([str(x) for x, _ in points], [y for _, y in points], label=label)
        if shape.log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_title(shape.title, fontsize=9)
        axes.set(xlabel=shape.x, ylabel=shape.y)
        axes.grid(alpha=0.3)
        if shape.by:
            axes.legend(frameon=False, fontsize=7)
    return page

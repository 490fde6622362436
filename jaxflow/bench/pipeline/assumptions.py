"""The ratios of SARATHI §5.3 under assumptions that the paper leaves open, one change of the setting at a time.

  python -m jaxflow.bench pipeline --simulate --assumptions --num_requests 1500 --output_json assumptions.json

The base has a fast hand-over, cheap layers and a host that takes no time. The last row has the three changes that
bring all ratios near the paper's.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxflow.bench.pipeline.scenarios import (
    ORCA_BEST,
    PAPER,
    PROMPT_CHUNK,
    STEP_CHUNK,
    TP_ONLY,
    Study,
    ratios,
    run_all,
)
from jaxflow.bench.pipeline.simulate import PipelineRun
from jaxflow.bench.pipeline.stage_time import Link

FAST_LINK = Link(latency_s=500e-6)
TOLERANCES = {
    "bubble_orca_best_over_sarathi": 0.25,
    "speedup_over_orca_best": 0.15,
    "speedup_over_tp_only": 0.15,
}
BASE: dict[str, Any] = {"layer_s": 250e-6, "link": FAST_LINK, "host_s": 0.0}
# The name of each assumption, and the fields in which the study differs from the base.
CHANGES: dict[str, dict[str, Any]] = {
    "base: 250 us a layer, 0.5 ms a hand-over": {},
    "ops at their roofline, nothing beside": {"layer_s": 0.0, "link": Link(latency_s=0.0)},
    "60 % of FLOP/s, 70 % of memory, tiles of 128": {
        "compute_share": 0.6,
        "memory_share": 0.7,
        "tile_rows": 128,
    },
    "requests move between micro-batches": {"moving": True},
    "9 micro-batches of 24": {"micro_batches": 9, "slots": 24},
    "Orca-best prefills up to 4 prompts a step": {"orca_prompts": 4},
    "requests arrive at 8 a second": {"requests_per_s": 8.0},
    "lengths by Zipf in a random order": {"length_order": "random"},
    "each device sends all activations": {"sends_all": True},
    "a stage is held while it sends": {"link": dataclasses.replace(FAST_LINK, holds_stage=True)},
    "400 us a layer": {"layer_s": 400e-6},
    "2 ms a hand-over": {"link": Link(latency_s=2e-3)},
    "15 ms of the host between two steps": {"host_s": 15e-3},
    "the last three": {"layer_s": 400e-6, "link": Link(latency_s=2e-3), "host_s": 15e-3},
}


def studies(study: Study) -> dict[str, Study]:
    """Return the study under each assumption, by the assumption's name."""
    return {name: dataclasses.replace(study, **(BASE | change)) for name, change in CHANGES.items()}


def measure(study: Study, processes: int = 2) -> dict[str, Any]:
    """Return the ratios and idle shares under each assumption. processes: scenarios at the same time."""
    start_s = time.perf_counter()
    names = (STEP_CHUNK, PROMPT_CHUNK, ORCA_BEST, TP_ONLY)
    changed = studies(study)
    found = iter(run_all([(each, name) for each in changed.values() for name in names], processes))
    rows = {}
    for assumption, each in changed.items():
        runs = {name: next(found)[0] for name in names}
        rows[assumption] = {"study": dataclasses.asdict(each)} | {
            sarathi: _row(runs, sarathi) for sarathi in (STEP_CHUNK, PROMPT_CHUNK)
        }
    return {
        "command_name": "pipeline",
        "requests": study.requests,
        "assumptions": rows,
        "simulated_in_s": time.perf_counter() - start_s,
        "paper": PAPER if study.is_papers else {},
    }


def _row(runs: Mapping[str, PipelineRun], name: str) -> dict[str, Any]:
    """Return the ratios of one reading of SARATHI, its idle share, and whether the paper's ratios are near."""
    sarathi, orca = runs[name], runs[ORCA_BEST]
    found = ratios(runs, name)
    middle = [_middle(run) for run in (orca, sarathi)]
    return found | {
        "mean_bubble_ratio": float(orca.bubble_s.mean() / sarathi.bubble_s.mean()),
        "bubble_ratio_without_ends": float(np.median(middle[0]) / np.median(middle[1])),
        "idle_sarathi": 1 - sarathi.busy_share,
        "idle_orca_best": 1 - orca.busy_share,
        "agrees": all(abs(found[each] / PAPER[each] - 1) <= far for each, far in TOLERANCES.items()),
    }


def _middle(run: PipelineRun) -> np.ndarray:
    """Return the bubble times of the requests that end neither in the first nor in the last quarter."""
    low, high = np.quantile(run.finished_s, [0.25, 0.75])
    return run.bubble_s[(run.finished_s >= low) & (run.finished_s <= high)]


def text(report: Mapping[str, Any]) -> str:
    """Return the report as a table, one line for each assumption and reading of the chunk."""
    head = ("bubble", "mean", "no ends", "/orca", "/tp", "idle", "orca idle")
    lines = [f"{'assumption':48}{'chunk':>8}" + "".join(f"{name:>11}" for name in head) + "  agrees"]
    for assumption, readings in report["assumptions"].items():
        for name, chunk in ((STEP_CHUNK, "step"), (PROMPT_CHUNK, "prompt")):
            row = readings[name]
            figures = (
                row["bubble_orca_best_over_sarathi"],
                row["mean_bubble_ratio"],
                row["bubble_ratio_without_ends"],
                row["speedup_over_orca_best"],
                row["speedup_over_tp_only"],
            )
            lines.append(
                f"{assumption:48}{chunk:>8}"
                + "".join(f"{figure:11.2f}" for figure in figures)
                + f"{row['idle_sarathi']:11.1%}{row['idle_orca_best']:11.1%}  {'yes' if row['agrees'] else 'no'}"
            )
    paper = report["paper"]
    if paper:
        lines.append(
            f"{'the paper':56}{paper['bubble_orca_best_over_sarathi']:11.2f}{'-':>11}{'-':>11}"
            f"{paper['speedup_over_orca_best']:11.2f}{paper['speedup_over_tp_only']:11.2f}"
        )
    return "\n".join(lines)

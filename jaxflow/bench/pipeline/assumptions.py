"""The ratios of SARATHI §5.3 under assumptions that the paper leaves open, one
change of the setting at a time.

  python -m jaxflow.bench pipeline --simulate --assumptions --num_requests 1500 --output_json assumptions.json

The base has a fast hand-over, cheap layers and a host that takes no time. The last row has the three changes
that bring all ratios near the paper's.
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
    TP_ONLY,
    Study,
    ratios,
    run_all,
)
from jaxflow.bench.pipeline.simulate import PipelineRun
from jaxflow.bench.pipeline.stage_time import StageLink

FAST_LINK = StageLink(latency_s=500e-6)
TOLERANCES = {
    "bubble_orca_best_over_sarathi": 0.25,
    "speedup_over_orca_best": 0.15,
    "speedup_over_tp_only": 0.15,
}
BASE: dict[str, Any] = {"layer_s": 250e-6, "link": FAST_LINK, "host_s": 0.0}
# The name of each assumption, and the fields in which the study differs from the base.
CHANGES: dict[str, dict[str, Any]] = {
    "base: 250 us a layer, 0.5 ms a hand-over": {},
    "ops at their roofline, nothing beside": {"layer_s": 0.0, "link": StageLink(latency_s=0.0)},
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
    "2 ms a hand-over": {"link": StageLink(latency_s=2e-3)},
    "15 ms of the host between two steps": {"host_s": 15e-3},
    "the last three": {"layer_s": 400e-6, "link": StageLink(latency_s=2e-3), "host_s": 15e-3},
}


def studies(study: Study) -> dict[str, Study]:
    """Return the study under each assumption, by the assumption's name."""
    return {name: dataclasses.replace(study, **(BASE | change)) for name, change in CHANGES.items()}


def measure(study: Study, processes: int = 2) -> dict[str, Any]:
    """Return the ratios and idle shares under each assumption. processes: scenarios at the same time.

    SARATHI's chunk is that of the prompt, beside the decodes of its step.
    """
    start_s = time.perf_counter()
    changed = studies(study)
    cases = {
        (assumption, name): (_alone(each) if name == TP_ONLY else each, name)
        for assumption, each in changed.items()
        for name in (PROMPT_CHUNK, ORCA_BEST, TP_ONLY)
    }
    distinct = list(dict.fromkeys(cases.values()))
    found = {case: run for case, (run, _) in zip(distinct, run_all(distinct, processes), strict=True)}
    return {
        "command_name": "pipeline",
        "requests": study.requests,
        "assumptions": {
            assumption: _row(*(found[cases[assumption, name]] for name in (PROMPT_CHUNK, ORCA_BEST, TP_ONLY)))
            | {"study": dataclasses.asdict(each)}
            for assumption, each in changed.items()
        },
        "simulated_in_s": time.perf_counter() - start_s,
        "paper": PAPER if study.is_papers else {},
    }


def _alone(study: Study) -> Study:
    """Return the study without the fields that replicas of one stage do not
    have, so that equal runs run once.
    """
    return dataclasses.replace(
        study, link=FAST_LINK, sends_all=False, micro_batches=None, moving=False, slots=study.replica_slots
    )


def _row(sarathi: PipelineRun, orca: PipelineRun, tp: PipelineRun) -> dict[str, Any]:
    """Return the ratios under one assumption, the idle shares, and whether the paper's ratios are near."""
    found = ratios({PROMPT_CHUNK: sarathi, ORCA_BEST: orca, TP_ONLY: tp}, PROMPT_CHUNK)
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
    """Return the report as a table, one line for each assumption."""
    columns = {
        "bubble": "bubble_orca_best_over_sarathi",
        "mean": "mean_bubble_ratio",
        "no ends": "bubble_ratio_without_ends",
        "over orca": "speedup_over_orca_best",
        "over tp": "speedup_over_tp_only",
    }
    head = (*columns, "idle", "orca idle")
    lines = [f"{'assumption':48}" + "".join(f"{name:>11}" for name in head) + "  agrees"]
    for assumption, row in report["assumptions"].items():
        lines.append(
            f"{assumption:48}"
            + "".join(f"{row[key]:11.2f}" for key in columns.values())
            + f"{row['idle_sarathi']:11.1%}{row['idle_orca_best']:11.1%}  {'yes' if row['agrees'] else 'no'}"
        )
    if paper := report["paper"]:
        figures = (f"{paper[key]:11.2f}" if key in paper else f"{'-':>11}" for key in columns.values())
        lines.append(f"{'the paper':48}" + "".join(figures))
    return "\n".join(lines)

"""Savings from KV reuse between requests, by round of a conversation and by the tier that held the pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxflow.bench.report.requests import WIDTH, Record, line

ROUNDS = {"first_round": "First rounds", "later_rounds": "Later rounds"}


def figures(records: Sequence[Record], tiers: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the reused and computed prompt tokens, and the times to first token of first and later rounds.

    Only completed requests count.

    tiers: prompt tokens from each lower tier, if known. The other reused tokens came from the device.

    `reusable_input_tokens` counts the tokens that an earlier request also had. An initially empty, unbounded
    cache with single-token pages could reuse all of them. Hit rates are relative to the reusable tokens. The
    saved share is relative to all input tokens.
    """
    done = [record for record in records if record.completed]
    cached, total = sum(r.cached_prompt_tokens for r in done), sum(r.prompt_tokens for r in done)
    reusable = sum(r.known_tokens for r in done)
    result: dict[str, Any] = {
        "reused_input_tokens": cached,
        "reusable_input_tokens": reusable,
        "computed_input_tokens": total - cached,
        "compute_saved": cached / total if total else 0.0,
        "reuse_hit_rate": cached / reusable if reusable else None,
    }
    if tiers is not None:
        by_tier = {"device": cached - sum(tiers.values()), **tiers}
        result["reused_input_tokens_by_tier"] = by_tier
        result["compute_saved_by_tier"] = {
            name: tokens / total if total else 0.0 for name, tokens in by_tier.items()
        }
        result["reuse_hit_rate_by_tier"] = (
            {name: tokens / reusable for name, tokens in by_tier.items()} if reusable else None
        )
    for name, chosen in (
        ("first_round", [r for r in done if r.round == 1]),
        ("later_rounds", [r for r in done if r.round > 1]),
    ):
        if chosen:
            result[name] = _side(chosen)
    return result


def tier_tokens(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens from the tiers below the device between two readings
    of an engine's `Stats.kv_tiers`.
    """
    came, read = (after.get(name, 0) - before.get(name, 0) for name in ("host_hit_tokens", "disk_hit_tokens"))
    return {"host": came - read, "disk": read}


def _side(records: Sequence[Record]) -> dict[str, Any]:
    ms = np.array([record.latencies()["ttft"] for record in records]) * 1e3
    prompt = sum(record.prompt_tokens for record in records)
    return {
        "completed": len(records),
        "total_input_tokens": prompt,
        "reused_input_tokens": sum(record.cached_prompt_tokens for record in records),
        "mean_ttft_ms": float(ms.mean()),
        "median_ttft_ms": float(np.median(ms)),
        "p99_ttft_ms": float(np.percentile(ms, 99)),
    }


def text(result: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = [
        "Reuse of KV".center(WIDTH, "-"),
        line("Reused input tokens:", _share(result["reused_input_tokens"], result["compute_saved"])),
    ]
    for tier, tokens in result.get("reused_input_tokens_by_tier", {}).items():
        lines.append(line(f"  from the {tier}:", _share(tokens, result["compute_saved_by_tier"][tier])))
    if result["reuse_hit_rate"] is not None:
        lines.append(
            line(
                "of reusable input tokens:",
                f"{result['reuse_hit_rate']:.2%} of {result['reusable_input_tokens']}",
            )
        )
    for name, header in ROUNDS.items():
        if name in result:
            side = result[name]
            lines.append(line(f"{header}:", side["completed"]))
            lines.append(line("  Mean TTFT (ms):", side["mean_ttft_ms"]))
            lines.append(line("  Median TTFT (ms):", side["median_ttft_ms"]))
            lines.append(line("  P99 TTFT (ms):", side["p99_ttft_ms"]))
    return "\n".join(lines)


def _share(tokens: int, share: float) -> str:
    return f"{tokens} ({share:.2%})"

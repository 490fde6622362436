"""Report of an offloaded run as JSON and text: throughput as in FlexGen (§6), traffic, and use of the link.

The link's busy share is relative to the rate of trains of transfers that was measured on all devices of the
run at once, over the run and over its decodes. The two differ with 4-bit KV, because the computation of
prompts takes longer than the store of their KV.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxflow.flexgen.geometry import pinned_sharding
from jaxflow.flexgen.policy import TIERS
from jaxflow.flexgen.runtime import BlockStats, Runtime
from jaxflow.flexgen.tiers import VerbTraffic, added
from jaxflow.flexgen.waits import added_waits

_WIDTH = 72


@dataclasses.dataclass(frozen=True)
class LinkRates:
    """Bytes per second to a device and from a device, each direction measured separately."""

    down_bytes_per_s: float
    up_bytes_per_s: float


def measure_links(devices: Sequence[jax.Device], megabytes: int = 256) -> LinkRates:  # type: ignore[valid-type]
    """Measure a device's rates while all devices transfer, by trains: the best of a few, after a warm-up.

    Devices may share a way to the host's memory, so their rates together may be lower than alone.
    """
    size = megabytes << 20
    here = [jax.sharding.SingleDeviceSharding(device) for device in devices]
    away = [pinned_sharding(one) for one in here]
    host = [jax.device_put(np.zeros(size, np.uint8), one) for one in away]
    there = jax.device_put(host, here)
    return LinkRates(size / _best(host, here), size / _best(there, away))


def _best(arrays: Sequence[jax.Array], targets: Sequence[jax.sharding.Sharding]) -> float:
    found = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        pairs = list(zip(arrays, targets, strict=True)) * _TRAIN
        jax.block_until_ready([jax.device_put(array, target) for array, target in pairs])
        found.append((time.perf_counter() - started) / _TRAIN)
    return min(found[1:])


def report(runtime: Runtime, link: LinkRates) -> dict[str, Any]:
    """Return the report of all blocks since the start.

    `tokens_per_s`: generated tokens / (prefill + decode seconds), FlexGen §6.
    """
    blocks = runtime.stats
    policy = runtime.policy
    latency_s, tokens = sum(one.latency_s for one in blocks), sum(one.tokens for one in blocks)
    decoded = sum(one.tokens - one.sequences for one in blocks)
    moved = totals(blocks)
    down, up = (sum(getattr(one, f"link_{way}_bytes") for one in moved.values()) for way in ("down", "up"))
    # each device has a link, and its share of the traffic
    links = runtime.geometry.tp * policy.pipeline_parallel_size
    down_s, up_s = down / links / link.down_bytes_per_s, up / links / link.up_bytes_per_s
    busiest_s = max(down_s, up_s)
    rates = (link.down_bytes_per_s, link.up_bytes_per_s)
    prompts = [sum(one.prefill_crossed[way] for one in blocks) for way in (0, 1)]
    decode_s = sum(one.decode_s for one in blocks)
    decodes_s = max(
        (total - early) / links / rate for total, early, rate in zip((down, up), prompts, rates, strict=True)
    )
    return {
        "command_name": "offload",
        "policy": msgspec.to_builtins(policy),
        "schedule": runtime.offload.order,
        "overlap": runtime.offload.overlap,
        "tensor_parallel_size": runtime.geometry.tp,
        "effective_block_size": policy.block_size,
        "sequences_by_tier": {
            tier: sum(p.rows for p in runtime.geometry.kv_splits if p.tier == tier) for tier in TIERS
        },
        "load_s": runtime.load_s,
        "start_s": dict(runtime.start_s),
        "sequences": sum(one.sequences for one in blocks),
        "tokens": tokens,
        "latency_s": latency_s,
        "prefill_s": sum(one.prefill_s for one in blocks),
        "decode_s": decode_s,
        "tokens_per_s": tokens / latency_s if latency_s else 0.0,
        "decode_tokens_per_s": decoded / decode_s if decoded else 0.0,
        "block_latency_s": [one.latency_s for one in blocks],
        "traffic": {verb: msgspec.to_builtins(one) for verb, one in moved.items()},
        "link": {
            "down_bytes_per_s": link.down_bytes_per_s,
            "up_bytes_per_s": link.up_bytes_per_s,
            "down_bytes": down,
            "up_bytes": up,
            "down_busy_share": down_s / latency_s if latency_s else 0.0,
            "up_busy_share": up_s / latency_s if latency_s else 0.0,
            "busy_share": busiest_s / latency_s if latency_s else 0.0,
            "prefill_down_bytes": prompts[0],
            "prefill_up_bytes": prompts[1],
            "decode_busy_share": decodes_s / decode_s if decode_s else 0.0,
            "down_mean_bytes_per_s": down / links / latency_s if latency_s else 0.0,
            "bound_tokens_per_s": tokens / busiest_s if busiest_s else None,
        },
        "account_bytes": {tier: runtime.account.total(tier) for tier in TIERS},
        "compilations_after_warmup": runtime.compilations,
        "host_taken_bytes": runtime.host_taken_bytes,
        "waits": msgspec.to_builtins(added_waits(one.waits for one in blocks)),
        "warm_up_waits": msgspec.to_builtins(runtime.warm_up_waits),
    }


def totals(blocks: Sequence[BlockStats]) -> dict[str, VerbTraffic]:
    """Return the sum of the traffic of several blocks, by verb."""
    return added(block.traffic for block in blocks)


def text(result: dict[str, Any]) -> str:
    """Return a report as text."""
    policy, link = result["policy"], result["link"]
    lines = [" Offloaded generation ".center(_WIDTH, "=")]

    def add(name: str, value: object) -> None:
        lines.append(f"{name:40}{value}")

    add("Model:", policy["model"])
    add(
        "Block:",
        (
            f"{policy['pipeline_parallel_size'] * policy['num_gpu_batches']} x {policy['gpu_batch_size']} = "
            f"{result['effective_block_size']} sequences"
        ),
    )
    for kind in ("weights", "kv", "activations"):
        add(f"{kind} on device/host/disk (%):", "/".join(f"{policy[kind][tier]:.4g}" for tier in TIERS))
    add("Bits of weights, KV:", f"{policy['weight_bits']}, {policy['kv_bits']}")
    add("Attention of decodes on the:", "host" if policy["host_attention"] else "device")
    add("Attended rows of V (%):", f"{policy['value_top_k_percent']:g}")
    add("Prefill + decode (s):", f"{result['prefill_s']:.2f} + {result['decode_s']:.2f}")
    add(
        "Generated tokens/s:",
        f"{result['tokens_per_s']:.3f} (decodes only {result['decode_tokens_per_s']:.3f})",
    )
    add(
        "Link, measured (GB/s down, up):",
        f"{link['down_bytes_per_s'] / 1e9:.1f}, {link['up_bytes_per_s'] / 1e9:.1f}",
    )
    add(
        "Link busy (down, up):",
        (
            f"{link['down_busy_share']:.0%}, {link['up_busy_share']:.0%}; in decodes "
            f"{link['decode_busy_share']:.0%}"
        ),
    )
    if link["bound_tokens_per_s"]:
        add("Limit by the link's bandwidth (tokens/s):", f"{link['bound_tokens_per_s']:.3f}")
    lines.append(f"{'verb':18}{'times':>9}{'GB down':>11}{'GB up':>11}{'GB read':>11}{'GB written':>12}")
    for verb, one in result["traffic"].items():
        sizes = [one[f"{name}_bytes"] / 1e9 for name in ("link_down", "link_up", "disk_read", "disk_write")]
        lines.append(
            f"{verb:18}{one['times']:>9}{sizes[0]:>11.3f}{sizes[1]:>11.3f}{sizes[2]:>11.3f}{sizes[3]:>12.3f}"
        )
    return "\n".join(lines)


_REPEATS, _TRAIN = 5, 4

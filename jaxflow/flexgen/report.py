"""What an offloaded run reached, as JSON and for people: throughput as FlexGen counts it, and how busy the
link was.

A link's share is of what trains of transfers reach on this machine (`jaxflow.flexgen.link_speed`), over a run, and
over its decodes alone: of 4 bits the device computes prompts longer than their KV takes to go home.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxflow.flexgen.link_speed import Link
from jaxflow.flexgen.policy import TIERS
from jaxflow.flexgen.runtime import BlockStats, Runtime
from jaxflow.flexgen.traffic import Moved

_WIDTH = 72


def report(runtime: Runtime, link: Link) -> dict[str, Any]:
    """All blocks that were run since the start. `tokens_per_s`: generated tokens / (prefill + decode
    seconds), FlexGen §6.
    """
    blocks = runtime.stats
    policy = runtime.policy
    latency_s, tokens = sum(one.latency_s for one in blocks), sum(one.tokens for one in blocks)
    decoded = sum(one.tokens - one.sequences for one in blocks)
    moved = totals(blocks)
    down, up = (sum(getattr(one, f"link_{way}_bytes") for one in moved.values()) for way in ("down", "up"))
    links = runtime.geometry.tp  # each device has its own, and its part of what crosses
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
        "schedule": runtime.offload.schedule,
        "overlap": runtime.offload.overlap,
        "tensor_parallel_size": links,
        "effective_block_size": policy.block_size,
        "sequences_by_tier": {
            tier: sum(p.rows for p in runtime.geometry.kv_parts if p.tier == tier) for tier in TIERS
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
    }


def totals(blocks: Sequence[BlockStats]) -> dict[str, Moved]:
    """The traffic of several blocks, by verb."""
    found: dict[str, Moved] = {}
    for block in blocks:
        for verb, one in block.traffic.items():
            sums = found.setdefault(verb, Moved())
            for field in msgspec.structs.fields(Moved):
                setattr(sums, field.name, getattr(sums, field.name) + getattr(one, field.name))
    return found


def text(result: dict[str, Any]) -> str:
    """A report for people."""
    policy, link = result["policy"], result["link"]
    lines = [" Offloaded generation ".center(_WIDTH, "=")]

    def add(name: str, value: object) -> None:
        lines.append(f"{name:40}{value}")

    add("Model:", policy["model"])
    add(
        "Block:",
        (
            f"{policy['num_gpu_batches']} x {policy['gpu_batch_size']} = "
            f"{result['effective_block_size']} sequences"
        ),
    )
    for kind in ("weights", "kv", "activations"):
        add(f"{kind} on device/host/disk (%):", "/".join(f"{policy[kind][tier]:.4g}" for tier in TIERS))
    add("Bits of weights, of KV:", f"{policy['weight_bits']}, {policy['kv_bits']}")
    add("Decodes attend on the:", "host" if policy["host_attention"] else "device")
    add("Prefill + decode (s):", f"{result['prefill_s']:.2f} + {result['decode_s']:.2f}")
    add(
        "Generated tokens/s:",
        f"{result['tokens_per_s']:.3f} (decode alone {result['decode_tokens_per_s']:.3f})",
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
        add("Bound by the link's bandwidth (tokens/s):", f"{link['bound_tokens_per_s']:.3f}")
    lines.append(f"{'verb':18}{'times':>9}{'GB down':>11}{'GB up':>11}{'GB read':>11}{'GB written':>12}")
    for verb, one in result["traffic"].items():
        sizes = [one[f"{name}_bytes"] / 1e9 for name in ("link_down", "link_up", "disk_read", "disk_write")]
        lines.append(
            f"{verb:18}{one['times']:>9}{sizes[0]:>11.3f}{sizes[1]:>11.3f}{sizes[2]:>11.3f}{sizes[3]:>12.3f}"
        )
    return "\n".join(lines)

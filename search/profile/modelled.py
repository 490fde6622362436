"""Profiles from the cost model, for searches before the machine was measured.

On a card with known kernels and joules (`search.profile.clock`), an op takes its cycles at the clock that
the card settles at, or the time of its bytes. On another card it takes the longest of its times at the
device's rates.
"""

import dataclasses
import math
from collections.abc import Iterable

import msgspec

from jaxflow.config import ModelConfig
from jaxflow.model.cost import FP8_PRODUCTS, Device, op_times, work_times
from jaxflow.model.graph import BFLOAT16, Graph, Op, Widths, Work, model_graph
from pallas_kernels.gemm.grouped.tiles import expected_tiles, tile_rows
from search.profile.clock import ClockCard, Governor, governor_of, shipped_card
from search.profile.op_times import ATTENTION, EXCHANGE, OpTime, Profile, ProfileError, alone, seconds

_INTAKE = 3.0  # an SM's intake over its share of the bandwidth, for unknown cards


@dataclasses.dataclass(frozen=True)
class KernelModel:
    """The times of ops on a card with known kernels, at a clock."""

    device: Device
    card: ClockCard
    governor: Governor
    total_sms: int
    kv_dtype: str = "bfloat16"

    def seconds(self, op: Op, work: Work, sms: int, clock_hz: float) -> float:
        """Return the seconds on `sms` SMs, in full waves."""
        card, governor, share = self.card, self.governor, 0.0
        dtype, rates = product_dtype(op, governor.dtype), self.device.rates
        if op.kind == "dense":
            share = card.tensor_share[dtype]
        elif op.kind == "attention":
            share = card.attention_share
            rates = dataclasses.replace(
                rates,
                memory_bytes_per_s=card.attention_bytes_per_s.get(self.kv_dtype, rates.memory_bytes_per_s),
            )
        peak = governor.power.flops_per_cycle[dtype] * clock_hz * sms / self.total_sms
        least = work_times(work, rates, governor.dtype)
        intake_s = work.memory_bytes / (sms * card.sm_bytes_per_cycle.get(self.kv_dtype, math.inf) * clock_hz)
        fixed_s = card.collective_s if op.kind == "network" else card.kernel_s
        products_s = padded_flops(op, work) / (share * peak) if share else 0.0
        return fixed_s + max(products_s, intake_s, least.memory_s, least.network_s)

    def alone(self, op: Op, tokens: int, keys: int, sms: int) -> OpTime:
        """Return the time in isolation, at the clock that the card settles at."""
        work = op.work(alone(op, tokens, keys))
        own = dataclasses.replace(self.governor, dtype=product_dtype(op, self.governor.dtype))
        clock = own.settle(lambda hz: self.seconds(op, work, sms, hz), work)
        took = self.seconds(op, work, sms, clock)
        return OpTime(op.name, tokens, keys, sms, took, own.watts(work, clock, took), clock / 1e6)


def product_dtype(op: Op, dtype: str) -> str:
    """Return the dtype of an op. Only a layer's four products are float8_e4m3fn; all else is bfloat16."""
    return "bfloat16" if dtype == "float8_e4m3fn" and op.name not in FP8_PRODUCTS else dtype


def padded_flops(op: Op, work: Work) -> float:
    """Return the FLOPs that the kernel of an op computes.

    The last tile of an expert is computed whole, also where the tokens that chose the expert do not fill it.
    """
    if not op.experts or not work.flops:
        return work.flops
    number, chosen = op.experts
    tokens = round(work.flops / sum(each.flops for what, each in op.demand if what == "tokens"))
    rows = tile_rows(tokens, chosen, number)
    computed = expected_tiles(tokens, chosen, number, rows) * rows * number
    return work.flops * max(computed / (tokens * chosen), 1.0)


def modelled_profile(
    name: str,
    config: ModelConfig,
    device: Device,
    *,
    tp: int = 1,
    widths: Widths = BFLOAT16,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    tokens: Iterable[int] = tuple(range(128, 2049, 128)),
    keys: Iterable[int] = (256, 1024, 4096),
    sms: Iterable[int] | None = None,
    total_sms: int | None = None,
    card: ClockCard | None = None,
) -> Profile:
    """Return the profile of one of `tp` devices, with both forms of the collectives.

    On a part of the SMs compute shrinks in proportion; memory shrinks only below the SMs' own intake. No
    kernel keeps other ops to a part. sms: the modelled SM counts; None: all. total_sms: None: those of such
    a device. card: the device's kernels; None: the shipped constants.
    """
    total_sms = device.sms if total_sms is None else total_sms
    parts = sorted({total_sms} if sms is None else set(sms))
    card, governor = card or shipped_card(device.name), governor_of(device.name, dtype)
    kernels = (
        None if card is None or governor is None else KernelModel(device, card, governor, total_sms, kv_dtype)
    )
    times, graphs = [], [model_graph(config, tp, widths, scattered=True)] if tp > 1 else []
    for op in {
        op.name: op
        for graph in (*graphs, model_graph(config, tp, widths))
        for layer in graph.layers
        for op in layer
    }.values():
        for count in sorted(set(tokens)):
            for context in sorted(set(keys)) if op.name in ATTENTION else (0,):
                for part in parts if op.kind in ("dense", "attention") else (total_sms,):
                    if kernels is not None:
                        times.append(kernels.alone(op, count, context, part))
                        continue
                    found, share = (
                        op_times(op, alone(op, count, context), device.rates, dtype),
                        part / total_sms,
                    )
                    took = max(
                        found.compute_s / share, found.memory_s / min(1.0, share * _INTAKE), found.network_s
                    )
                    times.append(OpTime(op.name, count, context, part, took))
    return Profile(
        device=device.name,
        versions={},
        model=name,
        tensor_parallel_size=tp,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        total_sms=total_sms,
        method=(
            f"modelled from the datasheet, nothing "
            f"measured{'' if kernels is None else '; cycles and joules of measured kernels'}"
        ),
        op_times=tuple(times),
    )


SMS = 0  # SMs of peer copies: concurrent ops get all


def copied(profile: Profile, graph: Graph, card: ClockCard) -> Profile:
    """Return the profile with the graph's collectives by the copy engines, at each measured number of
    tokens.

    The time of an exchange is the profile's where it was measured, else the card's. It holds no SMs.

    Raises: ProfileError where neither knows it.
    """
    measured = any(one.op == EXCHANGE for one in profile.op_times)
    if not measured and (card.exchange_s is None or card.exchange_bytes_per_s is None):
        raise ProfileError(f"sums='copies': how long they take on a {card.device} is not known")
    sums = {op.name: op for layer in graph.layers for op in layer if op.kind == "network"}

    def sent_s(name: str, one: OpTime) -> float:
        """Return the seconds of an exchange: each device sends its part, as
        in an all-reduce of two devices.
        """
        if measured:
            return seconds(profile, EXCHANGE, one.tokens)
        assert card.exchange_s is not None and card.exchange_bytes_per_s is not None
        return (
            card.exchange_s
            + sums[name].work(alone(sums[name], one.tokens, one.keys)).network_bytes
            / card.exchange_bytes_per_s
        )

    times = []
    for one in profile.op_times:
        if one.op not in sums:
            times.append(one)
            continue
        for name in (
            one.op,
            one.op.replace("_reduce", "_swap"),
        ):  # on four devices an all-reduce is two exchanges
            if name in sums:
                times.append(OpTime(name, one.tokens, one.keys, SMS, sent_s(name, one)))
    return msgspec.structs.replace(
        profile, op_times=tuple(times), method=f"{profile.method}; sums by the copy engines"
    )

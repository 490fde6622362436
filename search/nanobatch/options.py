"""The options of a task for stage II: its time on each SM count that it may get (NanoFlow §4.1.2)."""

from collections.abc import Collection

from jaxflow.model.composition import Composition
from search.nanobatch.cyclic import Option
from search.nanobatch.layer_tasks import Chain, Task
from search.profile.op_times import NETWORK_SMS
from search.profile.share_times import ShareTimes

# An SM count between those measured is offered where one SM more saves this share of the product's time.
_WAVE_GAIN = 0.03


def chain_s(
    times: ShareTimes, chain: Chain, step: Composition, sms: int, side_streams: bool = False
) -> float:
    """Return the seconds of a chain on `sms` SMs. side_streams: its plan uses side streams."""
    took = sum(times.seconds(op, step, sms, side_streams) for op in chain.ops)
    return took + times.nano_s if side_streams and took and not chain.is_network else took


def task_s(times: ShareTimes, task: Task, step: Composition, sms: int) -> float:
    """Return the seconds of a task on `sms` SMs."""
    return chain_s(times, task.chain, step, sms, task.side_streams)


def wave_filling_sms(times: ShareTimes, task: Task, step: Composition) -> tuple[int, ...]:
    """Return SM counts, between those measured, that save a compute-bound task a part of a wave."""
    names, full = [op.name for op in task.chain.ops if op.name in times.products], times.profile.total_sms
    measured = [
        sms
        for sms in times.offered_sms()
        if sms < full <= 2 * sms and all(sms in times.known.get(name, ()) for name in names)
    ]
    if not times.knows_waves or task.resource != "compute" or not names or not measured:
        return ()
    within = range(measured[0], measured[-1] + 1)
    took = [task_s(times, task, step, sms) for sms in within]
    return tuple(
        sms
        for sms, before, now in zip(within[1:], took[:-1], took[1:], strict=True)
        if now < before * (1 - _WAVE_GAIN)
    )


def task_options(
    times: ShareTimes, task: Task, step: Composition, limit: int, extra_sms: Collection[int] = ()
) -> tuple[Option, ...]:
    """Return the options of a task, by rising SM count and falling time.

    A compute-bound task gets at least half of the SMs. Another task gets at most half of them, or all.

    limit: the largest number of options next to the full device. extra_sms: SM counts to offer in addition to
    those measured; only counts between two measured ones are used.
    """
    full, chain = times.profile.total_sms, task.chain
    if chain.is_network:
        first = next(op.name for op in chain.ops if op.kind == "network")
        known = [sms for sms in times.known.get(first, ()) if sms < full] or [min(NETWORK_SMS, full)]
        return tuple(Option(sms, chain_s(times, chain, step, sms)) for sms in known)
    bounded = [op.name for op in chain.ops if op.kind in ("dense", "attention")]
    sizes = [
        sms
        for sms in times.offered_sms()
        if all(sms in times.known.get(name, ()) for name in bounded)
        and (2 * sms >= full if task.resource == "compute" else 2 * sms <= full)
    ]
    between = {sms for sms in extra_sms if sizes and sizes[0] < sms < sizes[-1]}
    found = [Option(sms, task_s(times, task, step, sms)) for sms in sorted({*sizes, *between, full})]
    if not found[-1].seconds:
        return (Option(0, 0.0),)
    if not limit:
        return (found[-1],)
    kept = [
        option for i, option in enumerate(found) if all(option.seconds < other.seconds for other in found[:i])
    ]
    return tuple(_spread(kept[:-1], limit) + kept[-1:])


def _spread(options: list[Option], limit: int) -> list[Option]:
    """Return at most `limit` of the options, evenly spread."""
    if len(options) <= limit:
        return options
    return [options[round(i * (len(options) - 1) / max(1, limit - 1))] for i in range(limit)]

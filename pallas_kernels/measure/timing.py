"""Timing of GPU work under serving conditions: sustained load, rivals in turn, with clock, watts and joules.

Each measurement lasts long enough for the power governor to settle.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Wrapped

from pallas_kernels.measure.sensor import sample

_AHEAD = 3  # programs in flight: hides the host, while all outputs still fit in memory


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call.

    `us`: median microseconds over the windows. `spread`: relative spread of the windows. `mhz`: median SM
    clock. `watts`: mean power of a card. `joules`: energy of a call on all sampled cards. Clock, watts and
    joules are None for windows too short to read. `seconds`: total measured time.
    """

    us: float
    spread: float
    mhz: float | None
    watts: float | None
    joules: float | None
    seconds: float


def repeat(run: Callable[[], Any], times: int) -> None:
    """Run `times` programs with at most `_AHEAD` in flight, and wait for the last one."""
    ahead: deque = deque()
    for _ in range(times):
        ahead.append(run())
        if len(ahead) > _AHEAD:
            _wait(ahead.popleft())
    _wait(list(ahead))  # JAX treats a deque as a leaf and would not wait for its arrays


def _wait(arrays: Any) -> None:
    """Wait for arrays. Skip the donated ones: the run that took them is waited for later."""
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(arrays) if not leaf.is_deleted()])


def looped(one: Callable[[Any, Any], Any], rounds: int) -> Wrapped:
    """Return a program (xs, ws) -> outputs that calls one(x, w) on every pair, `rounds` times, on the device.

    Every x has a separate w, because XLA merges products that share one. The loop keeps the output addresses
    constant. A program with new output addresses at every call records its CUDA graph at every call, which
    costs as much as a short kernel.
    """

    def run(xs, ws):
        def body(i, _):
            return [one(lax.optimization_barrier((x, i))[0], w) for x, w in zip(xs, ws, strict=True)]

        shapes = jax.eval_shape(body, jnp.int32(0), None)
        return lax.fori_loop(0, rounds, body, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))

    return jax.jit(run)


def seconds_of_one(run: Callable[[], Any]) -> float:
    """Return the approximate seconds of one run.

    The number of runs grows until they last 30 ms twice, because the first runs may record a graph.
    """
    repeat(run, 3)
    times, least = 1, 0.0
    while True:
        start = time.perf_counter()
        repeat(run, times)
        took = (time.perf_counter() - start) / times
        if took * times <= 0.03:
            times, least = 4 * times, 0.0
        elif least:
            return min(least, took)
        else:
            least = took


def interleaved(
    ways: Mapping[str, Callable[[], Any]],
    *,
    calls: Mapping[str, int] | int = 1,
    seconds: float = 0.6,
    rounds: int = 3,
    cards: int = 1,
) -> dict[str, Timing]:
    """Time several implementations in turn, so that temperature, clocks and neighbors are the same for all.

    Args:
      ways: functions that enqueue a program and return its arrays. A program should last at least a
      millisecond, so that the host does not limit the measured time. calls: number of timed calls in one
      program, for each implementation or for all. seconds: total measured time of each implementation, in
      `rounds` windows. One more window at the start only warms up. cards: number of cards that run the
      programs; power and clock are read from each.
    """
    many = dict.fromkeys(ways, calls) if isinstance(calls, int) else calls
    times, windows, clocks, powers = (
        {},
        {name: [] for name in ways},
        {name: [] for name in ways},
        {name: [] for name in ways},
    )
    for name, run in ways.items():
        times[name] = max(1, round(seconds / rounds / seconds_of_one(run)))
    order = list(ways.items())
    for i in range(rounds + 1):
        for name, run in order if i % 2 else reversed(order):
            with sample(cards) as readings:
                start = time.perf_counter()
                repeat(run, times[name])
                took = time.perf_counter() - start
            if i:
                windows[name].append(took / times[name] / many[name])
                for card in readings.cards:
                    clocks[name] += card.clock_mhz
                    powers[name] += card.watts
    return {
        name: _timing(windows[name], clocks[name], powers[name], times[name] * many[name], cards)
        for name in ways
    }


def _timing(windows: list[float], clocks: list[float], powers: list[float], calls: int, cards: int) -> Timing:
    middle, watts = float(np.median(windows)), float(np.mean(powers)) if powers else None
    return Timing(
        us=middle * 1e6,
        spread=(max(windows) - min(windows)) / middle,
        mhz=float(np.median(clocks)) if clocks else None,
        watts=watts,
        joules=None if watts is None else watts * cards * middle,
        seconds=sum(windows) * calls,
    )


def sustained(fn, *args, calls: int, seconds: float = 0.6) -> dict:
    """Return the `Timing`, as a dictionary, of one of the `calls` that fn(*args) makes."""
    return dataclasses.asdict(
        interleaved({"": lambda: fn(*args)}, calls=calls, seconds=seconds, rounds=4)[""]
    )

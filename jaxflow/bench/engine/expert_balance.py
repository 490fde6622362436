"""Simulate the balance of experts over devices: routes that drift, and placements from measured loads.

  python -m jaxflow.bench expert_balance --output_json balance.json

A step sends each token to different experts. The router's preference is Zipf's law over an order of the
experts that drifts. Every `--step_interval` steps the experts are placed anew by the tokens that the last
`--window_size` steps counted. No placement sees the router's preferences. A step waits for the device with
the most tokens, so a step's balance is the mean over the largest number of tokens of a device.
"""

import collections
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.report import machine
from jaxflow.config import ConfigError
from jaxflow.model.expert_placement import place_experts

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The experts of a layer, and how many of them a token goes to."""

    name: str
    experts: int
    chosen: int


MIXTURES = (Mixture("Qwen3-30B-A3B", 128, 8), Mixture("Mixtral-8x7B", 8, 2))


@dataclasses.dataclass(frozen=True)
class Routes:
    """The routes of a simulation.

    zipf: the exponent of the router's preferences.
    drift_steps: the steps after which the experts' latent popularity is
      correlated with the present one by 1/e.
    """

    mixture: Mixture
    tokens: int
    zipf: float
    drift_steps: float

    def counts(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield the tokens at each expert, [E], step after step."""
        keep = np.exp(-1 / self.drift_steps)
        popularity = rng.normal(size=self.mixture.experts)
        while True:
            rank = 1 + np.argsort(np.argsort(-popularity)).astype(np.float32)
            # The first of exponential arrivals at rates rank ** -zipf are a draw without replacement.
            arrivals = rng.standard_exponential((self.tokens, self.mixture.experts), dtype=np.float32)
            arrivals *= rank**self.zipf
            experts = np.argpartition(arrivals, self.mixture.chosen - 1, axis=1)[:, : self.mixture.chosen]
            yield np.bincount(experts.reshape(-1), minlength=self.mixture.experts)
            noise = rng.normal(size=popularity.shape)
            popularity = keep * popularity + np.sqrt(1 - keep**2) * noise


@dataclasses.dataclass
class ExpertLayout:
    """The experts of a layer over devices, and the balance of each step.

    rebalances: whether the experts are placed anew; otherwise device i keeps the i-th experts.
    """

    devices: int
    slots: int
    rebalances: bool
    placed: np.ndarray
    balances: list[float] = dataclasses.field(default_factory=list)
    moves: list[int] = dataclasses.field(default_factory=list)
    placing_s: list[float] = dataclasses.field(default_factory=list)

    def take(self, tokens: np.ndarray, rng: np.random.Generator) -> None:
        """Send the tokens of a step. A token goes to one copy of its expert, by a hash of the token."""
        at = tokens[self.placed]
        copies = np.bincount(self.placed, minlength=len(tokens))
        for expert in np.flatnonzero(copies > 1):
            even = np.full(copies[expert], 1 / copies[expert])
            at[self.placed == expert] = rng.multinomial(tokens[expert], even)
        loads = at.reshape(self.devices, -1).sum(axis=1)
        self.balances.append(float(loads.mean() / loads.max()))

    def rebalance(self, measured: np.ndarray) -> None:
        """Place the experts by measured tokens [E]."""
        if self.rebalances:
            begun_s = time.perf_counter()
            (found,) = place_experts(measured[None], self.devices, self.slots, self.placed[None])
            self.placing_s.append(time.perf_counter() - begun_s)
            self.moves.append(int((found != self.placed).sum()))
            self.placed = found


def simulate(
    routes: Routes,
    devices: list[int],
    spare: float,
    *,
    steps: int,
    window_size: int,
    step_interval: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return a row for each number of devices and each layout.

    The steps before the first placement, one window, are not in the means.
    spare: the slots beyond the number of experts, over this number.
    """
    rng, experts = np.random.default_rng(seed), routes.mixture.experts
    layouts: list[tuple[str, ExpertLayout]] = []
    for number in devices:
        more = -(-round(experts * (1 + spare)) // number)
        even = np.arange(experts)
        filled = np.concatenate([even, np.arange(number * more - experts) % experts])
        layouts += [
            ("experts in order", ExpertLayout(number, experts // number, False, even)),
            ("placed by load", ExpertLayout(number, experts // number, True, even)),
            ("placed by load, with copies", ExpertLayout(number, more, True, filled)),
        ]
    window: collections.deque[np.ndarray] = collections.deque(maxlen=window_size)
    for step, tokens in enumerate(routes.counts(rng)):
        if step >= window_size + steps:
            break
        if step >= window_size and (step - window_size) % step_interval == 0:
            for _, layout in layouts:
                layout.rebalance(np.sum(window, axis=0))
        for _, layout in layouts:
            layout.take(tokens, rng)
        window.append(tokens)
    return [_row(routes, name, layout, window_size) for name, layout in layouts]


def _row(routes: Routes, name: str, layout: ExpertLayout, skipped: int) -> dict[str, Any]:
    balances = np.array(layout.balances[skipped:])
    row: dict[str, Any] = {
        "model": routes.mixture.name,
        "experts": routes.mixture.experts,
        "experts_per_token": routes.mixture.chosen,
        "tokens_per_step": routes.tokens,
        "drift_steps": routes.drift_steps,
        "devices": layout.devices,
        "layout": name,
        "slots": layout.devices * layout.slots,
        "mean_over_max_load": float(balances.mean()),
        "worst_step": float(balances.min()),
    }
    if layout.rebalances:
        # The first placement leaves the experts' order, and moves more than the later ones.
        row["moved_slots_per_rebalance"] = float(np.mean(layout.moves[1:])) if layout.moves[1:] else None
        row["placing_ms"] = float(1e3 * np.median(layout.placing_s))
    return row


def define_flags() -> None:
    """Define the command's flags."""
    flags.DEFINE_list("devices", ["2", "4", "8"], "Numbers of devices, divisors of 128 or 8.")
    flags.DEFINE_list("tokens", ["512", "2048", "4096"], "Tokens of a step.")
    flags.DEFINE_list(
        "drift_steps", ["10000", "100000"], "Steps after which popularity is correlated by 1/e."
    )
    flags.DEFINE_float("zipf", 1.0, "Exponent of the router's preferences.", lower_bound=0.0)
    flags.DEFINE_float(
        "spare", 0.25, "Slots beyond the experts, over the number of experts.", lower_bound=0.0
    )
    flags.DEFINE_integer("steps", 1000, "Steps measured.", lower_bound=1)
    flags.DEFINE_integer("window_size", 50, "Steps whose tokens a placement reads.", lower_bound=1)
    flags.DEFINE_integer("step_interval", 50, "Steps between two placements.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the routes.", lower_bound=0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError."""
    numbers, drifts, sizes = (_numbers(flag) for flag in ("devices", "drift_steps", "tokens"))
    for number in numbers:
        if all(mixture.experts % number for mixture in MIXTURES):
            experts = " or ".join(str(mixture.experts) for mixture in MIXTURES)
            raise ConfigError("devices", number, f"a divisor of {experts} experts")
    settings: dict[str, Any] = {
        name: FLAGS[name].value for name in ("steps", "window_size", "step_interval", "seed")
    }
    rows = []
    for mixture in MIXTURES:
        devices = [number for number in numbers if mixture.experts % number == 0]
        for drift in drifts:
            for tokens in sizes:
                found = simulate(Routes(mixture, tokens, FLAGS.zipf, drift), devices, FLAGS.spare, **settings)
                rows += found
                for row in found:
                    print(
                        f"{row['model']:14} drift {drift:>7.0f}  {tokens:>5} tokens"
                        f"  {row['devices']} devices  {row['layout']:28} {row['slots']:>4} slots"
                        f"  balance {row['mean_over_max_load']:.3f}  worst step {row['worst_step']:.3f}",
                        file=sys.stderr,
                    )
    head = {"command_name": "expert_balance", **machine.describe()}
    return {**head, "zipf": FLAGS.zipf, "spare": FLAGS.spare, **settings, "rows": rows}


def _numbers(flag: str) -> list[int]:
    """Return the numbers of a flag. Raises: ConfigError unless there are some, all positive."""
    words: list[str] = FLAGS[flag].value or []
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(flag, ",".join(words), "positive whole numbers, as 2,4")
    return found

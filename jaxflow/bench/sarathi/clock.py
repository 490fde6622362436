"""Two sources of times for SARATHI's figures: an interface, and the cost model's implementation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from jaxflow.bench.engine.sarathi import WHOLE, SimulatedPolicy, simulate
from jaxflow.bench.workload.lengths import Item, constant
from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.cost import Rates, step_timer
from jaxflow.model.graph import model_graph


@dataclasses.dataclass(frozen=True)
class EqualRequests:
    """Requests of equal length that all wait from the start.

    Attributes:
      slots: B, the sequences that run at the same time.
      budget: most tokens of a step.
      separate: True for steps of prefill only and steps of decodes only, the paper's baseline. False for
        decode-maximal steps.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    slots: int
    budget: int
    separate: bool

    @property
    def items(self) -> list[Item]:
        """Return the requests."""
        return constant(self.requests, self.prompt_tokens, self.output_tokens)


class Clock(Protocol):
    """A source of the seconds of steps and runs."""

    def fits(self, step: Composition) -> bool:
        """Return True if the device holds the step's keys and values."""
        ...

    def run_fits(self, run: EqualRequests) -> bool:
        """Return True if the device holds the keys and values of the run's B sequences."""
        ...

    def steps_s(self, steps: Mapping[str, Composition]) -> dict[str, float]:
        """Return the seconds of each step."""
        ...

    def runs_s(self, runs: Mapping[str, EqualRequests]) -> dict[str, float]:
        """Return the seconds of each run."""
        ...


class PredictedClock:
    """The times of the cost model. The clock also keeps the steps and runs that it was asked for."""

    def __init__(self, step_s: Callable[[Composition], float]):
        self._step_s = step_s
        self.steps: set[Composition] = set()
        self.runs: set[EqualRequests] = set()

    @classmethod
    def of_model(
        cls, model: ModelConfig, rates: Rates, *, tp: int = 1, dtype: str = "bfloat16", tile_rows: int = 128
    ) -> "PredictedClock":
        """Return the clock of a model on `tp` devices with these rates.

        tile_rows: rows of a GEMM's tile, see `jaxflow.model.cost.op_times`.
        """
        times = step_timer(model_graph(model, tp), rates, dtype, tile_rows=tile_rows)
        return cls(lambda step: times(step).sequential_s)

    def fits(self, step: Composition) -> bool:
        """Return True: the cost model has no memory limit."""
        return True

    def run_fits(self, run: EqualRequests) -> bool:
        """Return True: the cost model has no memory limit."""
        return True

    def steps_s(self, steps: Mapping[str, Composition]) -> dict[str, float]:
        """See `Clock.steps_s`."""
        self.steps.update(steps.values())
        return {name: self._step_s(step) for name, step in steps.items()}

    def runs_s(self, runs: Mapping[str, EqualRequests]) -> dict[str, float]:
        """See `Clock.runs_s`."""
        self.runs.update(runs.values())
        return {name: self._run_s(run) for name, run in runs.items()}

    def _run_s(self, run: EqualRequests) -> float:
        name, budget = ("request-level", WHOLE) if run.separate else ("decode-maximal", run.budget)
        return simulate(run.items, SimulatedPolicy(name, budget), run.slots, self._step_s).duration_s

"""Health of the server, as Kubernetes asks for health: started, live and ready.

Live means that steps advance while there is work. An idle engine is live. A device that hangs keeps the
engine's thread alive, so only the steps show the fault. Ready means live, loaded and not draining.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from jaxflow.request import Event, Finished, SamplingParams
from serving.operations.fleet import Fleet

if TYPE_CHECKING:
    from jaxflow.llm import LLM

MIN_STALL_S = 10.0
STALL_STEPS = 20  # a stall lasts this many of the longest recent steps
FIRST_TOKEN_TIMEOUT_S = 600.0


class ServedState(Protocol):
    """The served model, as operations read it."""

    @property
    def draining(self) -> bool:
        """Return True once new requests are refused."""
        ...

    @property
    def loaded(self) -> bool:
        """Return True once the model is loaded."""
        ...

    @property
    def llm(self) -> "LLM":
        """Return the loaded model. Raises: a refusal while the model loads."""
        ...


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer to one question of health. `reason` is empty if the answer is yes."""

    reason: str = ""

    @property
    def ok(self) -> bool:
        """Return True if the answer is yes."""
        return not self.reason


HEALTHY = Verdict()


class Health:
    """The health of a served model.

    Args:
      stall_s: seconds without progress after which the server is not live; None for the larger of
        `MIN_STALL_S` and `STALL_STEPS` times the longest recent step.
      longest_step_s: returns the seconds of the longest recent step.
      fleet: the replicas behind the server, of which one must serve; None for one engine.
    """

    def __init__(
        self,
        served: ServedState,
        longest_step_s: Callable[[], float],
        stall_s: float | None = None,
        fleet: Fleet | None = None,
    ):
        self._served, self._longest_step_s, self._stall_s = served, longest_step_s, stall_s
        self._fleet = fleet

    @property
    def stall_s(self) -> float:
        """Return the seconds without progress that make a stall."""
        if self._stall_s is not None:
            return self._stall_s
        return max(MIN_STALL_S, STALL_STEPS * self._longest_step_s())

    @property
    def stalled_for_s(self) -> float:
        """Return the seconds that steps have not advanced, if these make a stall; else 0."""
        if not self._served.loaded:
            return 0.0
        idle_s = self._served.llm.driver.seconds_without_progress()
        return idle_s if idle_s > self.stall_s else 0.0

    def live(self) -> Verdict:
        """Answer if the process should keep running. A process that loads is live."""
        if not self._served.loaded:
            return HEALTHY
        if not self._served.llm.driver.alive:
            return Verdict("the engine stopped")
        if stalled_s := self.stalled_for_s:
            return Verdict(f"no step advanced for {stalled_s:.0f} s; --stall_s is {self.stall_s:g}")
        return HEALTHY

    def startup(self) -> Verdict:
        """Answer if the model is loaded and made its first token."""
        return HEALTHY if self._served.loaded else Verdict("the model is loading")

    def ready(self) -> Verdict:
        """Answer if new requests are served."""
        if self._served.draining:
            return Verdict("the server is draining")
        started = self.startup()
        if started.ok and self._fleet is not None and (reason := self._fleet.unready()):
            return Verdict(reason)
        return self.live() if started.ok else started


class _FirstToken:
    """A mailbox that keeps the end of one request."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def post(self, events: list[Event]) -> None:
        """Take the events of a step."""
        for event in events:
            if isinstance(event, Finished):
                self.error = event.error
                self.ended.set()


def make_first_token(llm: "LLM", timeout_s: float = FIRST_TOKEN_TIMEOUT_S) -> None:
    """Generate one token, which proves that the device, the programs and the engine's thread work.

    Raises:
      RuntimeError: no token within `timeout_s`, or a fault.
    """
    mailbox = _FirstToken()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = llm.request([0], sampling, request_id="jaxflow-first-token")
    llm.driver.submit(request, mailbox)
    if not mailbox.ended.wait(timeout_s):
        raise RuntimeError(f"the engine made no token within {timeout_s:g} s of loading")
    if mailbox.error is not None:
        raise RuntimeError("the engine failed at its first token") from mailbox.error

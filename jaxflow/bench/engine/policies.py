"""The step policies of the papers' baselines, for `Scheduler(policy=...)` (SARATHI §4.1, §5.2)."""

import numpy as np

from jaxflow.scheduler.scheduler import Chunks, DecodeMaximal, Scheduler, StepPolicy
from jaxflow.scheduler.state import Sequence


class PrefillFirst:
    """vLLM's first policy: waiting prompts are prefilled in steps of their own, and decodes stall."""

    min_tokens = 0

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        chunks = scheduler.prefill(now, cut_prompts=False)
        return np.zeros(0, np.int32) if chunks else scheduler.decode(), chunks


class OrcaWorst:
    """Orca's worst case: all requests of a batch start together, and the batch admits none while it decodes.

    Requests leave the batch when they end.
    """

    min_tokens = 0

    def __init__(self) -> None:
        self._open = True

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        self._open = self._open or not scheduler.num_running
        chunks = scheduler.prefill(now, admit=self._open, cut_prompts=False)
        self._open = bool(chunks) and self._open
        return np.zeros(0, np.int32) if chunks else scheduler.decode(), chunks


class RequestLevel(OrcaWorst):
    """FasterTransformer's policy: as `OrcaWorst`, but ended requests keep their row until the batch ends."""

    def __init__(self) -> None:
        super().__init__()
        self._batch: set[Sequence] = set()

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        if not scheduler.num_running:
            self._batch.clear()
        filled = super().fill(scheduler, now)
        self._batch.update(scheduler.admitted)
        self.min_tokens = min(len(self._batch), scheduler.config.token_budget)
        return filled


class OrcaBest:
    """Orca's best case: a step has the full prefill of one new request, next to the running decodes.

    prompts: most new requests of a step.
    """

    min_tokens = 0

    def __init__(self, prompts: int = 1):
        self._prompts = prompts

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        slots = scheduler.decode()
        return slots, scheduler.prefill(now, decodes=len(slots), max_chunks=self._prompts, cut_prompts=False)


class Hybrid:
    """SARATHI with a fixed chunk: all decodes, and one chunk of at most `chunk_size` tokens a step."""

    min_tokens = 0

    def __init__(self, chunk_size: int):
        self._chunk_size = chunk_size

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        slots = scheduler.decode()
        chunks = scheduler.prefill(now, decodes=len(slots), max_tokens=self._chunk_size, max_chunks=1)
        return slots, chunks


POLICIES = {
    "decode-maximal": DecodeMaximal,
    "request-level": RequestLevel,
    "orca-best": OrcaBest,
    "orca-worst": OrcaWorst,
    "prefill-first": PrefillFirst,
    "hybrid": Hybrid,
}


def step_policy(name: str, chunk_size: int | None = None) -> StepPolicy:
    """Return a new policy by its name in `POLICIES`. `chunk_size` is for "hybrid"."""
    return Hybrid(chunk_size) if chunk_size is not None else POLICIES[name]()

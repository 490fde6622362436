"""The messages between a router and a replica. Each can be pickled."""

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.loop import Stats
from jaxflow.engine.step_log import StepRecord
from jaxflow.kv.tiers.host_store import Key
from jaxflow.request import Event, SamplingParams
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.text.tokenizer import Tokenizer


class Loan(msgspec.Struct, frozen=True):
    """Pages that wait for a fetch.

    Attributes:
      number: the name of the loan, never used again.
      address: of the sender's transport.
      lengths: bytes of each page.
      checksums: CRC-32 of each page, or empty.
    """

    number: int
    address: str
    keys: tuple[Key, ...]
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all pages."""
        return sum(self.lengths)


class Order(msgspec.Struct, frozen=True):
    """A request for a replica.

    Attributes:
      name: the request's name at the replica. A request that moves gets a new one, so no late event is taken
        for an event of its new replica.
      number: `Route.number`.
      expected_tokens: of the answer, all sequences together.
      lends_after: pages of the prompt to skip, for an order to compute the prompt and lend its other
        pages; None for an order to answer.
      loan: pages of the prompt to fetch before the request begins.
    """

    name: str
    number: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    cache_salt: str
    expected_tokens: float
    lends_after: int | None = None
    loan: Loan | None = None


class Lent(msgspec.Struct, frozen=True):
    """The end of an order with `lends_after`.

    Attributes:
      cached_tokens: prompt tokens that the engine found in its own caches.
      loan: None if there is none, for `reason`.
    """

    name: str
    cached_tokens: int = 0
    loan: Loan | None = None
    reason: str = ""


class Fetched(msgspec.Struct, frozen=True):
    """The end of a fetch, sent before the first event of its order.

    Attributes:
      name: of the order.
      seconds: from the order's arrival to the pages in host memory.
      reason: of a failed fetch, or empty.
    """

    name: str
    loan: Loan
    seconds: float
    reason: str = ""


class EndLoan(msgspec.Struct, frozen=True):
    """The acknowledgement of a loan, for the replica that lent it. `name`: of the request."""

    name: str
    number: int


class ReplicaModel(msgspec.Struct, frozen=True):
    """The loaded model of a replica.

    Attributes:
      device: the devices of the replica, as the status page shows them.
      process_id: of the replica's process, on its own machine.
      seconds_per_token: measured time of a token's prefill, if the replica exchanges pages.
    """

    name: str
    model_config: ModelConfig
    engine_config: EngineConfig
    scheduling: SchedulerConfig
    generation_config: Mapping[str, Any]
    max_model_len: int
    tokenizer: Tokenizer | None
    device: str
    process_id: int
    seconds_per_token: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """The events and the state of a replica since its last report.

    Attributes:
      outstanding_tokens: prompt and expected output tokens that are not computed yet.
      last_number: the latest `Order.number` that the replica has counted.
      stalled_s: seconds since a step advanced, 0 without work.
      clock_s: the replica's `time.monotonic`, by which `steps` are dated.
      fault: the fault that ended the engine, or empty.
      open_loans: `PageExchange.open_loans`.
    """

    events: list[Event]
    steps: list[StepRecord]
    stats: Stats
    outstanding_tokens: float
    last_number: int
    stalled_s: float
    clock_s: float
    fault: str
    lent: list[Lent] = []
    fetched: list[Fetched] = []
    open_loans: int = 0

    @property
    def longest_step_s(self) -> float:
        """Return the seconds of the longest of the steps."""
        return max((step.read_s - step.enqueued_s for step in self.steps), default=0.0)


class LineOrder(msgspec.Struct, frozen=True):
    """A line of a batch for a replica. The replica makes the text of its answer.

    Attributes:
      name: as in `Order`.
      url, body: of the line. `body` is JSON.
      priority: of the request; a higher number is later.
    """

    name: str
    url: str
    body: bytes
    priority: int


class LineAnswer(msgspec.Struct, frozen=True):
    """The answer of a line: the HTTP status, and the JSON of the body. `name`: of the order."""

    name: str
    status: int
    body: bytes


class LineReport(msgspec.Struct, frozen=True):
    """The answers and the state of a replica since its last report.

    The other fields are those of `Report`.
    """

    answers: list[LineAnswer]
    longest_step_s: float
    stalled_s: float
    fault: str

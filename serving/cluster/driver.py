"""The driver of several replicas, with the interface of `jaxflow.engine.driver.Driver`.

One thread with an event loop owns all requests. A request is at one replica at a time. When its replica is
lost, the request goes to another one: as it is while it has no token, else as the rest of its answer
(`serving.cluster.resume`). Where the rest cannot be computed, the request ends with `Interrupted`. Each
sequence gets one `Finished`.
"""

import asyncio
import collections
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Sequence

import msgspec

from jaxflow.engine.driver import EngineDead, Mailbox
from jaxflow.engine.live_request import refused
from jaxflow.engine.loop import Stats
from jaxflow.engine.step_log import StepLog
from jaxflow.kv.prefix import page_names
from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    FinishReason,
    Interrupted,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    Started,
    Timings,
    Usage,
)
from jaxflow.scheduler.config import SchedulerConfig, accept, prefix_salt
from serving.cluster.apart import ApartRule, Load, Prompt, TransferRecord, saves_time
from serving.cluster.link import Launch, StartFailed
from serving.cluster.member import Member as AnyMember
from serving.cluster.member import Phase
from serving.cluster.messages import EndLoan, Fetched, Lent, Loan, Order, ReplicaModel, Report
from serving.cluster.resume import rest_of
from serving.cluster.router import NoReplica, Route, Router
from serving.cluster.totals import total
from serving.cluster.wanted import WantedReplicas
from serving.operations.fleet import ReplicaState

log = logging.getLogger(__name__)

type Member = AnyMember[Order | EndLoan, Report]

FIRST_EXPECTED_TOKENS = 256.0  # the expected length of an answer before the first answer has ended
MEAN_SHARE = 0.02  # the weight of the latest answer in the mean length
RETRY_S = 1.0
MAX_LOSSES = 3  # a request at this many lost replicas may be the cause of the losses
CLOSE_S = 15.0
RELIEVE_S = 1.0  # between two looks for requests that wait at a slow replica


@dataclasses.dataclass(slots=True, eq=False)
class _Live:
    """A request under way.

    Attributes:
      pages: the content names of the prompt's full pages.
      left: the sequences that have not ended.
      made: tokens of each sequence; `token_ids`: of the only sequence, so far.
      moves: times that it left a replica; `losses`: of them, from a lost one.
      avoided: the number of the slow replica where it waited too long.
      name: at its replica; `sent_s`: the time when it went there.
      queued: prompt tokens that it waits for, in the driver's count.
      loan: pages of its prompt that its replica fetches; `lender`: the replica that computed them.
      apart: its prompt was computed by another replica, which found `cached_apart` tokens of it in a cache.
    """

    request: Request
    mailbox: Mailbox
    arrived_s: float
    left: set[int]
    made: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    pages: list[bytes] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    member: Member | None = None
    name: str = ""
    sent_s: float = 0.0
    moves: int = 0
    losses: int = 0
    avoided: int | None = None
    queued: int = 0
    loan: Loan | None = None
    lender: Member | None = None
    apart: bool = False
    cached_apart: int | None = None  # None if the pages did not arrive
    cached_tokens: int | None = None  # None until it has started
    first_token_s: float | None = None


class ClusterDriver:
    """Several replicas as one engine.

    Args:
      wanted: the replicas to begin with.
      launch: starts a process.
      stall_s, start_s: see `Member`.
      drain_s: seconds that a replica has to finish its requests before a planned end; then they move.
      rule: decides whether a prompt is computed apart from its answer, where there are replicas for it.
      seed: of the router's random order, and of the seeds of requests without a seed; None: random.
    """

    def __init__(
        self,
        wanted: WantedReplicas,
        launch: Launch,
        *,
        stall_s: float | None = None,
        drain_s: float = 30.0,
        start_s: float = 1800.0,
        rule: ApartRule = ApartRule.PREDICTED,
        seed: int | None = None,
    ):
        self.fault: BaseException | None = None
        self.log = StepLog()
        self.model: ReplicaModel | None = None  # the model, as the first ready replica describes it
        self.moved = self.interrupted = 0
        self._launch, self._stall_s, self._drain_s, self._start_s = launch, stall_s, drain_s, start_s
        self._wanted = wanted
        self._random = random.Random(seed)
        self._router: Router | None = None
        self._prefill_router: Router | None = None  # of the replicas that compute prompts for others
        self._rule, self.transfers = rule, TransferRecord()
        self._queued_tokens = {False: 0, True: 0}  # prompt tokens that wait, at both kinds of replicas
        self._members: list[Member] = []
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._live: dict[str, _Live] = {}
        self._by_name: dict[str, _Live] = {}
        self._held: collections.deque[_Live] = collections.deque()
        self._ended_stats: list[Stats] = []
        self._mean_output = FIRST_EXPECTED_TOKENS
        self._lock = threading.Lock()
        self._queued = 0  # submitted and not yet taken by the driver's thread
        self._relieved_s = 0.0  # the time of the last look for requests at a slow replica
        self._draining = self._closed = False
        self._idle = threading.Event()
        self._first: list[Exception | None] = []
        self._first_ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._changing = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="jaxflow-cluster", daemon=True)

    # ---- any thread

    def start(self) -> ReplicaModel:
        """Start the replicas, and wait for the first one.

        Raises:
          StartFailed: no replica could load the model.
        """
        self._thread.start()
        self._call(self._change(self._wanted))
        self._first_ready.wait()
        if self.model is None:
            error = next((error for error in self._first if error is not None), None)
            self.close()
            raise error or StartFailed("the router was closed")
        return self.model

    @property
    def alive(self) -> bool:
        """True while requests can be taken."""
        return self._thread.is_alive() and self.fault is None

    def seconds_without_progress(self) -> float:
        """Return 0: a replica that stalls is replaced, and its requests move."""
        return 0.0

    @property
    def scheduling(self) -> SchedulerConfig:
        """The limits of a request."""
        assert self.model is not None
        return self.model.scheduling

    def accept(self, request: Request) -> Request:
        """Return the request with its limit. Raises: InvalidRequest."""
        return accept(self.scheduling, request)

    def submit(self, request: Request, mailbox: Mailbox) -> None:
        """Queue a request, see `Driver.submit`. Raises: InvalidRequest, QueueFull, Draining, EngineDead."""
        request = self.accept(request)
        with self._lock:
            if self.fault is not None:
                raise EngineDead("the router stopped after a fault") from self.fault
            if self._draining or self._closed:
                raise Draining("the router is shutting down")
            waiting = self.stats().waiting_requests
            serving = len(self._serving(prefills=False))
            if waiting >= self.scheduling.max_waiting * max(1, serving):
                raise QueueFull(waiting, RETRY_S)
            self._queued += 1
            self._idle.clear()
        self._loop.call_soon_threadsafe(self._admit, request, mailbox, time.monotonic())

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored."""
        self._loop.call_soon_threadsafe(self._abort, request_id)

    def stats(self) -> Stats:
        """Return the counters of all replicas, and the requests that wait here for a replica."""
        reports = [(member, member.report) for member in list(self._members)]
        found = total([stats_of(m, r) for m, r in reports if r is not None], list(self._ended_stats))
        here = self._queued + len(self._held)
        return msgspec.structs.replace(found, waiting_requests=found.waiting_requests + here)

    def expert_tokens(self) -> None:
        """Return None: the router does not add up the counts of its replicas."""
        return None

    def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones. Return the number aborted at the timeout."""
        with self._lock:
            self._draining = True
        deadline = time.monotonic() + timeout_s
        while (self._live or self._queued) and self.alive and time.monotonic() < deadline:
            self._idle.wait(min(0.1, max(0.0, deadline - time.monotonic())))
        names = list(self._live)
        for name in names:
            self.abort(name)
        return len(names)

    def change(self, wanted: WantedReplicas) -> None:
        """Bring the replicas to a wanted state, one change after another. Returns at once."""
        asyncio.run_coroutine_threadsafe(self._change(wanted), self._loop)

    def close(self) -> None:
        """Abort what runs, and end all replicas and the thread."""
        with self._lock:
            if self._closed:
                return
            self._draining = self._closed = True
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # ---- the state, for operation

    def unready(self) -> str:
        """Return why no request is served; empty if some replica serves."""
        return "" if self._serving(prefills=False) else "no replica serves"

    def replicas(self) -> list[ReplicaState]:
        """Return the state of each replica."""
        return [
            ReplicaState(
                index=m.index,
                state=str(m.phase),
                version=m.version,
                requests=len(m.names),
                outstanding_tokens=0.0 if m.report is None else m.report.outstanding_tokens,
                restarts=m.restarts,
                reason=m.reason,
                process_id=0 if m.description is None else m.description.process_id,
                prefills=m.prefills,
                open_loans=0 if m.report is None else m.report.open_loans,
            )
            for m in list(self._members)
        ]

    @property
    def device(self) -> str:
        """The device of a replica."""
        return "" if self.model is None else self.model.device

    # ---- the driver's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _close(self) -> None:
        for name in list(self._live):
            self._abort(name)
        for member in self._members:
            member.stop()
        if self._tasks:
            _, slow = await asyncio.wait(self._tasks.values(), timeout=CLOSE_S)
            for task in slow:  # tasks of a hung process, which is killed
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    # ---- replicas come and go

    async def _change(self, wanted: WantedReplicas) -> None:
        """Add or remove replicas, then replace those of another version, one at a time."""
        async with self._changing:
            for prefills, number in ((False, wanted.replicas), (True, wanted.prefill_replicas)):
                if not await self._change_kind(wanted, number, prefills):
                    return
            self._wanted = wanted

    async def _change_kind(self, wanted: WantedReplicas, number: int, prefills: bool) -> bool:
        """Change the replicas of one kind. Return False if a new engine failed."""
        current = [m for m in self._members if m.phase is not Phase.STOPPED and m.prefills is prefills]
        for member in current[number:]:
            await self._remove(member)
        free = iter(i for i in range(10**9) if i not in {m.index for m in self._members})
        for _ in range(number - len(current)):
            self._add(next(free), wanted, prefills)
        for member in current[:number]:
            differs = (member.config, member.version) != (wanted.config, wanted.version)
            if differs and not await self._replace(member, wanted):
                failed = (wanted.version, member.index)
                log.error("the update to version %r stops: replica %d failed", *failed)
                return False
        return True

    def _add(self, index: int, wanted: WantedReplicas, prefills: bool) -> None:
        member: Member = AnyMember(
            index,
            wanted.config,
            wanted.version,
            launch=self._launch,
            owner=self,
            stall_s=self._stall_s,
            start_s=self._start_s,
            prefills=prefills,
        )
        self._members.append(member)
        tell = _tell_nobody if prefills else self._tell_first
        self._tasks[member] = asyncio.ensure_future(member.run(tell))

    async def _remove(self, member: Member) -> None:
        await self._retire(member, for_good=True)
        await self._tasks.pop(member)
        self._members.remove(member)

    async def _replace(self, member: Member, wanted: WantedReplicas) -> bool:
        """Give a member another engine. Return False, with the old engine back, if the new one fails."""
        before = member.config, member.version
        member.config, member.version = wanted.config, wanted.version
        await self._retire(member, for_good=False)
        await member.until(Phase.SERVING, Phase.STOPPED, lost=True)
        if member.phase is Phase.SERVING:
            return True
        member.config, member.version = before
        return False

    async def _retire(self, member: Member, *, for_good: bool) -> None:
        """Let a member finish its requests and end its process. What runs after `drain_s` moves."""
        if (router := self._router_of(member)) is not None:
            router.lost(member.index)
        member.leave(for_good=for_good)
        try:
            await asyncio.wait_for(member.until(Phase.STARTING, Phase.STOPPED), self._drain_s)
        except TimeoutError:
            for name in list(member.names):
                self._move(self._by_name[name])
            await member.until(Phase.STARTING, Phase.STOPPED)

    def _tell_first(self, error: Exception | None) -> None:
        self._first.append(error)
        if error is None or len(self._first) >= sum(not m.prefills for m in self._members):
            self._first_ready.set()

    def joined(self, member: Member, description: ReplicaModel) -> None:
        """See `serving.cluster.member.Owner`."""
        if self.model is None:
            self.model = description
        mine, its = self.model, description
        for field in ("name", "model_config", "max_model_len"):
            if getattr(mine, field) != getattr(its, field):
                raise StartFailed(
                    f"replica {member.index}: {field} is {getattr(its, field)}, and the router serves "
                    f"{getattr(mine, field)}"
                )
        router = self._router_of(member)
        if router is None:
            pages = sum(description.scheduling.num_pages)
            block, seed = description.scheduling.block_size, self._random.getrandbits(32)
            router = Router(1, pages, block, seed=seed, candidates=None)
            if member.prefills:
                self._prefill_router = router
            else:
                self._router = router
        while router.num_replicas <= member.index:
            router.add()
        router.lost(member.index, restarted=True)
        router.report(member.index, 0.0, 0)
        asyncio.get_running_loop().call_soon(self._send_held)

    def heard(self, member: Member, report: Report) -> None:
        """See `serving.cluster.member.Owner`."""
        router = self._router_of(member)
        if member.phase is Phase.SERVING and router is not None:
            router.report(member.index, report.outstanding_tokens, report.last_number)
        shift_s = time.monotonic() - report.clock_s
        self.log.steps.extend(
            step._replace(
                replica=member.index, enqueued_s=step.enqueued_s + shift_s, read_s=step.read_s + shift_s
            )
            for step in report.steps
        )
        for lent in report.lent:
            self._take_lent(member, lent)
        for fetched in report.fetched:
            self._take_fetched(member, fetched)
        posts: dict[int, tuple[Mailbox, list[Event]]] = {}
        for event in report.events:
            live = self._by_name.get(event.request_id)
            if live is None or live.member is not member:
                continue
            if report.fault and type(event) is Finished and event.error is not None:
                continue  # the fault of the engine, not of the request: the request moves
            for message in self._caller_events(live, event):
                posts.setdefault(id(live.mailbox), (live.mailbox, []))[1].append(message)
        for mailbox, events in posts.values():
            self._post(mailbox, events)
        if time.monotonic() > self._relieved_s + RELIEVE_S:
            self._relieve()

    def _relieve(self) -> None:
        """Move requests that wait at a slow replica while another replica has none that waits.

        A replica is slow for a request that has waited there for half of `stall_s`. At most half of such
        requests move at once, the oldest first, so that the other replica does not become the slow one.
        """
        now = self._relieved_s = time.monotonic()
        serving = [m for m in self._serving(prefills=False) if m.report is not None]
        if all(m.report.stats.waiting_requests for m in serving):  # type: ignore[union-attr]
            return
        for slow in serving:
            if not (waiting := slow.report.stats.waiting_requests):  # type: ignore[union-attr]
                continue
            here = [live for name in slow.names if (live := self._by_name.get(name)) is not None]
            unanswered = sorted((live for live in here if not live.made), key=lambda live: live.sent_s)
            late = [live for live in unanswered[-waiting:] if now - live.sent_s > slow.stall_s / 2]
            for live in late[: -(-len(late) // 2)]:
                live.avoided = slow.index
                self._move(live)

    def lost(self, member: Member, reason: str) -> None:
        """See `serving.cluster.member.Owner`."""
        router = self._router_of(member)
        if router is not None and member.index < router.num_replicas:
            router.lost(member.index, restarted=True)
        if member.report is not None:
            self._ended_stats = [total([], [*self._ended_stats, stats_of(member, member.report)])]
        member.report = None
        for live in [live for live in self._live.values() if live.member is member]:
            live.losses += bool(reason)
            self._move(live)

    # ---- requests

    def _admit(self, request: Request, mailbox: Mailbox, arrived_s: float) -> None:
        with self._lock:
            self._queued -= 1
        refusal = Draining("the router is shutting down") if self._closed else None
        if request.request_id in self._live:
            accepted = "a name that no request under way has"
            refusal = InvalidRequest("request_id", request.request_id, accepted)
        if refusal is not None:
            self._post(mailbox, refused(request, refusal))
            return
        if request.sampling.seed is None:  # so that another replica can go on with the same draws
            seed = self._random.getrandbits(63)
            request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))
        live = _Live(request, mailbox, arrived_s, set(range(request.sampling.n)))
        salt = prefix_salt(self.scheduling, request, 0)
        if self.scheduling.enable_prefix_caching and salt is not None:
            live.pages = page_names(request.prompt_token_ids, salt, self.scheduling.block_size)
        self._live[request.request_id] = live
        skip = self._goes_apart(live)
        if skip is None or not self._prefill(live, skip):
            self._send(live, request)

    def _send(self, live: _Live, rest: Request) -> None:
        """Send a request, or the rest of one, to the replica that the router chooses.

        Hold it if there is none.
        """
        sampling, expected = rest.sampling, self._expected(rest)
        try:
            assert self._router is not None
            tokens = len(rest.prompt_token_ids)
            session = rest.session or None
            route = self._router.route(live.pages, tokens, expected, session=session, excluded=live.avoided)
        except NoReplica:
            self._end_loan(live)
            self._held.append(live)
            return
        member = self._member(route)
        live.name = f"{live.request.request_id}~{live.moves}" if live.moves else live.request.request_id
        live.member, live.sent_s = member, time.monotonic()
        self._by_name[live.name] = live
        prompt = tuple(rest.prompt_token_ids)
        self._queue(live, len(prompt) - route.expected_hit_tokens)
        order = Order(live.name, route.number, prompt, sampling, rest.priority, rest.cache_salt, expected)
        member.send(msgspec.structs.replace(order, loan=live.loan))

    # ---- prompts computed by another replica

    def _goes_apart(self, live: _Live) -> int | None:
        """Return the pages of the prompt that need no transfer, for a
        prefill apart; None for one together.
        """
        here, there = self._serving(prefills=False), self._serving(prefills=True)
        possible = here and there and live.pages and live.request.sampling.prompt_logprobs is None
        if not possible or self.transfers.paused(time.monotonic()):
            return None
        assert self._router is not None and self._prefill_router is not None
        size, tokens = self.scheduling.block_size, len(live.request.prompt_token_ids)
        full = (tokens - 1) // size  # the last token is always computed where the answer is
        names = live.pages[:full]
        skip = self._router.longest_hit(names)
        if skip == full:
            return None
        hit = self._prefill_router.longest_hit(names)
        prompt = Prompt(
            together=tokens - skip * size,
            apart=(full - hit) * size,
            moved=(full - skip) * size,
            rest=tokens - full * size,
        )
        load = Load(
            self._queued_tokens[False] / len(here),
            self._queued_tokens[True] / len(there),
            sum(m.report.stats.running_requests for m in here if m.report is not None) / len(here),
        )
        described = here[0].description
        token_s = 0.0 if described is None else described.seconds_per_token
        apart = self._rule is ApartRule.ALWAYS or saves_time(prompt, load, token_s, self.transfers.token_s)
        return skip if apart else None

    def _prefill(self, live: _Live, skip: int) -> bool:
        """Send the full pages of a prompt to a replica that computes and lends them.

        Return False without one.
        """
        request, size = live.request, self.scheduling.block_size
        prompt = tuple(request.prompt_token_ids[: (len(request.prompt_token_ids) - 1) // size * size])
        assert self._prefill_router is not None
        try:
            route = self._prefill_router.route(live.pages[: len(prompt) // size], len(prompt), 0.0)
        except NoReplica:
            return False
        live.name, live.member = f"{request.request_id}~prefill", self._member(route)
        live.sent_s, live.apart = time.monotonic(), True
        self._by_name[live.name] = live
        self._queue(live, len(prompt) - route.expected_hit_tokens)
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
        live.member.send(
            Order(
                live.name,
                route.number,
                prompt,
                sampling,
                request.priority,
                request.cache_salt,
                expected_tokens=0.0,
                lends_after=skip,
            )
        )
        return True

    def _take_lent(self, member: Member, lent: Lent) -> None:
        """Send a request to the replica that answers, with its loan if there is one."""
        member.done(lent.name)
        live = self._by_name.get(lent.name)
        if live is None or live.member is not member:  # it was aborted or moved
            if lent.loan is not None:
                self._acknowledge(member, lent.loan, lent.name)
            return
        self._by_name.pop(lent.name)
        self._queue(live, 0)
        live.member = None
        if lent.loan is None:
            self._note_failed(live, lent.reason)
        else:
            live.loan, live.lender = lent.loan, member
            live.cached_apart = lent.cached_tokens
        self._send(live, live.request)

    def _take_fetched(self, member: Member, fetched: Fetched) -> None:
        """Acknowledge a loan."""
        live = self._by_name.get(fetched.name)
        if live is None or live.member is not member or live.loan is None:
            return
        if fetched.reason:
            live.cached_apart = None
            self._note_failed(live, fetched.reason)
        else:
            assert self.model is not None
            pages = len(fetched.loan.keys) // len(self.scheduling.num_pages)
            tokens = pages * self.scheduling.block_size
            self.transfers.note(tokens, fetched.loan.bytes, fetched.seconds)
        self._end_loan(live)

    def _note_failed(self, live: _Live, reason: str) -> None:
        log.warning("the KV pages of request %s are computed again: %s", live.request.request_id, reason)
        self.transfers.note_failure(time.monotonic())

    def _end_loan(self, live: _Live) -> None:
        if live.loan is not None and live.lender is not None:
            self._acknowledge(live.lender, live.loan, live.name)
        live.loan = live.lender = None

    @staticmethod
    def _acknowledge(lender: Member, loan: Loan, name: str) -> None:
        lender.send(EndLoan(name, loan.number))
        lender.done(name)

    def _queue(self, live: _Live, tokens: int) -> None:
        """Count the prompt tokens that a request waits for at its replica; 0
        when it does not wait any more.
        """
        if live.member is not None:
            self._queued_tokens[live.member.prefills] += tokens - live.queued
            live.queued = tokens

    def _serving(self, *, prefills: bool) -> list[Member]:
        """Return the replicas of one kind that take requests."""
        return [m for m in self._members if m.phase is Phase.SERVING and m.prefills is prefills]

    def _router_of(self, member: Member) -> Router | None:
        return self._prefill_router if member.prefills else self._router

    def _member(self, route: Route) -> Member:
        return next(m for m in self._members if m.index == route.replica and m.phase is Phase.SERVING)

    def _send_held(self) -> None:
        held, self._held = self._held, collections.deque()
        for live in held:
            self._resend(live)

    def _resend(self, live: _Live) -> None:
        may_move = self._can_move(live) and live.losses < MAX_LOSSES
        rest = rest_of(live.request, live.token_ids) if may_move else None
        if rest is not None:
            self._send(live, rest)
            return
        self.interrupted += 1
        where = "the replica" if live.losses < MAX_LOSSES else f"the {MAX_LOSSES}th replica"
        self._end(live, Interrupted(f"{where} of this request was lost after {live.made.total()} tokens"))

    @staticmethod
    def _can_move(live: _Live) -> bool:
        """Return True if the caller got no event of the request, or only tokens of its one sequence."""
        return live.cached_tokens is None or live.request.sampling.n == 1

    def _move(self, live: _Live) -> None:
        """Take a request from its replica, and send it to another one."""
        self._detach(live)
        live.moves += 1
        self.moved += 1
        self._resend(live)

    def _detach(self, live: _Live) -> None:
        self._end_loan(live)
        if live.member is not None:
            self._queue(live, 0)
            self._by_name.pop(live.name, None)
            live.member.abort(live.name)
            live.member = None

    def _expected(self, request: Request) -> float:
        assert request.limit is not None
        room = request.limit - len(request.prompt_token_ids)
        return request.sampling.n * min(room, self._mean_output)

    def _caller_events(self, live: _Live, event: Event) -> Sequence[Event]:
        """Return the events for the caller that follow from a replica's event.

        Keep the books of the request.
        """
        name = live.request.request_id
        if type(event) is Delta:
            live.made[event.index] += len(event.token_ids)
            if live.request.sampling.n == 1:
                live.token_ids += event.token_ids
            if live.first_token_s is None:
                self._queue(live, 0)
                live.first_token_s = time.monotonic()
            return (
                Delta(name, event.index, event.token_ids, event.logprobs, event.text)
                if live.moves
                else event,
            )
        if type(event) is Started:
            if live.cached_tokens is not None:
                return ()
            if live.cached_apart is not None:  # the other pages of the cache were computed for this request
                cached = min(event.cached_prompt_tokens, live.cached_apart)
                event = msgspec.structs.replace(event, cached_prompt_tokens=cached)
            live.cached_tokens = event.cached_prompt_tokens
            return (msgspec.structs.replace(event, request_id=name) if live.moves else event,)
        assert type(event) is Finished
        if live.moves or live.apart:
            event = self._as_one(live, event)
        self._note_end(live, event)
        if not live.left:
            if live.member is not None:
                self._queue(live, 0)
                live.member.done(live.name)
            self._by_name.pop(live.name, None)
            self._forget(live)
        return (event,)

    def _as_one(self, live: _Live, event: Finished) -> Finished:
        """Return the end of a request that moved, with the tokens and times of the whole answer."""
        usage, timings, before_s = event.usage, event.timings, live.sent_s - live.arrived_s
        if live.request.sampling.n == 1:
            prompt = len(live.request.prompt_token_ids)
            usage = Usage(prompt, live.cached_tokens or 0, len(live.token_ids))
        first_s = before_s + timings.time_to_first_token_s
        if live.first_token_s is not None:
            first_s = min(first_s, live.first_token_s - live.arrived_s)
        timings = Timings(
            queued_s=min(first_s, before_s + timings.queued_s),
            time_to_first_token_s=first_s,
            total_s=before_s + timings.total_s,
            preemptions=timings.preemptions + live.moves,
        )
        return msgspec.structs.replace(
            event, request_id=live.request.request_id, usage=usage, timings=timings
        )

    def _note_end(self, live: _Live, event: Finished) -> None:
        live.left.discard(event.index)
        self.log.ends.append(event)
        if event.reason is not FinishReason.ABORT:
            self._mean_output += MEAN_SHARE * (event.usage.completion_tokens - self._mean_output)

    def _forget(self, live: _Live) -> None:
        self._live.pop(live.request.request_id, None)
        if not self._live and not self._queued:
            self._idle.set()

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        self._detach(live)
        if live in self._held:
            self._held.remove(live)
        self._end(live, None)

    def _end(self, live: _Live, error: BaseException | None) -> None:
        """End the sequences of a request that has no replica."""
        now = time.monotonic()
        first_s = 0.0 if live.first_token_s is None else live.first_token_s - live.arrived_s
        prompt, cached = len(live.request.prompt_token_ids), live.cached_tokens or 0
        timings = Timings(first_s, first_s, now - live.arrived_s, live.moves)
        name = live.request.request_id
        events: list[Event] = []
        for index in sorted(live.left):
            usage = Usage(prompt, cached, live.made[index])
            event = Finished(name, index, FinishReason.ABORT, usage, timings, error=error)
            self._note_end(live, event)
            events.append(event)
        self._forget(live)
        self._post(live.mailbox, events)

    def _post(self, mailbox: Mailbox, events: list[Event]) -> None:
        try:
            mailbox.post(events)
        except Exception:
            log.exception("a mailbox failed; its request continues without events")


def _tell_nobody(error: Exception | None) -> None:
    """Take the start of a replica for which no caller waits."""


def stats_of(member: Member, report: Report) -> Stats:
    """Return the counters of a replica, without the tokens that nobody gets:
    those drawn after a lent prompt.
    """
    if not member.prefills:
        return report.stats
    return msgspec.structs.replace(report.stats, completion_tokens=0)

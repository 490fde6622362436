"""The host's half of the KV hierarchy, as the scheduler sees it: which pages go to the host, and which come
back for whom.

NanoFlow §4.2.2. What a step completes is stored right after it. A waiting sequence of which the host knows
more than the device is set aside when its turn comes: pages are held for it, filled as copies arrive, and it
gets a slot when all have. Nothing here copies: `take_scatters`, `take_stores` and `take_fetches` say what is to
be copied, in this order and before the step runs that was decided with them; whoever copies tells `stored`
and `fetched`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.prefix import part_name
from jaxflow.kv.tiers.host_store import HostStore, Key, key_of
from jaxflow.scheduler.fetch_cost import LoadCosts, worth_loading
from jaxflow.scheduler.page_fetch import Holds, Load, Piece, plan_load, reachable
from jaxflow.scheduler.state import Sequence as Seq

# a sequence waits for pages from below this many times as long as their tokens take to compute, at most
PATIENCE = 8.0


class Below(Holds, Protocol):
    """The tier below the host."""

    def used(self, keys: Sequence[Key]) -> None:
        """Pages that are the last to go, the last of them last of all."""
        ...

    def seconds(self, num_bytes: int) -> float:
        """How long it would take to read so much now."""
        ...

    def read_ahead(self, keys: Sequence[Key]) -> None:
        """Begins to read pages into the host's store, as many as it can now; `HostTier.arrived` is told of
        each that was reserved.
        """
        ...


@dataclasses.dataclass
class TierCounters:
    """Since start."""

    device_hit_tokens: int = 0  # of prompts, found on the device when they first got a slot
    host_hit_tokens: int = 0  # of prompts, brought from the host
    disk_hit_tokens: int = 0  # those of them that the host had to read first
    swapped_in: int = 0  # pre-empted sequences that went on in the middle of a page
    cancelled: int = 0  # loads given up


class HostTier:
    """Stores and loads of one scheduler.

    Args:
      staging_bytes: of the devices together, for copies under way, of each direction.

    Attributes:
      loads: what is under way, or waits for a slot.
    """

    def __init__(self, store: HostStore, costs: LoadCosts, staging_bytes: int, below: Below | None = None):
        self.store, self.costs, self.staging_bytes, self.below = store, costs, staging_bytes, below
        self.counters = TierCounters()
        self.loads: list[Load] = []
        self._behind: list[tuple[Seq, Load]] = []  # sequences that wait for a load of somebody else's
        self._freed: list[Seq] = []  # whose loads failed
        self._parts: list[
            tuple[int, int, bytes]
        ] = []  # (group, page, name) of pre-empted sequences' last pages
        self._storing_bytes = self._fetching_bytes = 0
        self._landed: list[tuple[Load, Piece, Any]] = []
        self._scatters: list[tuple[Piece, Any]] = []

    def attach(self, tables: PageTables) -> None:
        """Whose pages these are."""
        self._tables = tables
        for pool in tables.pools:
            pool.newly_named = []

    @property
    def busy(self) -> bool:
        """Whether something waits to be copied, or a sequence for a copy."""
        named = any(pool.newly_named for pool in self._tables.pools)
        return bool(
            named
            or self._parts
            or self.loads
            or self._behind
            or self._freed
            or self._scatters
            or self._landed
        )

    @property
    def copying(self) -> bool:
        """Whether copies are under way."""
        return self._storing_bytes > 0 or self._fetching_bytes > 0

    # ---- to the host

    def swap_out(self, seq: Seq) -> None:
        """Before a sequence loses its pages: so that it can go on where it is, if that is cheaper than to
        compute it again.

        Its whole pages went when they were completed; left is the last one, filled in part.
        """
        size, end = self._tables.block_size, min(seq.num_known, seq.num_computed)
        seq.swapped = None
        if end % size == 0 or seq.chain is None or not worth_loading(end, self._bytes_of(end), self.costs):
            return
        seq.names(end // size, size)
        digest = part_name(seq.chain, seq.token_ids, end, size)
        self._parts += [
            (group, row[end // size], digest) for group, row in enumerate(self._tables.rows[seq.slot])
        ]
        seq.swapped = end, digest

    def take_stores(self) -> list[tuple[int, int, Key]]:
        """(group, page, key) of what is to be gathered now; `stored` is awaited for each."""
        stores, candidates = [], [(group, page, digest, True) for group, page, digest in self._parts]
        self._parts = []
        for group, pool in enumerate(self._tables.pools):
            if pool.newly_named:
                candidates += [(group, page, digest, False) for page, digest in pool.newly_named]
                pool.newly_named = []
        for group, page, digest, part in candidates:
            key, size = key_of(group, digest), self.store.page_bytes[group]
            if self.store.contains(key) or self._storing_bytes + size > self.staging_bytes:
                continue
            if self.store.reserve(key, part=part):
                self._storing_bytes += size
                stores.append((group, page, key))
        return stores

    def stored(self, key: Key, data: Any | None) -> None:
        """A page of `take_stores` is on the host; None: it could not be copied."""
        self._storing_bytes -= self.store.page_bytes[key[0]]
        self.arrived(key, data)

    def arrived(self, key: Key, data: Any | None, *, from_below: bool = False) -> None:
        """A page for which room was reserved is on the host, from whichever side; None: it will not come."""
        if data is None:
            self.store.drop(key)
        else:
            self.store.put(key, data, from_below=from_below)

    def used(self, names: Sequence[bytes]) -> None:
        """A chain was used: its pages are the last to go, the first page last of all."""
        keys = [key_of(group, name) for name in reversed(names) for group in range(len(self._tables.pools))]
        self.store.touch(keys)
        if self.below is not None:
            self.below.used(keys)

    # ---- to the device

    def admitted(self, seq: Seq, found: int, load: Load | None) -> None:
        """A sequence got a slot with `found` positions computed, some of them by way of a `load`."""
        loaded = 0 if load is None else load.tokens
        self.used(seq.names(found // self._tables.block_size, self._tables.block_size))
        if seq.t_first_schedule is None:
            self.counters.device_hit_tokens += found - loaded
            self.counters.host_hit_tokens += loaded
            if load is not None and load.pieces:
                self.counters.disk_hit_tokens += loaded * load.from_below // len(load.pieces)

    def queued(self, seq: Seq) -> None:
        """A sequence begins to wait: what only the tier below has is read ahead."""
        if self.below is not None and seq.chain is not None:
            size = self._tables.block_size
            self._read_ahead(seq.names((seq.num_known - 1) // size, size))

    def consider(
        self, seq: Seq, names: list[bytes], hit: int, fits: Callable[[list[bytes]], bool]
    ) -> bool | None:
        """Whether a sequence whose turn it is should wait for pages from the host.

        Args:
          names: of all pages that it may begin with; the device has the first `hit`.
          fits: whether memory will do for a sequence that begins with such pages.

        Returns:
          None: no, there is nothing to gain. True: it was set aside. False: it should, but there is no room
          yet.
        """
        if self.below is not None:
            self._read_ahead(names)
        load = plan_load(seq, names, hit, self._tables, self.store)
        if load is None:
            return None
        parts = sum(self.store.page_bytes) if load.part else 0
        if not worth_loading(
            load.tokens, parts + sum(self.store.page_bytes[key[0]] for key in load.missing), self.costs
        ):
            return None
        for other in self.loads:
            if not other.complete and not load.missing.isdisjoint(other.missing):
                self._behind.append((seq, other))
                return True
        if not fits(load.names) or not load.hold(self._tables):
            return False
        self.store.pin(piece.key for piece in load.to_fetch)
        self.loads.append(load)
        return True

    def take_fetches(self) -> list[tuple[Load, Piece, Any]]:
        """Copies to begin now, with what is to be copied; `fetched` is awaited for each."""
        fetches: list[tuple[Load, Piece, Any]] = []
        for load in list(self.loads):
            if any(
                not self.store.contains(piece.key) for piece in load.to_fetch
            ):  # what was on its way did not arrive
                self._freed.append(self.cancel(load))
                continue
            later: list[Piece] = []
            for piece in load.to_fetch:
                size = self.store.page_bytes[piece.group]
                if self.store.ready(piece.key) and self._fetching_bytes + size <= self.staging_bytes:
                    self._fetching_bytes += size
                    load.flying += 1
                    load.from_below += self.store.was_read(piece.key)
                    self.store.unpin([piece.key])
                    fetches.append((load, piece, self.store.get(piece.key)))
                else:
                    later.append(piece)
            load.to_fetch = later
        return fetches

    def fetched(self, load: Load, piece: Piece, data: Any | None) -> None:
        """A copy is on the device; None: it could not be made."""
        self._landed.append((load, piece, data))

    def settle(self) -> list[Seq]:
        """Names what has arrived, for `take_scatters`. Returns the sequences whose turn is to be looked at
        again.
        """
        for load, piece, data in self._landed:
            self._fetching_bytes -= self.store.page_bytes[piece.group]
            load.flying -= 1
            if load.ended:
                continue
            if data is None:
                self._freed.append(self.cancel(load))
                continue
            self.store.counters.loaded += 1
            if piece.whole:
                self._tables.pools[piece.group].register(piece.page, piece.digest)
            self._scatters.append((piece, data))
        self._landed = []
        waiting = [(seq, load) for seq, load in self._behind if not (load.ended or load.complete)]
        freed = [*self._freed, *(seq for seq, load in self._behind if load.ended or load.complete)]
        self._behind, self._freed = waiting, []
        return freed

    def take_scatters(self) -> list[tuple[Piece, Any]]:
        """What is to be written to the cache before the next step."""
        scatters, self._scatters = self._scatters, []
        return scatters

    def ready_loads(self) -> list[Load]:
        """Loads that are complete, oldest first."""
        return sorted((load for load in self.loads if load.complete), key=lambda load: load.seq.key)

    def admit(self, load: Load) -> None:
        """The sequence of a complete load takes up what was held for it, next, before anything is allocated."""
        for piece in load.pieces:
            if piece.whole:  # somebody else may have had the name when it arrived, and lost it
                self._tables.pools[piece.group].register(piece.page, piece.digest)
        self._end(load, keep_part=True)
        self.counters.swapped_in += load.part is not None
        self._forget_part(load.seq)

    def cancel(self, load: Load) -> Seq:
        """Gives a load up; copies under way are dropped when they arrive. Returns its sequence, which has to
        wait again.
        """
        self._end(load)
        self.counters.cancelled += 1
        return load.seq

    def forget(self, seq: Seq) -> None:
        """A sequence is not wanted any more."""
        self._behind = [(other, load) for other, load in self._behind if other is not seq]
        self._freed = [other for other in self._freed if other is not seq]
        for load in [load for load in self.loads if load.seq is seq]:
            self._end(load)
        self._forget_part(seq)

    # ----

    def _end(self, load: Load, *, keep_part: bool = False) -> None:
        load.ended = True
        self.loads.remove(load)
        self.store.unpin(piece.key for piece in load.to_fetch)
        load.release(self._tables, keep_part=keep_part)

    def _forget_part(self, seq: Seq) -> None:
        """Nobody will ask for the page that a pre-empted sequence had filled in part."""
        if seq.swapped is not None:
            self.store.discard(key_of(group, seq.swapped[1]) for group in range(len(self._tables.pools)))
            seq.swapped = None

    def _read_ahead(self, names: list[bytes]) -> None:
        """Has those of a sequence's pages brought to the host that only the tier below has and that it could
        begin with.

        Not where computing them is sooner by far. A little later is no loss: the device works for others
        meanwhile.
        """
        assert self.below is not None
        reach, missing = reachable(names, self._tables, [self.store, self.below])
        keys = [key for key in missing if not self.store.contains(key)]
        if not keys:
            return
        tokens = (reach - reachable(names, self._tables, [self.store])[0]) * self._tables.block_size
        seconds = self.below.seconds(sum(self.store.page_bytes[key[0]] for key in keys))
        if seconds <= PATIENCE * tokens * self.costs.seconds_a_token:
            self.below.read_ahead(keys)

    def _bytes_of(self, tokens: int) -> int:
        """Of the pages of one sequence."""
        pages = -(-tokens // self._tables.block_size)
        windows = zip(self._tables.windows, self.store.page_bytes, strict=True)
        return sum(
            size * (pages if w is None else min(pages, -(-w // self._tables.block_size) + 1))
            for w, size in windows
        )

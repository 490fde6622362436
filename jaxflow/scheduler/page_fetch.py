"""What a sequence that was set aside waits for: pages on their way from the host to places that are held for
them.
"""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.prefix import first_seen, longest_hit
from jaxflow.kv.tiers.host_store import HostStore, Key, key_of
from jaxflow.scheduler.state import Sequence


class Holds(Protocol):
    """A tier below the device."""

    def contains(self, key: Key) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """A page of a load: where its content is to go."""

    group: int
    page: int
    digest: bytes
    whole: bool  # it has a name on the device, too

    @property
    def key(self) -> Key:
        return key_of(self.group, self.digest)


@dataclasses.dataclass(eq=False)
class Load:
    """The pages that a sequence will begin with.

    Attributes:
      names: of the whole pages.
      tokens: positions that what comes from the host spares computing.
      part: positions computed, and the name, if the page after those is known in part.
      missing: keys of what the device does not have.
      held: pages referenced for it, in each group; those of `part` apart, in `part_pages`.
      pieces: all that is fetched; of them `to_fetch` are not on their way yet, and `flying` have not been
      scattered. from_below: how many of them the host had to read first.
    """

    seq: Sequence
    names: list[bytes]
    tokens: int
    part: tuple[int, bytes] | None
    missing: frozenset[Key]
    held: list[list[int]] = dataclasses.field(default_factory=list)
    part_pages: list[int] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    to_fetch: list[Piece] = dataclasses.field(default_factory=list)
    flying: int = 0
    from_below: int = 0
    ended: bool = False

    @property
    def complete(self) -> bool:
        return not self.to_fetch and not self.flying

    @property
    def partial(self) -> tuple[int, list[int]] | None:
        """The page that is known in part, as `Running.enter` takes it."""
        return None if self.part is None else (self.part[0], self.part_pages)

    def hold(self, tables: PageTables) -> bool:
        """Takes references and places; False, and nothing is taken, where there are not enough."""
        for group, window in enumerate(tables.windows):
            names = self.names[first_seen(len(self.names) * tables.block_size, window, tables.block_size) :]
            missing = [key_of(group, name) in self.missing for name in names]
            taken = tables.hold(group, names, more=self.part is not None)
            if taken is None:
                self.release(tables)
                self.held, self.part_pages, self.pieces = [], [], []
                return False
            pages, more = taken
            self.held.append(pages)
            self.part_pages += more
            self.pieces += [
                Piece(group, page, name, True)
                for page, name, away in zip(pages, names, missing, strict=True)
                if away
            ]
            if self.part is not None:
                self.pieces.append(Piece(group, more[0], self.part[1], False))
        self.to_fetch = list(self.pieces)
        return True

    def release(self, tables: PageTables, *, keep_part: bool = False) -> None:
        """Gives back what `hold` took; `keep_part`: but the page that is known in part, which somebody takes
        over.
        """
        for group, pages in enumerate(self.held):
            tables.release_held(group, pages)
        for group, page in enumerate(() if keep_part else self.part_pages):
            tables.release_held(group, [page])


class _Anywhere:
    """A pool's names and those of the tiers below as one, for `longest_hit`."""

    def __init__(self, group: int, tables: PageTables, tiers: Iterable[Holds]):
        self._group, self._pool, self._tiers = group, tables.pools[group], tuple(tiers)

    def find(self, digest: bytes) -> int:
        page = self._pool.find(digest)
        if page >= 0:
            return page
        key = key_of(self._group, digest)
        return 0 if any(tier.contains(key) for tier in self._tiers) else -1


def reachable(names: list[bytes], tables: PageTables, tiers: Iterable[Holds]) -> tuple[int, list[Key]]:
    """How many of the leading pages `names` the device and these tiers have, and what the device lacks of
    them, in order.

    Of a layer group with a window only what is seen after them.
    """
    size, windows = tables.block_size, tables.windows
    reach = longest_hit(
        [_Anywhere(group, tables, tiers) for group in range(len(windows))], windows, names, size
    )
    firsts = [first_seen(reach * size, window, size) for window in windows]
    wanted = ((i, group) for i in range(reach) for group, first in enumerate(firsts) if i >= first)
    return reach, [key_of(group, names[i]) for i, group in wanted if tables.pools[group].find(names[i]) < 0]


def plan_load(
    seq: Sequence, names: list[bytes], hit: int, tables: PageTables, host: HostStore
) -> Load | None:
    """What the host has for a sequence beyond the first `hit` pages, which the device has; None if nothing.

    `names`: of all pages it may begin with.
    """
    size, groups = tables.block_size, range(len(tables.windows))
    reach, missing = reachable(names, tables, [host])
    end, part = reach * size, None
    swapped = seq.swapped
    if swapped is not None and swapped[0] // size == reach and swapped[0] < seq.num_known:
        at_hand = all(host.contains(key_of(group, swapped[1])) for group in groups)
        part, end = (swapped, swapped[0]) if at_hand else (None, end)
    if end <= hit * size:
        return None
    return Load(seq, names[:reach], end - hit * size, part, frozenset(missing))

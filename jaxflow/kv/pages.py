"""One layer group's KV pages, as the host sees them: who holds them, and which are kept for their content.

A page is free, or referenced by one or more sequences, or cached: referenced by nobody, but its content has a
name (a digest of all tokens up to its end, see `jaxflow.kv.prefix`) under which a later sequence may take
it up again. Cached pages are as good as free: `allocate` evicts the one given back longest ago once the free
ones are used up.

The device runs steps in the order in which they were scheduled. So a page may be given back, and given to
someone else, while a step that reads it is still running: what the new owner writes comes later.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or cached: a caller did not look at `available` first."""


class PagePool:
    """Reference counts and the content index of pages 0..num_pages-1.

    `keep`: whether pages that nobody references any more stay cached under their digest. Without it a page
    can be shared only while somebody references it.

    Attributes:
      newly_named: (page, digest) of what `register` named, in order, for who takes it from here; None: not
      written down.
    """

    def __init__(self, num_pages: int, *, keep: bool = True):
        self.num_pages = num_pages
        self.keep = keep
        self.newly_named: list[tuple[int, bytes]] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._named: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Gives `count` pages of no particular content, each referenced once. Raises: OutOfPages."""
        free = self._free
        if count > len(free):
            self._evict(count - len(free))
        cut = len(free) - count
        pages = free[cut:]
        del free[cut:]
        for page in pages:
            self._references[page] = 1
        return pages

    def reference(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are referenced or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder away. Of pages that become cached together, the first given is evicted first."""
        references, digests = self._references, self._digests
        for page in pages:
            left = references[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is released, but nobody holds it")
            references[page] = left
            if left == 0:
                if digests[page] is None:
                    self._free.append(page)
                elif self.keep:
                    self._cached[page] = None
                else:
                    self._forget(page)
                    self._free.append(page)

    def find(self, digest: bytes) -> int:
        """The page with this content, or -1."""
        return self._named.get(digest, -1)

    def register(self, page: int, digest: bytes) -> None:
        """Names the content of a referenced page. The first page of a content keeps the name; a copy stays
        nameless.
        """
        if digest not in self._named and self._digests[page] is None:
            self._named[digest] = page
            self._digests[page] = digest
            if self.newly_named is not None:
                self.newly_named.append((page, digest))

    def _evict(self, count: int) -> None:
        if count > len(self._cached):
            raise OutOfPages(
                f"{count - len(self._cached)} pages more than the {self.num_pages} of the pool can give"
            )
        for _ in range(count):
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        digest = self._digests[page]
        if digest is not None:
            del self._named[digest]
            self._digests[page] = None


def held(pages: Sequence[int]) -> list[int]:
    """The pages of one row that are really there, last first: released so, a chain is evicted from its tail."""
    return [page for page in reversed(pages) if page >= 0]

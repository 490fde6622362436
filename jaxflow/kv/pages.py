"""KV pages of one page group, as the host counts them: holders, and the pages kept for their content.

A page is free, referenced by one or more sequences, or cached. A cached page has no holder, but its content
has a name (a digest of all tokens up to its end, see `jaxflow.kv.prefix`), under which a later sequence can
reference the page again. `allocate` takes free pages first, then evicts the cached page that was released
longest ago.

The device runs steps in the order of their scheduling. So a page can be released and given to another
sequence while a step that reads the page still runs: the writes of the new holder come later.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class OutOfPages(RuntimeError):
    """An allocation of more pages than `PagePool.available`."""


class PagePool:
    """Reference counts and the content index of pages 0..num_pages-1.

    Args:
      keep: keep pages without holder cached under their name. Otherwise a page can be shared only while a
        sequence references the page.
      on_named: called with (page, digest) for each page that `register` names.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        keep: bool = True,
        on_named: Callable[[int, bytes], None] | None = None,
    ):
        self.num_pages = num_pages
        self.keep = keep
        self._on_named = on_named
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._named: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """The number of pages that `allocate` can give: free and cached pages."""
        return len(self._free) + len(self._cached)

    def references(self, page: int) -> int:
        """Return the number of holders of a page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages of arbitrary content, each with one reference. Raises: OutOfPages."""
        free = self._free
        if count > len(free):
            self._evict(count - len(free))
        split = len(free) - count
        pages = free[split:]
        del free[split:]
        for page in pages:
            self._references[page] = 1
        return pages

    def reference(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are referenced or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder of each page. The first page that becomes cached is evicted first."""
        references, digests = self._references, self._digests
        for page in pages:
            left = references[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is released, but no sequence holds the page")
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
        """Return the page with this content, or -1."""
        return self._named.get(digest, -1)

    def register(self, page: int, digest: bytes) -> None:
        """Name the content of a referenced page. A second page of the same content stays without a name."""
        if digest not in self._named and self._digests[page] is None:
            self._named[digest] = page
            self._digests[page] = digest
            if self._on_named is not None:
                self._on_named(page, digest)

    def _evict(self, count: int) -> None:
        if count > len(self._cached):
            short = count - len(self._cached)
            raise OutOfPages(f"{short} pages more than available were allocated from {self.num_pages} pages")
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
    """Return the present pages of a row, last first, so that a chain is evicted from its tail."""
    return [page for page in reversed(pages) if page >= 0]

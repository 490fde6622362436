"""Names for the content of pages, and how long a known prefix is.

The KV of a page depends on its tokens and on all tokens before them, so its name is a chained digest: of the
name of the page before it and of its own tokens; the chain begins at a salt. Digests are 128 bits of BLAKE2b:
that two contents ever share one is not a case to handle.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

DIGEST_BYTES = 16


class Index(Protocol):
    """Where content is found by its name: one layer group's `PagePool`, or more than that."""

    def find(self, digest: bytes) -> int:
        """At least 0 if it is at hand, else -1."""
        ...


def root(salt: bytes) -> bytes:
    """Where the chain of one salt begins."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"jaxflow.pages").digest()


def extend(chain: list[bytes], tokens: np.ndarray, pages: int, block_size: int) -> None:
    """Makes `chain` cover `pages` whole pages of `tokens` (int32); chain[i] is the root, then the name of
    page i - 1.
    """
    begin = len(chain) - 1
    content, step = tokens[begin * block_size : pages * block_size].tobytes(), 4 * block_size
    for i in range(pages - begin):
        chain.append(
            hashlib.blake2b(chain[-1] + content[i * step : (i + 1) * step], digest_size=DIGEST_BYTES).digest()
        )


def part_name(chain: Sequence[bytes], tokens: np.ndarray, end: int, block_size: int) -> bytes:
    """The name of a page of which only positions up to `end` are computed; all of `tokens` before them are
    known.

    No whole page has it: less than a page's tokens went into it.
    """
    begin = end // block_size
    return hashlib.blake2b(
        chain[begin] + tokens[begin * block_size : end].tobytes(), digest_size=DIGEST_BYTES
    ).digest()


def first_seen(position: int, window: int | None, block_size: int) -> int:
    """The first page that a query at `position`, or any later one, can see in a layer group of this window."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def longest_hit(
    pools: Sequence[Index], windows: Sequence[int | None], names: Sequence[bytes], block_size: int
) -> int:
    """How many of the leading pages `names` need not be computed.

    After a hit of m pages the next query is at position m * block_size. Full attention needs all m pages; a
    layer group of window w just those that this query sees. The answer is the largest m for which every group
    has what it needs.
    """
    reach = len(names)  # full groups end the search early: a prompt nobody sent before costs one look-up
    for pool, window in zip(pools, windows, strict=True):
        if window is None:
            reach = next((i for i in range(reach) if pool.find(names[i]) < 0), reach)
    if all(window is None for window in windows):
        return reach
    best = 0
    runs = [0] * len(windows)  # pages present without a gap, up to and with page m - 1
    for m in range(1, reach + 1):
        enough = True
        for g, window in enumerate(windows):
            if window is None:
                continue
            runs[g] = runs[g] + 1 if pools[g].find(names[m - 1]) >= 0 else 0
            enough = enough and runs[g] >= m - first_seen(m * block_size, window, block_size)
        if enough:
            best = m
    return best

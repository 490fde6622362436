"""Names of page contents, and the length of a known prefix.

The KV of a page depends on its tokens and on all tokens before the page. So the name of a page is a chained
digest: of the previous page's name and of the page's tokens. The chain begins at a salt. A digest has 128
bits of BLAKE2b, so that a collision need not be handled.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxflow.config import Window
from jaxflow.kv.visible import unseen

DIGEST_BYTES = 16


class Index(Protocol):
    """A lookup of page contents by name, such as the `PagePool` of a page group."""

    def find(self, digest: bytes) -> int:
        """Return a number of at least 0 for present content, else -1."""
        ...


def root(salt: bytes) -> bytes:
    """Return the first digest of the chain of a salt."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"jaxflow.pages").digest()


def extend(chain: list[bytes], tokens: np.ndarray, pages: int, block_size: int) -> None:
    """Extend `chain` to `pages` complete pages of `tokens` (int32).

    chain[0] is the root; chain[i] is the name of page i - 1.
    """
    begin = len(chain) - 1
    content, step = tokens[begin * block_size : pages * block_size].tobytes(), 4 * block_size
    for i in range(pages - begin):
        chain.append(
            hashlib.blake2b(chain[-1] + content[i * step : (i + 1) * step], digest_size=DIGEST_BYTES).digest()
        )


def part_name(chain: Sequence[bytes], tokens: np.ndarray, end: int, block_size: int) -> bytes:
    """Return the name of a partial page, with positions up to `end`; all `tokens` before `end` are known.

    No complete page has this name, because the digest covers less than a page of tokens.
    """
    begin = end // block_size
    return hashlib.blake2b(
        chain[begin] + tokens[begin * block_size : end].tobytes(), digest_size=DIGEST_BYTES
    ).digest()


def longest_hit(
    pools: Sequence[Index], windows: Sequence[Window], names: Sequence[bytes], block_size: int
) -> int:
    """Return how many of the leading pages `names` are present, so that their tokens need no computation.

    After a hit of m pages the next query is at position m * block_size. Full attention needs all m pages; a
    group with a window needs only the pages that this query sees. The result is the largest m for which every
    group has the pages that it needs.
    """
    reach = len(names)  # full groups first: they end the search of an unknown prompt after one lookup
    for pool, window in zip(pools, windows, strict=True):
        if window is None:
            reach = next((i for i in range(reach) if pool.find(names[i]) < 0), reach)
    if all(window is None for window in windows):
        return reach
    best = 0
    runs = [0] * len(windows)  # pages present without a gap, up to page m - 1
    heads = [0] * len(windows)  # pages present without a gap, from page 0
    for m in range(1, reach + 1):
        enough = True
        for g, window in enumerate(windows):
            if window is None:
                continue
            runs[g] = runs[g] + 1 if pools[g].find(names[m - 1]) >= 0 else 0
            heads[g] = max(heads[g], runs[g] if runs[g] == m else 0)
            gap = unseen(m * block_size, window, block_size)
            enough = enough and heads[g] >= min(gap.start, m) and runs[g] >= m - gap.stop
        if enough:
            best = m
    return best


def page_names(prompt: Sequence[int], salt: bytes, block_size: int) -> list[bytes]:
    """Return the content names of a prompt's full pages."""
    names = [root(salt)]
    extend(names, np.asarray(prompt, np.int32), len(prompt) // block_size, block_size)
    return names[1:]

"""The forecast of the peak use of KV pages, which decides admission (NanoFlow §4.2.1).

Running sequences grow by one token a step and release all their pages when they end. `OutputLengths`
estimates the length of an output, and `Forecast` the largest number of pages in use at once. A sequence is
admitted if the peak with it stays within the page pool.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxflow.scheduler.state import Sequence

FOREVER = 2**30


class OutputLengths:
    """Estimates of output lengths, from the lengths of recent outputs.

    The estimate for a running output is a quantile of the recent lengths that exceed its present length. Each
    sequence has its own quantile, its rank in [0, 1), so that the estimated ends are spread like real ones. A
    mean would end all sequences together, release few pages for a long time, and make the forecast too high.
    An output longer than all recent ones is estimated at twice its length.

    The first outputs to end are mostly short ones. Therefore the memory begins with `PRIORS` lengths, spread
    exponentially with mean `prior`, and replaces the oldest first.
    """

    PRIORS = 64

    def __init__(self, prior: int = 512, remembered: int = 1024):
        self._lengths = np.zeros(remembered, np.int32)
        self._recorded = min(self.PRIORS, remembered)
        spread = (np.arange(self._recorded) + 0.5) / self._recorded
        self._lengths[: self._recorded] = np.ceil(-prior * np.log1p(-spread))
        self._sorted: np.ndarray | None = None

    def record(self, length: int) -> None:
        """Record the length in tokens of an output that has ended."""
        self._lengths[self._recorded % len(self._lengths)] = length
        self._recorded += 1
        self._sorted = None

    def expect(self, produced: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the expected total lengths, int [n], of outputs that have
        `produced` [n] tokens and continue.

        `rank` [n]: the quantile of each. Every expected length exceeds the produced tokens.
        """
        if self._sorted is None:
            self._sorted = np.sort(self._lengths[: self._recorded])
        n = len(self._sorted)
        beyond = np.searchsorted(self._sorted, produced, side="right")
        found = self._sorted[np.minimum(beyond + ((n - beyond) * rank).astype(np.int64), n - 1)]
        return np.where(beyond < n, found, 2 * produced + 1)

    def final(self, seq: Sequence) -> int:
        """Return the positions that a waiting or prefilling sequence is
        expected to have computed at its end.
        """
        if seq.request.sampling.ignore_eos:
            return seq.limit - 1
        expected = self.expect(np.array([seq.num_total - seq.num_prompt]), np.array([seq.rank]))
        return min(seq.limit, seq.num_prompt + int(expected[0])) - 1


class Forecast:
    """The use of one full-attention group's pages in the coming steps.

    All decodes advance one token a step. A decode with c computed positions and r to come holds
    ceil((c + t) / S) pages in step t = 1..r, and no pages after it. The use falls only when a decode ends, so
    its peak is in the last step of one of the decodes. The time at which a prefill ends depends on the room
    of the steps. The forecast counts a prefilling sequence as complete at once, lets it grow from the next
    step on, and never ends it, which bounds every delay. With exact lengths the use never exceeds the
    forecast.

    The count is exact in pages and takes O(n (log n + S)) for n decodes.

    Attributes:
      use: int [n + 1], pages in use in the last step of each decode, and after all of them.
    """

    def __init__(
        self, computed: np.ndarray, remaining: np.ndarray, discount: np.ndarray, common: int, block_size: int
    ):
        """Forecast the use of n decodes.

        Args:
          computed: int [n], computed positions.
          remaining: int [n], positions to come, at least 1.
          discount: int [n], pages that a decode holds and its end will not free.
          common: pages in use that no single end will free.
          block_size: tokens a page, S.
        """
        self._size = block_size
        order = np.argsort(-remaining, kind="stable")
        computed, steps = computed[order] + block_size - 1, remaining[order]
        pages, offset = np.divmod(computed, block_size)
        more_pages, more_offset = np.divmod(steps, block_size)
        # With c + S - 1 = S * pages + offset and t = S * more_pages + more_offset, ceil((c + t) / S) is
        # pages + more_pages, plus 1 if offset + more_offset >= S. Row k sums this at t = steps[k] over the
        # decodes that have not ended then: rows 0..k, and the rows with the same number of steps as row k.
        rows = np.arange(1, len(order) + 1)
        carries = _count_at_least(offset, block_size - more_offset, block_size)
        use = common + np.cumsum(pages - discount[order]) + rows * more_pages + carries
        self._steps = np.append(steps, FOREVER)
        self.use = np.append(use, common)

    def use_with(
        self, begin: int, end: int, found: int = 0, lent: Mapping[int, int] = MappingProxyType({})
    ) -> np.ndarray:
        """Return `use` with one more sequence.

        Args:
          begin: positions that the sequence prefills.
          end: positions that it has computed at its end.
          found: pages of the sequence that are in use already.
          lent: {steps: pages}: found pages that another sequence would free after so many steps.
        """
        use = self.use - np.minimum(begin + self._steps, end) // -self._size - found
        for steps, count in lent.items():
            use += count * (self._steps > steps)
        return use


def _count_at_least(values: np.ndarray, floors: np.ndarray, size: int, block: int = 32) -> np.ndarray:
    """Return int [n]: for each k, the number of values[0..k] that are at least floors[k].

    Values are in 0..size-1, floors in 1..size. Blocks before the block of k are counted by their histograms,
    the block of k value by value: O(n (block + size / block)).
    """
    n = len(values)
    blocks = -(-n // block)
    block_of = np.arange(n) // block
    histogram = np.bincount(block_of * (size + 1) + values, minlength=blocks * (size + 1)).reshape(
        blocks, size + 1
    )
    at_least = histogram[:, ::-1].cumsum(axis=1)[:, ::-1]
    before = at_least.cumsum(axis=0) - at_least
    padded, bars = np.zeros(blocks * block, np.int16), np.ones(blocks * block, np.int16)
    padded[:n], bars[:n] = values, floors
    # [i, b, k]: value i of block b against the floor of row k of block b, for i <= k; summed over i
    padded = np.ascontiguousarray(padded.reshape(blocks, block).T)
    counts = (padded[:, :, None] >= bars.reshape(blocks, block)) & np.tri(block, dtype=bool).T[:, None, :]
    inside = np.add.reduce(counts.view(np.uint8), axis=0).ravel()[:n]
    return before[block_of, floors] + inside

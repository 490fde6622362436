"""Will the pages last? A forecast of the peak use of KV pages by what runs now (NanoFlow §4.2.1).

Running sequences grow by a token a step and give all their pages back when they end. `OutputLengths` guesses
how long an output gets, `Forecast` finds the most pages that will ever be in use at once. A sequence is
admitted if with it the peak stays within the pool.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxflow.scheduler.state import Sequence

FOREVER = 2**30


class OutputLengths:
    """What the outputs that ended lately tell about how long a running one gets.

    A running output is expected to end like the recent ones that exceeded what it has already: an output that
    has outlived the short ones is not expected to be short. Not like their mean: if all of them ended at
    their means, hardly anything would be given back for a long while, and the forecast of the sum would be
    too high. Each output has a rank in [0, 1) instead and is expected to be that quantile of them, so that
    the ends of many are spread like real ones. Who has outlived them all is expected to double.

    Outputs that end early tend to be short ones, and while few have ended they would be taken for typical. So
    at first
    `PRIORS` lengths stand in, spread exponentially with mean `prior`; they are forgotten like the oldest.
    """

    PRIORS = 64

    def __init__(self, prior: int = 512, remembered: int = 1024):
        self._lengths = np.zeros(remembered, np.int32)
        self._recorded = min(self.PRIORS, remembered)
        spread = (np.arange(self._recorded) + 0.5) / self._recorded
        self._lengths[: self._recorded] = np.ceil(-prior * np.log1p(-spread))
        self._sorted: np.ndarray | None = None

    def record(self, length: int) -> None:
        """An output has ended after `length` tokens."""
        self._lengths[self._recorded % len(self._lengths)] = length
        self._recorded += 1
        self._sorted = None

    def expect(self, produced: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Total lengths int [n] to be expected of outputs that have `produced` [n] tokens and go on; more
        than these.
        """
        if self._sorted is None:
            self._sorted = np.sort(self._lengths[: self._recorded])
        n = len(self._sorted)
        beyond = np.searchsorted(self._sorted, produced, side="right")
        found = self._sorted[np.minimum(beyond + ((n - beyond) * rank).astype(np.int64), n - 1)]
        return np.where(beyond < n, found, 2 * produced + 1)

    def final(self, seq: Sequence) -> int:
        """Positions that a sequence which waits or prefills is expected to compute, in the end."""
        if seq.request.sampling.ignore_eos:
            return seq.limit - 1
        expected = self.expect(np.array([seq.num_total - seq.num_prompt]), np.array([seq.rank]))
        return min(seq.limit, seq.num_prompt + int(expected[0])) - 1


class Forecast:
    """The use of one full-attention group's pages over the steps to come.

    Decodes all advance together, one token a step, so their future is known up to their lengths: with c
    positions computed and r to come a sequence holds ceil((c + t) / S) pages in step t = 1..r, and none after
    it. Use falls only where one ends, so its peak is in the last step of one of them. A sequence that is
    still to be prefilled is not tied to that clock: when its growth starts depends on the room that steps
    will have. It is counted as prefilled at once, growing from the next step of the decodes on, and never
    ending, which bounds every delay. So when lengths are exact, use never exceeds the forecast.

    Counting is exact in pages, in O(n (log n + S)) for n decodes.
    """

    def __init__(
        self, computed: np.ndarray, remaining: np.ndarray, discount: np.ndarray, common: int, block_size: int
    ):
        """The decodes [n], each with `remaining` >= 1 positions to come.

        `discount` [n]: pages of each that its end will not free, `common`: pages in use that nobody's end
        will free.

        Attribute `use`: int [n + 1], pages in use whenever one of them ends, and after that.
        """
        self._size = block_size
        order = np.argsort(-remaining, kind="stable")
        computed, steps = computed[order] + block_size - 1, remaining[order]
        whole, part = np.divmod(computed, block_size)
        late, phase = np.divmod(steps, block_size)
        # ceil((c + t) / S) with c + S - 1 = S * whole + part and t = S * late + phase is whole + late, and
        # one more if part + phase >= S. Row k sums it at t = steps[k] over all that are still there: rows
        # 0..k, and equals of row k.
        rows = np.arange(1, len(order) + 1)
        carries = _count_at_least(part, block_size - phase, block_size)
        use = common + np.cumsum(whole - discount[order]) + rows * late + carries
        self._steps = np.append(steps, FOREVER)
        self.use = np.append(use, common)

    def use_with(
        self, begin: int, end: int, found: int = 0, lent: Mapping[int, int] = MappingProxyType({})
    ) -> np.ndarray:
        """`use` if a sequence is added that first computes `begin` positions and ends at `end`.

        `found`: pages of it that are in use already. `lent`: how many of those somebody pays for who would
        else free them in so many steps; they stay.
        """
        use = self.use - np.minimum(begin + self._steps, end) // -self._size - found
        for steps, count in lent.items():
            use += count * (self._steps > steps)
        return use


def _count_at_least(values: np.ndarray, floors: np.ndarray, size: int, block: int = 32) -> np.ndarray:
    """For each k how many of values[0..k] are at least floors[k]: int [n]; values in 0..size-1, floors in
    1..size.

    Whole blocks before k by their histograms, the rest of k's own block one by one: O(n (block + size /
    block)).
    """
    n = len(values)
    blocks = -(-n // block)
    block_of = np.arange(n) // block
    histogram = np.bincount(block_of * (size + 1) + values, minlength=blocks * (size + 1)).reshape(
        blocks, size + 1
    )
    at_least = histogram[:, ::-1].cumsum(axis=1)[:, ::-1]
    before = at_least.cumsum(axis=0) - at_least
    own, bars = np.zeros(blocks * block, np.int16), np.ones(blocks * block, np.int16)
    own[:n], bars[:n] = values, floors
    # [i, b, k]: value i of block b against the floor of row k of block b, for i <= k; summed over i
    own = np.ascontiguousarray(own.reshape(blocks, block).T)
    counts = (own[:, :, None] >= bars.reshape(blocks, block)) & np.tri(block, dtype=bool).T[:, None, :]
    inside = np.add.reduce(counts.view(np.uint8), axis=0).ravel()[:n]
    return before[block_of, floors] + inside

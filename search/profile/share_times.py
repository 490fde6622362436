"""Op times on a part of the device's SMs, from a profile's isolated times and the slowdowns of its pairs.

NanoFlow's stage II has a table of the performance that concurrent ops keep (§4.1.1, Table 3). Here a
concurrent op takes its isolated time on its SMs, times a slowdown. The simulation of a plan takes the
slowdown of the measured pair where there is one (`ShareTimes.slowdown_beside`). A solver does not know yet
what runs beside an op, and takes the median over the pairs (`search.profile.clock.slowdown`), as the
simulation does for other pairs.
"""

import bisect
import collections
import functools
import math
from collections.abc import Collection, Mapping

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.cost import find_device
from jaxflow.model.graph import Graph, Op
from pallas_kernels.gemm.fp8.tile_schedule import filled
from search.profile.clock import ClockCard, ClockScaling, of_pair, shipped_card, slowdown
from search.profile.modelled import SMS
from search.profile.op_times import ATTENTION, Profile, seconds
from search.profile.op_watts import OpWatts

INTAKE = 3.0  # an SM's largest intake, over its share of the memory's bandwidth
TILE_ROWS, TILE_COLUMNS = 128, 256  # of the persistent products
_CLOCK_STEP_HZ = 5e6


class ShareTimes:
    """The op times of one profile and one model.

    products: their [K, N], if the profile lacks their waves. A profile of pairs was measured at many sizes
    on the full device, so it knows the waves there, but not on parts of it. card: the constants of the
    device; None: the shipped ones. memory_sms: the SMs offered to memory-bound ops, with the rest for
    compute-bound ops; None: all measured counts.
    """

    def __init__(
        self,
        profile: Profile,
        graph: Graph,
        products: Mapping[str, tuple[int, int]] | None = None,
        card: ClockCard | None = None,
        memory_sms: Collection[int] | None = None,
    ):
        device = find_device(profile.device)
        self.card = card or (shipped_card(device.name) if device else None)
        self.profile, self.graph, self.products, self.memory_sms = profile, graph, products or {}, memory_sms
        self.windows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for ops in graph.layers:
            for op in ops:
                self.windows[op.name][op.window] += 1
        self.known: dict[str, tuple[int, ...]] = {}
        for name, sms in sorted(profile.curves):
            self.known[name] = (*self.known.get(name, ()), sms)
        self.root: ShareTimes | None = None
        self.by_clock: dict[float, ShareTimes] = {}

    @property
    def clocked(self) -> bool:
        """Return whether the profile has clocks."""
        return self.profile.op_times[0].clock_mhz is not None

    def at(self, clock_hz: float) -> "ShareTimes":
        """Return the op times at this clock, rounded up a little; without clocks, unchanged."""
        if not self.clocked:
            return self
        root = self.root or self
        clock_hz = math.ceil(clock_hz / _CLOCK_STEP_HZ - 1e-6) * _CLOCK_STEP_HZ
        if clock_hz not in root.by_clock:
            root.by_clock[clock_hz] = found = ShareTimes(
                root.clocks.at(root.profile, clock_hz), root.graph, root.products, root.card, root.memory_sms
            )
            found.root = root
        return root.by_clock[clock_hz]

    @functools.cached_property
    def overlap_slowdown(self) -> float:
        """Return the slowdown of concurrent ops: the profile's, or the card's without pairs."""
        if not self.profile.pairs:
            return self.card.overlap_slowdown if self.card else 1.0
        return self.root.overlap_slowdown if self.root else slowdown(self.profile, self.clocks)

    @functools.cached_property
    def pair_slowdowns(self) -> dict[tuple[str, str, int], float]:
        """Return the slowdown of each measured pair: of a product, attention, and the SMs of the product."""
        if self.root:
            return self.root.pair_slowdowns
        pairs = {
            (pair.first, pair.second, pair.first_sms): of_pair(self.profile, self.clocks, pair)
            for pair in self.profile.pairs
            if pair.second in ATTENTION
        }
        return {key: max(1.0, lost) for key, lost in pairs.items() if lost is not None}

    def slowdown_beside(self, one: tuple[str, int], other: tuple[str, int]) -> float:
        """Return how many times as long an op takes beside another: the measured pair's slowdown, or the
        median over the pairs.

        one, other: an op's name and its SMs.
        """
        for (product, sms), (attention, _) in ((one, other), (other, one)):
            if (product, attention, sms) in self.pair_slowdowns:
                return self.pair_slowdowns[product, attention, sms]
        return self.overlap_slowdown

    @property
    def copies(self) -> bool:
        """Return whether collectives use the copy engines."""
        return any(self.known.get(op.name) == (SMS,) for op in self.graph.layers[0])

    @property
    def nano_s(self) -> float:
        """Return the cost of a chain in a plan with side streams beyond its op times: joins, copies and lost
        fusion.
        """
        return self.card.nano_s if self.card else 0.0

    @functools.cached_property
    def op_watts(self) -> OpWatts:
        """Return the watts of the profile's ops, each at its own clock."""
        return OpWatts.of((self.root or self).profile)

    @functools.cached_property
    def clocks(self) -> ClockScaling:
        return ClockScaling(self.graph, self.profile, self.card)

    def seconds(self, op: Op, step: Composition, sms: int, side_streams: bool = False) -> float:
        """Return the seconds of an op on a layer, averaged over the model's layers. side_streams: the plan
        has side streams.

        Raises: ProfileError if the op was not measured.
        """
        if op.local_rows:  # measured on all rows, but each device has only a part of the rows
            share = self.profile.tensor_parallel_size
            step = Composition(step.tokens / share, 1.0)
        windows = self.windows[op.name]
        lost = (
            self.overlap_slowdown
            if side_streams and sms < self.profile.total_sms and op.kind in ("dense", "attention")
            else 1.0
        )
        took = sum(
            number * self._seconds(op.name, op.kind, step, window, sms) for window, number in windows.items()
        )
        return lost * took / windows.total()

    @staticmethod
    def case(name: str, step: Composition, window: int | None) -> tuple[float, float]:
        """Return the tokens of an op in a step, and attention's mean keys, else 0."""
        if name not in ATTENTION:
            return step.tokens, 0.0
        count, total = (
            ("decode_tokens", "decode_keys")
            if name == "decode_attention"
            else ("chunk_tokens", "chunk_pairs")
        )
        tokens = step.count(count)
        return tokens, step.count(total, window) / tokens if tokens else 0.0

    def _seconds(self, name: str, kind: str, step: Composition, window: int | None, sms: int) -> float:
        tokens, keys = self.case(name, step, window)
        if not tokens:
            return 0.0
        full = self.profile.total_sms
        if kind == "network" and self.copies:
            return seconds(self.profile, name, tokens, keys, SMS)
        if kind in ("other", "network") and sms not in self.known.get(name, ()):
            alone = seconds(self.profile, name, tokens, keys)
            return (
                alone if kind == "network" else alone * max(1.0, full / (INTAKE * sms))
            )  # no kernel is bounded to a part
        if sms == full:
            return seconds(self.profile, name, tokens, keys, sms) / (
                1.0 if self.profile.pairs else self.fill(name, tokens, sms)
            )
        return self._on(name, tokens, keys, sms) / self.fill(name, tokens, sms)

    def _on(self, name: str, tokens: float, keys: float, sms: int) -> float:
        """Return the seconds in full waves on a part of the device; rates are interpolated between measured
        counts.

        Raises: ProfileError for fewer SMs than any measured count.
        """
        known = self.known.get(name, ())
        if sms in known or not known or not known[0] < sms < known[-1]:
            return self._full_waves(name, tokens, keys, sms)
        at = bisect.bisect(known, sms)
        fewer, more = known[at - 1], known[at]
        low, high = (1 / self._full_waves(name, tokens, keys, share) for share in (fewer, more))
        return 1 / (low + (high - low) * (sms - fewer) / (more - fewer))

    def _full_waves(self, name: str, tokens: float, keys: float, sms: int) -> float:
        """Return the seconds in full waves, computed from measured times with partly filled waves."""
        if not self.profile.pairs or name not in self.products:
            return seconds(self.profile, name, tokens, keys, sms)
        curve = (
            next(iter(self.profile.curves[name, sms].values())) if (name, sms) in self.profile.curves else []
        )
        if len(curve) < 2:
            return seconds(self.profile, name, tokens, keys, sms)
        xs = [count for count, _ in curve]
        at = min(max(1, bisect.bisect_left(xs, tokens)), len(xs) - 1)
        (x0, y0), (x1, y1) = curve[at - 1], curve[at]
        y0, y1 = y0 * self.fill(name, x0, sms), y1 * self.fill(name, x1, sms)
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0) if tokens > x0 else y0

    def fill(self, name: str, tokens: float, sms: int) -> float:
        """Return the full part of a product's waves; the last wave is split in two along K. 1 without [K,
        N].

        In e4m3 the tiles and the cost of the split are the kernel's; `up_gate`, with a quantised result, is
        never split.
        """
        if name not in self.products or not tokens:
            return 1.0
        k, n = self.products[name]
        if self.profile.dtype == "float8_e4m3fn":
            return filled(math.ceil(tokens), n, k, sms, blocked=name == "down", quantize=name == "up_gate")
        waves = math.ceil(tokens / TILE_ROWS) * math.ceil(n / TILE_COLUMNS) / sms
        return 2 * waves / math.ceil(2 * waves - 1e-9)

    def offered_sms(self) -> tuple[int, ...]:
        """Return the offered SM counts that some product or attention was measured on."""
        pairs = {sms for pair in self.profile.pairs for sms in (pair.first_sms, pair.second_sms)} - {
            0
        }  # copies hold none
        bounded = {
            sms
            for name, known in self.known.items()
            for sms in known
            if name in ATTENTION or name in ("qkv", "up_gate", "down")
        }
        known, full = bounded | pairs, self.profile.total_sms
        offered = (
            known
            if self.memory_sms is None
            else {full, *self.memory_sms, *(full - sms for sms in self.memory_sms)}
        )
        return tuple(sorted(known & offered))

    @property
    def knows_waves(self) -> bool:
        """Return whether SM counts that fill the waves of products may be offered; not where counts are
        given.
        """
        return self.memory_sms is None and bool(self.products)


def product_shapes(config: ModelConfig, tp: int) -> dict[str, tuple[int, int]]:
    """Return [K, N] of the dense layer's products, on one of `tp` devices."""
    heads, kv = config.num_heads // tp, max(1, config.num_kv_heads // tp)
    up, d = config.intermediate_size // tp, config.hidden_size
    return {
        "qkv": (d, (heads + 2 * kv) * config.head_dim),
        "out_proj": (heads * config.head_dim, d),
        "up_gate": (d, up * (2 if config.gated_mlp else 1)),
        "down": (up, d),
    }

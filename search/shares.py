"""How long an op takes on a share of the device, in SMs: from a profile's times and its pairs (NanoFlow §4.1.1, Table 3)."""

import collections
import functools
import math
from collections.abc import Mapping

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Graph, Op
from search.clocked import Clocks
from search.cyclic import Option
from search.op_times import ATTENTION, Profile, seconds
from search.structure import Chain, Task

NETWORK_SMS = 16  # that a collective occupies where the profile does not say
INTAKE = 3.0  # an SM takes in so many times its share of the memory's bandwidth
TILE_ROWS, TILE_COLUMNS = 128, 256  # of the persistent products
_CLOCK_STEP_HZ = 5e6


class Shares:
    """Answers for one profile and one model. `columns`: of products, where the profile knows nothing of waves."""

    def __init__(self, profile: Profile, graph: Graph, columns: Mapping[str, int] | None = None):
        self.profile, self.graph, self.columns = profile, graph, columns or {}
        self.windows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for ops in graph.layers:
            for op in ops:
                self.windows[op.name][op.window] += 1
        self.known: dict[str, tuple[int, ...]] = {}
        for name, sms in sorted(profile.curves):
            self.known[name] = (*self.known.get(name, ()), sms)
        self.kept = _kept(profile)
        self.root: Shares | None = None
        self.by_clock: dict[float, Shares] = {}

    @property
    def clocked(self) -> bool:
        """Whether the profile says at which clocks it was taken."""
        return self.profile.op_times[0].clock_mhz is not None

    def at(self, clock_hz: float) -> "Shares":
        """The same ops at this clock, or one that is a little higher; as they are where the profile knows no clocks."""
        if not self.clocked:
            return self
        root = self.root or self
        clock_hz = math.ceil(clock_hz / _CLOCK_STEP_HZ - 1e-6) * _CLOCK_STEP_HZ
        if clock_hz not in root.by_clock:
            root.by_clock[clock_hz] = found = Shares(root.clocks.at(root.profile, clock_hz), root.graph, root.columns)
            found.root = root
        return root.by_clock[clock_hz]

    @functools.cached_property
    def clocks(self) -> Clocks:
        return Clocks(self.graph, self.profile)

    def seconds(self, op: Op, step: Composition, sms: int) -> float:
        """An op on a layer, the mean over the model's layers. Raises: ProfileError if it was not measured."""
        if op.own_rows:  # timed on all rows, but every device has its own
            share = self.profile.tensor_parallel_size
            step = Composition(step.tokens / share, 1.0)
        windows = self.windows[op.name]
        return sum(number * self._seconds(op.name, op.kind, step, window, sms) for window, number in windows.items()) / windows.total()

    def _seconds(self, name: str, kind: str, step: Composition, window: int | None, sms: int) -> float:
        tokens, keys = step.tokens, 0.0
        if name in ATTENTION:
            count, total = ("decode_tokens", "decode_keys") if name == "decode_attention" else ("chunk_tokens", "chunk_pairs")
            tokens = step.count(count)
            keys = step.count(total, window) / tokens if tokens else 0.0
        full = self.profile.total_sms
        if kind in ("other", "network") and sms not in self.known.get(name, ()):
            alone = seconds(self.profile, name, tokens, keys)
            return alone if kind == "network" else alone * max(1.0, full / (INTAKE * sms))  # no kernel that a share bounds
        kept = self.kept[name].get(sms)
        if kept is not None and sms != full:
            return min(seconds(self.profile, name, tokens, keys, known) for known in self.known[name]) / kept
        return seconds(self.profile, name, tokens, keys, sms) / self.fill(name, tokens, sms)

    def fill(self, name: str, tokens: float, sms: int) -> float:
        """The part of a product's waves that holds tiles; the last wave is cut in two along K (1 where columns are not given)."""
        if name not in self.columns or not tokens:
            return 1.0
        waves = math.ceil(tokens / TILE_ROWS) * math.ceil(self.columns[name] / TILE_COLUMNS) / sms
        return 2 * waves / math.ceil(2 * waves - 1e-9)

    def chain(self, chain: Chain, step: Composition, sms: int) -> float:
        return sum(self.seconds(op, step, sms) for op in chain.ops)

    def sizes(self) -> tuple[int, ...]:
        """All shares that some product or attention was timed on."""
        bounded = {sms for name, known in self.known.items() for sms in known if name in ATTENTION or name in ("qkv", "up_gate", "down")}
        return tuple(sorted(bounded | {sms for pair in self.profile.pairs for sms in (pair.first_sms, pair.second_sms)}))

    def options(self, task: Task, step: Composition, most: int) -> tuple[Option, ...]:
        """The ways to run a task, of rising share and falling time; at most `most` beside the whole device.

        A compute-bound task takes half of the device or more, others half of it at most, or all of it.
        """
        full, chain = self.profile.total_sms, task.chain
        if chain.is_network:
            first = next(op.name for op in chain.ops if op.kind == "network")
            known = [sms for sms in self.known.get(first, ()) if sms < full] or [NETWORK_SMS]
            return tuple(Option(sms, self.chain(chain, step, sms)) for sms in known)
        bounded = [op.name for op in chain.ops if op.kind in ("dense", "attention")]
        sizes = [
            sms for sms in self.sizes()
            if all(sms in self.known.get(name, ()) or sms in self.kept[name] for name in bounded)
            and (2 * sms >= full if task.resource == "compute" else 2 * sms <= full)
        ]  # fmt: skip
        found = [Option(sms, self.chain(chain, step, sms)) for sms in sorted({*sizes, full})]
        if not found[-1].seconds:
            return (Option(0, 0.0),)
        if not most:
            return (found[-1],)
        kept = [option for i, option in enumerate(found) if all(option.seconds < other.seconds for other in found[:i])]
        return tuple(_spread(kept[:-1], most) + kept[-1:])


def _kept(profile: Profile) -> dict[str, dict[int, float]]:
    """op -> sms -> P: the share of its best speed that the op kept beside others, the mean over its pairs."""
    found: dict[str, dict[int, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for pair in profile.pairs:
        found[pair.first][pair.first_sms].append(pair.first_performance)
        found[pair.second][pair.second_sms].append(pair.second_performance)
    kept = {name: {sms: sum(ps) / len(ps) for sms, ps in by_sms.items() if min(ps) > 0} for name, by_sms in found.items()}
    return collections.defaultdict(dict, kept)


def _spread(options: list[Option], most: int) -> list[Option]:
    """At most `most` of them, evenly."""
    if len(options) <= most:
        return options
    return [options[round(i * (len(options) - 1) / max(1, most - 1))] for i in range(most)]


def product_columns(config: ModelConfig, tp: int) -> dict[str, int]:
    """N of the dense layer's products, on one of `tp` devices."""
    kv = max(1, config.num_kv_heads // tp)
    up = config.intermediate_size // tp * (2 if config.gated_mlp else 1)
    d = config.hidden_size
    return {"qkv": (config.num_heads // tp + 2 * kv) * config.head_dim, "out_proj": d, "up_gate": up, "down": d}

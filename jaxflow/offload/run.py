"""One block under way: each square's compute, and what comes and goes beside it."""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxflow.offload.activation_store import ActivationStore
from jaxflow.offload.block import Block
from jaxflow.offload.compiled import Compiled
from jaxflow.offload.geometry import BEFORE, Geometry, halves
from jaxflow.offload.host_attention import HostAttention
from jaxflow.offload.host_tier import views
from jaxflow.offload.inputs import Drawn, Inputs
from jaxflow.offload.kv_store import KvStore
from jaxflow.offload.schedule import Schedule, Square
from jaxflow.offload.tiers import Tiers
from jaxflow.offload.weight_store import WeightStore

_IN_FLIGHT = 2  # stores that may be under way when the next is issued


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a block runs on. host_attention: None where all decodes attend on the device; host_thread: what it is called on, in order."""

    geometry: Geometry
    compiled: Compiled
    tiers: Tiers
    weights: WeightStore
    kv: KvStore
    activations: ActivationStore
    host_attention: HostAttention | None
    host_thread: concurrent.futures.ThreadPoolExecutor
    schedule: Schedule
    overlap: bool
    eos: frozenset[int]


@dataclasses.dataclass
class Half:
    """A decode whose attention is under way on the host."""

    square: Square
    weights: dict[str, Any]
    stream: jax.Array
    outputs: tuple
    attended: concurrent.futures.Future


class Run:
    """The state of a block."""

    def __init__(self, setup: Setup, block: Block):
        self._d, self._block, self._g = setup, block, setup.geometry
        self.width = block.batches if setup.schedule == "zigzag" else 1  # batches that pass a layer together
        self._tiers, self._kv, self._activations = setup.tiers, setup.kv, setup.activations
        self._all = tuple(dict.fromkeys(key for layer in setup.weights.placed.layers for key in layer))
        self._layers: dict[int, dict[str, Any]] = {}  # weights on the device
        self._loaded: dict[Square, tuple] = {}  # KV that is on its way for a square
        self._x: dict[int, tuple] = {}  # activations on the device, by batch
        self._halves: collections.deque[Half] = collections.deque()
        self._stores: collections.deque[concurrent.futures.Future] = collections.deque()
        self._last: Any = ()  # what the last square computes
        self._inputs = Inputs(setup.geometry, block, setup.compiled.vocabulary, setup.eos)

    # ---- a square

    def place(self, one: Square) -> int:
        """Which of the batches that pass a layer together a square is."""
        return one.batch if self.width > 1 else 0

    def step(self, order: Sequence[Square], i: int) -> Iterator[Drawn]:
        """Computes square i of the order, and brings what the next ones need."""
        d, one = self._d, order[i]
        nxt = order[i + 1] if i + 1 < len(order) else None
        host = d.host_attention is not None and one.token > 0
        lag = int(host and self.width > 1)
        if self._halves and (not lag or self._halves[0].square.batch == one.batch):
            yield from self._finish_half()
        jax.block_until_ready(self._last)
        self._last = ()
        nxt_layer, later_layer = self._coming(order, i)
        if self.place(one) == 0:
            self._layers = {layer: arrays for layer, arrays in self._layers.items() if layer in (one.layer, nxt_layer)}
        weights = self._need(one.layer, self._all)
        if d.overlap:
            self._fetch_next(self.place(one), lag, nxt_layer, later_layer)
            if nxt is not None and not host:
                self._load_next(one, nxt)
        if host:
            self._begin_half(one, weights)
            if len(self._halves) > lag:
                yield from self._finish_half()
        else:
            yield from self._compute(one, weights)
        if d.overlap:
            self._load_later(order, i)
        self._bound_stores(_IN_FLIGHT if d.overlap else 0)

    def stop(self) -> Iterator[Drawn]:
        """Ends what is under way between two batches or at the end; loads that nobody will use are given up."""
        while self._halves:
            yield from self._finish_half()
        jax.block_until_ready((self._last, list(self._loaded.values())))
        self._bound_stores(0)
        for one, loaded in self._loaded.items():
            self._kv.used((one.layer, one.batch), loaded)
        self._loaded.clear()
        self._x.clear()
        self._layers.clear()
        self._kv.rest()
        self._activations.rest()
        self._d.weights.rest()

    def end(self) -> None:
        """Leaves nothing under way, whatever happened."""
        for half in self._halves:
            concurrent.futures.wait([half.attended])
        concurrent.futures.wait(self._stores)
        self._tiers.staging.forget_transfers()

    def _compute(self, one: Square, weights: dict[str, Any]) -> Iterator[Drawn]:
        layer, key = self._g.config.layers[one.layer], (one.layer, one.batch)
        x, lengths = self._take_x(one), self._block.lengths[one.batch]
        if one.token == 0:
            program = self._d.compiled.prefill[layer]
            x, self._kv.home[key], pages = program(weights, x, self._kv.home[key], self._inputs.rows[one.batch].lengths)
            self._last = x
            self._store(self._kv.store_pages(key, pages))
        else:
            loaded = self._loaded.pop(one, None)
            loaded = self._settled(self._kv.load(key, one.token, lengths)) if loaded is None else loaded
            positions, live = self._inputs.positions(one)
            program = self._d.compiled.decode[layer]
            x, self._kv.home[key], _, rows = program(weights, x, self._kv.home[key], loaded, positions, live)
            self._last = x
            self._kv.used(key, x)
            self._store(self._kv.store_rows(key, rows, one.token, lengths))
        self._settled(x)
        yield from self._pass_on(one, x)

    def _begin_half(self, one: Square, weights: dict[str, Any]) -> None:
        """The first half of a decode; hands what must be attended to on the host to its thread."""
        d, layer, key = self._d, self._g.config.layers[one.layer], (one.layer, one.batch)
        before, after = halves(weights)
        x, lengths = self._take_x(one), self._block.lengths[one.batch]
        positions, live = self._inputs.positions(one)
        stream, outputs, self._kv.home[key], queries, rows = d.compiled.before[layer](
            {name: weights[name] for name in before}, x, self._kv.home[key], positions, live
        )
        self._last = stream
        rising = self._tiers.up((queries, rows))
        queries_bytes, rows_bytes = (sum(a.nbytes for a in jax.tree.leaves(tree)) for tree in (queries, rows))
        self._tiers.traffic.add("store_kv", times=len(rows), up=rows_bytes)
        self._tiers.traffic.add("host_attention", times=1, up=queries_bytes, down=queries_bytes)
        cached = self._kv.wanted(key, one.token, lengths)
        attended = d.host_thread.submit(self._attend, one, rising, cached, lengths)
        self._kv.follow(key, attended)
        self._halves.append(Half(one, {name: weights[name] for name in after}, stream, outputs, attended))
        if not d.overlap:
            concurrent.futures.wait([attended])

    def _attend(self, one: Square, rising: Any, cached: list, lengths: np.ndarray) -> list:
        """On the host's thread: stores this token's KV, attends; returns the outputs as `HostArray`s to be given back."""
        key, layer, outputs = (one.layer, one.batch), self._g.config.layers[one.layer], []
        queries, rows = self._tiers.arrived(rising)
        host = self._d.host_attention
        assert host is not None
        for part, q, new, future in zip(self._kv.away, queries, rows, cached, strict=True):
            kv = future.result()
            try:
                self._kv.write_row(part, key, new, one.token, lengths)
                if part.tier == "disk":
                    self._kv.place(kv, views(new), part, lengths + (one.token - 1))
                out = self._tiers.staging.take(q.array)
                at = slice(part.start, part.stop)
                keys = np.where(lengths[at] > 0, lengths[at] + one.token, 0).astype(np.int32)
                for heads, k, v, attended in zip(q.views, kv[0].views, kv[1].views, out.views, strict=True):
                    host(layer, heads, k, v, keys, attended)
                outputs.append(out)
                self._tiers.traffic.add("host_attention", host_kv=sum(view.nbytes for view in views(kv)))
            finally:
                self._kv.done(part, kv)
        return outputs

    def _finish_half(self) -> Iterator[Drawn]:
        """The second half of the decode that has waited longest."""
        half = self._halves.popleft()
        attended = half.attended.result()
        arrived = tuple(self._tiers.down(out) for out in attended)
        for out, array in zip(attended, arrived, strict=True):
            self._tiers.staging.give(out, array)
        after = self._d.compiled.after[self._g.config.layers[half.square.layer]]
        x = after(half.weights, half.stream, half.outputs, arrived)
        self._last = (self._last, x)
        self._settled(x)
        yield from self._pass_on(half.square, x)

    # ---- activations and tokens

    def _take_x(self, one: Square) -> tuple:
        """A square's input on the device: embedded tokens, what is there, or what its store has."""
        if one.layer == 0:
            ids, positions = self._inputs.tokens(one)
            return self._d.compiled.embed[one.token == 0](self._d.weights.ends, ids, positions)
        x = self._x.pop(one.batch, None)
        return self._settled(self._activations.load(one.batch)) if x is None else x

    def _pass_on(self, one: Square, x: tuple) -> Iterator[Drawn]:
        """A square's output: to its home, or after the last layer to the sampler."""
        if one.layer + 1 < self._g.config.num_layers:
            self._store(self._activations.store(one.batch, x))
            return
        yield self._inputs.draw(self._d.compiled, self._d.weights.ends, one, x)

    # ---- what comes and goes beside

    def _need(self, layer: int, keys: tuple[str, ...]) -> dict[str, Any]:
        """A layer's weights on the device; fetches what is not on its way."""
        own = self._d.weights.placed.layers[layer]
        found = self._layers.setdefault(layer, {})
        missing = tuple(key for key in keys if key in own and key not in found)
        if missing:
            found |= self._settled(self._d.weights.fetch(layer, missing))
            if set(missing) - set(BEFORE) and self._d.weights.is_away(layer):
                self._tiers.traffic.add("fetch_layer", times=1)
        return {key: found[key] for key in own if key in keys}

    def _coming(self, order: Sequence[Square], i: int) -> tuple[int | None, int | None]:
        """The layer whose weights are wanted after this one's, and the one after it; None: none, or this one's again."""
        found: list[int | None] = []
        for ahead in (1, 2):
            j = i - self.place(order[i]) + ahead * self.width
            found.append(order[j].layer if j < len(order) and order[j].layer != order[i].layer else None)
        return found[0], found[1]

    def _fetch_next(self, place: int, lag: int, layer: int | None, later: int | None) -> None:
        """Sends the next layer's weights on their way, where the last layer's have left the device."""
        if layer is None:
            return
        if place == 0:
            self._need(layer, BEFORE if lag else self._all)
        if place == lag:  # from here on nothing of the layer before is computed, its second half included
            self._need(layer, self._all)
            if later is not None:
                self._d.weights.read_ahead(later)

    def _load_next(self, one: Square, nxt: Square) -> None:
        """What the next square needs and this one does not make."""
        if nxt.token > 0 and self._d.host_attention is None and nxt[1:] != one[1:]:
            self._loaded[nxt] = self._kv.load((nxt.layer, nxt.batch), nxt.token, self._block.lengths[nxt.batch])
        if nxt.layer > 0 and nxt.batch != one.batch:
            self._x[nxt.batch] = self._activations.load(nxt.batch)

    def _load_later(self, order: Sequence[Square], i: int) -> None:
        """Starts to read from disk what the square after the next needs, if the next does not make it."""
        if i + 2 >= len(order):
            return
        nxt, later = order[i + 1], order[i + 2]
        if later.token > 0 and later[1:] != nxt[1:]:
            self._kv.read_ahead((later.layer, later.batch), later.token, self._block.lengths[later.batch])
        pending = {half.square.batch for half in self._halves}
        if later.layer > 0 and later.batch not in (nxt.batch, *pending):
            self._activations.read_ahead(later.batch)

    def _store(self, future: concurrent.futures.Future | None) -> None:
        if future is not None:
            self._stores.append(future)

    def _bound_stores(self, most: int) -> None:
        while len(self._stores) > most:
            self._stores.popleft().result()

    def _settled(self, tree: Any) -> Any:
        """Without overlap, waits for it."""
        return tree if self._d.overlap else jax.block_until_ready(tree)

"""One block under way: each square's compute, and what it makes on its way home. What comes before it is
`jaxflow.flexgen.prefetch`'s.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxflow.flexgen.activation_store import ActivationStore
from jaxflow.flexgen.block import Block
from jaxflow.flexgen.compiled import Compiled
from jaxflow.flexgen.geometry import Geometry, halves
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.kv_store import KvStore
from jaxflow.flexgen.pinned_memory import views
from jaxflow.flexgen.prefetch import Ahead
from jaxflow.flexgen.schedule import Schedule, Square
from jaxflow.flexgen.step_inputs import Drawn, Inputs
from jaxflow.flexgen.tiers import Tiers
from jaxflow.flexgen.verbs import Verbs, wait_for
from jaxflow.flexgen.weight_store import WeightStore


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a block runs on. host_attention: None where all decodes attend on the device; host_thread: what it
    is called on, in order.
    """

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
        self._verbs = Verbs(setup.overlap, setup.tiers.traffic)
        self._ahead = Ahead(
            setup.tiers,
            setup.weights,
            setup.kv,
            setup.activations,
            self._verbs,
            block,
            self.width,
            setup.host_attention is not None,
        )
        self._halves: collections.deque[Half] = collections.deque()
        self._last: Any = ()  # what the last square computes
        self._inputs = Inputs(setup.geometry, block, setup.compiled.vocabulary, setup.eos)

    # ---- a square

    def place(self, one: Square) -> int:
        """Which of the batches that pass a layer together a square is."""
        return self._ahead.place(one)

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
        weights = self._ahead.weights(order, i)
        if d.overlap:
            self._ahead.fetch_next(order, i, lag)
            if nxt is not None and not host:
                self._ahead.load_next(one, nxt)
        if host:
            self._begin_half(one, weights)
            if len(self._halves) > lag:
                yield from self._finish_half()
        else:
            yield from self._compute(one, weights)
        if d.overlap and i + 2 < len(order):
            self._ahead.read_later(order[i + 1], order[i + 2], {half.square.batch for half in self._halves})
        self._verbs.bound_stores()

    def stop(self) -> Iterator[Drawn]:
        """Ends what is under way between two batches, at the end, or where the caller stops; loads that
        nobody will use are given up.

        Raises: DiskError.
        """
        while self._halves:
            yield from self._finish_half()
        jax.block_until_ready((self._last, self._ahead.under_way))
        self._verbs.bound_stores(0)
        self._ahead.forget()

    def end(self) -> None:
        """Leaves nothing under way, whatever happened."""
        wait_for(half.attended for half in self._halves)
        self._verbs.rest()
        self._tiers.staging.forget_transfers()

    def _compute(self, one: Square, weights: dict[str, Any]) -> Iterator[Drawn]:
        layer, key = self._g.config.layers[one.layer], (one.layer, one.batch)
        x, lengths = self._take_x(one), self._block.lengths[one.batch]
        if one.token == 0:
            program, given = self._d.compiled.prefill[layer], self._inputs.rows[one.batch].lengths
            x, self._kv.home[key], pages = self._verbs.do(
                "compute", lambda: program(weights, x, self._kv.home[key], given)
            )
            self._last = x
            self._verbs.store("store_kv", lambda: self._kv.store_pages(key, pages))
        else:
            loaded, (positions, live) = self._ahead.kv(one), self._inputs.positions(one)
            program = self._d.compiled.decode[layer]
            x, self._kv.home[key], _, rows = self._verbs.do(
                "compute", lambda: program(weights, x, self._kv.home[key], loaded, positions, live)
            )
            self._last = x
            self._kv.used(key, x)
            self._verbs.store("store_kv", lambda: self._kv.store_rows(key, rows, one.token, lengths))
        yield from self._pass_on(one, x)

    def _begin_half(self, one: Square, weights: dict[str, Any]) -> None:
        """The first half of a decode; hands what must be attended to on the host to its thread."""
        d, layer, key = self._d, self._g.config.layers[one.layer], (one.layer, one.batch)
        before, after = halves(weights)
        x, lengths = self._take_x(one), self._block.lengths[one.batch]
        positions, live = self._inputs.positions(one)
        first = {name: weights[name] for name in before}
        stream, outputs, self._kv.home[key], queries, rows = self._verbs.do(
            "compute", lambda: d.compiled.before[layer](first, x, self._kv.home[key], positions, live)
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
            self._verbs.do("host_attention", attended.result)

    def _attend(self, one: Square, rising: Any, cached: list, lengths: np.ndarray) -> list:
        """On the host's thread: stores this token's KV, attends; returns the outputs as `HostArray`s to be
        given back.
        """
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
        x = self._verbs.do("compute", lambda: after(half.weights, half.stream, half.outputs, arrived))
        self._last = (self._last, x)
        yield from self._pass_on(half.square, x)

    # ---- activations and tokens

    def _take_x(self, one: Square) -> tuple:
        """A square's input on the device: embedded tokens, what is there, or what its store has."""
        if one.layer == 0:
            ids, positions = self._inputs.tokens(one)
            return self._verbs.do(
                "compute",
                lambda: self._d.compiled.embed[one.token == 0](self._d.weights.ends, ids, positions),
            )
        return self._ahead.activations(one.batch)

    def _pass_on(self, one: Square, x: tuple) -> Iterator[Drawn]:
        """A square's output: to its home, or after the last layer to the sampler."""
        if one.layer + 1 < self._g.config.num_layers:
            self._verbs.store("store_activation", lambda: self._activations.store(one.batch, x))
            return
        yield self._inputs.draw(self._d.compiled, self._d.weights.ends, one, x)

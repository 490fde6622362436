"""Block loop: FlexGen's Algorithm 1 in any order of the steps, with transfers
concurrent with the computation.

During the computation of a step, the next layer's weights and the next step's KV and activations are copied
to the device, the output of the last step is copied from the device, and the disk is read for the step after
the next. One thread enqueues everything, and waits for the step before. A transfer that is issued before a
computation runs concurrently with it. A transfer that is issued after may wait for it, because device memory
is allocated in the order of the computations. So the loop issues the loads of the next step first, then the
computation of this step, then its stores.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxflow.flexgen.activation_store import ActivationStore
from jaxflow.flexgen.block import Block, BlockInputs, BlockOrder, BlockStep, DrawnTokens, block_order
from jaxflow.flexgen.config import Schedule
from jaxflow.flexgen.geometry import BEFORE, SHARDED, Geometry, device_sharding, halves, tree_bytes
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.kv_store import Key, KvStore
from jaxflow.flexgen.pinned_memory import views
from jaxflow.flexgen.programs import Compiled
from jaxflow.flexgen.tiers import Tiers, Traffic
from jaxflow.flexgen.waits import Waits
from jaxflow.flexgen.weight_store import WeightStore

_IN_FLIGHT = 2  # limit of the stores under way when the next store is issued


class Verbs:
    """Issuer of the verbs of a block in order, from one thread.

    With overlap, the verbs run concurrently. Without overlap, each verb ends before the next begins, and the
    traffic counts its seconds.
    """

    def __init__(self, overlap: bool, traffic: Traffic, waits: Waits):
        self._overlap, self._traffic, self._waits = overlap, traffic, waits
        self._stores: collections.deque[concurrent.futures.Future] = collections.deque()

    def do(self, verb: str, issue: Callable[[], Any]) -> Any:
        """Return the result of `issue`: arrays under way, or complete arrays without overlap."""
        if self._overlap:
            with self._waits.of("programs") if verb == "compute" else contextlib.nullcontext():
                return issue()
        started = time.perf_counter()
        made = jax.block_until_ready(issue())
        self._traffic.add(verb, seconds=time.perf_counter() - started)
        return made

    def store(self, verb: str, issue: Callable[[], Sequence[Any]]) -> None:
        """Issue a store, which returns arrays and futures under way; only the futures are limited."""
        started = time.perf_counter()
        made = issue()
        futures = [item for item in made if isinstance(item, concurrent.futures.Future)]
        if self._overlap:
            self._stores.extend(futures)
        elif made:
            for future in futures:
                future.result()
            jax.block_until_ready([item for item in made if not isinstance(item, concurrent.futures.Future)])
            self._traffic.add(verb, seconds=time.perf_counter() - started)

    def bound_stores(self, most: int = _IN_FLIGHT) -> None:
        """Wait until at most `most` stores are under way. Raises: the exception of a store."""
        while len(self._stores) > most:
            self._stores.popleft().result()

    def rest(self) -> None:
        """Wait until no store is under way, also after an error."""
        wait_for(self._stores)


def wait_for(futures: Iterable[concurrent.futures.Future]) -> None:
    """Wait for futures, also after an error.

    `concurrent.futures.wait` does not return for futures that a pool's shutdown cancelled.
    """
    for future in futures:
        with contextlib.suppress(concurrent.futures.CancelledError):
            future.exception()


@dataclasses.dataclass(frozen=True)
class BlockSetup:
    """The resources on which blocks run.

    Attributes:
      host_attention: None without attention on the host.
      host_thread: runs the host's part of decodes in order.
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

    @property
    def halved(self) -> bool:
        """Return True if the host works between the two halves of a decode."""
        return bool(self.compiled.before)

    def free(self) -> None:
        """Release all memory of device and host."""
        for store in (self.weights, self.kv, self.activations, self.tiers.staging):
            store.free()


class Prefetcher:
    """Loads of one block that start before their step, and earlier reads from disk."""

    def __init__(self, setup: BlockSetup, verbs: Verbs, block: Block):
        self._tiers, self._weights, self._do = setup.tiers, setup.weights, verbs.do
        self._kv, self._activations = setup.kv, setup.activations
        self._lengths, self._slot = block.lengths, setup.geometry.slot
        self._host_attention = setup.host_attention is not None  # then no KV is loaded
        self._halved = setup.halved
        self._all = tuple(dict.fromkeys(key for layer in setup.weights.placed.layers for key in layer))
        self._layers: dict[int, dict[str, Any]] = {}  # weights on the device
        self._loaded: dict[BlockStep, tuple] = {}  # KV under way for a step
        self._x: dict[int, tuple] = {}  # activations under way, by batch

    # ---- inputs of a step

    def weights(self, order: BlockOrder, i: int) -> dict[str, Any]:
        """Return the weights of step i's layer on the device, and release the weights of earlier layers."""
        if i == order.first[i]:
            wanted = (order.steps[i].layer, self._coming(order, i)[0])
            self._layers = {layer: arrays for layer, arrays in self._layers.items() if layer in wanted}
        return self._need(order.steps[i].layer, self._all)

    def kv(self, step: BlockStep) -> tuple:
        """Return the splits of a decode's KV that are not on the device tier."""
        loaded = self._loaded.pop(step, None)
        if loaded is None:
            loaded = self._do(
                "load_kv",
                lambda: self._kv.load(self._key(step), step.token, self._lengths[step.batch]),
            )
        return loaded

    def activations(self, batch: int) -> tuple:
        """Return the output of a batch's last step."""
        x = self._x.pop(batch, None)
        return (
            self._do("load_activation", lambda: self._activations.load(self._slot(batch))) if x is None else x
        )

    # ---- loads for later steps

    def fetch_next(self, order: BlockOrder, i: int, lag: int) -> None:
        """Start to fetch the next layer's weights, after the last layer's weights have left the device.

        `lag`: number of steps between the two halves of a decode that attends on the host.
        """
        place, (layer, later) = i - order.first[i], self._coming(order, i)
        if layer is None:
            return
        if place == 0:
            self._need(layer, BEFORE if lag else self._all)
        if place == lag:  # all steps of the last layer, second halves included, have been computed
            self._need(layer, self._all)
            if later is not None:
                self._weights.read_ahead(later)

    def load_next(self, step: BlockStep, following: BlockStep) -> None:
        """Load the inputs of the next step that this step does not compute."""
        if following.token > 0 and not self._host_attention and following[1:] != step[1:]:
            self._loaded[following] = self._kv.load(
                self._key(following), following.token, self._lengths[following.batch]
            )
        halved = self._halved and step.token > 0  # then the last layer's output may be in its second half
        if following.layer > 0 and following.batch != step.batch and not halved:
            self._x[following.batch] = self._activations.load(self._slot(following.batch))

    def read_later(self, following: BlockStep, later: BlockStep, pending: set[int]) -> None:
        """Start to read from disk for the step after the next, unless the next step computes the data.

        `pending`: batches that have not ended.
        """
        if later.token > 0 and later[1:] != following[1:]:
            self._kv.read_ahead(self._key(later), later.token, self._lengths[later.batch])
        if later.layer > 0 and later.batch != following.batch and later.batch not in pending:
            self._activations.read_ahead(self._slot(later.batch))

    @property
    def under_way(self) -> list[tuple]:
        """Loaded KV that no step has taken."""
        return list(self._loaded.values())

    def forget(self) -> None:
        """Discard all unused loads, after their transfers have ended. Raises: DiskError."""
        for step, loaded in self._loaded.items():
            self._kv.used(self._key(step), loaded)
        self._loaded.clear()
        self._x.clear()
        self._layers.clear()
        self._kv.rest()
        self._activations.rest()
        self._weights.rest()

    def _need(self, layer: int, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return a layer's weights on the device, and fetch the missing ones."""
        own = self._weights.placed.layers[layer]
        found = self._layers.setdefault(layer, {})
        missing = tuple(key for key in keys if key in own and key not in found)
        if missing:
            found |= self._do("fetch_layer", lambda: self._weights.fetch(layer, missing))
            if set(missing) - set(BEFORE) and self._weights.is_away(layer):
                self._tiers.traffic.add("fetch_layer", times=1)
        return {key: found[key] for key in own if key in keys}

    def _coming(self, order: BlockOrder, i: int) -> tuple[int | None, int | None]:
        """Return the layers of the next two groups of steps, None for no layer or the same layer."""
        found: list[int | None] = []
        ahead = order.end[i]
        for _ in range(2):
            layer = order.steps[ahead].layer if ahead < len(order.steps) else None
            found.append(None if layer == order.steps[i].layer else layer)
            ahead = order.end[ahead] if ahead < len(order.steps) else ahead
        return found[0], found[1]

    def _key(self, step: BlockStep) -> Key:
        """Return the place of a step's KV."""
        return step.layer, self._slot(step.batch)


@dataclasses.dataclass
class HalfDecode:
    """A decode with its attention, or its rows of V, under way on the host.

    `kept`: as `Programs.before` returns it.
    """

    step: BlockStep
    weights: dict[str, Any]
    stream: jax.Array
    outputs: tuple
    kept: tuple
    attended: concurrent.futures.Future


class StageTransfer(Protocol):
    """Arrays on their way between stages; see `jaxflow.flexgen.stages.HandOver`."""

    def give(self, stage: int, token: int, batch: int, arrays: Any) -> None: ...
    def take(self, stage: int, token: int, batch: int) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Handing:
    """A stage's place in a pipeline.

    `following`: the mesh of the next stage; the last stage's is the first.
    """

    exchange: StageTransfer
    stage: int
    following: Mesh
    last: bool

    def receive(self, step: BlockStep) -> Any:
        """Wait for what the stage before hands over for a step. Raises: PipelineStopped."""
        return self.exchange.take(self.stage, step.token, step.batch)

    def send(self, step: BlockStep, x: tuple) -> None:
        """Start to copy the output of a step to the next stage."""
        x = jax.device_put(x, device_sharding(self.following, SHARDED))
        self.exchange.give(self.stage + 1, step.token, step.batch, x)

    def send_tokens(self, drawn: DrawnTokens) -> None:
        """Start to copy drawn tokens to the first stage."""
        tokens = jax.device_put(drawn.tokens, device_sharding(self.following))
        self.exchange.give(0, drawn.token + 1, drawn.batch, tokens)


class RunningBlock:
    """The state of a running block: the computation of each step, and the stores of its outputs.

    `handing`: the place in a pipeline; None without stages.
    """

    def __init__(self, setup: BlockSetup, block: Block, handing: Handing | None = None):
        self._handing = handing
        self._setup, self._block, self._g = setup, block, setup.geometry
        self._tiers, self._kv, self._activations = setup.tiers, setup.kv, setup.activations
        self._verbs = Verbs(setup.overlap, setup.tiers.traffic, setup.tiers.waits)
        self._prefetcher = Prefetcher(setup, self._verbs, block)
        self._halves: collections.deque[HalfDecode] = collections.deque()
        self._last: Any = ()  # the arrays of the last step
        self._inputs = BlockInputs(setup.geometry, block, setup.compiled.vocabulary, setup.eos)

    # ---- a step

    def step(self, order: BlockOrder, i: int) -> Iterator[DrawnTokens]:
        """Enqueue step i of the order, and the transfers for the next steps."""
        setup, steps = self._setup, order.steps
        step, following = steps[i], steps[i + 1] if i + 1 < len(steps) else None
        halved = setup.halved and step.token > 0
        lag = int(halved and order.end[i] - order.first[i] > 1)
        waits = self._tiers.waits
        waits.phase = "decode" if step.token > 0 else "prefill"
        if self._handing is not None and step.layer == 0:  # another stage may wait for these
            while self._halves:
                yield from self._finish_half()
        if self._halves and (not lag or self._halves[0].step.batch == step.batch):
            yield from self._finish_half()
        with waits.of("computation"):
            jax.block_until_ready(self._last)
        self._last = ()
        weights = self._prefetcher.weights(order, i)
        if setup.overlap:
            self._prefetcher.fetch_next(order, i, lag)
            if following is not None and not (halved and setup.host_attention is not None):
                self._prefetcher.load_next(step, following)
        if halved:
            self._begin_half(step, weights)
            if len(self._halves) > lag:
                yield from self._finish_half()
        else:
            yield from self._compute(step, weights)
        if setup.overlap and i + 2 < len(steps):
            self._prefetcher.read_later(
                steps[i + 1], steps[i + 2], {half.step.batch for half in self._halves}
            )
        with waits.of("stores"):
            self._verbs.bound_stores()

    def stop(self) -> Iterator[DrawnTokens]:
        """End all work under way, and discard unused loads.

        Raises: DiskError.
        """
        while self._halves:
            yield from self._finish_half()
        jax.block_until_ready((self._last, self._prefetcher.under_way))
        self._verbs.bound_stores(0)
        self._prefetcher.forget()

    def end(self) -> None:
        """Wait for all work under way, also after an error."""
        wait_for(half.attended for half in self._halves)
        self._verbs.rest()
        self._tiers.staging.forget_transfers()

    def _compute(self, step: BlockStep, weights: dict[str, Any]) -> Iterator[DrawnTokens]:
        layer, key = self._g.config.layers[step.layer], self._key(step)
        x, lengths = self._take_x(step), self._block.lengths[step.batch]
        if step.token == 0:
            program, given = self._setup.compiled.prefill[layer], self._inputs.rows(step.batch).lengths
            x, self._kv.home[key], pages = self._verbs.do(
                "compute", lambda: program(weights, x, self._kv.home[key], given)
            )
            self._last = x
            self._verbs.store("store_kv", lambda: self._kv.store_pages(key, pages))
        else:
            loaded, (positions, live) = self._prefetcher.kv(step), self._inputs.positions(step)
            program = self._setup.compiled.decode[layer]
            x, self._kv.home[key], _, rows = self._verbs.do(
                "compute", lambda: program(weights, x, self._kv.home[key], loaded, positions, live)
            )
            self._last = x
            self._kv.used(key, x)
            self._verbs.store("store_kv", lambda: self._kv.store_rows(key, rows, step.token, lengths))
        yield from self._pass_on(step, x)

    def _begin_half(self, step: BlockStep, weights: dict[str, Any]) -> None:
        """Enqueue the first half of a decode, and submit the host's part to the host's thread."""
        setup, layer, key = self._setup, self._g.config.layers[step.layer], self._key(step)
        before, after = halves(weights)
        x, lengths = self._take_x(step), self._block.lengths[step.batch]
        positions, live = self._inputs.positions(step)
        first, program = {name: weights[name] for name in before}, setup.compiled.before[layer]
        on_host = setup.host_attention is not None
        loaded = () if on_host else self._prefetcher.kv(step)
        stream, outputs, self._kv.home[key], asked, kept, rows = self._verbs.do(
            "compute", lambda: program(first, x, self._kv.home[key], loaded, positions, live)
        )
        self._last = stream
        self._kv.used(key, stream)
        rising = self._tiers.up((asked, rows))
        asked_bytes, rows_bytes = (tree_bytes(tree) for tree in (asked, rows))
        self._tiers.traffic.add("store_kv", times=len(rows), up=rows_bytes)
        if on_host:
            self._tiers.traffic.add("host_attention", times=1, up=asked_bytes, down=asked_bytes)
            cached = self._kv.wanted(key, step.token, lengths)
            attended = setup.host_thread.submit(self._attend, step, rising, cached, lengths)
        else:
            self._tiers.traffic.add("load_kv", up=asked_bytes)
            attended = setup.host_thread.submit(self._read_values, step, rising, lengths)
        self._kv.follow(key, attended)
        self._halves.append(
            HalfDecode(step, {name: weights[name] for name in after}, stream, outputs, kept, attended)
        )
        if not setup.overlap:
            self._verbs.do("host_attention" if on_host else "load_kv", attended.result)

    def _read_values(self, step: BlockStep, rising: Any, lengths: np.ndarray) -> list:
        """Read the chosen rows of V, on the host's thread, and store this token's KV.

        Return rows to give back.
        """
        key, layer, found = self._key(step), self._g.config.layers[step.layer], []
        chosen, rows = self._tiers.arrived(rising)
        for split, positions, new in zip(self._kv.away, chosen, rows, strict=True):
            values = jax.tree.map(self._tiers.staging.take, self._g.top_values(layer, split.rows))
            found.append(values)
            self._kv.fill_values(split, key, positions.views, lengths, values)
            self._kv.write_row(split, key, new, step.token, lengths)
            self._tiers.traffic.add("load_kv", down=tree_bytes(self._g.top_values(layer, split.rows)))
        return found

    def _attend(self, step: BlockStep, rising: Any, cached: list, lengths: np.ndarray) -> list:
        """Store this token's KV and attend, on the host's thread. Return outputs to give back."""
        key, layer, outputs = self._key(step), self._g.config.layers[step.layer], []
        queries, rows = self._tiers.arrived(rising)
        host = self._setup.host_attention
        assert host is not None
        for split, q, new, future in zip(self._kv.away, queries, rows, cached, strict=True):
            kv = future.result()
            try:
                self._kv.write_row(split, key, new, step.token, lengths)
                if split.tier == "disk":
                    self._kv.place(kv, views(new[: len(kv)]), split, lengths + (step.token - 1))
                out = self._tiers.staging.take(q.array)
                at = slice(split.start, split.stop)
                keys = np.where(lengths[at] > 0, lengths[at] + step.token, 0).astype(np.int32)
                for i, (heads, k, attended) in enumerate(zip(q.views, kv[0].views, out.views, strict=True)):
                    if self._g.policy.sparse_values:
                        v = functools.partial(self._kv.value_rows, split, key, i, lengths)
                    else:
                        v = kv[1].views[i]
                    host(layer, heads, k, v, keys, attended)
                outputs.append(out)
                self._tiers.traffic.add(
                    "host_attention", host_kv=self._g.attended_bytes(layer, split, keys.tolist())
                )
            finally:
                self._kv.done(split, kv)
        return outputs

    def _finish_half(self) -> Iterator[DrawnTokens]:
        """Enqueue the second half of the decode that waits longest."""
        half = self._halves.popleft()
        attended = half.attended.result()
        arrived = tuple(self._tiers.down(out) for out in attended)
        jax.tree.map(self._tiers.staging.give, tuple(attended), arrived)
        after = self._setup.compiled.after[self._g.config.layers[half.step.layer]]
        x = self._verbs.do(
            "compute", lambda: after(half.weights, half.stream, half.outputs, half.kept, arrived)
        )
        self._last = (self._last, x)
        yield from self._pass_on(half.step, x)

    # ---- activations and tokens

    def _key(self, step: BlockStep) -> Key:
        """Return the place of a step's KV."""
        return step.layer, self._g.slot(step.batch)

    def _take_x(self, step: BlockStep) -> tuple:
        """Return the input of a step on the device: embedded tokens, or the activations of the last layer."""
        if step.layer == 0 and self._handing is not None:
            if self._handing.stage > 0:
                return self._receive(self._handing, step)
            if step.token > 0:
                self._inputs.receive(step.batch, self._receive(self._handing, step))
        if step.layer == 0:
            ids, positions = self._inputs.tokens(step)
            return self._verbs.do(
                "compute",
                lambda: self._setup.compiled.embed[step.token == 0](self._setup.weights.ends, ids, positions),
            )
        return self._prefetcher.activations(step.batch)

    def _receive(self, handing: Handing, step: BlockStep) -> Any:
        with self._tiers.waits.of("stage"):
            return handing.receive(step)

    def _pass_on(self, step: BlockStep, x: tuple) -> Iterator[DrawnTokens]:
        """Store the output of a step, or draw tokens after the last layer."""
        if step.layer + 1 < self._g.config.num_layers:
            self._verbs.store(
                "store_activation", lambda: self._activations.store(self._g.slot(step.batch), x)
            )
            return
        if self._handing is not None and not self._handing.last:
            with self._tiers.waits.of("copies"):
                self._handing.send(step, x)
            return
        with self._tiers.waits.of("programs"):
            drawn = self._inputs.draw(self._setup.compiled, self._setup.weights.ends, step, x)
        if self._handing is not None and step.token + 1 < self._g.policy.output_tokens:
            self._handing.send_tokens(drawn)
        yield drawn


def _ended(order: BlockOrder, i: int, finished: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the batches of a group of decodes with sequences that have all ended."""
    group = order.steps[i : order.end[i]]
    return [step.batch for step in group if step.token > 0 and finished([step.batch])]


class BlockRunner:
    """Runner of blocks, one at a time.

    Attributes:
      prefill_s: seconds until the last prompt of the last block was computed.
      prefill_crossed: bytes to the device and from the device in this time.
    """

    def __init__(self, setup: BlockSetup):
        self._setup, self._closed = setup, False
        self.prefill_s = 0.0
        self.prefill_crossed = (0, 0)

    def run(
        self, block: Block, finished: Callable[[Sequence[int]], bool], on_step: Callable[[BlockStep], object]
    ) -> Generator[DrawnTokens, None, None]:
        """Run a block, and yield each batch's tokens when they are enqueued.

        A caller that stops early must close the iterator.

        Args:
          finished: return True if all sequences of these batches have ended.
          on_step: called with each step when it is enqueued.

        Raises: DiskError, also from closing the iterator.
        """
        g, run = self._setup.geometry, RunningBlock(self._setup, block)
        schedule, under_way = self._setup.schedule, g.policy.num_gpu_batches
        tokens = g.policy.output_tokens
        order = block_order(block.batches, g.config.num_layers, tokens, schedule, under_way)
        started, self.prefill_s, self.prefill_crossed = time.perf_counter(), 0.0, (0, 0)
        prompts_left = block.batches
        try:
            i = 0
            while i < len(order.steps):
                if order.steps[i].layer == 0 and order.first[i] == i:
                    over = _ended(order, i, finished)
                    if over and (schedule == "diagonal" or len(over) == order.end[i] - i):
                        order, i = order.rest(i, over), 0
                        yield from run.stop()
                        continue
                for drawn in run.step(order, i):
                    yield drawn
                    if drawn.token == 0:
                        prompts_left -= 1
                        if not prompts_left:
                            jax.block_until_ready(drawn.tokens)
                            self.prefill_s = time.perf_counter() - started
                            self.prefill_crossed = self._setup.tiers.traffic.crossed()
                on_step(order.steps[i])
                i += 1
            yield from run.stop()
        except GeneratorExit:  # the caller stops: the next block must not take data that was read ahead
            if not self._closed:
                for _ in run.stop():
                    pass
            raise
        finally:
            run.end()

    def free(self) -> None:
        """Release all memory of device and host. No block can run afterwards."""
        self._setup.free()

    def close(self) -> None:
        """Stop the thread of the host's attention."""
        self._closed = True
        self._setup.host_thread.shutdown(cancel_futures=True)

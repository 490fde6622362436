"""What comes to the device before a square needs it: layers' weights, KV, activations; and what is read from
disk before that.

In the time of a square the next layer's weights and the next square's tensors travel, and the disk is read
for the one after it.
"""

from collections.abc import Sequence
from typing import Any

from jaxflow.flexgen.activation_store import ActivationStore
from jaxflow.flexgen.block import Block
from jaxflow.flexgen.geometry import BEFORE
from jaxflow.flexgen.kv_store import KvStore
from jaxflow.flexgen.schedule import Square
from jaxflow.flexgen.tiers import Tiers
from jaxflow.flexgen.verbs import Verbs
from jaxflow.flexgen.weight_store import WeightStore


class Ahead:
    """Of one block. width: batches that pass a layer together; host_attention: whether decodes attend on the
    host, so that no KV comes.
    """

    def __init__(
        self,
        tiers: Tiers,
        weights: WeightStore,
        kv: KvStore,
        activations: ActivationStore,
        verbs: Verbs,
        block: Block,
        width: int,
        host_attention: bool,
    ):
        self._tiers, self._weights, self._kv, self._activations, self._do = (
            tiers,
            weights,
            kv,
            activations,
            verbs.do,
        )
        self._lengths, self._width, self._host_attention = block.lengths, width, host_attention
        self._all = tuple(dict.fromkeys(key for layer in weights.placed.layers for key in layer))
        self._layers: dict[int, dict[str, Any]] = {}  # weights on the device
        self._loaded: dict[Square, tuple] = {}  # KV that is on its way for a square
        self._x: dict[int, tuple] = {}  # activations on their way, by batch

    # ---- what a square takes

    def weights(self, order: Sequence[Square], i: int) -> dict[str, Any]:
        """Those of square i's layer, on the device; those of layers that are done with leave it."""
        if self.place(order[i]) == 0:
            wanted = (order[i].layer, self._coming(order, i)[0])
            self._layers = {layer: arrays for layer, arrays in self._layers.items() if layer in wanted}
        return self._need(order[i].layer, self._all)

    def kv(self, one: Square) -> tuple:
        """The parts of a decode's KV that are not at home on the device."""
        loaded = self._loaded.pop(one, None)
        if loaded is None:
            loaded = self._do(
                "load_kv", lambda: self._kv.load((one.layer, one.batch), one.token, self._lengths[one.batch])
            )
        return loaded

    def activations(self, batch: int) -> tuple:
        """What a batch's last square made."""
        x = self._x.pop(batch, None)
        return self._do("load_activation", lambda: self._activations.load(batch)) if x is None else x

    # ---- what is sent for

    def place(self, one: Square) -> int:
        """Which of the batches that pass a layer together a square is."""
        return one.batch if self._width > 1 else 0

    def fetch_next(self, order: Sequence[Square], i: int, lag: int) -> None:
        """Sends the next layer's weights on their way, where the last layer's have left the device.

        lag: squares by which the second half of a decode, which the host attends to, is behind the first.
        """
        place, (layer, later) = self.place(order[i]), self._coming(order, i)
        if layer is None:
            return
        if place == 0:
            self._need(layer, BEFORE if lag else self._all)
        if place == lag:  # from here on nothing of the layer before is computed, its second half included
            self._need(layer, self._all)
            if later is not None:
                self._weights.read_ahead(later)

    def load_next(self, one: Square, nxt: Square) -> None:
        """What the next square needs and this one does not make."""
        if nxt.token > 0 and not self._host_attention and nxt[1:] != one[1:]:
            self._loaded[nxt] = self._kv.load((nxt.layer, nxt.batch), nxt.token, self._lengths[nxt.batch])
        if nxt.layer > 0 and nxt.batch != one.batch:
            self._x[nxt.batch] = self._activations.load(nxt.batch)

    def read_later(self, nxt: Square, later: Square, pending: set[int]) -> None:
        """Starts to read from disk what the square after the next needs, if the next does not make it.
        pending: batches not done yet.
        """
        if later.token > 0 and later[1:] != nxt[1:]:
            self._kv.read_ahead((later.layer, later.batch), later.token, self._lengths[later.batch])
        if later.layer > 0 and later.batch != nxt.batch and later.batch not in pending:
            self._activations.read_ahead(later.batch)

    @property
    def under_way(self) -> list[tuple]:
        """KV that nobody has taken yet."""
        return list(self._loaded.values())

    def forget(self) -> None:
        """Gives up what nobody will take; its transfers must have ended. Raises: DiskError."""
        for one, loaded in self._loaded.items():
            self._kv.used((one.layer, one.batch), loaded)
        self._loaded.clear()
        self._x.clear()
        self._layers.clear()
        self._kv.rest()
        self._activations.rest()
        self._weights.rest()

    def _need(self, layer: int, keys: tuple[str, ...]) -> dict[str, Any]:
        """A layer's weights on the device; fetches what is not on its way."""
        own = self._weights.placed.layers[layer]
        found = self._layers.setdefault(layer, {})
        missing = tuple(key for key in keys if key in own and key not in found)
        if missing:
            found |= self._do("fetch_layer", lambda: self._weights.fetch(layer, missing))
            if set(missing) - set(BEFORE) and self._weights.is_away(layer):
                self._tiers.traffic.add("fetch_layer", times=1)
        return {key: found[key] for key in own if key in keys}

    def _coming(self, order: Sequence[Square], i: int) -> tuple[int | None, int | None]:
        """The layer whose weights are wanted after square i's, and the one after it; None: none, or this
        one's again.
        """
        found: list[int | None] = []
        for ahead in (1, 2):
            j = i - self.place(order[i]) + ahead * self._width
            found.append(order[j].layer if j < len(order) and order[j].layer != order[i].layer else None)
        return found[0], found[1]

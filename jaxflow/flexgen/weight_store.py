"""The weights of all layers, each tensor on its tier, and `fetch_layer`: a layer's weights on the device, in
time for its first batch.
"""

import concurrent.futures
from collections import Counter
from typing import Any

import jax

from jaxflow.flexgen.geometry import PlacedWeights
from jaxflow.flexgen.pinned_memory import buffer_key, views
from jaxflow.flexgen.scratch_files import DiskFile
from jaxflow.flexgen.shards import array_bytes, tree_bytes
from jaxflow.flexgen.tiers import Tiers

Keys = tuple[str, ...]


class WeightStore:
    """Filled layer by layer, then read. A layer's tensors on disk lie in one file, each by the pieces of the
    devices.
    """

    def __init__(self, placed: PlacedWeights, tiers: Tiers):
        self.placed, self._tiers = placed, tiers
        self.ends: dict[str, jax.Array] = {}
        self._device: list[dict[str, Any]] = []
        self._host: list[dict[str, Any]] = []
        self._files: list[DiskFile | None] = []
        self._ahead: dict[tuple[int, str], concurrent.futures.Future] = {}

    def add(self, arrays: dict[str, Any], *, wait_on_host: bool = False) -> None:
        """The next layer's weights, on the device; those that live elsewhere leave it. Raises: DiskError.

        wait_on_host: those that live on the device leave it too, until `settle`.
        """
        layer, tiers = len(self._device), self._tiers
        of = self.placed.tiers[layer]
        stays = {key: a for key, a in arrays.items() if of[key] == "device"}
        self._device.append(tiers.up(stays) if wait_on_host else stays)
        self._host.append(tiers.arrived(tiers.up({key: a for key, a in arrays.items() if of[key] == "host"})))
        away = self.placed.of_tier(layer, "disk")
        file = None
        if away:
            assert tiers.folder is not None
            file = tiers.folder.create(f"layer-{layer:05d}.weights", tree_bytes(away))
            on_host = tiers.arrived(tiers.up({key: arrays[key] for key in away}))
            for key, offset in self._offsets(layer).items():
                file.write(offset, views(on_host[key]))
            file.drop_cache()
        self._files.append(file)

    def settle(self) -> None:
        """Brings what waited on the host to the device, side by side.

        Put there as layers are made it lies between gaps as large as what a layer is made of, too small for
        the largest program.
        """
        self._device = [self._tiers.down(stays) for stays in self._device]
        jax.block_until_ready(self._device)

    def reserve_staging(self) -> None:
        """Host buffers for two layers' tensors of the disk: one on its way to the device, one being read."""
        for structs in disk_pairs(self.placed):
            self._tiers.staging.reserve(structs)

    def fetch(self, layer: int, keys: Keys) -> dict[str, Any]:
        """The tensors of a layer, those that are away on their way to the device. Raises: DiskError."""
        found = {key: a for key, a in self._device[layer].items() if key in keys}
        tiers = self._tiers
        host = {key: a for key, a in self._host[layer].items() if key in keys}
        found |= tiers.down(host)
        for key in self._on_disk(layer, keys):
            future = self._ahead.pop((layer, key), None)
            buffers = self._read(layer, key) if future is None else future.result()
            found[key] = tiers.down(buffers)
            jax.tree.map(tiers.staging.give, buffers, found[key])
        down = tree_bytes(self.placed.of_tier(layer, "host", keys)) + tree_bytes(
            self.placed.of_tier(layer, "disk", keys)
        )
        tiers.traffic.add("fetch_layer", down=down)
        return found

    def read_ahead(self, layer: int) -> None:
        """Starts to read what `fetch` will want of the disk."""
        for key in self.placed.of_tier(layer, "disk"):
            if (layer, key) not in self._ahead:
                self._ahead[layer, key] = self._tiers.read_weights(lambda key=key: self._read(layer, key))

    def is_away(self, layer: int) -> bool:
        """Whether something of a layer must be fetched."""
        return any(tier != "device" for tier in self.placed.tiers[layer].values())

    def rest(self) -> None:
        """Gives up what was read ahead."""
        for future in self._ahead.values():
            for buffer in jax.tree.leaves(future.result()):
                self._tiers.staging.give(buffer)
        self._ahead.clear()

    def free(self) -> None:
        """Lets go of all weights."""
        self.ends.clear()
        self._device.clear()
        self._host.clear()

    def _on_disk(self, layer: int, keys: Keys) -> dict[str, Any]:
        return self.placed.of_tier(layer, "disk", keys)

    def _read(self, layer: int, key: str) -> Any:
        """`HostArray`s of a tensor that lies on disk."""
        file, staging = self._files[layer], self._tiers.staging
        assert file is not None
        buffers = jax.tree.map(staging.take, self.placed.layers[layer][key])
        try:
            size = file.read(self._offsets(layer)[key], views(buffers))
        except BaseException:
            jax.tree.map(staging.give, buffers)
            raise
        file.drop_cache()
        self._tiers.traffic.add("fetch_layer", read=size)
        return buffers

    def _offsets(self, layer: int) -> dict[str, int]:
        """Where each tensor begins in its layer's file."""
        offsets, at = {}, 0
        for key, structs in self.placed.of_tier(layer, "disk").items():
            offsets[key] = at
            at += tree_bytes(structs)
        return offsets


def disk_pairs(placed: PlacedWeights) -> list[list[Any]]:
    """For each layer, the shapes of what it and the next have on disk: what staging must hold at once."""
    layers = [jax.tree.leaves(placed.of_tier(i, "disk")) for i in range(len(placed.layers))]
    return [one + two for one, two in zip(layers, layers[1:] + layers[:1], strict=True)]


def staging_bytes(pairs: list[list[Any]]) -> int:
    """Of the buffers that hold any one of these, by shape."""
    most: Counter = Counter()
    for structs in pairs:
        most |= Counter(map(buffer_key, structs))
    return sum(count * array_bytes(jax.ShapeDtypeStruct(*key[:2])) for key, count in most.items())

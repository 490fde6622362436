"""Weights of all layers, each tensor on its tier, and `fetch_layer`, the copy to the device."""

import concurrent.futures
from collections import Counter
from typing import Any

import jax

from jaxflow.flexgen.geometry import PlacedWeights, array_bytes, tree_bytes
from jaxflow.flexgen.pinned_memory import buffer_key, views
from jaxflow.flexgen.scratch_files import DiskFile
from jaxflow.flexgen.tiers import Tiers

Keys = tuple[str, ...]


class WeightStore:
    """Weights, added layer by layer and then read.

    The tensors of a layer on disk share one file, in which a tensor consists of the shards of the devices.
    """

    def __init__(self, placed: PlacedWeights, tiers: Tiers):
        self.placed, self._tiers = placed, tiers
        self.ends: dict[str, jax.Array] = {}
        self._device: list[dict[str, Any]] = []
        self._host: list[dict[str, Any]] = []
        self._files: list[DiskFile | None] = []
        self._ahead: dict[tuple[int, str], concurrent.futures.Future] = {}

    def add(self, arrays: dict[str, Any], *, wait_on_host: bool = False) -> None:
        """Add the next layer's weights, given on the device, and move them to their tiers.

        Args:
          wait_on_host: move the tensors of the device tier to the host, too, until `settle`.

        Raises: DiskError.
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
        """Move the tensors that waited on the host to adjacent device memory.

        Tensors that stay on the device while layers are loaded leave gaps of the size of a layer's tensors,
        and the largest program does not fit in such a gap.
        """
        self._device = [self._tiers.down(stays) for stays in self._device]
        jax.block_until_ready(self._device)

    def reserve_staging(self) -> None:
        """Reserve host buffers for two layers on disk: one is copied while the next is read."""
        for structs in disk_pairs(self.placed):
            self._tiers.staging.reserve(structs)

    def fetch(self, layer: int, keys: Keys) -> dict[str, Any]:
        """Return the tensors of a layer, with the copies from host and disk started. Raises: DiskError."""
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
        """Start to read the tensors of a layer from disk."""
        for key in self.placed.of_tier(layer, "disk"):
            if (layer, key) not in self._ahead:
                self._ahead[layer, key] = self._tiers.read_weights(lambda key=key: self._read(layer, key))

    def is_away(self, layer: int) -> bool:
        """Return True if a tensor of the layer is not on the device."""
        return any(tier != "device" for tier in self.placed.tiers[layer].values())

    def rest(self) -> None:
        """Discard the tensors that were read ahead."""
        for future in self._ahead.values():
            for buffer in jax.tree.leaves(future.result()):
                self._tiers.staging.give(buffer)
        self._ahead.clear()

    def free(self) -> None:
        """Release all weights."""
        self.ends.clear()
        self._device.clear()
        self._host.clear()

    def _on_disk(self, layer: int, keys: Keys) -> dict[str, Any]:
        return self.placed.of_tier(layer, "disk", keys)

    def _read(self, layer: int, key: str) -> Any:
        """Return the `HostArray`s of a tensor on disk."""
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
        """Return the offset of each tensor in its layer's file."""
        offsets, at = {}, 0
        for key, structs in self.placed.of_tier(layer, "disk").items():
            offsets[key] = at
            at += tree_bytes(structs)
        return offsets


def disk_pairs(placed: PlacedWeights) -> list[list[Any]]:
    """Return, for each layer, the shapes of its and the next layer's tensors on disk."""
    layers = [jax.tree.leaves(placed.of_tier(i, "disk")) for i in range(len(placed.layers))]
    return [one + two for one, two in zip(layers, layers[1:] + layers[:1], strict=True)]


def staging_bytes(pairs: list[list[Any]]) -> int:
    """Return the bytes of the buffers that hold any one of these lists, by shape."""
    most: Counter = Counter()
    for structs in pairs:
        most |= Counter(map(buffer_key, structs))
    return sum(count * array_bytes(jax.ShapeDtypeStruct(*key[:2])) for key, count in most.items())

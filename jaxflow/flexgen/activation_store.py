"""Activations between layers, each split on its tier: `store_activation` and `load_activation`."""

import concurrent.futures
from typing import Any

import jax

from jaxflow.flexgen.geometry import Geometry, array_bytes
from jaxflow.flexgen.pinned_memory import HostArray, views
from jaxflow.flexgen.scratch_files import DiskFile
from jaxflow.flexgen.tiers import Tiers


class ActivationStore:
    """The activations of a block's batches, one array for each tier."""

    def __init__(self, geometry: Geometry, tiers: Tiers):
        self._g, self._tiers = geometry, tiers
        self.splits = geometry.activation_splits
        self.away = tuple(split for split in self.splits if split.tier != "device")
        self._pieces: dict[int, list[Any]] = {}  # the shape of the disk's split
        self._files: dict[int, DiskFile] = {}
        self._stores: dict[int, concurrent.futures.Future] = {}
        self._ahead: dict[int, concurrent.futures.Future] = {}

    def reserve(self) -> None:
        """Reserve the disk space of a block, and staging buffers. Raises: DiskError."""
        g, tiers = self._g, self._tiers
        for split in self.away:
            if split.tier == "disk":
                assert tiers.folder is not None
                for batch in range(g.places):
                    size = array_bytes(g.activation(split.rows, g.prompt))
                    self._files[batch] = tiers.folder.create(f"batch-{batch:03d}.activation", size)
                for tokens in {g.prompt, 1}:
                    tiers.staging.reserve(2 * [g.activation(split.rows, tokens)])

    def store(self, batch: int, pieces: tuple[jax.Array, ...]) -> list[Any]:
        """Move a batch's activations to their tiers; those of the device tier stay.

        Returns the copies under way; a copy to disk is a future.
        """
        tiers, kept, under_way = self._tiers, [], []
        for split, piece in zip(self.splits, pieces, strict=True):
            if split.tier != "device":
                tiers.traffic.add("store_activation", times=1, up=array_bytes(piece))
            if split.tier == "host":
                piece = tiers.up(piece)
                under_way.append(piece)
            elif split.tier == "disk":
                struct, rising = (
                    jax.ShapeDtypeStruct(piece.shape, piece.dtype, sharding=piece.sharding),
                    tiers.up(piece),
                )
                self._stores[batch] = tiers.write(lambda rising=rising: self._write(batch, rising))
                under_way.append(self._stores[batch])
                piece = struct
            kept.append(piece)
        self._pieces[batch] = kept
        return under_way

    def load(self, batch: int) -> tuple[jax.Array, ...]:
        """Return a batch's activations, with the copies to the device started, and remove them.

        Raises: DiskError.
        """
        tiers, found = self._tiers, []
        for split, piece in zip(self.splits, self._pieces.pop(batch), strict=True):
            if split.tier != "device":
                tiers.traffic.add("load_activation", times=1, down=array_bytes(piece))
            if split.tier == "host":
                piece = tiers.down(piece)
            elif split.tier == "disk":
                future = self._ahead.pop(batch, None)
                buffer = self._read(batch, piece) if future is None else future.result()
                piece = tiers.down(buffer)
                tiers.staging.give(buffer, piece)
            found.append(piece)
        return tuple(found)

    def read_ahead(self, batch: int) -> None:
        """Start to read the disk's split of a batch for `load`."""
        for split, piece in zip(self.splits, self._pieces[batch], strict=True):
            if split.tier == "disk" and batch not in self._ahead:
                self._ahead[batch] = self._tiers.read(lambda piece=piece: self._read(batch, piece))

    def rest(self) -> None:
        """Wait for the stores, and discard the activations that were read ahead. Raises: DiskError."""
        for future in self._stores.values():
            future.result()
        for future in self._ahead.values():
            self._tiers.staging.give(future.result())
        self._stores.clear()
        self._ahead.clear()
        self._pieces.clear()

    def free(self) -> None:
        """Release all activations."""
        for held in (self._pieces, self._stores, self._ahead):
            held.clear()

    def _write(self, batch: int, rising: jax.Array) -> None:
        size = self._files[batch].write(0, views(self._tiers.arrived(rising)))
        self._tiers.traffic.add("store_activation", written=size)

    def _read(self, batch: int, struct: Any) -> HostArray:
        store = self._stores.get(batch)
        if store is not None:
            store.result()
        buffer = self._tiers.staging.take(struct)
        try:
            size = self._files[batch].read(0, views(buffer))
        except BaseException:
            self._tiers.staging.give(buffer)
            raise
        self._tiers.traffic.add("load_activation", read=size)
        return buffer

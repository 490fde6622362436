"""KV of a block between its squares, each part on its tier: `load_kv` brings a batch's to the device,
`store_kv` takes new KV home.

On disk a part's file holds its prompts' pages, written once, and behind them a record a token, so that what a
decode adds is one small write at the end and not one a page.
"""

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.flexgen.geometry import Geometry, Part
from jaxflow.flexgen.pinned_memory import bits, reserve, views
from jaxflow.flexgen.scratch_files import DiskFile
from jaxflow.flexgen.shards import array_bytes, tree_bytes
from jaxflow.flexgen.tiers import Tiers

Key = tuple[int, int]  # layer, batch


class KvStore:
    """KV of all layers and batches. Positions: of each row of a part, where the token whose KV is stored or
    missing stands.
    """

    def __init__(self, geometry: Geometry, tiers: Tiers):
        self._g, self._tiers = geometry, tiers
        self.parts = geometry.kv_parts
        self.away = tuple(part for part in self.parts if part.tier != "device")
        self.home: dict[Key, Any] = {}  # the device's part; (): it has none
        self._host: dict[Key, Any] = {}
        self._files: dict[Key, DiskFile] = {}
        self._stores: dict[Key, concurrent.futures.Future] = {}
        self._ahead: dict[Key, concurrent.futures.Future] = {}
        self._down: dict[Key, Any] = {}  # staging buffers on their way down

    def reserve(self) -> None:
        """Takes all memory and disk that a block needs. Raises: DiskError."""
        g, tiers = self._g, self._tiers
        for key in [
            (layer, batch)
            for layer in range(g.config.num_layers)
            for batch in range(g.policy.num_gpu_batches)
        ]:
            self.home[key] = ()
            for part in self.parts:
                structs = g.kv_pages(part.rows)
                if part.tier == "device":
                    self.home[key] = jax.tree.map(
                        lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs
                    )
                elif part.tier == "host":
                    self._host[key] = jax.tree.map(reserve, structs)
                else:
                    assert tiers.folder is not None
                    self._files[key] = tiers.folder.create(
                        f"layer-{key[0]:05d}-batch-{key[1]:03d}.kv", file_bytes(g, part)
                    )
        for part in self.away:
            if part.tier == "disk":
                tiers.staging.reserve(2 * jax.tree.leaves(g.kv_pages(part.rows)))

    # ---- to the device

    def load(self, key: Key, token: int, lengths: np.ndarray) -> tuple:
        """The away parts of a batch's KV at a layer, on their way to the device, before token number `token`
        >= 1.

        lengths: [b], tokens of each prompt. Raises: DiskError.
        """
        return tuple(self._load(part, key, token, lengths) for part in self.away)

    def _load(self, part: Part, key: Key, token: int, lengths: np.ndarray) -> Any:
        tiers = self._tiers
        tiers.traffic.add("load_kv", times=1, down=tree_bytes(self._g.kv_pages(part.rows)))
        if part.tier == "host":
            self._settle(key)
            return tiers.down(self._host[key])
        self._down[key] = buffers = self._staged(part, key, token, lengths)
        return tiers.down(buffers)

    def used(self, key: Key, after: Any) -> None:
        """What was loaded has been read, once the arrays `after` are made: the loaded ones are donated, and
        cannot be waited for.
        """
        jax.tree.map(lambda buffer: self._tiers.staging.give(buffer, after), self._down.pop(key, ()))

    def read_ahead(self, key: Key, token: int, lengths: np.ndarray) -> None:
        """Starts to read what `load` or `wanted` of the same arguments will want of the disk, behind what is
        on its way there now.
        """
        for part in self.away:
            if part.tier == "disk" and key not in self._ahead:
                self._ahead[key] = self._start_reading(part, key, token, lengths)

    def wanted(self, key: Key, token: int, lengths: np.ndarray) -> list[concurrent.futures.Future]:
        """The away parts of a batch's KV at a layer as `HostArray`s, where the host can attend to it; each to
        be given back by `done`.
        """
        futures = []
        for part in self.away:
            if part.tier == "disk":
                futures.append(self._ahead.pop(key, None) or self._start_reading(part, key, token, lengths))
            else:
                self._settle(key)
                futures.append(concurrent.futures.Future())
                futures[-1].set_result(self._host[key])
        return futures

    def _start_reading(
        self, part: Part, key: Key, token: int, lengths: np.ndarray
    ) -> concurrent.futures.Future:
        stored = self._stores.get(key)
        return self._tiers.read(lambda: self._read(part, key, token, lengths, stored))

    def done(self, part: Part, kv: Any) -> None:
        if part.tier == "disk":
            jax.tree.map(self._tiers.staging.give, kv)

    def follow(self, key: Key, stored: concurrent.futures.Future) -> None:
        """Who reads a batch's KV at a layer from now on waits for `stored`."""
        self._stores[key] = stored

    # ---- home

    def store_pages(self, key: Key, pages: tuple) -> list[concurrent.futures.Future]:
        """Takes the away parts of a prompt's KV home. The device's memory is free once what is returned is
        done.
        """
        tiers = self._tiers
        waits = []
        for part, tree in zip(self.away, pages, strict=True):
            tiers.traffic.add("store_kv", times=1, up=tree_bytes(tree))
            if part.tier == "host":
                self._host.pop(key, None)  # its memory is what the new pages take
                waits.append(functools.partial(self._keep, key, tiers.up(tree)))
            else:
                waits.append(functools.partial(self._write_prompt, part, key, tiers.up(tree)))
        return self._submit(key, waits)

    def store_rows(
        self, key: Key, rows: tuple, token: int, lengths: np.ndarray
    ) -> list[concurrent.futures.Future]:
        """Takes the away parts of one token's KV home."""
        tiers = self._tiers
        waits = []
        for part, tree in zip(self.away, rows, strict=True):
            tiers.traffic.add("store_kv", times=1, up=tree_bytes(tree))
            waits.append(functools.partial(self._write_rows, part, key, tiers.up(tree), token, lengths))
        return self._submit(key, waits)

    def write_row(self, part: Part, key: Key, rows: Any, token: int, lengths: np.ndarray) -> None:
        """Puts one token's KV, `HostArray`s, in its place; blocks. Raises: DiskError."""
        if part.tier == "host":
            self.place(self._host[key], views(rows), part, lengths + (token - 1))
        else:
            g = self._g
            size = tree_bytes(g.kv_rows(part.rows))
            offset = prompt_bytes(g, part) + (token - 1) * size
            self._files[key].write(offset, views(rows))
            self._tiers.traffic.add("store_kv", written=size)

    def rest(self) -> None:
        """Waits for stores, and gives up what was read ahead. Raises: DiskError."""
        for key in list(self._stores):
            self._settle(key)
        for future in self._ahead.values():
            jax.tree.map(self._tiers.staging.give, future.result())
        self._ahead.clear()

    def free(self) -> None:
        """Lets go of all KV."""
        for held in (self.home, self._host, self._stores, self._ahead, self._down):
            held.clear()

    # ---- pieces

    def _submit(self, key: Key, waits: list) -> list[concurrent.futures.Future]:
        if not waits:
            return []

        def run() -> None:
            for work in waits:
                work()

        self._settle(key)
        self._stores[key] = self._tiers.write(run)
        return [self._stores[key]]

    def _settle(self, key: Key) -> None:
        """Waits until what was last stored is home."""
        future = self._stores.pop(key, None)
        if future is not None:
            future.result()

    def _staged(self, part: Part, key: Key, token: int, lengths: np.ndarray) -> Any:
        return (self._ahead.pop(key, None) or self._start_reading(part, key, token, lengths)).result()

    def _read(
        self, part: Part, key: Key, token: int, lengths: np.ndarray, stored: concurrent.futures.Future | None
    ) -> Any:
        """The pages of a part of the disk, in staging buffers, once what was `stored` before is there."""
        g, tiers, file = self._g, self._tiers, self._files[key]
        if stored is not None:
            stored.result()
        pages = jax.tree.map(tiers.staging.take, g.kv_pages(part.rows))
        try:
            size = file.read(0, self._prompt_pieces(pages))
            record = [
                np.empty((part.rows, *view.shape[1:2], *view.shape[3:]), view.dtype) for view in views(pages)
            ]
            for step in range(token - 1):
                size += file.read(prompt_bytes(g, part) + step * tree_bytes(g.kv_rows(part.rows)), record)
                self.place(pages, record, part, lengths + step)
        except BaseException:
            jax.tree.map(tiers.staging.give, pages)
            raise
        file.drop_cache()
        tiers.traffic.add("load_kv", read=size)
        return pages

    def _keep(self, key: Key, rising: Any) -> None:
        self._host[key] = self._tiers.arrived(rising)

    def _write_rows(self, part: Part, key: Key, rising: Any, token: int, lengths: np.ndarray) -> None:
        self.write_row(part, key, self._tiers.arrived(rising), token, lengths)

    def _write_prompt(self, part: Part, key: Key, rising: Any) -> None:
        file = self._files[key]
        size = file.write(0, self._prompt_pieces(self._tiers.arrived(rising)))
        file.drop_cache()
        self._tiers.traffic.add("store_kv", written=size)

    def _prompt_pieces(self, pages: Any) -> list[np.ndarray]:
        """The pages that hold prompt tokens, row by row."""
        g, pieces = self._g, []
        for view in views(pages):
            by_row = view.reshape(-1, g.pages, *view.shape[1:])
            pieces += [by_row[row, : g.prompt_pages] for row in range(by_row.shape[0])]
        return pieces

    def place(self, pages: Any, rows: list[np.ndarray], part: Part, positions: np.ndarray) -> None:
        """Writes one token's numbers of each row into its page. rows: as `views` has those of `g.kv_rows`."""
        at = positions[part.start : part.stop]
        row, page, place = np.arange(part.rows), at // self._g.page_size, at % self._g.page_size
        for target, new in zip(views(pages), rows, strict=True):
            by_row = bits(target).reshape(-1, self._g.pages, *target.shape[1:])
            by_row[row, page, :, place] = bits(new)


def prompt_bytes(g: Geometry, part: Part) -> int:
    """Of the pages that a part's file begins with."""
    return sum(array_bytes(s) * g.prompt_pages // g.pages for s in jax.tree.leaves(g.kv_pages(part.rows)))


def file_bytes(g: Geometry, part: Part) -> int:
    """Of a part's file behind its header: pages of the prompt and a record for each token but the last."""
    return prompt_bytes(g, part) + (g.policy.output_tokens - 1) * tree_bytes(g.kv_rows(part.rows))

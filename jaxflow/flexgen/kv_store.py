"""KV of a block between its steps, each split on its tier: `load_kv` to the device, `store_kv` to the tier.

The file of a split on disk has the pages of the prompts, written once, and then a record for each token. So a
decode adds one small write at the end of the file instead of a write for each page. With sparse values
(`jaxflow.flexgen.sparse_values`) a decode loads all keys and, later, the chosen rows of V.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.flexgen.geometry import Geometry, Split, array_bytes, tree_bytes
from jaxflow.flexgen.pinned_memory import bits, reserve, views
from jaxflow.flexgen.scratch_files import DiskFile, row_sum_bytes
from jaxflow.flexgen.sparse_values import NO_ROW
from jaxflow.flexgen.tiers import Tiers

Key = tuple[int, int]  # layer, batch


class KvStore:
    """KV of all layers and batches.

    Attributes:
      home: the device's split by (layer, batch); () without one.
    """

    def __init__(self, geometry: Geometry, tiers: Tiers):
        self._g, self._tiers = geometry, tiers
        self.splits = geometry.kv_splits
        self.away = tuple(split for split in self.splits if split.tier != "device")
        self.home: dict[Key, Any] = {}
        self._host: dict[Key, Any] = {}
        self._files: dict[Key, DiskFile] = {}
        self._stores: dict[Key, concurrent.futures.Future] = {}
        self._ahead: dict[Key, concurrent.futures.Future] = {}
        self._down: dict[Key, Any] = {}  # staging buffers under way to the device

    def reserve(self) -> None:
        """Reserve all memory and disk space of a block. Raises: DiskError."""
        g, tiers = self._g, self._tiers
        for key in [(layer, batch) for layer in range(g.config.num_layers) for batch in range(g.places)]:
            self.home[key] = ()
            for split in self.splits:
                structs = g.kv_pages(split.rows)
                if split.tier == "device":
                    self.home[key] = jax.tree.map(
                        lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs
                    )
                elif split.tier == "host":
                    self._host[key] = jax.tree.map(reserve, structs)
                else:
                    assert tiers.folder is not None
                    self._files[key] = tiers.folder.create(
                        f"layer-{key[0]:05d}-batch-{key[1]:03d}.kv", file_bytes(g, split)
                    )
        for split in self.away:
            if split.tier == "disk":
                tiers.staging.reserve(2 * jax.tree.leaves(g.loaded_pages(split.rows)))

    # ---- to the device

    def load(self, key: Key, token: int, lengths: np.ndarray) -> tuple:
        """Start to copy the KV of a batch at a layer to the device, and return the splits that lay elsewhere.

        With sparse values only the keys are loaded.

        Args:
          token: the number of the token to be computed, at least 1.
          lengths: [b], the tokens of each prompt.

        Raises: DiskError.
        """
        return tuple(self._load(split, key, token, lengths) for split in self.away)

    def _load(self, split: Split, key: Key, token: int, lengths: np.ndarray) -> Any:
        tiers = self._tiers
        loaded = self._g.loaded_pages(split.rows)
        tiers.traffic.add("load_kv", times=1, down=tree_bytes(loaded))
        if split.tier == "host":
            self._settle(key)
            return tiers.down(self._host[key][: len(loaded)])
        self._down[key] = buffers = self._staged(split, key, token, lengths)
        return tiers.down(buffers)

    def used(self, key: Key, after: Any) -> None:
        """Give back the staging buffers of loaded KV when the arrays `after` are computed.

        The loaded arrays themselves are donated, so that nothing can wait for them.
        """
        jax.tree.map(lambda buffer: self._tiers.staging.give(buffer, after), self._down.pop(key, ()))

    def read_ahead(self, key: Key, token: int, lengths: np.ndarray) -> None:
        """Start to read from disk for `load` or `wanted` of these arguments, after earlier writes."""
        for split in self.away:
            if split.tier == "disk" and key not in self._ahead:
                self._ahead[key] = self._start_reading(split, key, token, lengths)

    def wanted(self, key: Key, token: int, lengths: np.ndarray) -> list[concurrent.futures.Future]:
        """Return futures of the splits off the device as `HostArray`s, for attention on the host.

        Each result is given back by `done`.
        """
        futures = []
        for split in self.away:
            if split.tier == "disk":
                futures.append(self._ahead.pop(key, None) or self._start_reading(split, key, token, lengths))
            else:
                self._settle(key)
                futures.append(concurrent.futures.Future())
                futures[-1].set_result(self._host[key])
        return futures

    def _start_reading(
        self, split: Split, key: Key, token: int, lengths: np.ndarray
    ) -> concurrent.futures.Future:
        stored = self._stores.get(key)
        return self._tiers.read(lambda: self._read(split, key, token, lengths, stored))

    def done(self, split: Split, kv: Any) -> None:
        """Give back a result of `wanted`."""
        if split.tier == "disk":
            jax.tree.map(self._tiers.staging.give, kv)

    def follow(self, key: Key, stored: concurrent.futures.Future) -> None:
        """Let later reads of a batch's KV at a layer wait for `stored`."""
        self._stores[key] = stored

    def fill_values(
        self, split: Split, key: Key, chosen: Sequence[np.ndarray], lengths: np.ndarray, out: Any
    ) -> None:
        """Copy the chosen rows of V to host buffers for the device. Raises: DiskError.

        Args:
          chosen: positions [R, K', C] of each device's heads. A buffer's row for `NO_ROW` has any old values.
          out: `HostArray`s of `g.top_values`.
        """
        for i, target in enumerate(views(out)):
            index = chosen[i % len(chosen)]
            if split.tier == "host":
                pages = bits(views(self._host[key][1])[i])
                self._tiers.share(len(index), functools.partial(self._copy_rows, pages, index, bits(target)))
                continue
            row, head, rank = np.nonzero(index != NO_ROW)
            values = self.value_rows(split, key, i, lengths, row, head, index[row, head, rank])
            bits(target)[row, head, rank] = bits(values)

    def _copy_rows(self, pages: np.ndarray, index: np.ndarray, target: np.ndarray, rows: slice) -> None:
        """Copy the chosen rows of V of some sequences in one call, which does not hold Python's lock."""
        g, (_, heads, size, width) = self._g, pages.shape
        row = np.arange(rows.start, rows.stop)[:, None, None]
        page, place = index[rows] // size, index[rows] % size
        at = ((row * g.pages + page) * heads + np.arange(heads)[:, None]) * size + place
        out = target[rows].reshape(-1, width)
        np.take(pages.reshape(-1, width), at.reshape(-1), axis=0, out=out, mode="clip")

    def value_rows(
        self,
        split: Split,
        key: Key,
        view: int,
        lengths: np.ndarray,
        row: np.ndarray,
        head: np.ndarray,
        position: np.ndarray,
    ) -> np.ndarray:
        """Return stored V rows [n, H] of n sequences of a split, heads and positions. Raises: DiskError.

        Args:
          view: number of the array or shard among the `views` of the values.
        """
        g = self._g
        if split.tier == "host":
            pages = views(self._host[key][1])[view]
            _, heads, size, width = pages.shape
            at = ((row * g.pages + position // size) * heads + head) * size + position % size
            return np.take(bits(pages).reshape(-1, width), at, axis=0).view(pages.dtype)
        file, spans = self._files[key], value_spans(g, split)[view]
        heads, dtype, width = spans.heads, spans.dtype, spans.row_bytes
        token = position - lengths[split.start : split.stop][row]  # below 0 for a token of the prompt
        found = np.empty((len(row), width), np.uint8)
        page, place = position // g.page_size, position % g.page_size
        in_prompt = ((row * g.prompt_pages + page) * heads + head) * g.page_size + place
        for step in np.unique(np.maximum(token, -1)).tolist():
            mine = token < 0 if step < 0 else token == step
            rows = (in_prompt if step < 0 else row * heads + head)[mine]
            part = np.empty((len(rows), width), np.uint8)
            file.read_rows(spans.prompt if step < 0 else spans.record(step), rows, part)
            found[mine] = part
        self._tiers.traffic.add("load_kv", read=found.nbytes)
        return found.view(dtype)

    # ---- to the tiers

    def store_pages(self, key: Key, pages: tuple) -> list[concurrent.futures.Future]:
        """Move the splits off the device of a prompt's KV to their tiers.

        The device memory is free when the returned futures are done.
        """
        tiers = self._tiers
        waits = []
        for split, tree in zip(self.away, pages, strict=True):
            tiers.traffic.add("store_kv", times=1, up=tree_bytes(tree))
            if split.tier == "host":
                self._host.pop(key, None)  # its memory serves the new pages
                waits.append(functools.partial(self._keep, key, tiers.up(tree)))
            else:
                waits.append(functools.partial(self._write_prompt, split, key, tiers.up(tree)))
        return self._submit(key, waits)

    def store_rows(
        self, key: Key, rows: tuple, token: int, lengths: np.ndarray
    ) -> list[concurrent.futures.Future]:
        """Move the splits off the device of one token's KV to their tiers."""
        tiers = self._tiers
        waits = []
        for split, tree in zip(self.away, rows, strict=True):
            tiers.traffic.add("store_kv", times=1, up=tree_bytes(tree))
            waits.append(functools.partial(self._write_rows, split, key, tiers.up(tree), token, lengths))
        return self._submit(key, waits)

    def write_row(self, split: Split, key: Key, rows: Any, token: int, lengths: np.ndarray) -> None:
        """Write one token's KV, given as `HostArray`s, to its place; blocks. Raises: DiskError."""
        if split.tier == "host":
            self.place(self._host[key], views(rows), split, lengths + (token - 1))
        else:
            g = self._g
            size = tree_bytes(g.kv_rows(split.rows))
            offset = prompt_bytes(g, split) + (token - 1) * size
            self._write(self._files[key], offset, [[view] for view in views(rows)])
            self._tiers.traffic.add("store_kv", written=size)

    def rest(self) -> None:
        """Wait for the stores, and discard the KV that was read ahead. Raises: DiskError."""
        for key in list(self._stores):
            self._settle(key)
        for future in self._ahead.values():
            jax.tree.map(self._tiers.staging.give, future.result())
        self._ahead.clear()

    def free(self) -> None:
        """Release all KV."""
        for held in (self.home, self._host, self._stores, self._ahead, self._down):
            held.clear()

    # ----

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
        """Wait for the last store."""
        future = self._stores.pop(key, None)
        if future is not None:
            with self._tiers.waits.of("stores"):
                future.result()

    def _staged(self, split: Split, key: Key, token: int, lengths: np.ndarray) -> Any:
        return (self._ahead.pop(key, None) or self._start_reading(split, key, token, lengths)).result()

    def _read(
        self,
        split: Split,
        key: Key,
        token: int,
        lengths: np.ndarray,
        stored: concurrent.futures.Future | None,
    ) -> Any:
        """Read the pages of a split on disk to staging buffers, after the write `stored`."""
        g, tiers, file = self._g, self._tiers, self._files[key]
        if stored is not None:
            stored.result()
        pages = jax.tree.map(tiers.staging.take, g.loaded_pages(split.rows))
        try:
            size = file.read(0, list(itertools.chain(*self._prompt_pieces(pages))))
            record = [
                np.empty((split.rows, *view.shape[1:2], *view.shape[3:]), view.dtype) for view in views(pages)
            ]
            for step in range(token - 1):
                size += file.read(prompt_bytes(g, split) + step * tree_bytes(g.kv_rows(split.rows)), record)
                self.place(pages, record, split, lengths + step)
        except BaseException:
            jax.tree.map(tiers.staging.give, pages)
            raise
        file.drop_cache()
        tiers.traffic.add("load_kv", read=size)
        return pages

    def _keep(self, key: Key, rising: Any) -> None:
        self._host[key] = self._tiers.arrived(rising)

    def _write_rows(self, split: Split, key: Key, rising: Any, token: int, lengths: np.ndarray) -> None:
        self.write_row(split, key, self._tiers.arrived(rising), token, lengths)

    def _write_prompt(self, split: Split, key: Key, rising: Any) -> None:
        file = self._files[key]
        size = self._write(file, 0, self._prompt_pieces(self._tiers.arrived(rising)))
        file.drop_cache()
        self._tiers.traffic.add("store_kv", written=size)

    def _prompt_pieces(self, pages: Any) -> list[list[np.ndarray]]:
        """Return the pages of the prompt tokens of each view, sequence by sequence."""
        g, pieces = self._g, []
        for view in views(pages):
            by_row = view.reshape(-1, g.pages, *view.shape[1:])
            pieces.append([by_row[row, : g.prompt_pages] for row in range(by_row.shape[0])])
        return pieces

    def _write(self, file: DiskFile, offset: int, pieces: list[list[np.ndarray]]) -> int:
        """Write the pieces of all views of keys and values, so that what a decode reads can be checked."""
        if not self._g.policy.sparse_values:
            return file.write(offset, list(itertools.chain(*pieces)))
        keys, values = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
        size = file.write(offset, list(itertools.chain(*keys)))
        for one in values:
            size += file.write_rows(offset + size, one, one[0].shape[-1] * one[0].itemsize)
        return size

    def place(self, pages: Any, rows: list[np.ndarray], split: Split, positions: np.ndarray) -> None:
        """Write one token's keys and values of each sequence to its page.

        `rows`: the `views` of `g.kv_rows`.
        """
        at = positions[split.start : split.stop]
        row, page, place = np.arange(split.rows), at // self._g.page_size, at % self._g.page_size
        for target, new in zip(views(pages), rows, strict=True):
            by_row = bits(target).reshape(-1, self._g.pages, *target.shape[1:])
            by_row[row, page, :, place] = bits(new)


@dataclasses.dataclass(frozen=True)
class ValueSpans:
    """The places of one array or shard of the values in a split's file.

    Attributes:
      prompt: offset of the prompts' rows [R, pages, K', S].
      records: offset of the first token's rows [R, K'].
      record_bytes: distance of the tokens.
    """

    heads: int
    dtype: Any
    row_bytes: int
    prompt: int
    records: int
    record_bytes: int

    def record(self, step: int) -> int:
        """Return the offset of the rows of token `step` after the prompt."""
        return self.records + step * self.record_bytes


def value_spans(g: Geometry, split: Split) -> list[ValueSpans]:
    """Return where the values lie in the file of a split, for each array of values and each device."""
    total, record_bytes = prompt_bytes(g, split), tree_bytes(g.kv_rows(split.rows))
    prompt, records = total // 2, total + record_bytes // 2  # keys take the first half
    spans = []
    for struct in jax.tree.leaves(g.kv_rows(split.rows)[1]):
        rows, heads, width = struct.sharding.shard_shape(struct.shape)
        row_bytes = width * np.dtype(struct.dtype).itemsize
        for _ in range(g.tp):
            spans.append(ValueSpans(heads, np.dtype(struct.dtype), row_bytes, prompt, records, record_bytes))
            prompt += rows * heads * row_bytes * g.prompt_pages * g.page_size
            records += rows * heads * row_bytes
    return spans


def row_checksum_bytes(g: Geometry, split: Split) -> int:
    """Return the bytes in host memory of the checksums of a file's V rows."""
    if not g.policy.sparse_values:
        return 0
    tokens = g.prompt_pages * g.page_size + g.policy.output_tokens - 1
    return sum(
        row_sum_bytes(tokens * split.rows * span.heads * span.row_bytes, span.row_bytes)
        for span in value_spans(g, split)
    )


def prompt_bytes(g: Geometry, split: Split) -> int:
    """Return the bytes of the prompts' pages at the start of a split's file."""
    return sum(array_bytes(s) * g.prompt_pages // g.pages for s in jax.tree.leaves(g.kv_pages(split.rows)))


def file_bytes(g: Geometry, split: Split) -> int:
    """Return the bytes of a split's file: prompt pages, and a record a token except the last."""
    return prompt_bytes(g, split) + (g.policy.output_tokens - 1) * tree_bytes(g.kv_rows(split.rows))

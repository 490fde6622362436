"""Page copies: equal bits after a gather and a scatter, for every dtype, group and sharding; no copy of the
cache on an H200.
"""

import dataclasses
import math

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxflow.config import Layer, ModelConfig, Span
from jaxflow.kv.device_cache import make_cache, page_bytes, page_groups
from jaxflow.kv.tiers.offload import Transfers
from jaxflow.kv.tiers.page import HOST_MEMORY, copy_to
from jaxflow.kv.tiers.page_copies import PageCopies, PagePrograms, sizes_of, split
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.parallel.mesh import TP, make_mesh

PAGES = (40, 24)
BLOCK = 4


def small(kv_heads: int = 2) -> ModelConfig:
    """Return a model of three layers, one of them with a window."""
    layers = (Layer(), Layer(window=8), Layer())
    return ModelConfig("llama", 32, 16, 4, kv_heads, 8, 32, layers, 64)


def filled(cache, seed):
    """Return a cache of random bits without NaNs."""
    rng = np.random.default_rng(seed)

    def fill(array):
        values = rng.integers(-100, 100, array.shape).astype(np.float32)
        return jax.device_put(jnp.asarray(values).astype(array.dtype), array.sharding)

    return jax.tree.map(fill, cache)


def as_numpy(cache):
    return [np.asarray(a).view(np.uint8).reshape(a.shape[0], -1) for a in jax.tree.leaves(cache)]


@pytest.mark.parametrize(
    ("dtype", "tp"), [("float32", 1), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int8", 2)]
)
def test_scatter_writes_the_gathered_pages_only(dtype, tp):
    config, mesh = small(), make_mesh(tp)
    groups = page_groups(config, dtype, tp)
    copies = PageCopies(groups, PAGES, BLOCK, mesh, sizes=(1, 4))
    assert copies.page_bytes == page_bytes(groups, BLOCK, tp)
    source = filled(copies.warm_up(make_cache(groups, PAGES, BLOCK, mesh)), 1)
    target = filled(source, 2)
    before_source, before_target = as_numpy(source), as_numpy(target)
    rng = np.random.default_rng(3)
    moved = []
    for group, count in ((0, 9), (1, 3)):
        take, put = (rng.permutation(PAGES[group])[:count].tolist() for _ in range(2))
        pages = copies.gather(source, group, take)
        assert all(page.shape == (tp, copies.page_bytes[group] // 4) for page in pages)
        target = copies.scatter(target, group, put, pages)
        moved.append((take, put))
    expected = [a.copy() for a in before_target]
    per_layer = len(expected) // len(config.layers)
    for i, (now, then) in enumerate(zip(expected, before_source, strict=True)):
        take, put = moved[config.windows.index(config.layers[i // per_layer].window)]
        now[put] = then[take]
    for found, wanted in zip(as_numpy(target), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(as_numpy(source), before_source, strict=True):
        np.testing.assert_array_equal(found, wanted)
    # The bytes on the wire: of each shard its own heads, layer by layer, keys before values.
    [page] = copies.gather(source, 0, [5])
    layers = [source[i] for i, layer in enumerate(config.layers) if layer.window is None]
    for shard in range(tp):
        mine = [np.split(np.asarray(a), tp, axis=1)[shard][5] for a in jax.tree.leaves(layers)]
        assert np.asarray(page)[shard].tobytes() == b"".join(a.tobytes() for a in mine)


@pytest.mark.parametrize("count", range(1, 40))
def test_calls_take_all_pages_and_are_mostly_full(count):
    calls = split(count, (1, 4, 16))
    assert count <= sum(calls) < 2 * count + 1
    assert sum(calls) - count < calls[-1]


def test_large_pages_go_in_small_calls():
    assert sizes_of(8 << 20) == (1, 4, 16)
    assert sizes_of(32 << 20) == (1, 4)
    assert sizes_of(1 << 30) == (1,)


def test_groups_of_heads_are_copied_apart():
    """Pages of one group of heads come back without a change to the other groups of the same layers."""
    spans, windows = (Span(0, 4, 0), Span(0, 8, 0), Span(0, 4, 0)), (Span(0, 8, 0), Span(0, 4, 0))
    layers = (Layer(spans=spans, head_groups=(1, 0, 1)), Layer(spans=spans[:1] * 3, head_groups=(1, 1, 1)))
    config = dataclasses.replace(small(3), layers=layers, span_classes=windows)
    mesh, groups = make_mesh(1), page_groups(config, "int8", 1)
    assert [group.kv_heads for group in groups] == [(1,), (2, 3)]
    copies = PageCopies(groups, PAGES, BLOCK, mesh, (1, 2))
    source = filled(copies.warm_up(make_cache(groups, PAGES, BLOCK, mesh)), 1)
    target = filled(source, 2)
    before = jax.tree.map(np.asarray, target)
    target = copies.scatter(target, 1, [3, 0], copies.gather(source, 1, [2, 4]))
    for layer, parts in enumerate([(0, 1), (1,)]):
        for place, group in enumerate(parts):
            for found, old, new in zip(
                *(
                    jax.tree.leaves([array[place] for array in cache[layer]])
                    for cache in (target, before, source)
                ),
                strict=True,
            ):
                wanted = old.copy()
                if group == 1:
                    wanted[[3, 0]] = np.asarray(new)[[2, 4]]
                np.testing.assert_array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("float8_e4m3fn", 1), ("int8", 4)])
def test_on_an_h200_the_cache_is_written_in_place(dtype, tp):
    config = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    config = dataclasses.replace(config, layers=config.layers[:2])
    mesh = h200.h200_mesh((tp,))
    programs = PagePrograms(page_groups(config, dtype, tp)[0], 8192, 64, mesh)
    n, page = 4, programs.words * 4
    cache = jax.tree.leaves(programs.shapes())
    kv_bytes = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in cache)
    gather = h200.compile_for_h200(programs.gather(n), programs.shapes(), programs.ids_shape(n))
    scatter = h200.compile_for_h200(
        programs.scatter(n), programs.shapes(), programs.ids_shape(n), [programs.page_shape()] * n
    )
    for made in (gather, scatter):
        assert made.machine_code
        assert made.memory.temp_size_in_bytes < 2 * n * page
        for array in cache:
            assert made.copies(array.sharding.shard_shape(array.shape)) == 0
    assert scatter.memory.alias_size_in_bytes >= kv_bytes
    assert mesh.shape[TP] == tp
    assert "gather_pages" in gather.hlo
    assert "scatter_pages" in scatter.hlo


def test_copies_start_in_small_calls_in_alternating_directions(monkeypatch):
    transfers = Transfers()
    sharding = NamedSharding(make_mesh(1), PartitionSpec(None))
    calls = []
    for channel, name in ((transfers.to_host, "down"), (transfers.to_device, "up")):
        monkeypatch.setattr(
            channel,
            "_start",
            lambda sources, name=name, begin=channel._start: (
                calls.append((name, len(sources))) or begin(sources)
            ),
        )
    pages = [jax.device_put(np.full((1, 4), i, np.uint32), sharding) for i in range(9)]
    here = copy_to(pages, HOST_MEMORY)
    transfers.copy(
        [(i, page) for i, page in enumerate(pages)], [(i, page) for i, page in enumerate(here[:5])]
    )
    assert calls == [("down", 4), ("up", 4), ("down", 4), ("up", 1), ("down", 1)]
    transfers.close()
    for channel, count in ((transfers.to_host, 9), (transfers.to_device, 5)):
        found = channel.done()
        assert [(tag, int(page[0, 0]), page.sharding) for tag, page in found] == [
            (i, i, sharding.with_memory_kind(channel.memory_kind)) for i in range(count)
        ]
        assert channel.bytes == count * 16

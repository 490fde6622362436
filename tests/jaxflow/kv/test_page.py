"""Pages outside the cache: the same bytes on the disk for any cut into stages, and bounded staging space."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.kv.tiers.page import (
    HOST_MEMORY,
    blank_page,
    copy_to,
    from_bytes,
    largest_shard,
    page_size,
    to_bytes,
)
from jaxflow.kv.tiers.start import staging_bytes, staging_limit
from jaxflow.parallel.mesh import TP, stage_meshes

WORDS = (8, 20, 4)  # of a shard in each stage


def shape(words: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape of a part of `words` words a shard."""
    return jax.ShapeDtypeStruct(
        (mesh.size, words), np.uint32, sharding=NamedSharding(mesh, PartitionSpec(TP))
    )


def staged(tp: int, words=WORDS[:2]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(shape(n, mesh) for n, mesh in zip(words, stage_meshes(tp, len(words)), strict=True))


@pytest.mark.parametrize("tp", [1, 2])
def test_stages_do_not_change_the_bytes_of_a_page(tp):
    """Of each shard the words of all layers lie together, whichever stage has them."""
    parts = staged(tp)
    whole = shape(sum(WORDS[:2]), stage_meshes(tp, 1)[0])
    payload = np.random.default_rng(0).integers(0, 256, page_size(whole), dtype=np.uint8)
    assert page_size(parts) == page_size(whole) == len(payload)
    one, several = from_bytes(payload, whole), from_bytes(payload, parts)
    for page in (one, several):
        assert b"".join(words.tobytes() for words in to_bytes(page)) == payload.tobytes()
    np.testing.assert_array_equal(np.concatenate(several, axis=1), one)
    for part, expected in zip(several, parts, strict=True):
        assert part.sharding == expected.sharding.with_memory_kind(HOST_MEMORY)


def test_each_part_is_copied_within_its_stage():
    parts = staged(2)
    pages = [blank_page(parts), blank_page(parts)]
    down = copy_to(pages, HOST_MEMORY)
    up = copy_to(down, None)
    for some, kind in ((down, HOST_MEMORY), (up, None)):
        for page in some:
            assert [part.sharding for part in page] == [
                part.sharding.with_memory_kind(kind or part.sharding.memory_kind) for part in parts
            ]


@given(st.lists(st.lists(st.integers(1, 1 << 26), min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_device_gets_more_than_its_staging_space(groups):
    """Of groups of pages on any stages, the copies under way fit the space of the fullest device."""
    mesh = stage_meshes(1, 1)[0]
    pages = [tuple(shape(words, mesh) for words in group) for group in groups]
    each, limit = staging_bytes(tuple(map(largest_shard, pages))), staging_limit(pages)
    for page in pages:
        assert limit >= page_size(page), "a page never fits"
        assert limit * largest_shard(page) <= each * page_size(page)
    if len({len(group) for group in groups}) == len({words for group in groups for words in group}) == 1:
        assert limit == each * len(groups[0]), "equal stages have the whole space"

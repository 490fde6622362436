"""The ahead-of-time compiler for an H200 works here, and its facts about small programs are right."""

import jax
import jax.numpy as jnp
import pytest
from h200 import H100, TARGET, abstract, compile_for_h200, h100_target, h200_mesh, read_thunks
from jax.sharding import PartitionSpec

from pallas_kernels.cards import card_of

CACHE = (16, 8, 64, 128)


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def append(cache, pages, new):
    """Replaces whole pages."""
    return cache.at[pages].set(new, mode="drop", wrap_negative_indices=False)


@pytest.fixture(scope="module")
def append_args():
    return abstract(h200_mesh(), (shape(*CACHE), shape(4, dtype=jnp.int32), shape(4, *CACHE[1:])))


def test_it_compiles_for_gpus_that_are_not_there():
    mesh = h200_mesh((4,))
    assert all(device.device_kind.startswith("NVIDIA H200") for device in mesh.devices.flat)
    assert {device.platform for device in jax.devices()} == {"cpu"}

    specs, replicated = (PartitionSpec(None, "tp"), PartitionSpec("tp")), PartitionSpec()
    fn = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "tp"), mesh=mesh, in_specs=specs, out_specs=replicated
    )
    args = abstract(mesh, (shape(256, 4096), shape(4096, 4096)), specs)
    compiled = compile_for_h200(fn, *args)
    assert compiled.machine_code
    assert "all-reduce" in compiled.hlo
    assert any(
        "gemm" in thunk.name or "Gemm" in thunk.kind or "cublas" in thunk.kind.lower()
        for thunk in compiled.thunks
    ), compiled.thunks
    assert compiled.memory.argument_size_in_bytes == 2 * (256 * 1024 + 1024 * 4096)  # heads of one shard


def test_an_h100_has_the_memory_of_its_card():
    h200_text = TARGET.read_text("utf-8")
    lines = zip(h200_text.splitlines(), h100_target(h200_text).splitlines(), strict=True)
    changed = {
        line.split(":")[0].strip(): line.split(":", 1)[1].strip() for h200, line in lines if h200 != line
    }
    assert changed.keys() == {
        "memory_bandwidth",
        "device_memory_size",
        "model_str",
        "name",
        "device_description_str",
    }
    (device,) = h200_mesh(device=H100).devices.flat
    card = card_of(device.device_kind)
    assert (card.device, device.core_count) == ("H100", card.hardware["sms"])
    assert int(changed["device_memory_size"]) == card.hardware["memory_bytes"]


def test_a_donated_cache_is_updated_in_place(append_args):
    compiled = compile_for_h200(append, *append_args, donate_argnums=(0,))
    assert compiled.copies(CACHE) == 0
    assert compiled.memory.alias_size_in_bytes == compiled.memory.output_size_in_bytes > 0


def test_a_copied_cache_is_seen(append_args):
    compiled = compile_for_h200(append, *append_args)
    assert compiled.copies(CACHE) == 1
    assert compiled.memory.alias_size_in_bytes == 0


def test_thunks_know_their_stream():
    dump = """
000: kKernel fusion.1 (stream)
001: kAsyncStart [a] region, computation_stream[1], async_id=7
    000: kKernel inner_kernel
    001: kCopy copy.2 communication_stream[0]
002: kGemm gemm.3
003: kAsyncDone done async_id=7
"""
    thunks = read_thunks(dump)
    assert [thunk.stream for thunk in thunks] == [
        "",
        "computation_stream[1]",
        "computation_stream[1]",
        "communication_stream[0]",
        "",
        "",
    ]
    assert [thunk.depth for thunk in thunks] == [0, 0, 1, 1, 0, 0]
    assert thunks[1].async_id == thunks[-1].async_id == 7
    assert [thunk.kind for thunk in thunks][-2:] == ["kGemm", "kAsyncDone"]

"""Pinned pools that take their memory at the start, and the waits that show a pool which grows later."""

import dataclasses
import threading
import time

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloaded import HOST, goldens, requests, run, runtime

from jaxflow.flexgen import pinned_memory, start
from jaxflow.flexgen.pinned_memory import PinnedPool, grow_pools
from jaxflow.flexgen.pool_limits import grown_bytes, usable_bytes
from jaxflow.flexgen.waits import Wait, Waits, added_waits
from jaxflow.parallel.mesh import make_mesh

MODEL = "stories260K"


@given(st.integers(1, 200), st.integers(1, 8))
def test_pools_of_a_policy_that_fits_do_not_grow_past_their_limit(gib, pools):
    limit = pools * gib * 2**30
    assert grown_bytes(usable_bytes("host", limit, pools)) <= limit


@pytest.mark.parametrize("devices", [1, 2])
def test_a_pool_grows_by_pieces_that_are_held_together(monkeypatch, devices):
    monkeypatch.setattr(pinned_memory, "_PIECE_ROWS", 1)
    held, put, before = [], jax.device_put, len(jax.live_arrays())
    monkeypatch.setattr(jax, "device_put", lambda *a: held.append(len(jax.live_arrays())) or put(*a))
    size = grow_pools(make_mesh(devices), 12 * devices * 1024 + 7, threading.Event())
    assert size == 10 * devices * 1024 and len(held) == 10 and held == list(range(held[0], held[0] + 10))
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("fault", ["RESOURCE_EXHAUSTED: no memory", "INTERNAL: broken"])
def test_a_pool_at_its_limit_stays_and_other_faults_are_raised(monkeypatch, fault):
    monkeypatch.setattr(pinned_memory, "_PIECE_ROWS", 1)

    def full(*_):
        raise jax.errors.JaxRuntimeError(fault)

    monkeypatch.setattr(jax, "device_put", full)
    if fault.startswith("INTERNAL"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
            grow_pools(make_mesh(1), 1 << 20, threading.Event())
    else:
        assert grow_pools(make_mesh(1), 1 << 20, threading.Event()) == 0


def test_the_pools_of_all_stages_grow_at_the_same_time_and_show_their_waits(tmp_path, monkeypatch):
    prompts, expected = goldens(MODEL, copies=2)
    both, asked, own = threading.Barrier(2, timeout=60), [], time.perf_counter

    def grow(mesh, size, _):
        both.wait()  # fails if one stage waits for the other
        asked.append((mesh.devices.flat[0].id, size))
        return size

    known = {"device": 1 << 40, "host": 1 << 40, "disk": None}
    monkeypatch.setattr("jaxflow.flexgen.start._free_by_tier", lambda *_: known)
    monkeypatch.setattr("jaxflow.flexgen.start.grow_pools", grow)
    monkeypatch.setattr("jaxflow.flexgen.start._POOL", PinnedPool())
    with runtime(MODEL, tmp_path, pipeline_parallel_size=2, weights=HOST, kv=HOST, activations=HOST) as made:
        assert dict(sorted(asked)) == {i: grown_bytes(made.account.pinned()[i]) for i in (0, 1)}
        started = own()
        assert run(made, requests(prompts)) == expected
        elapsed = own() - started
        assert len(made.warm_up_waits) == 2
        found = added_waits(block.waits for block in made.stats)
    assert len(found) == 2
    for stage in found:
        assert set(stage) == {"prefill", "decode"}
        assert set(stage["decode"]) == {"computation", "stage", "stores", "copies", "programs"}
        waits = [wait for by_cause in stage.values() for wait in by_cause.values()]
        assert 0 < sum(wait.seconds for wait in waits) <= elapsed
        assert all(wait.longest_s <= wait.seconds <= wait.times * wait.longest_s + 1e-6 for wait in waits)


def test_a_fault_of_one_stages_pool_ends_the_start(tmp_path, monkeypatch):
    known = {"device": 1 << 40, "host": 1 << 40, "disk": None}

    def grow(mesh, *_):
        if mesh.devices.flat[0].id == 1:
            raise MemoryError("pinned")
        return 0

    monkeypatch.setattr("jaxflow.flexgen.start._free_by_tier", lambda *_: known)
    monkeypatch.setattr("jaxflow.flexgen.start.grow_pools", grow)
    monkeypatch.setattr("jaxflow.flexgen.start._POOL", PinnedPool())
    before = threading.active_count()
    with (
        pytest.raises(MemoryError, match="pinned"),
        runtime(MODEL, tmp_path, pipeline_parallel_size=2, kv=HOST),
    ):
        pass
    assert threading.active_count() <= before


@pytest.mark.parametrize("fault", ["compile", "account"])
def test_pools_grow_while_programs_compile_and_stop_with_a_refusal(tmp_path, monkeypatch, fault):
    """The memory that they have by then counts as free for the next run of the process."""
    known = {"device": 1 << 40, "host": 1 << 40, "disk": None}
    grows, ended, pool, own = threading.Event(), [], PinnedPool(), start.compile_programs

    def grow(mesh, size, stopped):
        grows.set()
        ended.append(stopped.wait(timeout=60))
        return 1000

    def compile_programs(*arguments):
        assert grows.wait(timeout=60)
        if fault == "compile":
            raise ValueError("a program")
        return dataclasses.replace(own(*arguments), working_bytes=1 << 41)

    for name, value in (("grow_pools", grow), ("compile_programs", compile_programs), ("_POOL", pool)):
        monkeypatch.setattr(start, name, value)
    monkeypatch.setattr(start, "_free_by_tier", lambda *_: known)
    with pytest.raises(ValueError), runtime(MODEL, tmp_path, kv=HOST):
        pass
    assert ended == [True] and pool.free_bytes == 1000


@given(st.lists(st.integers(0, 10), min_size=1, max_size=5))
def test_waits_of_blocks_are_added(seconds):
    (total,) = added_waits([{"prefill": {"copies": Wait(1, one, one)}}] for one in seconds)
    assert total == {"prefill": {"copies": Wait(len(seconds), sum(seconds), max(seconds))}}


def test_waits_are_taken_once_and_kept_after_an_error():
    waits = Waits()
    with pytest.raises(ValueError), waits.of("stores"):
        raise ValueError
    waits.phase = "decode"
    with waits.of("stage"):
        pass
    found = waits.take()
    assert {phase: list(by_cause) for phase, by_cause in found.items()} == {
        "prefill": ["stores"],
        "decode": ["stage"],
    }
    assert waits.take() == {}

"""A follower's executor has the state of process 0's, bit for bit, whatever the loop does."""

import dataclasses
import types

import jax
import numpy as np
import toy
from hurry import compile_on_use
from test_loop import drawn_requests

from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.recorded_calls import CallRecorder, every_layout, replay
from jaxflow.engine.step_plans import choose_plans
from jaxflow.kv.tiers.page import page_size
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.start import start_host_tier
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

MODEL = "tiny-llama"
PAGES, HOST_PAGES = 24, 24  # few, so that pages leave the device and come back


def fresh() -> Executor:
    """Return an executor with the settings of `toy.executor`, which no other test has used."""
    config, _ = toy.executor(MODEL, budget=16, pages=PAGES)
    checkpoint = open_checkpoint(config.model)
    made = make_executor(config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False)
    compile_on_use(made)
    mesh, sizes = made.programs.mesh, (1, 4)
    made.add_page_copies(PageCopies(made.page_groups, made.num_pages, config.block_size, mesh, sizes))
    assert made.copies is not None
    made.kv = made.copies.warm_up(made.kv)
    return made


def state(executor: Executor) -> list[np.ndarray]:
    parts = (executor.kv, executor.page_table, executor.last_tokens, executor.params, executor.counts)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(parts)]


def test_the_same_state():
    config, _ = toy.executor(MODEL, budget=16, pages=PAGES)
    ours, theirs = fresh(), fresh()
    outside: dict = {}
    layouts = every_layout(theirs)
    channel = types.SimpleNamespace(send=lambda call: replay(theirs, layouts, outside, call))
    recorder = ours.recorder = CallRecorder(ours, channel)
    shapes = ours.page_shapes()
    size = max(map(page_size, shapes))
    config = dataclasses.replace(config, kv_offloading_size=HOST_PAGES * size / 2**30)
    tier = start_host_tier(config, shapes, lambda: 1.0, costs=toy.ALWAYS_LOAD, copy=recorder.copy)
    loop = make_loop(config, open_checkpoint(config.model).model_config, ours, tier)
    for _ in range(2):
        toy.run(loop, drawn_requests(9, seed=2), preempt_at=range(2, 60, 7))
    counters = tier.store.counters
    assert counters.stored > 0 and counters.loaded > 0
    assert loop.scheduler.num_preemptions > 0
    for left, right in zip(state(ours), state(theirs), strict=True):
        np.testing.assert_array_equal(left, right)
    loop.close()

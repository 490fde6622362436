"""Experts with copies give the tokens of experts without copies, also while they move between devices."""

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import h200
import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
import toy
from hurry import compile_on_use
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from test_goldens import ONE_SIZE, check, requests

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.expert_balancer import DamagedExpert, MovedLayer
from jaxflow.engine.expert_slots import expert_arrays, source_slots
from jaxflow.engine.loop import Loop
from jaxflow.engine.loop_start import make_loop, make_ranked_loop
from jaxflow.engine.ranked_loop import RankedLoop
from jaxflow.engine.recorded_calls import CallRecorder, every_layout, replay
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.llm import LLM
from jaxflow.model import expert_copies
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.expert_copies import choose_copies, copy_map
from jaxflow.model.expert_placement import place_experts
from jaxflow.parallel import expert_moves
from jaxflow.parallel.expert_moves import digests, move_slots
from jaxflow.parallel.mesh import TP, expert_axis_of, make_mesh, make_rank_mesh, place, sharded
from jaxflow.request import Event, FinishReason, SamplingParams


@pytest.fixture(autouse=True)
def copies_in_small_steps(monkeypatch):
    """Let the few tokens of a test's steps go to copies."""
    monkeypatch.setattr(expert_copies, "COPY_ROWS", 0)


def engine(model: str, devices: int, more: int | None, *, ranks: int = 1) -> Loop | RankedLoop:
    """Return an engine with experts over the devices of each rank.

    more: the copies; None: experts that stay.
    """
    settings = EngineConfig(
        model=str(paths.MODELS / model),
        block_size=16,
        tensor_parallel_size=devices,
        data_parallel_size=ranks,
        enable_expert_parallel=True,
        enable_eplb=more is not None,
        num_redundant_experts=more or 0,
        eplb_step_interval=2,
        max_num_batched_tokens=ONE_SIZE,
        max_num_seqs=8,
        num_kv_pages=96,
        step_sizes=str(ONE_SIZE),
    )
    checkpoint = open_checkpoint(settings.model)
    config = resolve(settings, checkpoint.model_config)
    made = make_executor(config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False)
    compile_on_use(made)
    make = make_loop if ranks == 1 else make_ranked_loop
    return make(config, checkpoint.model_config, made)


@pytest.mark.parametrize(("devices", "more"), [(1, 3), (2, 0), (4, 4)])
def test_goldens_while_experts_move(devices, more, goldens):
    golden, running = goldens("tiny-qwen3_moe"), engine("tiny-qwen3_moe", devices, more)
    check(golden, toy.run(running, requests(golden)))
    assert running.balancer is not None and running.balancer.placements > 1
    assert devices == 1 or running.balancer.moved_slots
    running.close()


def test_goldens_of_small_steps(goldens, monkeypatch):
    monkeypatch.setattr(expert_copies, "COPY_ROWS", 128)
    golden, running = goldens("tiny-qwen3_moe"), engine("tiny-qwen3_moe", 1, 8, ranks=4)
    check(golden, toy.run(running, requests(golden)))
    assert running.balancer is not None and running.balancer.moved_slots
    running.close()


@pytest.mark.parametrize(("ranks", "devices", "more"), [(2, 1, 0), (4, 1, 4), (2, 2, 0), (2, 2, 4)])
def test_goldens_of_ranks_while_experts_move(ranks, devices, more, goldens):
    """The experts are placed by the tokens of all ranks."""
    golden, running = goldens("tiny-qwen3_moe"), engine("tiny-qwen3_moe", devices, more, ranks=ranks)
    check(golden, toy.run(running, requests(golden)))
    assert isinstance(running, RankedLoop) and running.balancer is not None
    assert running.balancer.placements > 1 and running.balancer.moved_slots
    assert running.executor.placed is not None and running.executor.placed.shape[1] == 8 + more
    running.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_process_moves_the_same_experts(ranks, goldens):
    ours, theirs = (engine("tiny-qwen3_moe", 2 // ranks, 2, ranks=ranks) for _ in range(2))
    executors, moved = [one.executor for one in (ours, theirs)], {}
    layouts = every_layout(theirs.executor)
    follow = functools.partial(replay, theirs.executor, layouts, {}, moved=moved)
    ours.executor.recorder = CallRecorder(ours.executor, types.SimpleNamespace(send=follow))
    toy.run(ours, requests(goldens("tiny-qwen3_moe")))
    assert ours.balancer is not None and ours.balancer.moved_slots
    np.testing.assert_array_equal(*[one.placed for one in executors])
    states = [(one.weights, one.expert_counts, one.last_tokens) for one in executors]
    for left, right in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(left, right)
    ours.close()


def test_a_move_of_experts_that_stay_is_refused():
    running, sent = engine("tiny-qwen3_moe", 1, 0), []
    recorder = CallRecorder(running.executor, types.SimpleNamespace(send=sent.append))
    recorder.move_experts(0, np.arange(8))
    with pytest.raises(ValueError, match="stay"):
        replay(running.executor, every_layout(running.executor), {}, sent[0])


@pytest.mark.parametrize(("devices", "ranks"), [(4, 1), (1, 4), (2, 2)])
def test_all_tokens_to_one_device(devices, ranks, goldens):
    """The router prefers the same experts for all tokens, so that most devices get no token at first."""
    golden = goldens("tiny-gpt_oss")
    results = []
    for more in (None, 4):
        running = engine("tiny-gpt_oss", devices, more, ranks=ranks)
        layers = running.executor.weights["layers"]
        for layer in layers:
            bias = np.zeros(layer["router_bias"].shape, np.float32)
            bias[[0, 1, 2]] = 1e4, 2e4, 3e4
            layer["router_bias"] = place(
                bias.astype(layer["router_bias"].dtype), layer["router_bias"].sharding
            )
        results.append({name: result.tokens for name, result in toy.run(running, requests(golden)).items()})
        if running.balancer is not None:
            assert running.balancer.moved_slots
            busy = np.isin(running.executor.placed, [0, 1, 2]).reshape(len(layers), 4, -1)
            assert busy.any(axis=2).sum(axis=1).min() > 1  # copies went to devices that had no tokens
        running.close()
    assert results[0] == results[1]


def test_a_server_compiles_nothing_while_experts_move():
    """The tokens of a batch are those of each prompt alone, before and after the experts moved."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, 20).tolist() for _ in range(6)]
    sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
    with LLM(
        str(paths.MODELS / "tiny-mixtral"),
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        num_redundant_experts=2,
        eplb_step_interval=3,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        dtype="float32",
        progress=False,
    ) as llm:
        together = [out.outputs[0].token_ids for out in llm.generate(prompts, sampling, use_tqdm=False)]
        moved = llm.driver.call(lambda loop: loop.balancer and loop.balancer.moved_slots).result()
        alone = [llm.generate([one], sampling, use_tqdm=False)[0].outputs[0].token_ids for one in prompts]
        assert moved and together == alone
        assert llm.driver.stats().compilations_after_warmup == 0


def small_slots(mesh: Mesh) -> tuple[dict[str, np.ndarray], Any, dict[str, PartitionSpec]]:
    """Return 8 slots of three arrays on the host and on the devices of a mesh, and their partition."""
    rng = np.random.default_rng(0)
    old = {
        "bfloat16": rng.normal(size=(8, 3, 5)).astype(jnp.bfloat16),
        "float32": rng.normal(size=(8, 7)).astype(np.float32),
        "e4m3": rng.normal(size=(8, 2)).astype(jnp.float8_e4m3fn),
    }
    specs = dict.fromkeys(old, PartitionSpec(expert_axis_of(mesh)))
    return old, {name: place(array, sharded(mesh, specs[name])) for name, array in old.items()}, specs


@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (1, 2), (1, 4), (4, 1), (2, 2)])
def test_new_slots_hold_copies_of_the_old_slots(ranks, devices):
    mesh = make_mesh(devices) if ranks == 1 else make_rank_mesh(ranks, devices)
    old, arrays, specs = small_slots(mesh)
    source = np.random.default_rng(1).integers(0, 8, 12).astype(np.int32)
    new, before, after = move_slots(mesh, specs)(arrays, place(source, sharded(mesh, PartitionSpec())))
    for name, array in old.items():
        np.testing.assert_array_equal(np.asarray(new[name]).view(np.uint8), array[source].view(np.uint8))
    MovedLayer(0, source, source, new, before, after).check()
    np.testing.assert_array_equal(np.asarray(before), np.asarray(digests(old)))
    wrong = np.asarray(after).copy()
    wrong[5] ^= 1
    with pytest.raises(DamagedExpert, match=r"slots \[5\]"):
        MovedLayer(3, source, source, new, before, wrong).check()


def flipped(copied: Any) -> Any:
    """Flip the lowest bit of one word of a slot."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

    def flip(array: jax.Array) -> jax.Array:
        words = lax.bitcast_convert_type(array, bits[array.dtype.itemsize])
        last = (1,) + (-1,) * (array.ndim - 1)
        return lax.bitcast_convert_type(words.at[last].set(words[last] ^ 1), array.dtype)

    first, *others = copied
    return {first: flip(copied[first])} | {name: copied[name] for name in others}


FAULTS: dict[str, Callable[[Any], Any]] = {
    "a flipped bit": flipped,
    "a copy that did not arrive": lambda copied: jax.tree.map(lambda a: a.at[1].set(0), copied),
    "another slot's copy": lambda copied: jax.tree.map(lambda a: a.at[1].set(a[0]), copied),
    "one array of another slot": lambda copied: copied | {"float32": copied["float32"].at[1].set(1.0)},
}


def damage(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any], device: int) -> None:
    """Let the second slot of a device get a wrong copy in each move between devices."""
    moved = expert_moves._moved

    def wrong(old: Any, source: jax.Array, axis: Any) -> Any:
        copied, here = moved(old, source, axis), lax.axis_index(axis) == device
        return jax.tree.map(lambda a, b: jnp.where(here, a, b), fault(copied), copied)

    monkeypatch.setattr(expert_moves, "_moved", wrong)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_digests_notice_a_damaged_copy_on_any_device(fault, monkeypatch):
    mesh = make_rank_mesh(2, 2)
    _, arrays, specs = small_slots(mesh)
    source = np.arange(8, dtype=np.int32)[::-1].copy()
    for device in range(4):
        with monkeypatch.context() as patch:
            damage(patch, FAULTS[fault], device)
            found = move_slots(mesh, specs)(arrays, place(source, sharded(mesh, PartitionSpec())))
        with pytest.raises(DamagedExpert, match=rf"slots \[{2 * device + 1}\]"):
            MovedLayer(0, source, source, *found).check()


def test_a_damaged_copy_ends_the_engine_before_a_step_reads_it(goldens, monkeypatch):
    """Every request ends with the fault, and its tokens until then are those of the golden."""
    golden, running = goldens("tiny-qwen3_moe"), engine("tiny-qwen3_moe", 2, 4, ranks=2)
    damage(monkeypatch, flipped, device=3)
    programs, made = running.executor.programs, running.executor.compiler.small
    specs = expert_arrays(programs.weight_specs["layers"][0])
    made["move_experts"] = move_slots(programs.mesh, specs)  # engines share the compiled programs of tests
    given_requests = requests(golden)
    results = {one.request_id: toy.Result() for one in given_requests}
    for one in given_requests:
        running.add(one, 0.0)
    events: list[Event] = []
    with pytest.raises(DamagedExpert, match=r"slots \[10\]") as caught:
        while running.has_work:
            events += running.step()
    for event in [*events, *running.end_all(caught.value)]:
        results[event.request_id].take(event)
    for i, prompt in enumerate(golden["prompts"]):
        result = results[f"golden-{i}"]
        assert result.finished[0].reason == FinishReason.ABORT
        tokens = result.token_ids.get(0, [])
        assert tokens == prompt["greedy_ids"][: len(tokens)]
    assert any(result.token_ids for result in results.values())
    assert running.balancer is not None and running.balancer.moved_slots == 0
    running.close()


def test_a_copy_that_is_damaged_at_the_start_ends_the_start(monkeypatch):
    damage(monkeypatch, flipped, device=2)
    with pytest.raises(DamagedExpert, match=r"slots \[7\]"):
        engine("tiny-qwen3_moe", 2, 4, ranks=2)


def test_a_move_on_gpus_needs_little_more_memory_than_its_result():
    """The experts of a layer of Qwen3-30B-A3B on four devices.

    A device sends a slot to each device at a time.
    """
    mesh, spec = h200.h200_mesh((4,)), PartitionSpec(TP)
    shapes = {
        "expert_up_gate": jax.ShapeDtypeStruct((160, 1536, 2048), jnp.bfloat16),
        "expert_down": jax.ShapeDtypeStruct((160, 2048, 768), jnp.bfloat16),
    }
    old, source = (
        h200.abstract(mesh, shapes, dict.fromkeys(shapes, spec)),
        jax.ShapeDtypeStruct((160,), jnp.int32),
    )
    step = h200.compile_for_h200(
        move_slots(mesh, dict.fromkeys(shapes, spec)), old, h200.abstract(mesh, source)
    )
    assert " all-to-all" in step.hlo
    slot_bytes = 2 * 3 * 768 * 2048
    assert step.memory.output_size_in_bytes >= 40 * slot_bytes
    assert step.memory.temp_size_in_bytes < 20 * slot_bytes


@given(st.integers(0, 2), st.integers(0, 9), st.integers(0, 31))
def test_a_digest_notices_any_flipped_bit(slot, word, bit):
    arrays = np.random.default_rng(0).integers(0, 2**32, (3, 10), dtype=np.uint32)
    damaged = arrays.copy()
    damaged[slot, word] ^= np.uint32(1 << bit)
    differs = np.asarray(digests({"a": jnp.asarray(arrays)})) != np.asarray(
        digests({"a": jnp.asarray(damaged)})
    )
    assert differs.tolist() == [each == slot for each in range(3)]


def test_copies_share_the_tokens_and_a_token_keeps_its_copy():
    loads = np.array([[9.0, 1, 1, 1]])
    (placed,) = place_experts(loads, 3, 3)
    w: dict[str, Any] = jax.tree.map(jnp.asarray, copy_map(placed, 4, 3))
    rng = np.random.default_rng(0)
    tokens, positions = rng.integers(0, 999, 3000), rng.integers(0, 50, 3000)
    experts = np.stack([np.zeros(3000, int), rng.integers(1, 4, 3000)], axis=1)
    slots = np.asarray(choose_copies(w, experts, jnp.asarray(tokens), jnp.asarray(positions), 750.0))
    np.testing.assert_array_equal(placed[slots], experts)
    counts = collections.Counter(slots[:, 0].tolist())
    assert len(counts) == (placed == 0).sum() == 3 and min(counts.values()) > 900
    part = choose_copies(w, experts[7:9], jnp.asarray(tokens[7:9]), jnp.asarray(positions[7:9]), 750.0)
    np.testing.assert_array_equal(np.asarray(part), slots[7:9])


@given(st.data(), st.integers(1, 8), st.integers(1, 6))
def test_a_small_step_reads_each_expert_once_and_devices_read_evenly(data, devices, slots):
    """Each expert is read from one slot. Devices read even numbers, as far as single copies allow."""
    experts = data.draw(st.integers(1, devices * slots))
    loads = data.draw(drawn.arrays(float, (1, experts), elements=st.floats(0, 100)))
    (placed,) = place_experts(loads, devices, slots)
    w = jax.tree.map(jnp.asarray, copy_map(placed, experts, devices))
    chosen = np.arange(experts)[:, None]
    found = np.asarray(choose_copies(w, chosen, jnp.arange(experts), jnp.arange(experts), -1.0))[:, 0]
    np.testing.assert_array_equal(placed[found], np.arange(experts))
    reads = np.bincount(found // slots, minlength=devices)
    singles = [int((np.bincount(placed)[part] == 1).sum()) for part in placed.reshape(devices, slots)]
    assert reads.max() <= max(-(-experts // devices) + 1, *singles)


def test_an_expert_that_stays_is_copied_from_its_own_slot():
    before, after = np.array([0, 1, 2, 0]), np.array([1, 1, 0, 0])
    assert source_slots(before, after).tolist() == [1, 1, 0, 3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_expert_parallel": False}, "enable_eplb=True is not supported: False without"),
        ({"pipeline_parallel_size": 2}, "enable_eplb=True is not supported: False with several"),
        ({"enable_eplb": False}, "num_redundant_experts=2 is not supported: 0 without enable_eplb"),
        ({"num_redundant_experts": -2}, "num_redundant_experts=-2"),
        ({"num_redundant_experts": 3}, "num_redundant_experts=3 is not supported: a number that makes the 8"),
        (
            {"num_redundant_experts": 3, "tensor_parallel_size": 1, "data_parallel_size": 2},
            "num_redundant_experts=3 is not supported: a number that makes the 8",
        ),
        ({"eplb_step_interval": 0}, "eplb_step_interval=0"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(changes, said, monkeypatch):
    given_settings = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "num_redundant_experts": 2,
    }
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-mixtral"))
    monkeypatch.setattr(type(checkpoint.source), "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError, match=said):
        config = resolve(
            EngineConfig(str(paths.MODELS / "tiny-mixtral"), **given_settings | changes),
            checkpoint.model_config,
        )
        make_executor(config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False)

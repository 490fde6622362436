"""The choice of a rival's policy for a run, with a solver and without one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.flexgen.accounting import DoesNotFit
from jaxflow.flexgen.policy import TIERS
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement import solver
from search.placement.cost_model import memory_bytes, split
from search.placement.machine_curves import load_machine
from search.placement.rivals import BY_HAND, NAMES, SEARCHED, TierRoom, policy_named
from search.placement.solver import GIGA, MissingSolver, PlacementError, PlacementOptions, TierMemory
from search.placement.workload import workload

MACHINE = load_machine("h200")
OPT = workload("opt-6.7b", open_checkpoint("opt-6.7b", load_format="dummy").model_config, 512, 8)
ROOMY = TierMemory(100 * GIGA, 100 * GIGA, 100 * GIGA)
FEW = PlacementOptions(gpu_batch_sizes=(8, 16), num_gpu_batches=(1, 2))


def named(name, memory, options=FEW):
    return policy_named(name, OPT, MACHINE, TierRoom(memory, dict.fromkeys(TIERS, 0.0)), options)


@pytest.mark.parametrize("name", NAMES)
def test_only_searched_policies_need_a_solver(monkeypatch, name):
    monkeypatch.setattr(solver, "mip", None)
    if name in SEARCHED:
        with pytest.raises(MissingSolver):
            named(name, ROOMY)
        return
    policy = named(name, ROOMY)
    assert (policy.weights, policy.kv, policy.activations) in BY_HAND[name][0]
    used = memory_bytes(OPT, *split(policy))
    assert all(size <= capacity for size, capacity in zip(used, ROOMY, strict=True))


@given(st.sampled_from(sorted(BY_HAND)), st.sampled_from(TIERS))
def test_the_told_shortage_is_what_is_missing(name, tier):
    """With the told bytes of the short tier a policy fits, and with fewer none does."""
    options = dataclasses.replace(FEW, gpu_batch_sizes=(8,), num_gpu_batches=(1,), host_attention=False)
    none = dataclasses.replace(ROOMY, **{tier: 0.0})
    try:
        named(name, none, options)
    except PlacementError as refused:
        needed = float(str(refused).split("needs ")[1].split(" GB")[0])
        assert f"GB of the {tier}" in str(refused)
        named(name, dataclasses.replace(ROOMY, **{tier: 1.001 * needed * GIGA}), options)
        with pytest.raises(PlacementError, match=f"GB of the {tier}"):
            named(name, dataclasses.replace(ROOMY, **{tier: 0.9 * needed * GIGA}), options)


@pytest.mark.parametrize("tier", TIERS)
def test_a_refused_pipeline_says_what_a_stage_lacks(tier):
    """The account counts host and disk of all stages, and the cost model those of one."""
    rooms = []
    for stages in (1, 4):
        options = dataclasses.replace(FEW, pipeline_parallel_size=stages)
        policy, parts = named("all on the host", ROOMY, options), 1 if tier == "device" else stages
        room = TierRoom(ROOMY, dict.fromkeys(TIERS, 0.0))
        room.learn(DoesNotFit(tier, parts * 9 * 10**9, parts * 7 * 10**9, ""), policy, 6e9)
        rooms.append((room.memory, room.beyond))
    assert rooms[0] == rooms[1]


def test_a_block_that_takes_too_long_is_refused_with_its_time():
    with pytest.raises(PlacementError, match=r"takes [\d.]+ s, and max_latency_s is 1$"):
        named("all on disk", ROOMY, dataclasses.replace(FEW, max_latency_s=1.0))

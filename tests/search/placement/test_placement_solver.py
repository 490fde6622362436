"""The linear program: against brute force, with more memory, and its refusals."""

import dataclasses
import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.flexgen.policy import Policy, Shares
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import BlockChoice, TierShares, memory_bytes, predict, split
from search.placement.machine_curves import TimeCurve, load_machine
from search.placement.solver import (
    GIGA,
    PlacementError,
    PlacementOptions,
    TierMemory,
    candidates,
    least_bytes,
    link_bound,
    policy_of,
    search,
    solve,
)
from search.placement.workload import workload

# The host attends at the rate of its memory, so that every term can bind.
MACHINE = msgspec.structs.replace(load_machine("h200"), host_attention=TimeCurve(5e-5, 1e11))
OPT = workload("opt-30b", open_checkpoint("opt-30b", load_format="dummy").model_config, 512, 32)
LLAMA = workload("llama-3.1-8b", open_checkpoint("llama-3.1-8b", load_format="dummy").model_config, 1024, 128)
PAPER = TierMemory(16 * GIGA, 100 * GIGA, 500 * GIGA)
FEW = PlacementOptions(gpu_batch_sizes=(1, 8, 48), num_gpu_batches=(1, 3))


def gigabytes(low, high):
    return st.floats(low, high, allow_nan=False).map(lambda number: number * GIGA)


memories = st.builds(TierMemory, gigabytes(3, 40), gigabytes(1, 120), gigabytes(0, 400))
choices = st.builds(BlockChoice, st.sampled_from((1, 4, 16)), st.integers(1, 8), host_attention=st.booleans())
workloads = st.sampled_from((OPT, LLAMA))


def predicted(work, policy):
    return predict(work, MACHINE, policy)


@settings(max_examples=20)
@given(workloads, memories, choices, st.sampled_from((16, 4)))
def test_a_placement_keeps_its_limits_and_takes_what_was_said(work, memory, choice, bits):
    choice = dataclasses.replace(choice, weight_bits=bits)
    solved = solve(work, MACHINE, memory, choice, PlacementOptions())
    if solved is None:
        return
    policy = policy_of(work, MACHINE, memory, choice, PlacementOptions())
    for kind in (policy.weights, policy.kv, policy.activations):
        assert sum(kind) == pytest.approx(100, abs=1e-9)
    for used, capacity in zip(memory_bytes(work, *split(policy)), memory, strict=True):
        assert used <= capacity * (1 + 1e-6) + 1
    assert predicted(work, policy).latency_s == pytest.approx(solved[0], rel=1e-5)


@settings(max_examples=20)
@given(workloads, memories, choices, st.sampled_from((0, 1, 2)), st.floats(1.0, 3.0))
def test_more_memory_never_predicts_less_throughput(work, memory, choice, tier, factor):
    larger = list(memory)
    larger[tier] = larger[tier] * factor + GIGA
    before, after = (
        solve(work, MACHINE, given, choice, PlacementOptions()) for given in (memory, TierMemory(*larger))
    )
    assert before is None or (after is not None and after[0] <= before[0] * (1 + 1e-6))


def every(step):
    return [
        tuple(part / step for part in parts)
        for parts in itertools.product(range(step + 1), repeat=3)
        if sum(parts) == step
    ]


@settings(max_examples=8)
@given(workloads, memories, choices)
def test_the_program_equals_brute_force_on_a_coarse_grid(work, memory, choice):
    """The integer program finds the best of a 25 % grid. Free shares are at least as good."""
    best = math.inf
    for kinds in itertools.product(every(4), repeat=3):
        placed = TierShares(*kinds)
        if all(
            used <= capacity
            for used, capacity in zip(memory_bytes(work, choice, placed), memory, strict=True)
        ):
            best = min(best, predicted(work, policy_from(work, choice, placed)).latency_s)
    found = solve(work, MACHINE, memory, choice, PlacementOptions(percent_step=25))
    free = solve(work, MACHINE, memory, choice, PlacementOptions())
    if math.isinf(best):
        assert found is None
    else:
        assert found is not None and free is not None
        assert found[0] == pytest.approx(best, rel=1e-5)
        assert free[0] <= best * (1 + 1e-6)


def policy_from(work, choice, placed):
    shares = [
        Shares(*(100 * share for share in kind)) for kind in (placed.weights, placed.kv, placed.activations)
    ]
    weights, kv, activations = shares
    return Policy(
        model=work.model,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        weights=weights,
        kv=kv,
        activations=activations,
        **dataclasses.asdict(choice),
    )


def test_the_search_is_the_best_of_its_candidates_and_near_the_papers_policy():
    policy = search(OPT, MACHINE, PAPER)
    best = predicted(OPT, policy)
    assert best.tokens_per_s == pytest.approx(
        max(one.tokens_per_s for one in candidates(OPT, MACHINE, PAPER, PlacementOptions())), rel=1e-5
    )
    # The paper's policy is (20, 80) with KV on the host.
    assert 10 < policy.weights.device < 30 and policy.kv.device < 5 and policy.host_attention
    assert policy.num_gpu_batches > 1
    assert link_bound(OPT, MACHINE, PAPER, PlacementOptions()) >= best.link_tokens_per_s >= best.tokens_per_s


def test_a_latency_limit_costs_throughput_and_is_kept():
    free = predicted(OPT, search(OPT, MACHINE, PAPER, FEW))
    limit = 0.95 * free.latency_s
    limited = predicted(OPT, search(OPT, MACHINE, PAPER, dataclasses.replace(FEW, max_latency_s=limit)))
    assert limited.latency_s <= limit * (1 + 1e-6) and limited.tokens_per_s < free.tokens_per_s


def test_what_fits_the_device_stays_there():
    policy = search(
        LLAMA, MACHINE, TierMemory(80 * GIGA, 100 * GIGA, 0.0), dataclasses.replace(FEW, host_attention=False)
    )
    assert policy.weights == policy.kv == policy.activations == Shares(device=100.0)
    assert predicted(LLAMA, policy).link_s == 0


def test_four_bits_help_where_the_link_binds_and_exclude_the_host():
    wide = predicted(OPT, search(OPT, MACHINE, PAPER, FEW)).tokens_per_s
    assert (
        predicted(OPT, search(OPT, MACHINE, PAPER, dataclasses.replace(FEW, weight_bits=4))).tokens_per_s
        > wide
    )
    both = search(OPT, MACHINE, PAPER, dataclasses.replace(FEW, weight_bits=4, kv_bits=4))
    assert both.kv_bits == 4 and not both.host_attention and predicted(OPT, both).tokens_per_s > wide
    with pytest.raises(PlacementError, match="host_attention=on with kv_bits=4"):
        PlacementOptions(kv_bits=4, host_attention=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_latency_s": 0.0}, "max_latency_s=0"),
        ({"percent_step": 7}, "percent_step=7: a divisor"),
        ({"gpu_batch_sizes": ()}, "gpu_batch_sizes"),
        ({"num_gpu_batches": (0,)}, "num_gpu_batches"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes, words):
    with pytest.raises(PlacementError, match=words):
        PlacementOptions(**changes)


@pytest.mark.parametrize(
    ("capacity", "words"), [(math.nan, "gpu_mem=nan: GB, 0 or more"), (-1.0, "gpu_mem=-1e-09")]
)
def test_memory_that_is_no_amount_is_refused(capacity, words):
    with pytest.raises(PlacementError, match=words):
        TierMemory(capacity, 0.0, 0.0)


@pytest.mark.parametrize(
    ("memory", "pools"),
    [
        ((16, 10, 0), False),
        ((1, 10, 0), False),
        ((16, 0, 10), False),
        ((0.5, 1, 1), False),
        ((16, 10, 0), True),
        ((0.5, 1, 1), True),
    ],
)
def test_what_is_advised_fits(memory, pools):
    """The refusal names amounts of memory, and the search succeeds with each of them."""
    given = dict(zip(("gpu_mem", "cpu_mem", "disk"), memory, strict=True))
    with pytest.raises(PlacementError, match="does not fit; it would with") as refused:
        search(OPT, MACHINE, TierMemory(*(GIGA * number for number in memory), pools=pools), FEW)
    advice = str(refused.value).split("it would with ")[1].replace(" at least", "")
    ways = [given | _read(way) for way in advice.split(" or ")]
    for way in ways:
        search(OPT, MACHINE, TierMemory(*(GIGA * way[name] for name in given), pools=pools), FEW)


def _read(way):
    return {name: float(number) for name, number in (part.split("=") for part in way.split(" and "))}


def test_a_latency_that_no_block_reaches_is_refused_with_the_least():
    with pytest.raises(PlacementError, match=r"max_latency_s=1 .* takes [\d.]+ s at least") as refused:
        search(OPT, MACHINE, PAPER, dataclasses.replace(FEW, max_latency_s=1.0))
    least = float(str(refused.value).split("takes ")[1].split()[0])
    search(OPT, MACHINE, PAPER, dataclasses.replace(FEW, max_latency_s=least * 1.01))


def test_the_least_memory_of_a_tier_is_enough_and_no_less():
    choice, memory = BlockChoice(4, 2, host_attention=True), TierMemory(6 * GIGA, 40 * GIGA, 50 * GIGA)
    least = least_bytes(OPT, choice, memory, 0)
    for factor, fits in ((1.001, True), (0.999, False)):
        assert (
            solve(
                OPT, MACHINE, dataclasses.replace(memory, device=least * factor), choice, PlacementOptions()
            )
            is not None
        ) == fits


def test_free_links_bound_nothing():
    machine = msgspec.structs.replace(MACHINE, name="same")
    assert link_bound(LLAMA, machine, TierMemory(80 * GIGA, 0.0, 0.0), FEW) == math.inf

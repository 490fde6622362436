"""The diagonal block schedule (Appendix A.2.1): its order, its memory, and when the search chooses it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zigzag import Sizes, Square, traffic, zigzag

from jaxflow.flexgen.block import block_order
from jaxflow.flexgen.policy import Policy, Shares
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import BlockChoice, pass_terms, passes, predict, split
from search.placement.machine_curves import load_machine
from search.placement.solver import GIGA, PlacementOptions, TierMemory, candidates, search
from search.placement.workload import workload

small = st.integers(1, 6)


def diagonal(batches, layers, tokens, under_way):
    order = block_order(batches, layers, tokens, "diagonal", under_way)
    return order, [Square(*step) for step in order.steps]


@given(st.integers(1, 12), small, small, small)
def test_every_square_once_and_few_batches_under_way(batches, layers, tokens, under_way):
    order, squares = diagonal(batches, layers, tokens, under_way)
    assert len(squares) == len(set(squares)) == batches * layers * tokens
    traffic(squares, Sizes(1, 1, 1, 4), layers, tokens)  # raises for a wrong order
    begun, ended = set(), set()
    for square in squares:
        begun.add(square.batch)
        assert len(begun - ended) <= under_way
        # A batch takes the place of an earlier one that has ended.
        assert all(
            batch in ended
            for batch in begun
            if batch < square.batch and (square.batch - batch) % under_way == 0
        )
        if (square.token, square.layer) == (tokens - 1, layers - 1):
            ended.add(square.batch)
    for i, step in enumerate(order.steps):
        group = order.steps[order.first[i] : order.end[i]]
        assert {one.layer for one in group} == {step.layer} and step in group


@given(st.integers(1, 80), st.integers(2, 24), st.integers(1, 2))
def test_the_ratio_of_appendix_a2(s, n, layers):
    """With n batches, one at each token, the same memory holds (2s + 2n) / (2s + n)
    times the batches, within 2 / n.

    After the start, a diagonal fetches as many layers for a token as a zig-zag block of its size.
    """
    sizes = Sizes(weights=1.0, kv=1.0, activation=1.0, prompt_tokens=s)
    block = traffic(zigzag(n, layers, n, n), sizes, layers, n)
    found = traffic(diagonal(3 * n, layers, n, n)[1], sizes, layers, n)
    assert block.peak_kv / found.peak_kv == pytest.approx((2 * s + 2 * n) / (2 * s + n), abs=2 / n)
    longer = traffic(diagonal(4 * n, layers, n, n)[1], sizes, layers, n)
    if layers > 1:  # a single layer is loaded once
        assert longer.weight_loads - found.weight_loads == block.weight_loads


def opt(prompt, output):
    config = open_checkpoint("opt-30b", load_format="dummy").model_config
    return dataclasses.replace(workload("opt-30b", config, prompt, output), page_size=64)


H200 = load_machine("h200")
HOST = Shares(host=100.0)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_the_passes_hold_every_batch_at_every_token(batches, tokens, blocks):
    for schedule in ("zigzag", "diagonal"):
        choice = BlockChoice(4, batches, schedule=schedule)
        for number in (None, blocks):
            found = passes(choice, tokens, number)
            assert sum(one.number * one.prompts for one in found) == (number or 1) * batches
            assert sum(one.number * one.decodes for one in found) == (number or 1) * batches * (tokens - 1)


def test_prompts_and_decodes_share_a_fetch_of_the_weights():
    work, policy = opt(512, 32), Policy("opt-30b", 512, 32, 8, 6, HOST, HOST, HOST, schedule="diagonal")
    choice, placed = split(policy)
    kinds = passes(choice, 32)
    assert [(one.number, one.prompts, one.decodes) for one in kinds] == [(26, 0, 6), (6, 1, 5)]
    fewer, mixed = (pass_terms(work, H200, choice, placed, one) for one in kinds)
    weights = H200.host_to_device.seconds(work.weights * 2)
    assert mixed["device compute"] > fewer["device compute"]
    assert (
        mixed["host to device"] < fewer["host to device"] + weights
    )  # a prompt's activations, but no weights


def test_a_long_run_approaches_the_prediction():
    work, policy = opt(512, 32), Policy("opt-30b", 512, 32, 8, 6, HOST, HOST, HOST, schedule="diagonal")
    endless = predict(work, H200, policy).tokens_per_s
    rates = [predict(work, H200, policy, blocks=blocks).tokens_per_s for blocks in (1, 4, 64)]
    assert (
        rates == sorted(rates) and rates[0] < 0.8 * endless and rates[2] == pytest.approx(endless, rel=0.03)
    )


def test_the_search_takes_the_schedule_with_the_better_prediction():
    """Long prompts compute while the link waits, and short ones do not.

    So a diagonal is worth more for the former.
    """
    memory = TierMemory(16 * GIGA, 100 * GIGA, 0)
    both = PlacementOptions(schedules=("zigzag", "diagonal"), gpu_batch_sizes=(8, 16), num_gpu_batches=(3, 6))
    policy = search(opt(512, 32), H200, memory, both)
    best = {
        name: max(
            one.tokens_per_s
            for one in candidates(opt(512, 32), H200, memory, dataclasses.replace(both, schedules=(name,)))
        )
        for name in both.schedules
    }
    assert policy.schedule == max(best, key=lambda name: best[name])
    assert predict(opt(512, 32), H200, policy).tokens_per_s == pytest.approx(max(best.values()), rel=1e-4)

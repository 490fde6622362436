"""Placements over several devices (§4.4): the predictions against a simulated
pipeline and FlexGen's Table 3.
"""

import dataclasses

import msgspec
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.flexgen.block import pipeline_order
from jaxflow.flexgen.policy import Policy, Shares, load_policy
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import BlockChoice, memory_bytes, passes, predict, split
from search.placement.machine_curves import Machine, MachineError, load_machine
from search.placement.solver import GIGA, PlacementOptions, TierMemory, search
from search.placement.workload import workload

SETTINGS = paths.ROOT / "benchmarks" / "settings"
T4 = load_machine("t4")
# 16, 208 and 1500 GB on each machine, less the memory of the operating system.
TABLE_1 = TierMemory(15 * GIGA, 200 * GIGA, 1500 * GIGA)


def opt(name):
    return workload(name, open_checkpoint(name, load_format="dummy").model_config, 512, 32)


def pipeline_s(stages, tokens, prompt_s, decode_s):
    """Return the seconds of a block of `stages` micro-batches. A step of a stage takes prompt_s or decode_s.

    A stage begins a micro-batch when the stage before has ended it, and the first stage when the
    last has ended its token before.
    """
    free, ended = [0.0] * stages, [0.0] * stages
    for token in range(tokens):
        for batch in range(stages):
            at = ended[batch]
            for stage in range(stages):
                at = free[stage] = max(at, free[stage]) + (decode_s if token else prompt_s)
            ended[batch] = at
    return max(ended)


@given(st.integers(1, 6), st.integers(1, 20), st.floats(0.1, 50), st.floats(0.1, 5))
def test_the_passes_take_the_time_of_a_simulated_pipeline(stages, tokens, prompt_s, decode_s):
    """With decodes no longer than prompts, no stage waits after the last stage has begun."""
    decode_s = min(prompt_s, decode_s)
    found = passes(BlockChoice(1, 1, pipeline_parallel_size=stages), tokens)
    predicted = sum(stages * one.number * (prompt_s if one.prompts else decode_s) for one in found)
    assert predicted == pytest.approx(pipeline_s(stages, tokens, prompt_s, decode_s))


def steps_s(stages, width, layers, tokens, prompt_s, decode_s):
    """Return the seconds of the runtime's order.

    A stage takes a batch as soon as the stage before gives it.
    """
    steps = pipeline_order(stages * width, layers, tokens, width).steps
    ready, ended = [0.0] * len(steps), {}
    for token in range(tokens):
        here = [i for i, step in enumerate(steps) if step.token == token]
        for stage in range(stages):
            for i in here:
                step = steps[i]
                given = ended.get((stage - 1) % stages, {}).get((token - (stage == 0), step.batch), 0.0)
                free = ended.get(stage, {}).get("free", 0.0)
                ready[i] = max(free, given if step.layer == 0 else 0.0) + (decode_s if token else prompt_s)
                ended.setdefault(stage, {})["free"] = ready[i]
                if step.layer == layers - 1:
                    ended[stage][token, step.batch] = ready[i]
    return ended[stages - 1]["free"]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.floats(0.1, 5))
def test_the_order_of_steps_has_no_bubbles_but_the_filling_of_the_stages(
    stages, width, layers, tokens, decode_s
):
    prompt_s = max(1.0, decode_s)
    found = passes(BlockChoice(1, width, pipeline_parallel_size=stages), tokens)
    predicted = sum(
        stages * layers * width * one.number * (prompt_s if one.prompts else decode_s) for one in found
    )
    earlier = (stages - 1) * (width - 1) * prompt_s  # a stage begins with the first batch that is given
    made = steps_s(stages, width, layers, tokens, prompt_s, decode_s)
    assert predicted - earlier - 1e-9 <= made <= predicted + 1e-9


def capped(machine: Machine, rate: float) -> Machine:
    """Return the machine with links of at most `rate` bytes a second, whatever others do."""
    down, up = (
        msgspec.structs.replace(curve, units_per_s=min(rate, curve.units_per_s))
        for curve in (machine.host_to_device, machine.device_to_host)
    )
    return msgspec.structs.replace(machine, host_to_device=down, device_to_host=up)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_share_what_all_links_together_have(stages):
    policy = msgspec.structs.replace(
        load_policy(SETTINGS / "opt-30b-of-4.json"), pipeline_parallel_size=stages
    )
    work, own = opt("opt-30b"), msgspec.structs.replace(load_machine("h200"), all_links_per_s=None)
    for rate in (30e9, 90e9, 1e15):
        shared = msgspec.structs.replace(own, all_links_per_s=rate)
        assert predict(work, shared, policy) == predict(work, capped(own, rate / stages), policy)
    with pytest.raises(MachineError, match=r"all_links_per_s=0\.0: a positive rate"):
        msgspec.structs.replace(own, all_links_per_s=0.0).__post_init__()


def test_runs_over_stages_of_h200s_are_predicted():
    """Seconds of the decodes of two devices, and of the whole block of four with fewer weights on them."""
    work = workload(
        "opt-30b", open_checkpoint("opt-30b", load_format="dummy").model_config, 512, 32, page_size=64
    )
    two, four = (load_policy(SETTINGS / f"opt-30b-of-{n}.json") for n in (2, 4))
    four = msgspec.structs.replace(four, weights=Shares(70.0, 30.0, 0.0))
    made = predict(work, load_machine("h200"), two)
    assert made.latency_s - made.prefill_s == pytest.approx(50.86, rel=0.03)
    assert predict(work, load_machine("h200"), four).latency_s == pytest.approx(69.0, rel=0.03)


def test_a_stage_holds_its_layers_and_the_kv_of_all_micro_batches():
    host = Shares(host=100.0)
    work, one = opt("opt-30b"), Policy("opt-30b", 512, 32, 8, 3, *[host] * 3)  # type: ignore
    alone, four = (
        memory_bytes(work, *split(msgspec.structs.replace(one, pipeline_parallel_size=m))) for m in (1, 4)
    )
    weights = work.layers * work.weights * 2
    assert alone[1] - four[1] == pytest.approx(
        3 / 4 * weights
    )  # a quarter of the layers, four times the sequences


def test_four_devices_scale_as_in_table_3():
    """OPT-30B on 4 T4s: 3.2 times the throughput of one, and 4.2 times without the prompts."""
    options = PlacementOptions(gpu_batch_sizes=(16, 32, 40, 48), num_gpu_batches=(1, 3, 4))
    work, rates = opt("opt-30b"), []
    for stages in (1, 4):
        found = search(work, T4, TABLE_1, dataclasses.replace(options, pipeline_parallel_size=stages))
        made = predict(work, T4, found)
        assert found.pipeline_parallel_size == stages
        rates.append((made.tokens_per_s, made.decode_tokens_per_s(32)))
    assert rates[0][0] == pytest.approx(7.32, rel=0.2) and rates[1][0] == pytest.approx(23.61, rel=0.2)
    assert rates[1][0] / rates[0][0] == pytest.approx(3.2, rel=0.2)
    assert rates[1][1] / rates[0][1] == pytest.approx(4.2, rel=0.2)

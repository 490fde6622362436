"""Offloaded pipelines: the tokens of one device, the traffic of the cost
model, stops and faults in a stage.
"""

import os

import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloaded import DISK, HOST, MIXED, OUTPUT, PROMPT, goldens, policy, requests, run, runtime

from jaxflow.config import ConfigError, Layer, ModelConfig
from jaxflow.flexgen.block import BlockStep, pipeline_order
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.policy import PolicyError
from jaxflow.flexgen.scratch_files import DiskError
from jaxflow.flexgen.stages import split_layers
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import crossing_bytes
from search.placement.workload import workload

UNEVEN = "stories260K"  # 5 layers over 2 stages


@given(st.integers(1, 60), st.integers(1, 9))
def test_layers_are_split_equally_and_in_order(layers, stages):
    config = ModelConfig("", 0, 0, 1, 1, 1, 0, tuple(Layer(window=1 + i) for i in range(layers)), 8)
    parts = split_layers(config, stages)
    assert tuple(layer for part in parts for layer in part.layers) == config.layers
    sizes = [part.num_layers for part in parts]
    assert len(parts) == stages and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_stage_passes_one_micro_batch_after_the_other(batches, layers, tokens, width):
    order = pipeline_order(batches, layers, tokens, width)
    assert sorted(order.steps) == [
        BlockStep(token, layer, batch)
        for token in range(tokens)
        for layer in range(layers)
        for batch in range(batches)
    ]
    for i, step in enumerate(order.steps):
        group = order.steps[order.first[i] : order.end[i]]
        assert step in group and len({(one.token, one.layer, one.batch // width) for one in group}) == 1


@pytest.mark.parametrize("host_attention", [True, False])
def test_two_stages_give_the_tokens_of_one_device(host_attention, tmp_path):
    """16 sequences are a block of two micro-batches, and a block of a part of one."""
    prompts, expected = goldens(UNEVEN, copies=4)
    shares = {"weights": MIXED, "kv": MIXED, "activations": MIXED}
    with runtime(UNEVEN, tmp_path, pipeline_parallel_size=2, host_attention=host_attention, **shares) as made:  # type: ignore
        under_way = made.generate(requests(prompts))
        next(under_way)
        under_way.close()  # the caller stops early
        assert run(made, requests(prompts)) == expected
        assert [stats.tokens for stats in made.stats] == [72, 24]


def test_two_stages_read_few_rows_of_v(tmp_path):
    prompts, _ = goldens("tiny-llama")
    found = []
    for stages in (1, 2):
        changes = {"kv": HOST, "value_top_k_percent": 20.0, "pipeline_parallel_size": stages}
        with runtime("tiny-llama", tmp_path, **changes) as made:
            found.append(run(made, requests(prompts)))
    assert found[0] == found[1]


def test_the_cost_model_counts_the_traffic_of_all_stages(tmp_path):
    asked = policy(UNEVEN, kv=HOST, weights=HOST, pipeline_parallel_size=2)
    with runtime(UNEVEN, tmp_path, kv=HOST, weights=HOST, pipeline_parallel_size=2) as made:
        run(made, requests([[i + 1] * PROMPT for i in range(asked.block_size)]))
        moved = made.stats[-1].traffic
        config = open_checkpoint(str(paths.MODELS / UNEVEN)).model_config
    work = workload(UNEVEN, config, PROMPT, OUTPUT, wide_bytes=4.0, page_size=16)
    # Once for each micro-batch and token; the two layers of the last stage stay, because a stage keeps two.
    assert moved["fetch_layer"].times == 3 * 2 * OUTPUT + 2
    kv_only = crossing_bytes(work, policy(UNEVEN, kv=HOST, pipeline_parallel_size=2))
    assert moved["load_kv"].link_down_bytes == pytest.approx(kv_only["host to device"])
    assert moved["store_kv"].link_up_bytes == pytest.approx(kv_only["device to host"])


def test_a_fault_in_the_first_stage_ends_the_run(tmp_path, monkeypatch):
    prompts, _ = goldens("tiny-llama", copies=1)
    with runtime("tiny-llama", tmp_path, kv=DISK, pipeline_parallel_size=2) as made:
        folder, own = str(made._runner._setups[0].tiers.folder.path), os.preadv  # type: ignore

        def failing(fd, buffers, at):
            done = own(fd, buffers, at)
            if os.readlink(f"/proc/self/fd/{fd}").startswith(folder):
                buffers[0][1] ^= 16
            return done

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(DiskError, match="differ from the written bytes"):
            run(made, requests(prompts))
        with pytest.raises(RuntimeError, match="close the runtime"):
            run(made, requests(prompts))


def test_stages_that_cannot_run_are_refused(tmp_path):
    with pytest.raises(PolicyError, match="pipeline_parallel_size=0; accepted is a positive number"):
        policy(UNEVEN, pipeline_parallel_size=0)
    with pytest.raises(PolicyError, match="schedule='diagonal' with pipeline_parallel_size=2"):
        policy(UNEVEN, pipeline_parallel_size=2, schedule="diagonal")
    with pytest.raises(ConfigError, match=r"schedule='row'.*the policy's 2 stages"):
        OffloadConfig(policy(UNEVEN, pipeline_parallel_size=2), schedule="row")
    for stages, error, accepted in ((6, PolicyError, "at most 5"), (5, ConfigError, "at most 4")):
        changes = {"pipeline_parallel_size": stages}
        with pytest.raises(error, match=accepted), runtime(UNEVEN, tmp_path, **changes):
            pass

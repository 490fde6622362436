"""The steps of a mixture whose experts are spread whole, compiled for H200s:
the sums run beside other work.
"""

import dataclasses
import re

import pytest
from h200 import h200_mesh
from planned import SIMPLE, compiled
from schedule import read

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline import streams
from jaxflow.pipeline.handwritten import two_nano_batch_plan

pytestmark = pytest.mark.slow  # 40 s: XLA compiles the steps
MODEL = open_checkpoint("qwen3-30b-a3b", load_format="dummy").model_config
MODEL = dataclasses.replace(  # fewer layers and columns, which XLA compiles in a tenth of the time
    MODEL,
    layers=MODEL.layers[:1],
    hidden_size=256,
    head_dim=64,
    vocab_size=4096,
    expert_intermediate_size=128,
    num_experts=32,
    experts_per_token=2,
)


@pytest.mark.parametrize(("devices", "hosts"), [(8, 1), (16, 2)])
def test_the_sums_of_spread_experts_are_asynchronous(devices, hosts):
    """All sums but the last run beside work of the other nano-batch, and no other collective runs."""
    plan, mesh = two_nano_batch_plan(MODEL, 256, 128, tp=devices), h200_mesh((devices,), hosts=hosts)
    found = compiled(plan, MODEL, SIMPLE, devices, mesh=mesh, ep=True, **streams.GRAPHS["streams"])
    windows = read(found.hlo, plan)
    sums = [window for window in windows if any("all-reduce" in opcode for opcode in window.opcodes)]
    work = [window for window in windows if {"custom-call", "dot"} & {*window.opcodes}]
    assert len(sums) == 4 * MODEL.num_layers  # after attention and after the experts, of two nano-batches
    assert [any(one.meets(sent) for one in work) for sent in sums] == [True] * (len(sums) - 1) + [False]
    started = [thunk for thunk in found.thunks if thunk.kind == "kAllReduce" and thunk.depth]
    assert len(started) == len(sums) - 1
    assert all(thunk.stream.startswith("communication_stream") for thunk in started)
    assert not re.search(r"\b(all-to-all|collective-permute|reduce-scatter)\b", found.hlo)

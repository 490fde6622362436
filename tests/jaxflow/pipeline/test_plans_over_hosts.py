"""The steps of engines over several hosts, compiled for H200s: sums between hosts run beside other work."""

import dataclasses
import re

import pytest
from h200 import Compiled, h200_mesh
from jax.sharding import Mesh
from planned import ROWS, SIMPLE, compiled
from schedule import check_schedule, spans

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline import streams
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.program import graph_of

pytestmark = (
    pytest.mark.slow
)  # the steps of one host have the same operations, and compile in the usual suite
GPUS = 8  # of a host
TOKENS, SPLIT = 512, 192
LLAMA = open_checkpoint("llama-3-70b", load_format="dummy").model_config
LLAMA = dataclasses.replace(LLAMA, layers=LLAMA.layers[:2])
WIDE = dataclasses.replace(  # the sizes of Llama-3.1-405B, whose heads suffice for 64 devices
    LLAMA, hidden_size=16384, num_heads=128, intermediate_size=53248
)


def summed_over(found: Compiled) -> set[str]:
    """Return the groups of devices that the step sums over."""
    return set(re.findall(r"all-reduce(?:-start)?\(.*?replica_groups=(mesh\[\S+\])", found.hlo))


@pytest.mark.parametrize(("hosts", "model"), [(2, LLAMA), (8, WIDE)], ids=["2 x 8", "8 x 8"])
def test_the_sums_of_a_layer_are_asynchronous(hosts, model):
    """Each sum starts on the communication stream and ends after work of the other nano-batch.

    Only the last sum has nothing beside it.
    """
    tp = hosts * GPUS
    plan = two_nano_batch_plan(model, TOKENS, SPLIT, tp=tp)
    mesh = h200_mesh((tp,), hosts=hosts)
    found = compiled(plan, model, SIMPLE, tp, mesh=mesh, **streams.GRAPHS["streams"])
    graph = graph_of(plan, model, tp)
    check_schedule(found.hlo, plan, graph, ROWS)
    sent = spans(found.hlo, plan, graph, ROWS)
    sums_of_a_layer = 4  # after attention and after the MLP, of two nano-batches
    assert len(sent) == sums_of_a_layer * model.num_layers
    assert [bool(one.spanned) for one in sent] == [True] * (len(sent) - 1) + [False]
    sums = [thunk for thunk in found.thunks if thunk.kind == "kAllReduce" and thunk.depth]
    assert len(sums) == len(sent)
    assert all(thunk.stream.startswith("communication_stream") for thunk in sums)
    assert summed_over(found) == {f"mesh['tp'={tp}]"}


@pytest.mark.parametrize(("hosts", "own"), [(2, 1), (8, 5)])
def test_a_stage_of_one_host_sums_over_its_devices_alone(hosts, own):
    mesh = h200_mesh((hosts, GPUS), ("hosts", "tp"), hosts=hosts)
    stage = Mesh(mesh.devices[own], ("tp",))
    assert len({device.process_index for device in stage.devices.flat}) == 1
    found = compiled(sequential_plan(LLAMA, TOKENS, GPUS), LLAMA, SIMPLE, GPUS, mesh=stage)
    assert summed_over(found) == {f"mesh['tp'={GPUS}]"}
    assert not re.search(r"\b(send|recv|collective-permute|all-to-all)\b", found.hlo)

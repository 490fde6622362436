"""Sums over two or four devices that the copy engines send: every such plan is the plain forward, and what
cannot be one is refused.
"""

import drawn
import msgspec
import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import (
    copied,
    four_qkv_plan,
    gemms_in_two_plan,
    phased_plan,
    sequential_plan,
    swapped,
    two_nano_batch_plan,
    waited,
)
from jaxflow.pipeline.plan import NanoOp, PlanError, from_json, load, to_json
from jaxflow.pipeline.program import check, graph_of

TOKENS = 16
WORK = ((8, (3, 2)), (2, (9, 4)))
LLAMA = drawn.config_of("tiny-llama")
FP8_NUMBERS = {"quantization": "fp8", "kv": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("make", "name", "tp", "numbers"),
    [
        (two_nano_batch_plan, "tiny-gemma2", 2, {}),
        (gemms_in_two_plan, "tiny-mixtral", 2, {}),
        (gemms_in_two_plan, "tiny-llama", 2, FP8_NUMBERS),
        (two_nano_batch_plan, "tiny-llama", 4, FP8_NUMBERS),
        (phased_plan, "tiny-llama", 2, FP8_NUMBERS),
        (four_qkv_plan, "tiny-llama", 4, {}),
    ],
    ids=["post-norms", "experts", "fp8", "fp8, four devices", "fp8, streams", "four qkv"],
)
def test_plans_with_peer_copies_compute_the_plain_forward(make, name, tp, numbers):
    """The cut falls among decodes and into a chunk; the plain forward sums by all-reduces."""
    model = drawn.Bench(drawn.config_of(name), tp, **numbers)
    plan = (copied if tp == 2 else swapped)(make(model.config, TOKENS, 6, tp))
    check(plan, graph_of(plan, model.config, tp))
    model.check(plan, *(drawn.step(model.config, TOKENS, (6,), *work) for work in WORK))


def test_a_plan_with_peer_copies_is_not_sequential():
    """An unsplit plan with peer copies differs from the sequential plan; a
    measurement must tell the faster.
    """
    plain = sequential_plan(LLAMA, TOKENS, 2)
    plan = copied(plain)
    assert is_sequential(plain) and not is_sequential(plan)
    assert from_json(to_json(plan)) == plan and b"sums" not in to_json(plain)
    added = xla_options(plan, 2).items() - xla_options(plain, 2).items()
    assert {name for name, _ in added} == {"xla_gpu_collective_permute_mode"}


@pytest.mark.parametrize(("tp", "scattered"), [(1, False), (4, False), (2, True)])
def test_peer_copies_need_two_devices_and_all_reduces(tp, scattered):
    plan = copied(two_nano_batch_plan(LLAMA, TOKENS, 8, tp, scattered=scattered))
    with pytest.raises(PlanError, match="sums='copies'"):
        compile_plan(plan, LLAMA, tp)


def test_four_devices_exchange_in_two_steps():
    """The second step of each half's sum is amid the other half's turn; of one
    batch, right behind the first.
    """
    ids = [nano.id for nano in swapped(two_nano_batch_plan(LLAMA, TOKENS, 8, 4)).nano_ops]
    for swap, reduce, last in (
        ("attn_swap.0", "attn_reduce.0", "out_proj.1"),
        ("mlp_swap.0", "mlp_reduce.0", "down.1"),
    ):
        assert ids.index(swap) + 1 < ids.index(reduce) < ids.index(last)
    alone = [nano.id for nano in swapped(sequential_plan(LLAMA, TOKENS, 4)).nano_ops]
    assert alone.index("attn_reduce") == alone.index("attn_swap") + 1 and alone[-2:] == [
        "mlp_swap",
        "mlp_reduce",
    ]
    plan = swapped(two_nano_batch_plan(LLAMA, TOKENS, 8, 4))
    with pytest.raises(PlanError, match=r"attn_swap.0: op='attn_swap' is not in this model's layers"):
        compile_plan(plan, LLAMA, 2)
    with pytest.raises(PlanError, match=r"sums='kernels': swaps need sums='copies'"):
        compile_plan(msgspec.structs.replace(plan, sums="kernels"), LLAMA, 4)
    both = msgspec.structs.replace(
        plan, name="of both", nano_ops=(*plan.nano_ops, NanoOp("odd", "attn_scatter", 0, TOKENS))
    )
    with pytest.raises(PlanError, match=r"of both: .* both scattered and swapped"):
        compile_plan(both, LLAMA, 4)
    with pytest.raises(ValueError, match="tp is 2"):
        model_graph(LLAMA, 2, swapped=True)


def test_waited_sums_overlap_with_nothing():
    """The reader of an all-reduce follows directly, across layers as well: nano-batches without overlap, as
    in the ablation.
    """
    model = open_checkpoint("llama-3-70b", load_format="dummy").model_config
    plan = waited(copied(two_nano_batch_plan(model, 2048, 1024, 2)))
    check(plan, graph_of(plan, model, 2))
    assert plan == load(paths.ROOT / "benchmarks/plans/h200/llama-3-70b/tp2-fp8/ablation-nano-batches.json")
    for sent, reader in zip(plan.nano_ops, plan.nano_ops[1:], strict=False):
        if sent.op.endswith("_reduce"):
            assert (reader.op.endswith("_norm"), reader.start, reader.ahead) == (
                True,
                sent.start,
                int(sent.op == "mlp_reduce"),
            )

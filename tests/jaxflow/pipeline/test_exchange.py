"""Sums over two devices that the copy engines send: every such plan is the plain forward, and what cannot be one is refused."""

import drawn
import pytest

from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handmade import copied, products_in_two_plan, sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.order import check, graph_of
from jaxflow.pipeline.plan import PlanError, from_json, to_json

TOKENS = 16
WORK = ((8, (3, 2)), (2, (9, 4)))
LLAMA = drawn.config_of("tiny-llama")


@pytest.mark.parametrize(
    ("make", "name", "numbers"),
    [
        (two_nano_batch_plan, "tiny-gemma2", {}),
        (products_in_two_plan, "tiny-mixtral", {}),
        (products_in_two_plan, "tiny-llama", {"quantization": "fp8", "kv": "float8_e4m3fn"}),
    ],
    ids=["post-norms", "experts", "fp8"],
)
def test_copied_sums_are_the_plain_forwards(make, name, numbers):
    """The cut falls among decodes and into a chunk; the plain forward sums by all-reduces."""
    model = drawn.Bench(drawn.config_of(name), 2, **numbers)
    plan = copied(make(model.config, TOKENS, 6, 2))
    check(plan, graph_of(plan, model.config, 2))
    model.check(plan, *(drawn.step(model.config, TOKENS, (6,), *work) for work in WORK))


def test_it_is_a_plan_of_its_own():
    """Not the sequential one, even where nothing is cut: which is faster is to be measured."""
    plain = sequential_plan(LLAMA, TOKENS, 2)
    plan = copied(plain)
    assert is_sequential(plain) and not is_sequential(plan)
    assert from_json(to_json(plan)) == plan and b"sums" not in to_json(plain)
    added = xla_options(plan, 2).items() - xla_options(plain, 2).items()
    assert {name for name, _ in added} == {"xla_gpu_collective_permute_mode", "xla_gpu_use_memcpy_local_p2p"}


@pytest.mark.parametrize("tp", [1, 4])
def test_only_two_devices_exchange_whole_what_they_add(tp):
    plan = copied(two_nano_batch_plan(LLAMA, TOKENS, 8, tp))
    with pytest.raises(PlanError, match="sums='copies'"):
        compile_plan(plan, LLAMA, tp)

"""The searched plan files under benchmarks/plans against hand-written orders and the shipped plans.

The command below wrote the files, with each file's model, tokens and dtypes:

  python -m search plan --modelled --sums copies --overlap network --model llama-3-70b --gpus 2

A file for two devices in bfloat16 is compared at the steps of an engine with gpu_memory_utilization 0.95.
"""

import functools
import json
from pathlib import Path

import paths
import pytest
from search_toys import on_all_sms

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, model_graph
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import (
    copied,
    gemms_in_two_plan,
    sequential_plan,
    swapped,
    two_nano_batch_plan,
)
from jaxflow.pipeline.plan import SHIPPED, Plan, load
from search.nanobatch.known_orders import cuts_of
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.memory_fit import UTILIZATION, most_decodes
from search.nanobatch.plan import KEYS
from search.nanobatch.predict import outside_s
from search.nanobatch.simulate import simulate
from search.profile import modelled as copies
from search.profile.clock import shipped_card
from search.profile.modelled import modelled_profile
from search.profile.share_times import ShareTimes, product_shapes

FOLDER = paths.ROOT / "benchmarks" / "plans" / "h200"
H200, POWER, CARD = DEVICES["H200"], shipped_power("H200"), shipped_card("H200")
KINDS = {True: (FP8, "float8_e4m3fn"), False: (BFLOAT16, "bfloat16")}
# Key: file. Value: model, devices, tokens, cut of the hand-written order, cut of the found plan (0: none).
CASES = {
    "llama-3-70b-tp2-fp8": ("llama-3-70b", 2, 2048, 1024, 1024),
    "deepseek-67b-tp2-fp8": ("deepseek-67b", 2, 2048, 1024, 1536),
    "qwen2-72b-tp2-fp8": ("qwen2-72b", 2, 2048, 1024, 1536),
    "llama-3-70b-tp2-bfloat16": ("llama-3-70b", 2, 1024, 512, 0),
    "qwen2-72b-tp2-bfloat16": ("qwen2-72b", 2, 1024, 512, 0),
    "llama-3-70b-tp4-bfloat16": ("llama-3-70b", 4, 2048, 1024, 768),
    "llama-3-70b-tp4-fp8": ("llama-3-70b", 4, 4096, 2048, 2048),
}


def kind_of(name: str) -> str:
    """Return a case's devices and dtype, for example tp2-fp8."""
    return name.removeprefix(f"{CASES[name][0]}-")


def plan_file(name: str) -> Path:
    """Return the file of a case's searched plan."""
    return FOLDER / CASES[name][0] / "searched" / f"{kind_of(name)}.json"


def by_hand(name: str) -> dict[str, Plan]:
    """Return the hand-written plans by name."""
    model, tp, tokens, shipped, found = CASES[name]
    config, sent = open_checkpoint(model, load_format="dummy").model_config, copied if tp == 2 else swapped
    plans = {
        "sequential": sequential_plan(config, tokens, tp),
        "its sums copied": sent(sequential_plan(config, tokens, tp)),
    }
    for cut in {shipped, found} - {0}:
        plans[f"two nano-batches, {cut} + {tokens - cut}"] = sent(
            two_nano_batch_plan(config, tokens, cut, tp)
        )
        plans[f"products in two, {cut} + {tokens - cut}"] = sent(gemms_in_two_plan(config, tokens, cut, tp))
    return plans


@functools.cache
def gains(name: str) -> dict[str, float]:
    """Return predicted gains over the sequential step at 1024/512: the found plan ("found") and hand-written
    plans.
    """
    (model, tp, tokens, *_), fp8 = CASES[name], name.endswith("fp8")
    config, (widths, dtype) = open_checkpoint(model, load_format="dummy").model_config, KINDS[fp8]
    assert CARD is not None
    sizes, found = range(128, tokens + 1, 128), on_all_sms(load(plan_file(name)))
    profile = modelled_profile(
        model, config, H200, tp=tp, widths=widths, dtype=dtype, kv_dtype=dtype, keys=KEYS, tokens=sizes
    )
    plain, exchanged = model_graph(config, tp, widths), model_graph(config, tp, widths, swapped=tp == 4)
    fitting = most_decodes(model, config, profile, 1024, 512, tokens, UTILIZATION if fp8 or tp == 4 else 0.95)
    products, step = product_shapes(config, tp), StepShape.steady_state(tokens, 1024, 512, fitting)
    forms = {
        "kernels": ShareTimes(profile, plain, products),
        "copies": ShareTimes(copies.copied(profile, exchanged, CARD), exchanged, products),
    }
    outside = outside_s(plain, step.part(0, tokens), H200, dtype)
    seconds = {}
    for what, plan in (by_hand(name) | {"found": found}).items():
        own = forms[plan.sums]
        seconds[what] = simulate(plan, own.graph, own, step, device=H200, power=POWER).step_s + outside
    return {what: seconds["sequential"] / took for what, took in seconds.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_at_least_as_fast_as_what_was_written_by_hand(name):
    """The found plan compiles, has the expected cuts, and no hand-written plan is predicted 1 % faster.

    The plans were found before the simulation knew additions and copies of rows.
    """
    model, tp, _, _, cut = CASES[name]
    plan = load(plan_file(name))
    compile_plan(
        plan, open_checkpoint(model, load_format="dummy").model_config, tp, quantized=name.endswith("fp8")
    )
    assert cuts_of(plan) == ((cut,) if cut else ())
    found = gains(name)
    best = max(found.values())
    assert found["found"] > best - 0.01, found


@pytest.mark.parametrize("name", ["llama-3-70b-tp2-fp8", "llama-3-70b-tp4-bfloat16"])
def test_a_found_plan_with_a_hand_written_order_has_its_nano_ops(name):
    found = load(plan_file(name))
    shipped = load(SHIPPED / f"h200-{name.replace('fp8', 'float8_e4m3fn')}.json")
    assert found.nano_ops == by_hand(name)[found.name.rpartition(", sums ")[0]].nano_ops
    assert (found.nano_ops == shipped.nano_ops) == (name == "llama-3-70b-tp2-fp8")


@pytest.mark.parametrize("name", ["deepseek-67b-tp2-fp8", "qwen2-72b-tp2-fp8"])
def test_what_was_found_is_shipped_where_it_was_the_best_that_was_measured(name):
    found, shipped = (
        load(plan_file(name)),
        load(SHIPPED / f"h200-{name.replace('fp8', 'float8_e4m3fn')}.json"),
    )
    rows = json.loads(
        (paths.ROOT / f"benchmarks/h200/{CASES[name][0]}/plans-{kind_of(name)}.json").read_text("utf-8")
    )["plans"]
    for workload in ("1024/512", "512/0"):
        best = min((row for row in rows if row["workload"] == workload), key=lambda row: row["step_ms"])
        assert best["plan"].startswith(found.name) and found.nano_ops == shipped.nano_ops


def test_the_solver_has_the_shipped_order_of_four_devices():
    """The plans differ in two sums, issued one place earlier. The model predicts a gain of 0.2 % for that."""
    name, earlier = "llama-3-70b-tp4-fp8", {"attn_reduce.0", "mlp_reduce.1"}
    found, shipped = load(plan_file(name)), load(SHIPPED / "h200-llama-3-70b-tp4-float8_e4m3fn.json")
    orders = [
        [nano for nano in on_all_sms(plan).nano_ops if nano.id not in earlier] for plan in (found, shipped)
    ]
    assert found.name.startswith("searched") and orders[0] == orders[1]
    assert gains(name)["found"] == pytest.approx(gains(name)["two nano-batches, 2048 + 2048"], abs=3e-3)


def test_where_the_step_is_whole_it_is_the_sequential_one_with_its_sums_copied():
    for name, (*_, cut) in CASES.items():
        if not cut:
            assert load(plan_file(name)).nano_ops == by_hand(name)["its sums copied"].nano_ops


def test_at_512_it_has_the_nano_ops_of_the_plan_that_is_shipped_for_one_device():
    """Streams and SMs are equal as well; only the issue order differs."""
    found, shipped = (
        load(FOLDER / "llama-3.1-8b/searched/512.json"),
        load(SHIPPED / "h200-llama-3.1-8b-bfloat16.json"),
    )
    same = [
        {(nano.id, nano.start, nano.stop, nano.stream, nano.sms) for nano in plan.nano_ops}
        for plan in (found, shipped)
    ]
    assert same[0] == same[1] and found.nano_ops != shipped.nano_ops

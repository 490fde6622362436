"""Plans whose sums are copied, as the search finds them, beside the orders that were written by hand
(docs/overlap.md).

The files of benchmarks/plans/searched are what this made in at most seven minutes, with the tokens and dtypes
of each:

  python -m search plan --modelled --sums copies --overlap network --model llama-3-70b --gpus 2

Those of two devices in bf16 are held against the loads of an engine that uses 0.95 of the memory, as they are
measured.
"""

import functools
import json

import paths
import pytest
from searched import on_all_sms

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, model_graph
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handmade import (
    copied,
    products_in_two_plan,
    sequential_plan,
    swapped,
    two_nano_batch_plan,
)
from jaxflow.pipeline.plan import SHIPPED, Plan, digest, load
from search.nanobatch.known_orders import cuts_of
from search.nanobatch.layer_tasks import Load
from search.nanobatch.memory_fit import UTILIZATION, most_decodes
from search.nanobatch.plan import KEYS
from search.nanobatch.predict import outside_s
from search.nanobatch.shares import Shares, product_shapes
from search.nanobatch.simulate import simulate
from search.profile import copy_engine as copies
from search.profile.clock import shipped_card
from search.profile.modelled import modelled_profile

FOLDER = paths.ROOT / "benchmarks" / "plans" / "searched"
H200, POWER, CARD = DEVICES["H200"], shipped_power("H200"), shipped_card("H200")
KINDS = {True: (FP8, "float8_e4m3fn"), False: (BFLOAT16, "bfloat16")}
# by file: model, devices, tokens, where the order by hand cuts, and where what is found does (0: nowhere)
CASES = {
    "llama-3-70b-tp2-fp8": ("llama-3-70b", 2, 2048, 1024, 1024),
    "deepseek-67b-tp2-fp8": ("deepseek-67b", 2, 2048, 1024, 1536),
    "qwen2-72b-tp2-fp8": ("qwen2-72b", 2, 2048, 1024, 1536),
    "llama-3-70b-tp2-bfloat16": ("llama-3-70b", 2, 1024, 512, 0),
    "qwen2-72b-tp2-bfloat16": ("qwen2-72b", 2, 1024, 512, 0),
    "llama-3-70b-tp4-bfloat16": ("llama-3-70b", 4, 2048, 1024, 768),
    "llama-3-70b-tp4-fp8": ("llama-3-70b", 4, 4096, 2048, 2048),
}


def by_hand(name: str) -> dict[str, Plan]:
    """The plans that were written, by what the page calls them."""
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
        plans[f"products in two, {cut} + {tokens - cut}"] = sent(
            products_in_two_plan(config, tokens, cut, tp)
        )
    return plans


@functools.cache
def gains(name: str) -> dict[str, float]:
    """Of the search's plan ("found") and of those by hand over the sequential step, as they are predicted at
    1024/512.
    """
    (model, tp, tokens, *_), fp8 = CASES[name], name.endswith("fp8")
    config, (widths, dtype) = open_checkpoint(model, load_format="dummy").model_config, KINDS[fp8]
    assert CARD is not None
    sizes, found = range(128, tokens + 1, 128), on_all_sms(load(FOLDER / f"{name}.json"))
    profile = modelled_profile(
        model, config, H200, tp=tp, widths=widths, dtype=dtype, kv_dtype=dtype, keys=KEYS, tokens=sizes
    )
    plain, exchanged = model_graph(config, tp, widths), model_graph(config, tp, widths, swapped=tp == 4)
    fitting = most_decodes(model, config, profile, 1024, 512, tokens, UTILIZATION if fp8 or tp == 4 else 0.95)
    products, step = product_shapes(config, tp), Load.steady_state(tokens, 1024, 512, fitting)
    forms = {
        "kernels": Shares(profile, plain, products),
        "copies": Shares(copies.copied(profile, exchanged, CARD), exchanged, products),
    }
    outside = outside_s(plain, step.part(0, tokens), H200, dtype)
    seconds = {}
    for what, plan in (by_hand(name) | {"found": found}).items():
        own = forms[plan.sums]
        seconds[what] = simulate(plan, own.graph, own, step, device=H200, power=POWER).step_s + outside
    return {what: seconds["sequential"] / took for what, took in seconds.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_at_least_as_fast_as_what_was_written_by_hand(name):
    """As far as the model knows, whether the solver found it or its order was known; and a plan of the model,
    cut where the page says.
    """
    model, tp, _, _, cut = CASES[name]
    plan = load(FOLDER / f"{name}.json")
    compile_plan(
        plan, open_checkpoint(model, load_format="dummy").model_config, tp, quantized=name.endswith("fp8")
    )
    assert cuts_of(plan) == ((cut,) if cut else ())
    found = gains(name)
    best = max(found.values())
    assert found["found"] > best - 1e-9, found


@pytest.mark.parametrize("name", ["llama-3-70b-tp2-fp8", "llama-3-70b-tp4-bfloat16"])
def test_some_are_an_order_by_hand(name):
    """Of Llama-3-70B on two devices the shipped one."""
    found, shipped = (
        load(FOLDER / f"{name}.json"),
        load(SHIPPED / f"h200-{name.replace('fp8', 'float8_e4m3fn')}.json"),
    )
    assert (
        found.name.startswith("two nano-batches")
        and found.nano_ops == by_hand(name)[page_name(found)].nano_ops
    )
    assert (found.nano_ops == shipped.nano_ops) == (name == "llama-3-70b-tp2-fp8")


@pytest.mark.parametrize("name", ["deepseek-67b-tp2-fp8", "qwen2-72b-tp2-fp8"])
def test_what_was_found_is_shipped_where_it_was_the_best_that_was_measured(name):
    found, shipped = (
        load(FOLDER / f"{name}.json"),
        load(SHIPPED / f"h200-{name.replace('fp8', 'float8_e4m3fn')}.json"),
    )
    rows = json.loads((paths.ROOT / "benchmarks" / f"h200-plans-{name}.json").read_text("utf-8"))["plans"]
    for workload in ("1024/512", "512/0"):
        best = min((row for row in rows if row["workload"] == workload), key=lambda row: row["step_ms"])
        assert best["plan"].startswith(found.name) and found.nano_ops == shipped.nano_ops


def test_the_page_has_what_was_predicted_of_them():
    """By the search, of the plans as it left them, with shares of the device beside copies; the table is of
    all SMs.
    """
    names = ("deepseek-67b", "qwen2-72b")
    reports = [
        json.loads((paths.ROOT / "benchmarks" / f"h200-plans-{name}-tp2-fp8.json").read_text("utf-8"))[
            "plans"
        ]
        for name in names
    ]
    rows = [row for report in reports for row in report if row["plan"].startswith("searched")]
    assert [row["workload"] for row in rows] == ["1024/512", "512/0"] * 2
    measured, promised = (
        [f"{row[key]:.3f}" for row in rows] for key in ("against_sequential_of_its_size", "predicted_gain")
    )
    found = [load(FOLDER / f"{name}-tp2-fp8.json") for name in names]
    assert [f"{predicted(plan):.3f}" for plan in found] == promised[::2]
    for plan in found:
        shares = {
            nano.id: nano.sms
            for nano in plan.nano_ops
            if nano.sms and not nano.op.endswith(("norm", "append"))
        }
        assert shares == {"qkv.1": 84, "decode_attention.0": 84, "up_gate.1": 116} and not any(
            nano.stream for nano in plan.nano_ops
        )
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    deepseek, qwen = (f"{measured[at]} and {measured[at + 1]}" for at in (0, 2))
    said = (
        f"{promised[0]} and {promised[1]} at 1024 / 512 and 512 / 0, and {qwen} for Qwen2-72B, predicted "
        f"{promised[2]} and {promised[3]};"
    )
    assert f"{deepseek} for DeepSeek-67B, where the search had predicted {said}" in text
    readme = (paths.ROOT / "README.md").read_text("utf-8")
    assert f"predicted to gain {promised[0]} and {promised[2]} before they were measured" in readme


def test_the_solver_has_the_shipped_order_of_four_devices():
    """In fp8: the second steps of two sums are issued a place earlier, for which the model takes the step for
    a thousandth shorter.
    """
    name, earlier = "llama-3-70b-tp4-fp8", {"attn_reduce.0", "mlp_reduce.1"}
    found, shipped = load(FOLDER / f"{name}.json"), load(SHIPPED / "h200-llama-3-70b-tp4-float8_e4m3fn.json")
    orders = [
        [nano for nano in on_all_sms(plan).nano_ops if nano.id not in earlier] for plan in (found, shipped)
    ]
    assert found.name.startswith("searched") and orders[0] == orders[1]
    assert gains(name)["found"] == pytest.approx(gains(name)["two nano-batches, 2048 + 2048"], abs=1e-3)


def test_of_four_devices_none_was_measured_as_it_was_found():
    """The page says so: no plan that was measured does the same."""
    measured = {digest(load(path)) for path in (FOLDER.parent / "tp4").rglob("*.json")}
    assert len(measured) > 5 and all(
        digest(load(FOLDER / f"{name}.json")) not in measured for name in CASES if "tp4" in name
    )


def test_where_the_step_is_whole_it_is_the_sequential_one_with_its_sums_copied():
    for name, (*_, cut) in CASES.items():
        if not cut:
            assert load(FOLDER / f"{name}.json").nano_ops == by_hand(name)["its sums copied"].nano_ops


def page_name(plan: Plan) -> str:
    """What the page calls a plan that was found."""
    if plan.name.startswith("searched"):
        return f"the solver's, cut at {max(nano.start for nano in plan.nano_ops)}"
    return (
        plan.name.rpartition(", sums ")[0]
        if any(nano.start for nano in plan.nano_ops)
        else "sequential, sums copied"
    )


def table() -> list[str]:
    """The page's rows."""
    lines = []
    for name, (model, tp, tokens, shipped, _) in CASES.items():
        found, hand = gains(name), f"two nano-batches, {shipped} + {tokens - shipped}"
        what = page_name(load(FOLDER / f"{name}.json"))
        cells = (
            model,
            name.rpartition("-")[2],
            str(tp),
            hand,
            f"{found[hand]:.3f}",
            what,
            f"{found['found']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


ASKED = {  # of Llama-3.1-8B by its profile, by file: the words of the command
    "llama-3.1-8b-512": "--sms 40 --cuts 512 --split",
    "llama-3.1-8b-768": "--cuts 768",
    "llama-3.1-8b-256-1024": "--nano_batches 3 --cuts 256,1024",
}


def predicted(plan: Plan) -> float:
    """The gain of the step that it was made for, as its file has it."""
    assert plan.predictions is not None and plan.target is not None
    return Gain.of(plan.predictions).at(plan.target.decode_tokens, plan.target.mean_context_tokens)


def asked_table() -> list[str]:
    """The page's rows of one device."""
    plans = {words: load(FOLDER / f"{file}.json") for file, words in ASKED.items()}
    return [
        f"| `{words}` | {', '.join(map(str, cuts_of(plan)))} | {predicted(plan):.3f} |"
        for words, plan in plans.items()
    ]


def test_at_512_it_has_the_nano_ops_of_the_plan_that_is_shipped_for_one_device():
    """On its streams and SMs, in another order."""
    found, shipped = load(FOLDER / "llama-3.1-8b-512.json"), load(SHIPPED / "h200-llama-3.1-8b-bfloat16.json")
    same = [
        {(nano.id, nano.start, nano.stop, nano.stream, nano.sms) for nano in plan.nano_ops}
        for plan in (found, shipped)
    ]
    assert same[0] == same[1] and found.nano_ops != shipped.nano_ops


def test_the_page_has_what_was_found():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    for name, rows in (("found", table()), ("one device", asked_table())):
        assert (
            text.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0].splitlines()[2:]
            == rows
        )

"""Plans whose sums are copied, as the search finds them by itself, beside those that were written by hand (docs/overlap.md).

The files of benchmarks/plans/searched are what this made in at most ten minutes, with the tokens and dtypes of each:

  python -m search plan --modelled --sums copies --overlap network --model llama-3-70b --gpus 2
"""

import functools

import msgspec
import paths
import pytest

from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, model_graph
from jaxflow.pipeline.handmade import copied, products_in_two_plan, sequential_plan, swapped, two_nano_batch_plan
from jaxflow.pipeline.order import check, graph_of
from jaxflow.pipeline.plan import Plan, load
from search import copies
from search.clock import shipped_card
from search.modelled import modelled_profile
from search.plan import KEYS
from search.predict import outside_s
from search.shares import Shares, product_columns
from search.simulate import simulate
from search.structure import Load

FOLDER = paths.ROOT / "benchmarks" / "plans" / "searched"
H200, POWER, CARD = DEVICES["H200"], shipped_power("H200"), shipped_card("H200")
KINDS = {True: (FP8, "float8_e4m3fn"), False: (BFLOAT16, "bfloat16")}
CASES = {  # by file: model, devices, tokens, where the shipped plan cuts, and where the search does (0: nowhere)
    "llama-3-70b-tp2-fp8": ("llama-3-70b", 2, 2048, 1024, 1024),
    "deepseek-67b-tp2-fp8": ("deepseek-67b", 2, 2048, 1024, 1280),
    "llama-3-70b-tp2-bfloat16": ("llama-3-70b", 2, 1024, 512, 0),
    "qwen2-72b-tp2-bfloat16": ("qwen2-72b", 2, 1024, 512, 0),
    "llama-3-70b-tp4-bfloat16": ("llama-3-70b", 4, 2048, 1024, 512),
    "llama-3-70b-tp4-fp8": ("llama-3-70b", 4, 4096, 2048, 2304),
}
BETTER_BY_HAND = ("llama-3-70b-tp4-fp8",)  # by the model itself: the solver's time was over


def by_hand(name: str) -> dict[str, Plan]:
    """The plans that were written, by what the page calls them."""
    model, tp, tokens, shipped, found = CASES[name]
    config, sent = open_checkpoint(model, load_format="dummy").model_config, copied if tp == 2 else swapped
    plans = {"sequential": sequential_plan(config, tokens, tp), "its sums copied": sent(sequential_plan(config, tokens, tp))}
    for cut in {shipped, found} - {0}:
        plans[f"two nano-batches, {cut} + {tokens - cut}"] = sent(two_nano_batch_plan(config, tokens, cut, tp))
        plans[f"products in two, {cut} + {tokens - cut}"] = sent(products_in_two_plan(config, tokens, cut, tp))
    return plans


def on_all_sms(plan: Plan) -> Plan:
    """Copies need none: a share that the solver chose where nothing was lost by it."""
    return msgspec.structs.replace(plan, nano_ops=tuple(msgspec.structs.replace(nano, sms=None) for nano in plan.nano_ops))


@functools.cache
def gains(name: str) -> dict[str, float]:
    """Of the search's plan ("found") and of those by hand over the sequential step, as they are predicted at 1024/512."""
    (model, tp, tokens, *_), fp8 = CASES[name], name.endswith("fp8")
    config, (widths, dtype) = open_checkpoint(model, load_format="dummy").model_config, KINDS[fp8]
    assert CARD is not None
    sizes, found = range(128, tokens + 1, 128), on_all_sms(load(FOLDER / f"{name}.json"))
    profile = modelled_profile(model, config, H200, tp=tp, widths=widths, dtype=dtype, kv_dtype=dtype, keys=KEYS, tokens=sizes)
    plain, exchanged = model_graph(config, tp, widths), model_graph(config, tp, widths, swapped=tp == 4)
    columns, step = product_columns(config, tp), Load.steady_state(tokens, 1024, 512)
    forms = {"kernels": Shares(profile, plain, columns), "copies": Shares(copies.copied(profile, exchanged, CARD), exchanged, columns)}
    outside = outside_s(plain, step.part(0, tokens), H200, dtype)
    seconds = {}
    for what, plan in (by_hand(name) | {"found": found}).items():
        own = forms[plan.sums]
        seconds[what] = simulate(plan, own.graph, own, step, device=H200, power=POWER).step_s + outside
    return {what: seconds["sequential"] / took for what, took in seconds.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_at_least_as_fast_as_what_was_written_by_hand(name):
    """As far as the model knows; and it is a plan of the model, cut where the page says."""
    model, tp, _, _, cut = CASES[name]
    plan = load(FOLDER / f"{name}.json")
    check(plan, graph_of(plan, open_checkpoint(model, load_format="dummy").model_config, tp))
    assert {nano.start for nano in plan.nano_ops} - {0} == ({cut} if cut else set())
    found = gains(name)
    best = max(found.values())
    assert found["found"] > best - 0.001 if name not in BETTER_BY_HAND else best - 0.06 < found["found"] < best - 0.03, found


def test_on_four_devices_it_is_the_order_that_was_written_by_hand():
    """Cut at 512 instead of 1024: the second step of the first half's sum is issued one nano-op earlier, all else is as by hand."""
    name = "llama-3-70b-tp4-bfloat16"
    found, hand = load(FOLDER / f"{name}.json"), by_hand(name)["two nano-batches, 512 + 1536"]
    plans = [list(on_all_sms(plan).nano_ops) for plan in (found, hand)]
    for nano_ops in plans:
        nano_ops.remove(next(nano for nano in nano_ops if nano.id == "attn_reduce.0"))
    assert plans[0] == plans[1]


def test_where_the_step_is_whole_it_is_the_sequential_one_with_its_sums_copied():
    for name, (*_, cut) in CASES.items():
        if not cut:
            assert load(FOLDER / f"{name}.json").nano_ops == by_hand(name)["its sums copied"].nano_ops


def table() -> list[str]:
    """The page's rows."""
    lines = []
    for name, (model, tp, tokens, shipped, cut) in CASES.items():
        found, hand = gains(name), f"two nano-batches, {shipped} + {tokens - shipped}"
        what = f"cut at {cut}" if cut else "sequential, sums copied"
        cells = (model, name.rpartition("-")[2], str(tp), hand, f"{found[hand]:.3f}", what, f"{found['found']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_page_has_what_was_found():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert text.partition("<!-- found -->\n")[2].partition("\n<!-- /found -->")[0].splitlines()[2:] == table()

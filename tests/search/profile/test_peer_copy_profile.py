"""Sums by copy engines in the search: copies take no SMs, and plans name them."""

import msgspec
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.graph import FP8, model_graph
from jaxflow.pipeline.handwritten import copied as with_copies
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import load
from search.__main__ import main
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.simulate import simulate
from search.profile.clock import shipped_card
from search.profile.modelled import copied, modelled_profile
from search.profile.share_times import ShareTimes, product_shapes

MODEL = open_checkpoint("llama-3-70b", load_format="dummy").model_config
TOKENS, E4M3 = 2048, "float8_e4m3fn"
CARD = shipped_card("H200")
assert CARD is not None


@pytest.fixture(scope="module")
def forms():
    """Return the ShareTimes of both kinds of sums on two H200s."""
    graph = model_graph(MODEL, 2, FP8)
    settings = {"tp": 2, "widths": FP8, "dtype": E4M3, "kv_dtype": E4M3, "tokens": (512, 1024, TOKENS)}
    profile = modelled_profile("llama-3-70b", MODEL, DEVICES["H200"], **settings)
    return [
        ShareTimes(one, graph, product_shapes(MODEL, 2)) for one in (profile, copied(profile, graph, CARD))
    ]


def test_what_is_copied_costs_no_sms_and_about_what_was_measured(forms):
    kernels, copies = forms
    op, step = (
        next(op for op in copies.graph.layers[0] if op.name == "attn_reduce"),
        StepShape.steady_state(1024, 1024, 512).part(0, 1024),
    )
    assert (kernels.copies, copies.copies) == (False, True)
    # Measured in benchmarks/h200/kernels/all-reduce-of-two.json.
    assert copies.seconds(op, step, 132) == pytest.approx(62e-6, rel=0.02)
    load = StepShape.steady_state(TOKENS, 1024, 512)
    two = two_nano_batch_plan(MODEL, TOKENS, TOKENS // 2, 2)
    plans = [(two, kernels), (with_copies(two), copies), (sequential_plan(MODEL, TOKENS, 2), kernels)]
    by_kernels, by_copies, alone = (
        simulate(plan, shares.graph, shares, load).period_s for plan, shares in plans
    )
    assert by_copies < by_kernels and by_copies < alone / 1.05


def test_a_card_whose_copies_nobody_measured(forms):
    card = msgspec.structs.replace(CARD, exchange_s=None)
    with pytest.raises(ValueError, match="sums='copies': how long they take on a H200 is not known"):
        copied(forms[0].profile, forms[0].graph, card)


LINE = [
    "--modelled",
    "--model",
    "llama-3-70b",
    "--tokens",
    "512",
    "--nano_batches",
    "1",
    "--sums",
    "copies",
    "--out",
]


def test_the_command(tmp_path, no_flags, capsys):
    """Search with one nano-batch. Other tests cover the search."""
    assert main(["search", "plan", *LINE, str(tmp_path / "plan.json"), "--gpus", "2"]) == 0
    found = load(tmp_path / "plan.json")
    assert (
        found.name == "sequential, sums copied" and found.sums == "copies" and found.target.parallel.tp == 2
    )


@pytest.mark.parametrize("tp", [4, 8])
def test_of_other_numbers_of_devices(tp, tmp_path, no_flags, capsys):
    """Four devices swap in two steps. Eight devices have no such form."""
    assert main(["search", "plan", *LINE, str(tmp_path / "plan.json"), "--gpus", str(tp)]) == (
        2 if tp == 8 else 0
    )
    if tp == 8:
        assert "sums='copies' is not supported: reduce, scatter: on 8 devices" in capsys.readouterr().err
    else:
        found = load(tmp_path / "plan.json")
        assert found.sums == "copies" and "mlp_swap" in {nano.op for nano in found.nano_ops}

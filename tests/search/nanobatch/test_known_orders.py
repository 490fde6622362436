"""Known orders are valid plans, and a found plan is at least as fast as each of them."""

import dataclasses

import msgspec
import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.graph import FP8, model_graph
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import copied, two_nano_batch_plan
from jaxflow.pipeline.plan import load
from search.__main__ import main
from search.nanobatch import plan as command
from search.nanobatch.cuts import cut_sets
from search.nanobatch.cyclic import SearchError
from search.nanobatch.known_orders import ORDERS, best_known, cuts_of, known_plans, sequential, simulated
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.problem import SearchProblem
from search.nanobatch.stages import FoundPlan
from search.nanobatch.stages import search as solve
from search.profile.clock import shipped_card
from search.profile.modelled import copied as with_exchanges
from search.profile.modelled import modelled_profile
from search.profile.op_times import load_profile, save_profile
from search.profile.share_times import ShareTimes

TOKENS, CUTS = 1024, (384, 512)
CARD = shipped_card("H200")
PROFILE = paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json"


def setting_of(model: str, tp: int, form: str, **rest) -> SearchProblem:
    """Return a search problem with two possible cuts. form: how sums over devices are done."""
    config, dtype = open_checkpoint(model, load_format="dummy").model_config, "float8_e4m3fn"
    profile = modelled_profile(
        model, config, DEVICES["H200"], tp=tp, widths=FP8, dtype=dtype, kv_dtype=dtype,
        tokens=(128, TOKENS), keys=(1024,), sms=(132, 40, 92),
    )  # fmt: skip
    graph = model_graph(config, tp, FP8, scattered=form == "scatter", swapped=form == "copies" and tp == 4)
    profile = with_exchanges(profile, graph, CARD) if form == "copies" and CARD else profile
    return SearchProblem(
        graph,
        ShareTimes(profile, graph),
        StepShape.steady_state(TOKENS, 512, 512),
        DEVICES["H200"],
        places=CUTS,
        **rest,
    )


@pytest.mark.parametrize(
    ("model", "tp", "form", "rest", "names"),
    [
        ("llama-3.1-8b", 1, "reduce", {}, ("sequential", "two nano", "two phases")),
        ("llama-3.1-8b", 2, "reduce", {}, ("sequential", "two nano", "products", "two phases")),
        ("llama-3.1-8b", 2, "scatter", {}, ("sequential", "two nano", "two phases")),
        ("llama-3.1-8b", 2, "copies", {"split": True}, ("two nano", "products", "two phases")),
        ("llama-3.1-8b", 4, "copies", {}, ("sequential", "two nano", "products")),
        ("llama-3.1-8b", 4, "copies", {"overlap": ()}, ("sequential",)),
        ("llama-3.1-8b", 2, "copies", {"overlap": ()}, ("sequential", "waited for")),
        ("llama-3.1-8b", 2, "reduce", {"overlap": ("network",)}, ("sequential", "two nano", "products")),
        ("mixtral-8x7b", 2, "copies", {}, ("sequential", "two nano", "products")),
        ("llama-3.1-8b", 1, "reduce", {"nano_batches": 1}, ("sequential",)),
    ],
)
def test_every_known_order_is_a_plan_of_the_model(model, tp, form, rest, names):
    """The plans cover the allowed orders at every cut, and overlap only allowed resources."""
    setting, config = (
        setting_of(model, tp, form, **rest),
        open_checkpoint(model, load_format="dummy").model_config,
    )
    plans = list(known_plans(config, setting, ORDERS))
    assert {next(name for name in reversed(names) if name in plan.name) for plan in plans} == set(names)
    assert {cuts_of(plan) for plan in plans} <= {(), *((cut,) for cut in CUTS)}
    for plan in plans:
        compile_plan(plan, config, tp, quantized=True)
        assert plan.sums == ("copies" if form == "copies" else "kernels")
        assert any(nano.stream for nano in plan.nano_ops) == ("phases" in plan.name)
        simulated(plan, setting)


def test_the_best_of_them_is_as_the_simulation_says():
    setting, config = (
        setting_of("llama-3.1-8b", 4, "copies"),
        open_checkpoint("llama-3.1-8b", load_format="dummy").model_config,
    )
    best = best_known(config, setting, ORDERS)
    steps = [simulated(plan, setting).step_s for plan in known_plans(config, setting, ORDERS)]
    assert best is not None and best.step_s == min(steps) and sequential(config, setting).step_s == steps[0]
    assert (
        best_known(config, setting, ORDERS, stop_s=0.0).plan.nano_ops
        == sequential(config, setting).plan.nano_ops
    )  # the time limit allows one plan
    assert best_known(config, setting, ()) is None


def test_on_shares_that_were_not_timed_it_is_no_candidate():
    """The shipped profile lacks chunk attention on few SMs."""
    config, setting = (
        open_checkpoint("llama-3.1-8b", load_format="dummy").model_config,
        setting_of("llama-3.1-8b", 1, "reduce"),
    )
    profile = setting.shares.profile
    kept = tuple(
        one for one in profile.op_times if one.op != "chunk_attention" or one.sms == profile.total_sms
    )
    shares = ShareTimes(msgspec.structs.replace(profile, op_times=kept), setting.graph)
    assert best_known(config, setting, ("phases",)) is not None
    assert best_known(config, dataclasses.replace(setting, shares=shares), ("phases",)) is None


def test_cuts_are_where_they_are_asked_for():
    assert cut_sets(setting_of("llama-3.1-8b", 1, "reduce", nano_batches=3)) == [
        (),
        (384,),
        (512,),
        (384, 512),
    ]
    assert cut_sets(setting_of("llama-3.1-8b", 1, "reduce", split=True)) == [(384,), (512,)]
    scattered = dataclasses.replace(
        setting_of("llama-3.1-8b", 4, "scatter"), places=(384, 501, 514), nano_batches=3
    )
    assert cut_sets(scattered) == [(), (384,)]  # rows divide among the devices
    with pytest.raises(SearchError, match="no cut at 501 that divides among 4 devices"):
        cut_sets(dataclasses.replace(scattered, places=(501,), split=True))
    with pytest.raises(SearchError, match="tokens=1023 cannot be scattered: only multiples of the 4 devices"):
        cut_sets(dataclasses.replace(scattered, load=StepShape.steady_state(1023, 512, 512)))


@pytest.mark.parametrize("tokens", [20, 40, 200, 508])
def test_small_steps_of_scattered_rows_are_cut_where_these_divide(tokens):
    """An eighth of a step may not divide among the devices."""
    setting = dataclasses.replace(setting_of("llama-3.1-8b", 4, "scatter", split=True), places=())
    sets = cut_sets(dataclasses.replace(setting, load=StepShape.steady_state(tokens, 512, 512)))
    assert len(sets) >= 4 and not any(cut % 4 for cuts in sets for cut in cuts)


LINE = [
    "--model",
    "llama-3.1-8b",
    "--modelled",
    "--gpus",
    "2",
    "--sums",
    "copies",
    "--overlap",
    "network",
    "--tokens",
    "2048",
]
FP8_LINE = [*LINE, "--dtype", "float8_e4m3fn", "--kv_cache_dtype", "float8_e4m3fn", "--cuts", "1024"]


@pytest.mark.usefixtures("no_flags")
def test_what_is_found_is_not_behind_what_is_known(tmp_path, capsys, monkeypatch):
    """The solver returns the sequential step. The hand-written order wins, and the output says so."""
    whole = lambda setting, **rest: solve(dataclasses.replace(setting, nano_batches=1), **rest)
    monkeypatch.setattr(command, "search", whole)
    line = [*FP8_LINE, "--model", "llama-3-70b", "--orders", "solver,two"]
    assert main(["search", "plan", *line, "--out", str(tmp_path / "found.json")]) == 0
    found, model = (
        load(tmp_path / "found.json"),
        open_checkpoint("llama-3-70b", load_format="dummy").model_config,
    )
    assert found.nano_ops == copied(two_nano_batch_plan(model, 2048, 1024, 2)).nano_ops and not is_sequential(
        found
    )
    assert "a known order: " in capsys.readouterr().out


@pytest.mark.usefixtures("no_flags")
def test_the_name_of_what_is_found_tells_its_cuts(tmp_path, monkeypatch):
    """Plans of one workload with different cuts have different names."""
    by_hand = two_nano_batch_plan(
        open_checkpoint("llama-3.1-8b", load_format="dummy").model_config, 2048, 1536, 2
    )
    solver = lambda _, *, name, **rest: FoundPlan(
        msgspec.structs.replace(by_hand, name=name), 1.0, 1.0, 1.0, 1.0, (1536,)
    )
    monkeypatch.setattr(command, "search", solver)
    assert (
        main(["search", "plan", *FP8_LINE, "--orders", "solver", "--out", str(tmp_path / "found.json")]) == 0
    )
    assert (
        load(tmp_path / "found.json").name == "searched llama-3.1-8b 2048 1024/512, 1536 + 512, sums copied"
    )


@pytest.mark.usefixtures("no_flags")
def test_only_rows_that_divide_among_the_devices_are_scattered(tmp_path):
    """A cut that cannot be scattered uses the other forms. The written plan compiles."""
    line = [*LINE, "--sums", "all", "--tokens", "1000", "--cuts", "501", "--split", "--orders", "two"]
    assert main(["search", "plan", *line, "--out", str(tmp_path / "p.json")]) == 0
    plan, model = load(tmp_path / "p.json"), open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    assert cuts_of(plan) == (501,)
    compile_plan(plan, model, 2, quantized=False)


@pytest.mark.usefixtures("no_flags")
@pytest.mark.parametrize("sums", ["all", "scatter"])
def test_a_row_a_device_is_cut_in_the_other_forms(sums, tmp_path, capsys):
    line = [
        *LINE,
        "--tokens",
        "2",
        "--split",
        "--orders",
        "two",
        "--out",
        str(tmp_path / "p.json"),
        "--sums",
        sums,
    ]
    assert main(["search", "plan", *line]) == (sums == "scatter")
    if sums == "all":
        assert cuts_of(load(tmp_path / "p.json")) == (1,)
    else:
        assert (
            "tokens=2 has no cut at a multiple of 2 that divides among 2 devices" in capsys.readouterr().err
        )


@pytest.mark.usefixtures("no_flags")
@pytest.mark.parametrize("op", ["qkv", "decode_attention"])
def test_a_profile_without_an_op_is_refused_by_its_name(op, tmp_path, capsys):
    """A profile lacks ops after --ops or after a short time limit."""
    whole = load_profile(PROFILE)
    part = msgspec.structs.replace(whole, op_times=tuple(one for one in whole.op_times if one.op != op))
    save_profile(part, tmp_path / "part.json")
    line = [
        "--model",
        "llama-3.1-8b",
        "--profile",
        str(tmp_path / "part.json"),
        "--tokens",
        "512",
        "--out",
        str(tmp_path / "p.json"),
    ]
    assert main(["search", "plan", *line]) == 1
    assert f"op='{op}' on sms=132 was not measured for llama-3.1-8b" in capsys.readouterr().err


@pytest.mark.usefixtures("no_flags")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--orders", "any"], "solver, sequential, two"),
        (["--cuts", "2048"], "1 to 2047"),
        (["--cuts", "501", "--sums", "scatter"], "cuts=501 is not supported: multiples of the 2 devices"),
        (
            ["--tokens", "1001", "--sums", "scatter"],
            "tokens=1001 is not supported: multiples of the 2 devices",
        ),
        (
            ["--orders", "products", "--model", "llama-3.1-8b", "--gpus", "1", "--sums", "reduce"],
            "none of them",
        ),
    ],
)
def test_orders_and_cuts_that_there_are_not(line, words, tmp_path, capsys):
    assert main(["search", "plan", *LINE, *line, "--out", str(tmp_path / "p.json")]) == (
        1 if words == "none of them" else 2
    )
    assert words in capsys.readouterr().err

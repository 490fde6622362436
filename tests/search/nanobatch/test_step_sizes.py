"""Step sizes that `search plan` tries, their shares of the time limit, and the report of them."""

import functools
import itertools
import json
from pathlib import Path

import paths
import pytest

from jaxflow.engine.step_plans import token_buckets
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.plan import load
from search.__main__ import main
from search.nanobatch import plan as command
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.memory_fit import most_decodes
from search.nanobatch.plan import TimeShares
from search.nanobatch.predict import SEARCHED, SIZES, StepSize, line, most_promising
from search.nanobatch.problem import SearchProblem
from search.profile.op_times import load_profile
from search.profile.share_times import ShareTimes

MODEL = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
PROFILE = paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json"
SEQUENTIAL = ["search", "plan", "--profile", str(PROFILE), "--orders", "sequential"]
pytestmark = pytest.mark.usefixtures("no_flags")


@functools.cache
def measured_shares() -> ShareTimes:
    return ShareTimes(load_profile(str(PROFILE), model="llama-3.1-8b"), model_graph(MODEL))


def size_of(tokens: int, prompt: int, output: int) -> StepSize:
    """Return a step size with the measured profile's prediction."""
    shares = measured_shares()
    step = StepShape.steady_state(
        tokens, prompt, output, most_decodes("", MODEL, shares.profile, prompt, output, tokens)
    )
    return StepSize.of(
        MODEL, SearchProblem(shares.graph, shares, step, DEVICES["H200"], shipped_power("H200"))
    )


def test_an_engine_compiles_all_of_them_by_default():
    assert {*SIZES} <= {*token_buckets(2048, sparse=False, seqs=512)}


@pytest.mark.parametrize("lengths", [(512, 512), (512, 1024), (1000, 1000)])
def test_they_rank_as_they_were_measured(lengths):
    """The ranking of 512, 1536 and 2048 tokens equals the measured one."""
    rows = json.loads(
        (paths.ROOT / "benchmarks" / "h200/llama-3.1-8b/plans-bf16-sizes.json").read_text("utf-8")
    )["plans"]
    of_workload = (row for row in rows if row["sequential"] and row["workload"] == "{}/{}".format(*lengths))
    measured = {row["tokens"]: row["tokens_per_s"] for row in of_workload}
    sizes = [size_of(tokens, *lengths) for tokens in measured]
    assert [size.tokens for size in sorted(sizes, key=lambda size: size.tokens_per_s)] == sorted(
        measured, key=measured.__getitem__
    )
    for size in sizes:
        assert size.tokens_per_s == pytest.approx(measured[size.tokens], rel=0.07)


FOURTH = json.loads(
    (paths.ROOT / "benchmarks" / "h200/llama-3.1-8b/plans-bf16-cuts.json").read_text("utf-8")
)["plans"]
LENGTHS = ((1024, 512), (512, 1024), (1000, 1000))


def measured(prompt: int, output: int) -> dict[int, float]:
    """Return measured tokens a second of the sequential steps by step size."""
    return {
        row["tokens"]: row["tokens_per_s"]
        for row in FOURTH
        if row["sequential"] and row["workload"] == f"{prompt}/{output}"
    }


@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_is_kept_was_the_best_and_all_are_predicted(lengths):
    """The predicted best size is the measured best, and each prediction is exact to 3 %.

    Sizes whose measured rates are 2 % apart are predicted in their order. These steps were measured after
    the sizes had been chosen.
    """
    made = measured(*lengths)
    sizes = {tokens: size_of(tokens, *lengths) for tokens in made}
    assert {*SIZES} < {*made} and most_promising([sizes[tokens] for tokens in SIZES])[0].tokens == max(
        made, key=made.__getitem__
    )
    for one, other in itertools.permutations(SIZES, 2):
        if made[one] > 1.02 * made[other]:
            assert sizes[one].tokens_per_s > sizes[other].tokens_per_s
    assert all(size.tokens_per_s == pytest.approx(made[tokens], rel=0.03) for tokens, size in sizes.items())


def test_the_best_are_searched_first():
    sizes = [
        StepSize(512, 0, 20.0, 1 / 20),
        StepSize(1024, 0, 30.0, 1 / 30),
        StepSize(1536, 100, 25.0, 1 / 25),
        StepSize(2048, 600, 30.0, 1 / 30),
    ]
    assert [size.tokens for size in most_promising(sizes)] == [1024, 2048] and SEARCHED == 2
    frugal = [*sizes, StepSize(256, 0, 15.0, 1 / 40)]
    assert [size.tokens for size in most_promising(frugal)] == [1024, 2048, 256]
    assert line(sizes[1:3], sizes[1:2], 1024).endswith(
        "1024 30 (0 padding), 1536 25 (100 padding); plans for 1024; best 1024"
    )


def test_a_piece_may_take_its_part_of_what_those_before_it_left():
    now = [50.0]
    turns = TimeShares(90.0, 3, lambda: now[0])
    assert turns.next_s() == 30.0
    now[0] += 10.0  # the search ended early
    assert turns.next_s() == 40.0
    now[0] += 85.0
    assert turns.next_s() == 1.0 and turns.left == 0


def searched(monkeypatch, folder: Path, *words: str) -> list[tuple[int, float]]:
    """Return (tokens, time limit) of each search that the command starts. No search takes time."""
    begun, solve_one = [], command.solve_one

    def told(*args):
        begun.append((args[4].tokens, args[6]))
        return solve_one(*args)

    monkeypatch.setattr(command, "solve_one", told)
    assert main([*SEQUENTIAL, *words, "--out", str(folder)]) == 0
    return begun


def test_each_search_has_its_part_of_the_time(monkeypatch, tmp_path):
    """The searches share 90 % of the time limit: two sizes for each of two workloads."""
    lengths = ["--prompt_tokens", "1000,512", "--output_tokens", "1000,512", "--time_limit_s", "400"]
    begun = searched(monkeypatch, tmp_path, *lengths)
    assert [tokens for tokens, _ in begun] == [1024, 512, 2048, 1536]
    for (_, limit_s), most_s in zip(begun, (90, 120, 180, 360), strict=True):
        assert 85 < limit_s <= most_s


def test_without_tokens_the_size_that_makes_the_most_is_found_and_said(tmp_path, capsys):
    """At 1000/1000 a step of 2048 tokens has nearly 50 % padding."""
    words = ["--prompt_tokens", "1000", "--output_tokens", "1000", "--out", str(tmp_path / "p.json")]
    assert main([*SEQUENTIAL, *words]) == 0
    (said,) = [text for text in capsys.readouterr().out.splitlines() if "by tokens of a step" in text]
    assert "2048 15,353 (930 padding); plans for 1024 and 512; best 1024" in said
    assert load(tmp_path / "p.json").tokens == 1024


def test_of_one_size_nothing_is_said(tmp_path, capsys):
    assert main([*SEQUENTIAL, "--tokens", "2048", "--out", str(tmp_path / "p.json")]) == 0
    assert "by tokens of a step" not in capsys.readouterr().out and is_sequential(load(tmp_path / "p.json"))


def test_steps_that_could_not_be_cut_where_it_is_asked_are_left_out(tmp_path, capsys):
    assert main([*SEQUENTIAL, "--cuts", "640,1024", "--out", str(tmp_path / "p.json")]) == 0
    assert "tokens of a step: 1536 " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--cuts", "2048"], ["--cuts", "640", "--tokens", "512,2048"]])
def test_cuts_that_no_size_or_not_all_that_were_told_can_have_are_refused(words, tmp_path, capsys):
    assert main([*SEQUENTIAL, *words, "--out", str(tmp_path / "p.json")]) == 2
    assert "within every step" in capsys.readouterr().err

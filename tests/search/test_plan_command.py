"""`python -m search plan`: files that the engine reads, and what it refuses."""

import pytest
from searched import llama_shares

from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.order import check
from jaxflow.pipeline.plan import load
from search.__main__ import main
from search.op_times import Pair, save_profile
from search.shares import Shares, product_columns
from search.structure import Load, chains, make_task, repeated_layer

CONFIG = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config

pytestmark = pytest.mark.usefixtures("no_flags")


def test_a_portfolio_of_a_profile(tmp_path, capsys):
    """Two workloads, a plan each; of two budgets the better. Sequential here: the search itself has tests of its own."""
    save_profile(llama_shares().profile, tmp_path / "h200.json")
    line = ["--profile", str(tmp_path / "h200.json"), "--tokens", "1024,2048", "--nano_batches", "1", "--out", str(tmp_path / "plans")]
    assert main(["search", "plan", *line, "--prompt_tokens", "1024,512", "--output_tokens", "512,512"]) == 0
    out = capsys.readouterr().out
    assert "1024-512.json" in out and "sequential" in out and "joules" in out
    for name, decodes in (("1024-512", 1 / 3), ("512-512", 1 / 2)):
        plan = load(tmp_path / "plans" / f"{name}.json")
        check(plan, model_graph(CONFIG))
        assert plan.tokens in (1024, 2048) and plan.target.decode_tokens == round(plan.tokens * decodes) and plan.target.device == "H200"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--modelled", "--tokens", "few"], "whole numbers"),
        (["--modelled", "--prompt_tokens", "1,2"], "output_tokens"),
        ([], "--modelled"),
        (["--profile", "absent.json"], "absent.json"),
        (["--modelled", "--device", "A100-80GB", "--dtype", "float8_e4m3fn"], "bfloat16"),
        (["--modelled", "--nano_batches", "1", "--split"], "nano_batches"),
    ],
)
def test_what_is_refused_says_what_would_do(line, words, tmp_path, capsys):
    assert main(["search", "plan", *line, "--out", str(tmp_path / "p.json")]) == 1
    assert words in capsys.readouterr().err


def tasks_of(shares):
    graph = model_graph(CONFIG)
    rates, whole = None, Load.steady_state(2048, 1024, 512)
    return {
        chain.names[-1]: make_task(chain, 0, 2048, whole, rates, "bfloat16", ("memory",), False) for chain in chains(repeated_layer(graph))
    }, whole.part(0, 2048)


def test_what_pairs_kept_beside_each_other_decides_their_times():
    """Table 3: D / P for the shares that were measured in pairs."""
    base = llama_shares()
    profile = type(base.profile)(
        **{name: getattr(base.profile, name) for name in base.profile.__struct_fields__}
        | {"pairs": (Pair("up_gate", "decode_attention", 104, 28, 0.75, 0.5),)}
    )
    shares = Shares(profile, base.graph)
    tasks, step = tasks_of(shares)
    found = {option.share: option.seconds for option in shares.options(tasks["decode_attention"], step, 9)}
    assert found[28] == pytest.approx(min(found.values()) / 0.5)


def test_shares_are_told_by_the_waves_they_fill():
    """M = 16 s tokens fill every wave: 104 SMs at 1664 tokens; at 2048 tokens 128 of them would."""
    shares = Shares(llama_shares().profile, model_graph(CONFIG), product_columns(CONFIG, 1))
    assert shares.fill("qkv", 1664, 104) == 1.0 == shares.fill("up_gate", 1664, 104)
    assert shares.fill("qkv", 2048, 128) == 1.0 > shares.fill("qkv", 2048, 132)


def test_more_of_the_device_is_never_slower():
    tasks, step = tasks_of(llama_shares())
    for task in tasks.values():
        options = llama_shares().options(task, step, 9)
        assert [o.share for o in options] == sorted(o.share for o in options)
        assert [o.seconds for o in options] == sorted((o.seconds for o in options), reverse=True)

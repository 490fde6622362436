"""`python -m search plan`: files that the engine reads, and what it refuses."""

from pathlib import Path

import msgspec
import pytest
from searched import llama_shares

from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.order import check
from jaxflow.pipeline.plan import SHIPPED, load
from search.__main__ import main
from search.clocked import Clocks
from search.op_times import PAIR_DECODES, PAIR_TOKENS, Pair, ProfileError, save_profile, seconds
from search.plan import default_out, going_on
from search.shares import Shares, product_columns
from search.structure import Load, chains, make_task, repeated_layer

CONFIG = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config

pytestmark = pytest.mark.usefixtures("no_flags")


def test_a_portfolio_of_a_profile(tmp_path, capsys, monkeypatch):
    """Two workloads, a plan each; of two budgets the better. Sequential here: the search itself has tests of its own."""
    monkeypatch.chdir(tmp_path)
    save_profile(llama_shares().profile, tmp_path / "h200.json")
    line = ["--profile", str(tmp_path / "h200.json"), "--tokens", "1024,2048", "--nano_batches", "1"]
    assert main(["search", "plan", *line, "--prompt_tokens", "1024,512", "--output_tokens", "512,512"]) == 0
    out = capsys.readouterr().out
    assert "1024-512.json" in out and "sequential" in out and "joules" in out
    folder = Path("plans") / "h200-llama-3.1-8b-bfloat16"
    assert f"bench throughput --model llama-3.1-8b --plan {folder} --input_len 1024 --output_len 512" in out.splitlines()[-1]
    for name, decodes in (("1024-512", 1 / 3), ("512-512", 1 / 2)):
        plan = load(folder / f"{name}.json")
        check(plan, model_graph(CONFIG))
        assert plan.tokens in (1024, 2048) and plan.target.decode_tokens == round(plan.tokens * decodes) and plan.target.device == "H200"


def test_what_was_found_is_run_by_the_line_that_is_printed():
    """The plan's kind is the engine's: two devices, weights and cache of 8 bits. Without --out a file is named as the shipped ones are."""
    profile = msgspec.structs.replace(
        llama_shares().profile, model="org/llama-3-70b", tensor_parallel_size=2, dtype="float8_e4m3fn", kv_cache_dtype="float8_e4m3fn"
    )
    out = default_out(profile, several=False)
    assert out == Path("plans/h200-llama-3-70b-tp2-float8_e4m3fn.json") and (SHIPPED / out.name).exists()
    words = going_on(profile, "org/llama-3-70b", out, 512, 0).split()
    assert words[4:] == [
        "--model", "org/llama-3-70b", "--quantization", "fp8", "--kv_cache_dtype", "fp8", "--tensor_parallel_size", "2",
        "--plan", str(out), "--input_len", "512", "--output_len", "1", "--beside_sequential",
    ]  # fmt: skip


def test_shares_that_are_offered():
    base = llama_shares()
    assert base.sizes() == (28, 40, 92, 104, 132)
    tasks, step = tasks_of(base)
    few = Shares(base.profile, base.graph, few=(40,)).at(1.5e9)
    assert few.sizes() == (40, 92, 132)
    offered = {name: [option.share for option in few.options(tasks[name], step, 9)] for name in ("decode_attention", "up_gate")}
    assert offered == {"decode_attention": [40, 132], "up_gate": [92, 132]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--modelled", "--sms", "40,132"], "1 to 131"),
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


def pair(profile, slower: float, clock_mhz: float, op="up_gate", load: float = 1.0) -> Pair:
    """As `search measure` would write it of attention that lasts `load` times as long as the product, both `slower` than alone."""
    here = Clocks(model_graph(CONFIG), profile).at(profile, clock_mhz * 1e6)
    product_s = seconds(here, op, PAIR_TOKENS, 0, 104)
    keys = next(keys for keys in range(1, 4096) if seconds(here, "decode_attention", PAIR_DECODES, keys, 28) >= load * product_s)
    together_s = slower * max(product_s, seconds(here, "decode_attention", PAIR_DECODES, keys, 28))
    best = seconds(profile, op, PAIR_TOKENS, 0, 132), seconds(profile, "decode_attention", PAIR_DECODES, keys, 132)
    return Pair(op, "decode_attention", 104, 28, *(alone / together_s for alone in best), 700.0, clock_mhz)


@pytest.mark.parametrize("load", [0.8, 1.0, 1.2])
def test_what_pairs_lose_beyond_sms_and_clock_is_found_whichever_of_them_ended_first(load):
    """Table 3, of pairs on a grid of loads: the median of the slowdowns; pairs below the keys that were measured say nothing."""
    base = llama_shares()
    drawn = [pair(base.profile, slower, clock, load=load) for slower, clock in ((1.1, 1440.0), (1.2, 1500.0), (1.9, 1700.0))]
    short = Pair("out_proj", "decode_attention", 104, 28, 0.95, 1.0, 700.0, 1980.0)
    shares = Shares(msgspec.structs.replace(base.profile, pairs=(*drawn, short)), base.graph)
    assert shares.beside == pytest.approx(1.2, rel=0.01)
    tasks, step = tasks_of(shares)
    found, alone = ({o.share: o.seconds for o in one.options(tasks["decode_attention"], step, 9)} for one in (shares, base))
    assert found[28] == pytest.approx(1.2 * alone[28], rel=0.01)


def test_a_share_between_those_that_were_timed_has_a_rate_between_theirs():
    shares, step = llama_shares(), Load.steady_state(2048, 1024, 512).part(0, 2048)
    ops = {op.name: op for op in shares.graph.layers[-1]}
    few, between, many = (shares.seconds(ops["decode_attention"], step, sms) for sms in (28, 34, 40))
    assert 1 / between == pytest.approx((1 / few + 1 / many) / 2)
    with pytest.raises(ProfileError, match="sms=8"):
        shares.seconds(ops["decode_attention"], step, 8)


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

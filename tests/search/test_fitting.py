"""What memory holds of a load: decodes that are capped, padding that makes no tokens, models that are refused."""

import json
import math
from pathlib import Path

import msgspec
import paths
import pytest
from searched import llama_shares

from jaxflow.bench.steady import Workload, average_step
from jaxflow.config import ConfigError
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.pipeline.plan import Plan, load
from search.__main__ import main
from search.fitting import most_decodes
from search.structure import Load

LLAMA, LARGE = (open_checkpoint(name, load_format="dummy").model_config for name in ("llama-3.1-8b", "llama-3-70b"))
BF16 = llama_shares().profile
PROFILE = paths.ROOT / "profiles" / "h200-llama-3.1-8b.json"
VARIANTS = paths.ROOT / "benchmarks" / "h200-plans-llama-3.1-8b-variants.json"
pytestmark = pytest.mark.usefixtures("no_flags")


def test_as_many_decode_as_the_largest_batch_has(capsys):
    assert main(["search", "cost", "--model", "llama-3.1-8b", "--prompt_tokens", "1000", "--output_tokens", "1000"]) == 0
    said = capsys.readouterr().out.partition("of which ")[2].partition(" decode")[0]
    assert f"{most_decodes('llama-3.1-8b', LLAMA, BF16, 1000, 1000):.0f}" == said == "635"


def test_a_cache_of_half_the_bytes_holds_twice_the_requests():
    narrow = msgspec.structs.replace(BF16, kv_cache_dtype="float8_e4m3fn")
    assert most_decodes("", LLAMA, narrow, 1000, 1000) == pytest.approx(2 * most_decodes("", LLAMA, BF16, 1000, 1000))


@pytest.mark.parametrize(("device", "output"), [("a device of another make", 1000), ("NVIDIA H200", 0)])
def test_where_nothing_bounds_them_all_may_decode(device, output):
    assert most_decodes("", LLAMA, msgspec.structs.replace(BF16, device=device), 1000, output) == math.inf


def test_a_model_without_room_for_one_request_is_refused_with_the_bytes():
    on_one = msgspec.structs.replace(BF16, device="NVIDIA A100-SXM4-40GB")
    with pytest.raises(ConfigError, match=r"gpus=1 .*llama-3-70b's 141\.1 GB of weights and the 0\.4 GB .* 1 x A100-40GB is 40\.0 GB"):
        most_decodes("llama-3-70b", LARGE, on_one, 1024, 512)
    by_a_request = r"16\.1 GB of weights and the 26\.2 GB that the cache holds of one 200000/0 request"
    with pytest.raises(ConfigError, match=by_a_request):
        most_decodes("llama-3.1-8b", LLAMA, on_one, 200_000, 0)


@pytest.mark.parametrize(("prompt", "output", "most"), [(1000, 1000, 553), (512, 1024, 797), (1024, 512, 644), (512, 512, 1241)])
def test_a_load_is_the_step_that_the_bench_runs(prompt, output, most):
    """Decodes, prefill and what is left of the rows."""
    chunks = math.ceil(2048 * prompt / (prompt + output) / prompt)
    step = average_step(Workload(prompt, output), 2048, most_rows=most + chunks, kv_tokens=10**9, page_size=64)
    held = Load.steady_state(2048, prompt, output, most + 0.9)
    assert (held.decode_tokens, held.real_tokens) == (step.decode_tokens, step.tokens)
    assert held.tokens == 2048 and held.decode_keys == step.decode_keys
    assert (held.padding == 0) == (held == Load.steady_state(2048, prompt, output))


@pytest.mark.parametrize("lengths", [(1000, 1000), (512, 1024)])
def test_of_two_sizes_of_step_the_one_that_was_measured_faster_is_kept(lengths, tmp_path):
    """Not the larger, whose rows are padding to nearly a half: by real tokens."""
    rows = [row for row in json.loads(VARIANTS.read_text("utf-8"))["plans"] if row["workload"] == "{}/{}".format(*lengths)]
    best = max((row for row in rows if row["sequential"]), key=lambda row: row["tokens_per_s"])
    assert planned(lengths, "512,2048", tmp_path).tokens == best["tokens"] == 512


def test_what_is_padding_is_said(tmp_path, capsys):
    target = planned((1000, 1000), "2048", tmp_path).target
    assert target is not None and (target.decode_tokens, target.prefill_tokens) == (635, 635)
    assert "635 of 2048 tokens decode, 778 are padding" in capsys.readouterr().out


def planned(lengths: tuple[int, int], tokens: str, folder: Path) -> Plan:
    """What the command writes for a workload on an H200, of these sizes of step."""
    words = ["--prompt_tokens", str(lengths[0]), "--output_tokens", str(lengths[1]), "--orders", "sequential", "--tokens", tokens]
    assert main(["search", "plan", "--profile", str(PROFILE), *words, "--out", str(folder / "plan.json")]) == 0
    return load(folder / "plan.json")


def test_a_plan_of_a_model_that_does_not_fit_is_not_searched(tmp_path, capsys):
    out = tmp_path / "plan.json"
    line = ["--modelled", "--model", "llama-3-70b", "--gpus", "1", "--orders", "sequential", "--tokens", "128", "--out", str(out)]
    assert main(["search", "plan", *line]) == 1
    said = capsys.readouterr()
    assert "141.1 GB" in said.err and "141.0 GB" in said.err and not said.out and not out.exists()

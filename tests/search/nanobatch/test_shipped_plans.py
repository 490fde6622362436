"""Commands make every shipped plan again: `search plan`, then `search correct` with a report.

  python -m search plan --modelled --model llama-3-70b --gpus 2 --tokens 1024 --sums copies --orders two
  --cuts 512 --out two.json
  python -m search correct --measured_only --by_name --plan two.json
  --report benchmarks/h200/llama-3-70b/plans-tp2-bf16.json --out made.json

One plan comes from a search with another model of the card. `test_correct.py` holds the file before its
correction. Two plans are not shipped, since a smaller sequential step gives more tokens a second
(benchmarks/plans/h200/*/measured).
"""

import msgspec
import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.handwritten import copied, swapped, two_nano_batch_plan
from jaxflow.pipeline.plan import SHIPPED, Predictions, load, save
from search.__main__ import main

BENCHMARKS = paths.ROOT / "benchmarks"
FP8 = ["--dtype", "float8_e4m3fn", "--kv_cache_dtype", "float8_e4m3fn"]
MEASURED = {  # key: shipped file; value: measured plan, reports
    "llama-3-70b-tp2-float8_e4m3fn": ("llama-3-70b/tp2-fp8/two-copied", "h200/llama-3-70b/plans-tp2-fp8"),
    "llama-3-70b-tp2-bfloat16": ("llama-3-70b/tp2-bf16/two-copied", "h200/llama-3-70b/plans-tp2-bf16"),
    "llama-2-70b-tp2-float8_e4m3fn": ("llama-3-70b/tp2-fp8/two-copied", "h200/llama-2-70b/plans-tp2-fp8"),
    "deepseek-67b-tp2-float8_e4m3fn": ("deepseek-67b/searched/tp2-fp8", "h200/deepseek-67b/plans-tp2-fp8"),
    "qwen2-72b-tp2-float8_e4m3fn": ("qwen2-72b/searched/tp2-fp8", "h200/qwen2-72b/plans-tp2-fp8"),
    "qwen2-72b-tp2-bfloat16": ("llama-3-70b/tp2-bf16/two-copied", "h200/qwen2-72b/plans-tp2-bf16"),
    "llama-3-70b-tp4-float8_e4m3fn": ("llama-3-70b/tp4-fp8/two-swapped", "h200/llama-3-70b/plans-tp4-fp8"),
    "llama-3-70b-tp4-bfloat16": ("llama-3-70b/tp4-bf16/two-swapped", "h200/llama-3-70b/plans-tp4-bf16"),
}
NOT_SHIPPED = {"llama-3-70b-tp2-bfloat16", "qwen2-72b-tp2-bfloat16"}  # keys of MEASURED
SEQUENTIAL = {  # key: shipped file; value: flags of `search plan`
    "llama-3.1-8b-float8_e4m3fn": FP8,
    "mixtral-8x7b-tp2-bfloat16": ["--model", "mixtral-8x7b", "--gpus", "2", "--sums", "reduce"],
    "llama-3-70b-tp2-bfloat16": [
        "--model",
        "llama-3-70b",
        "--gpus",
        "2",
        "--tokens",
        "768",
        "--sums",
        "reduce",
    ],
    "qwen2-72b-tp2-bfloat16": [
        "--model",
        "qwen2-72b",
        "--gpus",
        "2",
        "--tokens",
        "768,1024",
        "--sums",
        "reduce",
    ],  # the search keeps 768 tokens
}
SEARCHED = {"llama-3.1-8b-bfloat16"}
pytestmark = pytest.mark.usefixtures("no_flags")


def test_there_are_no_others():
    assert {path.stem for path in SHIPPED.glob("*.json")} == {
        f"h200-{name}" for name in (*MEASURED, *SEQUENTIAL, *SEARCHED)
    }
    measured = (BENCHMARKS / "plans" / "h200").glob("*/measured/*.json")
    assert {f"{path.parent.parent.name}-{path.stem}" for path in measured} == NOT_SHIPPED
    assert MEASURED.keys() & SEQUENTIAL.keys() == NOT_SHIPPED


@pytest.mark.parametrize("name", MEASURED)
def test_it_is_an_order_by_hand_or_found_with_what_was_measured_of_it(name, tmp_path):
    """The shipped plan holds measured gains only, and no prediction."""
    file, *reports = MEASURED[name]
    kept = SHIPPED / f"h200-{name}.json"
    if name in NOT_SHIPPED:
        model, _, kind = name.partition("-tp2-")
        kept = BENCHMARKS / "plans" / "h200" / model / "measured" / f"tp2-{kind}.json"
    plan, made, out = (
        load(BENCHMARKS / "plans" / "h200" / f"{file}.json"),
        load(kept),
        tmp_path / "shipped.json",
    )
    tp, model = (
        made.target.parallel.tp,
        open_checkpoint(made.target.model, load_format="dummy").model_config,
    )
    by_hand = (copied if tp == 2 else swapped)(two_nano_batch_plan(model, plan.tokens, plan.tokens // 2, tp))
    assert plan == by_hand or "/searched/" in file
    save(
        msgspec.structs.replace(plan, target=None, predictions=Predictions((0,), (0,), ((1.0,),), ((2.0,),))),
        tmp_path / "plan.json",
    )
    line = [
        "--plan",
        str(tmp_path / "plan.json"),
        "--report",
        ",".join(str(BENCHMARKS / f"{report}.json") for report in reports),
    ]
    assert main(["search", "correct", "--measured_only", "--by_name", *line, "--out", str(out)]) == 0
    assert out.read_bytes() == kept.read_bytes()


def test_the_search_writes_an_order_by_hand(tmp_path):
    """Run the first command of this module's docstring."""
    kind = [
        "--model",
        "llama-3-70b",
        "--gpus",
        "2",
        "--tokens",
        "1024",
        "--sums",
        "copies",
        "--orders",
        "two",
        "--cuts",
        "512",
    ]
    assert main(["search", "plan", "--modelled", *kind, "--out", str(tmp_path / "two.json")]) == 0
    found = load(tmp_path / "two.json")
    assert found.predictions is not None and found.target is not None
    by_hand = msgspec.structs.replace(found, predictions=None, target=None)
    assert by_hand == load(BENCHMARKS / "plans/h200/llama-3-70b/tp2-bf16/two-copied.json")


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_sequential_one_is_written_by_the_search(name, tmp_path):
    out = tmp_path / "plan.json"
    assert (
        main(["search", "plan", "--modelled", "--orders", "sequential", *SEQUENTIAL[name], "--out", str(out)])
        == 0
    )
    assert out.read_bytes() == (SHIPPED / f"h200-{name}.json").read_bytes()

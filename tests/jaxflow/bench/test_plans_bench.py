"""`bench plans`: the average steps that it runs, and the command on a toy model."""

import dataclasses
import json

import msgspec
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.__main__ import main
from jaxflow.bench.plans import compare as plans_report
from jaxflow.bench.plans.steady import (
    StepWorkload,
    average_step,
    fitting_step,
    page_appends,
    parse_workload,
    rows_of,
    step_work,
)
from jaxflow.config import ConfigError, EngineConfig, ParallelConfig
from jaxflow.engine.layout import SlotSampling, StepLayout, pack
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import Predictions, Target, digest, save
from pallas_kernels.measure.timing import Timing

PAGE, ROWS = 16, 512
LENGTHS = st.integers(1, 2000)


@given(LENGTHS, st.integers(0, 2000), st.integers(16, 2048), st.integers(2, ROWS), st.integers(4, 4000))
def test_an_average_step_fits_and_keeps_the_workloads_balance(prompt, output, tokens, rows, pages):
    workload = StepWorkload(prompt, output)
    step = average_step(workload, tokens, most_rows=rows, kv_tokens=pages * PAGE, page_size=PAGE)
    assert step.tokens <= tokens and step.decode_tokens + len(step.chunks) <= max(rows, len(step.chunks))
    assert all(0 < size <= prompt and 0 <= start <= prompt - size for size, start in step.chunks)
    mean = Composition.steady_state(tokens, prompt, output)
    assert step.decode_tokens <= mean.decode_tokens + 1
    if step.decode_tokens > 20:
        assert step.chunk_tokens == pytest.approx(
            step.decode_tokens * prompt / output, rel=0.2, abs=0.5 + prompt / output
        )
        assert step.decode_keys == mean.decode_keys
    roomy = average_step(workload, tokens, most_rows=tokens, kv_tokens=10**9, page_size=PAGE)
    assert roomy.tokens == tokens and roomy.decode_tokens == round(mean.decode_tokens)


@given(
    st.sampled_from(
        [StepWorkload(200, 90), StepWorkload(64, 0), StepWorkload(50, 200), StepWorkload(33, 0, decodes=40)]
    ),
    st.integers(0, 99),
)
def test_step_work_has_the_composition_of_the_step(workload, seed):
    """Mean context, chunks and rows are as requested.

    Every KV token that a step reads has its own page, except behind a window.
    """
    tokens, windows, pages = 64, (None, 24), (2000, 2000)
    step = average_step(workload, tokens, most_rows=tokens, kv_tokens=10**6, page_size=PAGE)
    layout = StepLayout(tokens, tokens, tokens, PAGE, (20,), 2)
    work = step_work(workload, step, layout, 100, seed)
    assert work.mean_context_tokens == pytest.approx(step.decode_keys, rel=0.1)
    assert len(work.decode_slots) == step.decode_tokens and [
        (c.tokens, c.start) for c in work.chunks
    ] == list(step.chunks)
    fields = layout.views(pack(layout, work, SlotSampling.empty(tokens))[0])
    assert fields["num_decodes"] == step.decode_tokens and (fields["token_rows"] >= 0).sum() == step.tokens
    appends = page_appends(work, pages, windows, PAGE, seed)
    for group, window in enumerate(windows):
        table = {(slot, i): page for g, slot, i, page in appends.tolist() if g == group}
        own = [page for page in table.values() if page]
        assert len(own) == len(set(own)) and max(own) < pages[group]
        for row, length in enumerate(fields["lengths"][: len(work.slots)].tolist()):
            new = work.chunks[row - len(work.decode_slots)].tokens if row >= len(work.decode_slots) else 1
            seen = range(0 if window is None else max(0, length - new - window + 1), length)
            assert all(table[row, place // PAGE] for place in seen)
    larger = step_work(
        workload,
        average_step(workload, 128, most_rows=128, kv_tokens=10**6, page_size=PAGE),
        layout,
        100,
        seed,
    )
    same = min(len(work.decode_slots), len(larger.decode_slots))
    np.testing.assert_array_equal(work.decode_positions[:same], larger.decode_positions[:same])


@pytest.mark.parametrize("text", ["", "1024", "0/5", "4x0", "a/b", "1/2/3"])
def test_a_malformed_workload_is_refused(text):
    with pytest.raises(ConfigError, match="workloads="):
        parse_workload(text)


WORKLOADS = [
    StepWorkload(200, 90),
    StepWorkload(4, 0),
    StepWorkload(200, 0),
    StepWorkload(400, 2),
    StepWorkload(33, 0, decodes=40),
]


@given(st.sampled_from(WORKLOADS), st.integers(1, 64), st.integers(1, 99))
def test_a_step_fits_or_the_error_names_the_limit(workload, rows, pages):
    """The stated memory is sufficient, and less is not."""
    have = {"rows": rows, "pages": pages}
    try:
        step = fitting_step(workload, 64, **have, page_size=PAGE)
        same = average_step(workload, 64, most_rows=rows, kv_tokens=(pages - 1) * PAGE, page_size=PAGE)
        assert 0 < rows_of(step) <= rows and step == same
        page_appends(
            step_work(workload, step, StepLayout(64, 64, 64, PAGE), 100), (pages,), (None,), PAGE
        )  # in pages of the pool
    except ConfigError as error:
        lacked = {"max_num_seqs": "rows", "num_kv_pages": "pages"}[error.field]
        least = int(error.accepted.split()[2].rstrip(","))
        roomy = have | ({"pages": 10**6} if lacked == "rows" else {})
        assert rows_of(fitting_step(workload, 64, **roomy | {lacked: least}, page_size=PAGE))
        with pytest.raises(ConfigError, match=f"{error.field}={least - 1} .* at least {least}, "):
            fitting_step(workload, 64, **roomy | {lacked: least - 1}, page_size=PAGE)


def test_too_small_a_cache_is_refused():
    work = step_work(StepWorkload(100, 100), Composition(4, 150.0), StepLayout(8, 8, 8, PAGE), 100)
    with pytest.raises(ConfigError, match=r"num_kv_pages=20 .* at least "):
        page_appends(work, (20,), (None,), PAGE)


def test_the_command(tmp_path, no_flags, capsys):
    """One plan and the sequential plan on two workloads: the report is consistent."""
    model = str(paths.MODELS / "tiny-llama")
    target = Target("tiny-llama", "cpu", ParallelConfig(), "float32", "float32", 10, 22, 40)
    predicted = Predictions((0, 32), (1, 100), ((0.5, 0.5),) * 2, ((1.0, 1.0),) * 2)
    plan = msgspec.structs.replace(
        two_nano_batch_plan(open_checkpoint(model).model_config, 32, 12), target=target, predictions=predicted
    )
    save(plan, tmp_path / "one.json")
    line = ["--model", model, "--load_format", "dummy", "--plans", str(tmp_path), "--workloads", "24/12,8x30"]
    line += [
        "--num_kv_pages",
        "99",
        "--block_size",
        "16",
        "--seconds",
        "0.02",
        "--output_json",
        str(tmp_path / "out.json"),
    ]
    assert main(["bench", "plans", *line]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    sequential, cut, decodes = result["plans"]
    assert [row["tokens"] for row in result["plans"]] == [32, 32, 8]
    assert sequential["sequential"] and decodes["sequential"] and not cut["sequential"]
    assert (
        cut["decode_tokens"],
        cut["prefill_tokens"],
        decodes["decode_tokens"],
        decodes["prefill_tokens"],
    ) == (11, 21, 8, 0)
    model_config = open_checkpoint(model).model_config
    assert [row["digest"] for row in (sequential, cut, decodes)] == [
        digest(one) for one in (sequential_plan(model_config, 32), plan, sequential_plan(model_config, 8))
    ]
    for row in result["plans"]:
        assert row["tokens_per_s"] == pytest.approx(
            (row["decode_tokens"] + row["prefill_tokens"]) / row["step_ms"] * 1e3
        )
        assert row["fraction_of_optimal"] > 0
    assert cut["against_best_sequential"] == pytest.approx(sequential["step_ms"] / cut["step_ms"])
    assert (sequential["predicted_ms"], cut["predicted_ms"], decodes["predicted_ms"]) == (1000.0, 500.0, None)
    assert cut["prediction_error"] == pytest.approx(500 / cut["step_ms"] - 1)
    (pick,) = result["picks"]
    assert (
        pick["picked"] == cut["plan"]
        and pick["best"] in (cut["plan"], sequential["plan"])
        and pick["best_of_any_size"] == pick["best"]
    )
    assert "24/12: 11 decodes" in capsys.readouterr().out


REPORTS = paths.ROOT / "benchmarks"


def test_a_pick_is_compared_with_plans_without_predictions():
    """DeepSeek-67B's plan cut at 1280 gained 1.019; an order written by hand, without a prediction, gained
    1.045.
    """
    rows = json.loads((REPORTS / "h200/deepseek-67b/plans-tp2-fp8-cut-1280.json").read_text())["plans"]
    sequential, two, searched, copied = rows[:4]
    assert two["sure_gain"] is None and searched["sure_gain"] > 1
    for pick, sizes in zip(
        plans_report.summary(rows)["picks"], ((sequential, two, searched, copied), rows[4:]), strict=True
    ):
        best = max(sizes, key=lambda row: row["tokens_per_s"])
        assert (
            pick["picked"] == searched["plan"]
            and pick["best"] == pick["best_of_any_size"] == two["plan"] == best["plan"]
        )
        assert pick["picked_to_best"] == pick["picked_to_best_of_any_size"] < 0.98


def test_a_pick_is_compared_with_steps_of_other_sizes():
    """By real tokens: at 1000/1000 a step of 2048 is half padding, and the one of 512 was faster."""
    rows = json.loads((REPORTS / "h200/llama-3.1-8b/plans-bf16-variants.json").read_text())["plans"]
    pick = next(pick for pick in plans_report.summary(rows)["picks"] if pick["workload"] == "1000/1000")
    picked = next(row for row in rows if (row["workload"], row["plan"]) == ("1000/1000", pick["picked"]))
    assert (pick["tokens"], pick["best"], pick["picked_to_best"]) == (2048, "sequential, 2048 tokens", 1.0)
    assert pick["best_of_any_size"] == "sequential, 512 tokens"
    assert pick["picked_to_best_of_any_size"] == pytest.approx(picked["against_best_sequential"])
    result = {"plans": rows, "picks": [pick], "mean_prediction_error": None, "left_out": [], "command": ""}
    text = plans_report.text(result | {"made_s": 0.0, "measured_s": 0.0, "num_devices": 1, "device": "toy"})
    assert (
        "with 1.000 of the rate of the best, 'sequential, 2048 tokens', and 0.750 of the best of any size, "
        "'sequential, 512 tokens'."
    ) in text


@pytest.mark.parametrize("name", ["two nano-batches, 12 + 20", "sequential"])
def test_plans_of_one_name_are_refused(tmp_path, no_flags, capsys, name):
    """Two that differ, and one that is named as the sequential one is."""
    model, tp = open_checkpoint(str(paths.MODELS / "tiny-llama")).model_config, 1
    paths_ = [tmp_path / f"{cut}.json" for cut in (12, 16)]
    for cut, path in zip((12, 16), paths_, strict=True):
        save(msgspec.structs.replace(two_nano_batch_plan(model, 32, cut, tp), name=name), path)
    line = [
        "--model",
        str(paths.MODELS / "tiny-llama"),
        "--load_format",
        "dummy",
        "--plans",
        ",".join(map(str, paths_)),
        "--workloads",
        "24/12",
    ]
    assert main(["bench", "plans", *line]) == 1
    assert "name" in (said := capsys.readouterr().err) and name in said


def test_a_damaged_plan_is_refused_by_name(tmp_path, no_flags, capsys):
    """Uncut as it is, it would be left out as the sequential one."""
    model = str(paths.MODELS / "tiny-llama")
    plan = sequential_plan(open_checkpoint(model).model_config, 32)
    save(
        msgspec.structs.replace(plan, name="backwards", nano_ops=plan.nano_ops[::-1]), tmp_path / "plan.json"
    )
    line = [
        "--model",
        model,
        "--load_format",
        "dummy",
        "--plans",
        str(tmp_path / "plan.json"),
        "--workloads",
        "24/12",
    ]
    assert main(["bench", "plans", *line]) == 1
    assert capsys.readouterr().err.startswith("error: backwards: down: reads")


def test_a_truncated_model_has_a_predicted_gain_and_no_predicted_time():
    target = Target("llama-3.1-8b", "NVIDIA H200", ParallelConfig(), "bfloat16", "bfloat16", 10, 22, 40)
    predicted = Predictions((0, 32), (1, 100), ((0.5, 0.5),) * 2, ((1.0, 1.0),) * 2)
    model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    plan = msgspec.structs.replace(two_nano_batch_plan(model, 32, 12), target=target, predictions=predicted)
    for layers, ms in ((32, 500.0), (4, None)):
        cut = dataclasses.replace(model, layers=model.layers[:layers])
        found = plans_report._prediction(
            plan, {32: plan}, cut, Composition(10, 40.0), Timing(5e5, 0.0, None, None, None, 1.0)
        )
        assert found["predicted_ms"] == ms and found["predicted_gain"] == 2.0
        assert found["prediction_error"] == (0.0 if ms else None)


def test_fractions_of_an_h200s_optimum_and_bound(monkeypatch):
    """The four-resource bound of the step, on the device's own figures."""
    monkeypatch.setattr(
        plans_report.jax, "devices", lambda: [type("Device", (), {"device_kind": "NVIDIA H200"})()]
    )
    config = EngineConfig("llama-3.1-8b", dtype="bfloat16", kv_cache_dtype="bfloat16")
    model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    found = plans_report._optimum(config, model, Composition.steady_state(2048, 1024, 512), 1, 28_000.0)
    assert (
        found["binding"] == "energy" and 0.4 < found["fraction_of_optimal"] < found["fraction_of_bound"] < 1
    )

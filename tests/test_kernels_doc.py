"""docs/kernels.md has the figures of the committed reports of kernels."""

import json
import math

import paths
import pytest

FOLDER = paths.ROOT / "benchmarks"
DOC = (paths.ROOT / "docs" / "kernels.md").read_text("utf-8")
ROWS = {(row["group"], row["case"]): row for row in json.loads((FOLDER / "h200-kernels.json").read_text("utf-8"))["rows"]}
OVER = [f"2048 over {context}" for context in (0, 2048, 8192, 32768)]
MIXES = ["256 x mean 1024", "256 x mean 4096", "1 x 131072", "131072 + 200 x 512", "64 x 1100"]


def line(start):
    """The row that begins so, of what was wanted and reached."""
    return next(line for line in DOC.split("## What was wanted")[1].splitlines() if line.startswith(start))


def of(group, way, cases, form):
    """A way's rates in these cases, in 10**12 a second, as the table has them."""
    return " / ".join(format(ROWS[group, case]["ways"][way]["rate"] / 1e12, form) for case in cases)


def beside(group, rival, cases, digits=2):
    return " / ".join(f"{ROWS[group, case]['ratios'][rival]:.{digits}f}" for case in cases)


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def means(group, rival, rows):
    """Geometric means over the cases of so many rows."""
    ending = [[row["ratios"][rival] for (name, case), row in ROWS.items() if name == group and case.endswith(f" M {m}")] for m in rows]
    return " / ".join(f"{mean(ratios):.2f}" for ratios in ending)


@pytest.mark.parametrize(
    ("start", "figures"),
    [
        ("| decode attention, 256 rows", [of("decode_attention", "bf16", MIXES[:2], ".2f"), beside("decode_attention", "jax", MIXES[:2])]),
        ("| the same, e4m3: mean", [of("decode_attention_fp8", "fp8", MIXES, ".2f"), beside("decode_attention_fp8", "bf16", MIXES)]),
        ("| chunk attention, 2048", [of("chunk_attention", "bf16", OVER, ".0f"), beside("chunk_attention", "cudnn", OVER)]),
        ("| the same with φ | 464", [of("chunk_unified", "unified", OVER, ".0f"), beside("chunk_unified", "bf16", OVER)]),
        ("| the same in e4m3 | 536", [of("chunk_attention_fp8", "fp8", OVER, ".0f"), beside("chunk_attention_fp8", "bf16", OVER)]),
        ("| 8 chunks of 256", [beside("chunk_attention", "cudnn", ["8 x 256 over 0"])]),
        ("| flat, 1 / 16 / 64 rows", [means("flat_gemm", "xla", (1, 16, 64))]),
        ("| int4, 1 row", [means("int4_gemm", "flat", (1, 16))]),
    ],
)
def test_a_row_of_the_table_has_the_reports_figures(start, figures):
    assert all(figure in line(start) for figure in figures), figures


def test_few_sms_are_in_the_table():
    groups = [[row["ratios"]["dense, 132"] for (name, _), row in ROWS.items() if name == f"dense_gemm_{sms}"] for sms in (104, 112, 120)]
    assert " / ".join(f"{mean(ratios):.3f}" for ratios in groups) in line("| dense on 104")


def test_a_goal_of_e4m3_decodes_that_was_missed_is_said_to_be():
    assert not any(ROWS["decode_attention_fp8", case]["reached"] for case in MIXES)
    assert "| 1.8: missed" in line("| the same, e4m3: mean")


def test_the_runs_of_one_long_row_are_told():
    """The same kernel in five groups of the report; the goal is 4.2 TB/s."""
    case = "131072 + 200 x 512"
    groups = ("decode_attention", "decode_attention_fp8", "decode_unified", "decode_attention_int8", "decode_attention_triton")
    rates = [ROWS[group, case]["ways"]["bf16"]["rate"] / 1e12 for group in groups]
    assert sum(rate >= 4.2 for rate in rates) == 4
    assert f"4.2: reached in four of five runs ({min(rates):.2f} to {max(rates):.2f};" in line("| one of 131,072")


def test_the_checks_are_counted():
    report = json.loads((FOLDER / "h200-kernel-checks.json").read_text("utf-8"))
    now, earlier = (sum(map(len, report[part].values())) for part in ("checks", "earlier"))
    assert f"{now} checks in [h200-kernel-checks.json]" in DOC and f"`earlier` has {earlier} cases" in DOC
    assert all("ok=True" in one for part in ("checks", "earlier") for cases in report[part].values() for one in cases)


SAME = ("every part written and counted", "pages only copied", "pages in the L2")  # called in the table as in the report


def test_stages_of_an_e4m3_decode_are_in_their_table():
    rows = json.loads((FOLDER / "h200-stages.json").read_text("utf-8"))["rows"]
    us = {(row["what"], row["case"]): f"{row['us']:.1f}" for row in rows if row["kernel"] == "decode_attention"}
    for said, what in (("as it is", "whole"), ("parts of cut pairs not added up", "parts not added up"), *((same, same) for same in SAME)):
        assert f"| {said} | {us[what, MIXES[0]]} | {us[what, MIXES[1]]} |" in DOC


def test_products_with_a_stage_left_out_are_in_their_table():
    rows = json.loads((FOLDER / "h200-stages.json").read_text("utf-8"))["rows"]
    for row in rows:
        if row["kernel"] == "dense_gemm" and row["what"] == "whole":
            name = f"{row['model'].replace('/tp', ' / ')} `{row['op']}`, {row['m']:,} rows"
            assert f"| {name} | {row['us']:.1f}, {row['mhz']:.0f} |" in DOC, name


def test_nothing_that_a_run_wrote_names_a_folder_of_its_machine():
    for path in (FOLDER / "h200-kernels.json", FOLDER / "h200-stages.json", paths.ROOT / "pallas_kernels/tables/nvidia-h200.json"):
        assert "/tmp/" not in path.read_text("utf-8"), path.name

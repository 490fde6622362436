"""docs/kernels.md has the figures of the committed reports of kernels."""

import json
import math

import paths
import pytest

FOLDER = paths.ROOT / "benchmarks"
DOC = (paths.ROOT / "docs" / "kernels.md").read_text("utf-8")
ROWS = {
    (row["group"], row["case"]): row
    for row in json.loads((FOLDER / "h200-kernels.json").read_text("utf-8"))["rows"]
}
OVER = [f"2048 over {context}" for context in (0, 2048, 8192, 32768)]
EACH = (2048, 1024, 512, 256)  # rows
UP_GATE = [f"{model} up_gate M 2048" for model in ("8B", "70B/tp4")]
GATED = [f"8B up_gate M {m}" for m in sorted(EACH)]
LAYERS = [f"M {m}" for m in (1024, 2048)]
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


def means(group, rival, rows, without="none"):
    """Geometric means over the cases of so many rows, but for one op's."""
    cases = {
        case: row["ratios"] for (name, case), row in ROWS.items() if name == group and without not in case
    }
    return " / ".join(
        f"{mean([ratios[rival] for case, ratios in cases.items() if case.endswith(f' M {m}')]):.2f}"
        for m in rows
    )


def spread(lines):
    """The least and the most of some ratios, as the table has them."""
    return f"{min(lines):.2f} to {max(lines):.2f}"


@pytest.mark.parametrize(
    ("start", "figures"),
    [
        (
            "| decode attention, 256 rows",
            [of("decode_attention", "bf16", MIXES[:2], ".2f"), beside("decode_attention", "jax", MIXES[:2])],
        ),
        (
            "| the same, e4m3: mean",
            [of("decode_attention_fp8", "fp8", MIXES, ".2f"), beside("decode_attention_fp8", "bf16", MIXES)],
        ),
        (
            "| chunk attention, 2048",
            [of("chunk_attention", "bf16", OVER, ".0f"), beside("chunk_attention", "cudnn", OVER)],
        ),
        (
            "| the same with φ | 463",
            [of("chunk_unified", "unified", OVER, ".0f"), beside("chunk_unified", "bf16", OVER)],
        ),
        (
            "| the same in e4m3 | 534",
            [of("chunk_attention_fp8", "fp8", OVER, ".0f"), beside("chunk_attention_fp8", "bf16", OVER)],
        ),
        ("| 8 chunks of 256", [beside("chunk_attention", "cudnn", ["8 x 256 over 0"])]),
        ("| with φ", [beside("decode_fp8_unified", "fp8", MIXES, 3)]),
        (
            "| dense, bare",
            [
                of("dense_gemm", "dense", UP_GATE, ".0f").replace(" / ", " and "),
                means("dense_gemm", "xla", EACH),
            ],
        ),
        (
            "| dense with its gate",
            [of("dense_gemm_gated", "dense", GATED, ".0f"), beside("dense_gemm_gated", "xla", GATED)],
        ),
        (
            "| fp8, scales included",
            [f"{of('fp8_gemm', 'fp8', [case], ',.0f')}" for case in UP_GATE]
            + [means("fp8_gemm", "xla", EACH, without="down")],
        ),
        ("| a layer's", [f"{of(f'layer_{kind}', 'ours', LAYERS, ',.0f')}" for kind in ("bf16", "fp8")]),
        ("| a layer's", [f"{beside(f'layer_{kind}', 'xla', LAYERS)}" for kind in ("bf16", "fp8")]),
        ("| flat, 1 / 16 / 64 rows", [means("flat_gemm", "xla", (1, 16, 64))]),
        ("| int4, 1 row", [means("int4_gemm", "flat", (1, 16))]),
    ],
)
def test_a_row_of_the_table_has_the_reports_figures(start, figures):
    assert all(figure in line(start) for figure in figures), figures


def test_few_sms_are_in_the_table():
    groups = [
        [row["ratios"]["dense, 132"] for (name, _), row in ROWS.items() if name == f"dense_gemm_{sms}"]
        for sms in (104, 112, 120)
    ]
    assert " / ".join(f"{mean(ratios):.3f}" for ratios in groups) in line("| dense on 104")


def test_a_goal_of_e4m3_decodes_that_was_missed_is_said_to_be():
    assert not any(ROWS["decode_attention_fp8", case]["reached"] for case in MIXES)
    assert "| 1.8: missed" in line("| the same, e4m3: mean")


def test_the_runs_of_one_long_row_are_told():
    """The same kernel in five groups of the report; the goal is 4.2 TB/s."""
    case = "131072 + 200 x 512"
    groups = (
        "decode_attention",
        "decode_attention_fp8",
        "decode_unified",
        "decode_attention_int8",
        "decode_attention_triton",
    )
    rates = [ROWS[group, case]["ways"]["bf16"]["rate"] / 1e12 for group in groups]
    assert sum(rate >= 4.2 for rate in rates) == 4
    assert f"4.2: reached in four of five runs ({min(rates):.2f} to {max(rates):.2f};" in line(
        "| one of 131,072"
    )


def test_the_checks_are_counted():
    report = json.loads((FOLDER / "h200-kernel-checks.json").read_text("utf-8"))
    now, earlier = (sum(map(len, report[part].values())) for part in ("checks", "earlier"))
    assert f"{now} checks in [h200-kernel-checks.json]" in DOC and f"`earlier` has {earlier} cases" in DOC
    assert all(
        "ok=True" in one for part in ("checks", "earlier") for cases in report[part].values() for one in cases
    )


def test_the_checks_of_each_kernel_are_told_as_they_are():
    """How many, and how far from the float32 twin: the sections of kernels had those of builds before."""
    checks = json.loads((FOLDER / "h200-kernel-checks.json").read_text("utf-8"))["checks"]

    def of(group, *words, without="out_dtype"):
        cases = [one for one in checks[group] if all(word in one for word in words) and without not in one]
        errors = [float(one.partition(" error=")[2].split()[0]) for one in cases]
        return len(cases), *(
            f"{end(error for error in errors if error):.1e}".replace("e-0", "e-") for end in (min, max)
        )

    assert (
        f"{len(checks['dense_gemm'])} products, M 1 to 280,000" in DOC
        and "errors of {1} to {2} in norm".format(*of("dense_gemm")) in DOC
    )
    flat = of("flat_gemm", "flat_gemm ")
    assert (
        f"{flat[0] + 1} products (M 1 to 64" in DOC and f"errors of {flat[1]} to {flat[2]} in norm" in DOC
    )  # and one of float32
    assert f"{len(checks['fp8_gemm'])} cases ([json]" in DOC
    assert "{1} to {2} where they are not".format(*of("fp8_gemm", "scales=row", without="quantize")) in DOC
    assert len(checks["grouped_gemm"]) == 9 and "nine checks on an H200" in DOC
    assert of("grouped_gemm")[2] == "1.7e-3"
    assert "{1} to {2}, and at most".format(*of("attention", "float8")) in DOC
    assert "at most {2})".format(*of("attention", "bfloat16")) in DOC
    assert "{} checks within {} to {} of".format(*of("attention", "int8")) in DOC
    assert "error of {1} to {2} must be; {0} checks".format(*of("chunk", "int8")) in DOC


def test_the_rows_that_are_short_are_named():
    """A way's time is measured for 0.6 s, but where the page says so."""
    short = [key for key, row in ROWS.items() if min(way["seconds"] for way in row["ways"].values()) < 0.48]
    products = {key for key in short if key[0] in ("dense_gemm", "fp8_gemm")}
    assert all(
        case.endswith(" M 256") and " up_gate " not in case and " down " not in case for _, case in products
    )
    assert len(products) == 7 and "seven products of 256 rows" in DOC
    assert {group for group, _ in short if (group, _) not in products} == {
        *("ceiling_gemm", "decode_attention_int8", "decode_attention_triton", "flat_gemm_triton")
    }
    timed = [row for (group, _), row in ROWS.items() if group.startswith(("dense_gemm", "fp8_"))]
    apart = [max(way["spread"] for way in row["ways"].values()) for row in timed]
    counted = (
        f"Windows of one way lie 5 % apart or more in {sum(one >= 0.05 for one in apart)} of the "
        f"{len(timed)} cases"
    )
    assert (
        counted in DOC
        and [one >= 0.1 for one in apart].count(True) == 1
        and f"({max(apart):.0%}".replace("%", " %, XLA's") in DOC
    )


def test_the_card_of_the_products_is_told_by_its_read():
    other = json.loads((FOLDER / "settings" / "h200-kernels-ceilings-other-card.json").read_text("utf-8"))[
        "rows"
    ]
    reads = [rows["ways"]["read"]["rate"] / 1e12 for rows in (other[0], ROWS["ceilings", "read 2 GiB"])]
    told = DOC.split("| kernel | ours |")[0]
    assert (
        f"{reads[0]:.2f} TB/s ([its ceilings]" in told
        and f"whose ceilings stand in the report reads {reads[1]:.2f}" in told
    )


def test_down_in_fp8_is_told_beside_each_rival():
    cases = {
        case: row["ratios"] for (group, case), row in ROWS.items() if group == "fp8_gemm" and " down " in case
    }
    row = line("| fp8 `down`")
    assert f"{spread([ratios['xla'] for ratios in cases.values()])} of XLA's with a scale a token" in row
    low, high = (
        f"{end(ratios['xla, scales of 128'] for ratios in cases.values()):.1f}" for end in (min, max)
    )
    assert f"{low} to {high} of cuBLAS' with the same scales" in row
    rules = json.loads((paths.ROOT / "pallas_kernels" / "tables" / "nvidia-h200.json").read_text("utf-8"))[
        "rules"
    ]
    of_rows = {}
    for rule in rules:
        if rule["shape"]["scales"] == "blocks" and (rule["shape"]["n"], rule["shape"]["k"]) in (
            (4096, 14336),
            (8192, 7168),
        ):
            for one in rule["measured"]:
                of_rows.setdefault(one["rows"], []).append(
                    one["us"]["xla"] / min(us for kernel, us in one["us"].items() if kernel != "xla")
                )
                assert one.get("xla") == "cublas or triton" or one["rows"] in (
                    1,
                    2,
                    4,
                    16,
                    32,
                )  # of a build that did not say, and had the choice
    many, few, least = (
        spread([ratio for rows, ratios in of_rows.items() if low <= rows <= high for ratio in ratios])
        for low, high in ((256, 2048), (8, 128), (1, 4))
    )
    assert f"{many} at 256 to 2048 rows, {few} at 8 to 128" in row and f"(1 to 4 rows: {least})" in row
    measured = next(
        rule["measured"]
        for rule in rules
        if rule["shape"]["scales"] == "blocks" and rule["shape"]["k"] == 14336 and rule["shape"]["n"] == 4096
    )
    short = lambda us: format(us, ".1f" if us < 100 else ".0f")
    times = [one["us"] for one in measured if one["rows"] not in (1, 2, 4, 16, 32)]
    pairs = [
        f"{short(min(us for kernel, us in one.items() if kernel != 'xla'))} / {short(one['xla'])}"
        for one in times
    ]
    assert f"| down in fp8, a scale for 128 columns | {' | '.join(pairs)} |" in DOC


def test_the_kernels_of_a_step_over_a_random_cache_are_in_their_table():
    us = {}
    for precision in ("bf16", "fp8"):
        for step in json.loads((FOLDER / f"h200-decode-step-{precision}.json").read_text("utf-8"))["steps"]:
            for kernel in step["profiles"]["one by one"]["kernels"]:
                us[precision, step["requests"], kernel["kernel"]] = kernel["us"] / 32
    table = DOC.split("| requests at 1,100 keys |")[1].split("\n\n")[0]
    cells = [
        [cell.strip().split(",")[0].split(" with")[0] for cell in row.split("|")[2:-1:2]]
        for row in table.splitlines()
        if row.startswith("| ")
    ]
    products = {
        "`up_gate`": "28672x4096",
        "`down`": "4096x14336",
        "`qkv`": "6144x4096",
        "`out_proj`": "4096x4096",
    }
    for name, row in zip(
        [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")], cells, strict=True
    ):
        if name in products:
            flat = [
                (p, n, f"{'fp8_' * (p == 'fp8')}flat_gemm_{max(n, 8)}x{products[name]}")
                for p in ("bf16", "fp8")
                for n in (1, 64)
            ]
            assert [row[0], row[1], row[3], row[4]] == [f"{us[key]:.1f}" for key in flat], name
        if name == "decode attention":
            assert row == [
                f"{us[p, n, 'decode_attention_132']:.1f}" for p in ("bf16", "fp8") for n in (1, 64, 256)
            ]


def test_steps_that_begin_early_are_told_beside_their_graph():
    ms = {}
    for precision in ("bf16", "fp8"):
        for step in json.loads((FOLDER / f"h200-decode-step-{precision}.json").read_text("utf-8"))["steps"]:
            for way, t in step["ways"].items():
                ms[precision, step["requests"], way] = f"{t['us'] / 1e3:.2f}"
    graph, early, chunks = (
        {key[:2]: one for key, one in ms.items() if key[2] == way}
        for way in ("graph", "early", "graph and chunks")
    )
    pair = lambda precision, n: f"{graph[precision, n]} to {early[precision, n]}"
    assert (
        f"{pair('bf16', 1)} ms for one request, {pair('bf16', 64)} for 64; in fp8 {pair('fp8', 1)} "
        f"and {pair('fp8', 64)}"
    ) in DOC
    least = [f"{graph[precision, 256]} and {early[precision, 256]}" for precision in ("bf16", "fp8")]
    assert f"it gains nothing ({', '.join(least)} ms" in DOC
    few = [
        " and ".join(of[precision, n] for n in (1, 64))
        for precision in ("bf16", "fp8")
        for of in (chunks, graph)
    ]
    assert f"took {few[0]} ms with it and {few[1]} without" in DOC and f"(fp8 {few[2]}, {few[3]};" in DOC
    assert f"({early['bf16', 1]} / {early['bf16', 64]} / {float(graph['bf16', 256]):.1f})" in line(
        "| step of 1 / 64 / 256"
    )
    assert f"({graph['fp8', 1]} / {graph['fp8', 64]} / {float(graph['fp8', 256]):.1f})" in line(
        "| the same in fp8 with fp8 KV"
    )


def test_what_a_layer_can_gain_is_told():
    """By XLA's four products of the report, at 2,048 rows and at 1,024."""
    layers = {m: ROWS["layer_bf16", f"M {m}"]["ways"] for m in (2048, 1024)}
    bare = {
        m: sum(
            ROWS["dense_gemm", f"8B {op} M {m}"]["ways"]["xla"]["us"]
            for op in ("qkv", "out_proj", "up_gate", "down")
        )
        for m in layers
    }
    xla, ours = ({m: ways[way]["us"] for m, ways in layers.items()} for way in ("xla", "ours"))
    assert (
        f"take {bare[2048]:,.0f} of its layer's {xla[2048]:,.0f} µs at 2,048 rows, and "
        f"{bare[1024]:.0f} of {xla[1024]:.0f} at 1,024"
    ) in DOC
    gains = [xla[m] / base[m] for base in (bare, ours) for m in (2048, 1024)]
    assert "would gain {:.3f} and {:.3f}; ours gains {:.3f} and {:.3f}".format(*gains) in DOC
    assert f"({ours[2048]:,.0f} and {ours[1024]:.0f} µs" in DOC


SAME = (
    "every part written and counted",
    "pages only copied",
    "pages in the L2",
)  # called in the table as in the report


def test_stages_of_an_e4m3_decode_are_in_their_table():
    rows = json.loads((FOLDER / "h200-stages.json").read_text("utf-8"))["rows"]
    us = {
        (row["what"], row["case"]): f"{row['us']:.1f}" for row in rows if row["kernel"] == "decode_attention"
    }
    for said, what in (
        ("as it is", "whole"),
        ("parts of cut pairs not added up", "parts not added up"),
        *((same, same) for same in SAME),
    ):
        assert f"| {said} | {' | '.join(us[what, case] for case in MIXES)} |" in DOC


def test_parts_added_up_by_groups_are_told_beside_one_worker():
    rows = json.loads((FOLDER / "settings" / "h200-stages-decode-groups.json").read_text("utf-8"))["rows"]
    us = {(row["what"], row["case"]): f"{row['us']:.1f}" for row in rows}
    whole, one, none = ("whole", "added up by one worker", "parts not added up")
    long, beside = MIXES[2:4]
    assert (
        f"takes {us[whole, long]} µs for {us[one, long]},\n  and {us[none, long]} if nothing is added up"
        in DOC
    )
    assert f"where a pair has 40 parts, {us[whole, beside]} for {us[one, beside]}." in DOC
    runs = json.loads((FOLDER / "settings" / "h200-kernels-attention-other-card.json").read_text("utf-8"))[
        "rows"
    ]
    before = json.loads((FOLDER / "settings" / "h200-kernels-attention-earlier.json").read_text("utf-8"))[
        "rows"
    ]
    bf16 = lambda rows, case: sorted(
        row["ways"]["bf16"]["us"] for row in rows if row["case"] == case and "bf16" in row["ways"]
    )
    ends = lambda us: f"{us[0]:.1f} to {us[-1]:.1f}"
    one_worker = [
        ROWS[group, beside]
        for group in ("decode_attention", "decode_attention_fp8", "decode_unified", "decode_attention_triton")
    ]
    assert len(bf16(runs, beside)) == 3 and f"({ends(bf16(runs, beside))} µs in three windows" in DOC
    assert f"one worker's sums had taken {ends(bf16(one_worker, beside))})" in DOC
    now, then = bf16(runs, long), bf16(before, long)
    assert f"({now[0]:.1f} and {now[-1]:.1f} µs for {ends(then)})" in DOC


def test_products_with_a_stage_left_out_are_in_their_table():
    rows = json.loads((FOLDER / "h200-stages.json").read_text("utf-8"))["rows"]
    for row in rows:
        if row["kernel"] == "dense_gemm" and row["what"] == "whole":
            name = f"{row['model'].replace('/tp', ' / ')} `{row['op']}`, {row['m']:,} rows"
            assert f"| {name} | {row['us']:.1f}, {row['mhz']:.0f} |" in DOC, name


def test_products_on_few_sms_with_a_stage_left_out_are_in_their_table():
    """Windows that lie 4 % apart or more have that beside them."""
    rows = json.loads((FOLDER / "h200-stages.json").read_text("utf-8"))["rows"]
    cases = {(row["op"], row["m"], row["what"]): row for row in rows if row["kernel"] == "dense_gemm_104"}
    told = lambda row: (
        f"{row['of_whole']:.2f}" + (f" ({row['spread'] * 100:.0f} %)" if row["spread"] >= 0.04 else "")
    )
    for (op, m, what), row in cases.items():
        if what == "whole":
            left = " | ".join(
                told(cases[op, m, other]) for other in ("parts not added up", "nothing read", "xla")
            )
            assert f"| `{op}`, {m:,} rows | {row['us']:.1f}, {row['mhz']:.0f} | {left} |" in DOC


def test_pieces_by_the_speed_of_sms_are_told_as_they_were_timed():
    settings = FOLDER / "settings" / "h200-decode-sm-shares-by-smid.json"
    us = {
        (row["case"], row["cache"], way): f"{row[way]['us']:,.1f}"
        for row in json.loads(settings.read_text("utf-8"))["timings_us"]
        for way in row
        if way not in ("case", "cache")
    }
    both = lambda case, cache: [us[case, cache, way] for way in ("equal", "weighted, by SM")]
    one, many, long, few = MIXES[0], MIXES[1], MIXES[3], MIXES[4]
    in_bf16 = "{} to {} µs at mean 1024, {} to {} at 4096, {} to {} for one long beside 200"
    assert in_bf16.format(*both(one, "bf16"), *both(many, "bf16"), *both(long, "bf16")) in DOC
    assert "nothing for 64 rows ({}, {})".format(*both(few, "bf16")) in DOC
    assert "; ".join(", ".join(both(case, "fp8")) for case in (one, many, long)) in DOC
    ratios = [
        float(us[case, "bf16", "equal"].replace(",", "")) / float(us[case, "fp8", "equal"])
        for case in (one, many, long, few)
    ]
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} times its tokens/s there".format(*ratios) in DOC


def test_nothing_that_a_run_wrote_names_a_folder_of_its_machine():
    settings = [
        f"h200-{name}.json"
        for name in ("kernels-ceilings-other-card", "stages-decode-other-card", "decode-sm-shares-by-smid")
    ]
    reports = [f"h200-{name}.json" for name in ("kernels", "stages", "decode-step-bf16", "decode-step-fp8")]
    table = paths.ROOT / "pallas_kernels" / "tables" / "nvidia-h200.json"
    for path in (
        *(FOLDER / name for name in reports),
        *(FOLDER / "settings" / name for name in settings),
        table,
    ):
        assert "/tmp/" not in path.read_text("utf-8"), path.name


def test_the_first_steps_of_a_graph_are_told_beside_those_of_a_run_that_has_many():
    def of(name):
        by_bucket = json.loads((FOLDER / name).read_text("utf-8"))["steps"]["by_bucket"]
        return [by_bucket[size]["steps"] for size in ("8", "16", "32")], [
            f"{by_bucket[size]['mean_ms']:.2f}" for size in ("8", "16", "32")
        ]

    for name in ("h200-llama-3.1-8b-fp8-1024-512.json", "h200-llama-3.1-8b-fp8-sharegpt.json"):
        steps, ms = of(name)
        assert "{}, {} and {}".format(*steps) in DOC and "{}, {} and {}".format(*ms) in DOC
    steps, ms = of("settings/h200-llama-3.1-8b-1024-512-640-sequences-later.json")
    assert f"{steps[0]} steps of 8 rows took {float(ms[0]):.1f} ms" in DOC

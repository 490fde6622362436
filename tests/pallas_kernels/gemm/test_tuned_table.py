"""The tuned table: its choices, the rules from measurements, and the shipped files."""

import dataclasses
import json
import logging

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.weights import leaves
from jaxflow.parallel.mesh import TP
from pallas_kernels.cards import default_card
from pallas_kernels.gemm import api
from pallas_kernels.gemm import tuned_table as table
from pallas_kernels.gemm.api import HopperGemm, Product, eligible_kernels, kernel, product_of
from pallas_kernels.gemm.model_shapes import known_shapes
from pallas_kernels.gemm.tuned_table import Choice, Rule, Shape, Table
from pallas_kernels.measure.timing import Timing
from pallas_kernels.tune import __main__ as tune
from pallas_kernels.tune import rules as tune_rules
from pallas_kernels.tune import shapes as tune_shapes

E4M3 = "float8_e4m3fn"
A, B = Shape(6144, 4096), Shape(28672, 4096, gate_block=64)
TABLE = Table(
    "a GPU",
    (
        Rule(A, (Choice(2, "fma"), Choice(64, "flat", (("rows", 64),)), Choice(256, "xla"))),
        Rule(B, (Choice(256, "dense"),)),
    ),
)
SHIPPED = sorted(path for path in table.FOLDER.glob("*.json") if path.name != "shapes.json")


@pytest.mark.parametrize(
    ("rows", "kernel"), [(1, "fma"), (2, "fma"), (3, "flat"), (64, "flat"), (65, "xla"), (5000, "xla")]
)
def test_a_rule_goes_by_rows_and_its_last_choice_holds_beyond(rows, kernel):
    choice = TABLE.choose(A, rows)
    assert choice and choice.kernel == kernel


def test_beyond_its_last_rows_a_choice_has_no_tile():
    """A tile for few rows is too large for more rows."""
    rule = Rule(A, (Choice(8, "flat", (("rows", 8),)),))
    assert [rule.choose(rows) for rows in (8, 9)] == [Choice(8, "flat", (("rows", 8),)), Choice(8, "flat")]


def test_missing_rules_and_tables_are_warned_about_once(caplog):
    lone = dataclasses.replace(TABLE, device="a lone GPU")
    with caplog.at_level(logging.WARNING, "pallas_kernels.gemm.tuned_table"):
        assert lone.choose(Shape(96, 64), 8) is lone.choose(Shape(96, 64), 16) is None
        assert [Table("a new GPU").choose(Shape(n, 4096), 8) for n in (6144, 4096, 128)] == [None] * 3
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "kernels: no tuned rule near [96, 64] bfloat16 on a lone GPU",
        "kernels: no tuned table for a new GPU",
    ]


def test_an_unknown_shape_takes_the_nearest_rule_without_its_tile_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, "pallas_kernels.gemm.tuned_table"):
        choices = [TABLE.choose(Shape(5120, 4096), 16) for _ in range(3)]
    assert choices == [Choice(64, "flat")] * 3
    assert len(caplog.records) == 1 and "5120" in caplog.records[0].getMessage()
    assert caplog.messages == [
        "kernels: no tuned rule for [5120, 4096] bfloat16 on a GPU; using the rule of [6144, 4096]"
    ]
    gated = TABLE.choose(Shape(24576, 4096, gate_block=64), 16)
    assert gated and gated.kernel == "dense"


@pytest.mark.parametrize(
    "shape",
    [Shape(6144, 4096, "int4"), Shape(6144, 4096, gate_block=64), Shape(3000, 4096), Shape(6144, 16384)],
)
def test_other_weights_other_epilogues_and_what_is_far_have_no_rule(shape):
    assert TABLE.choose(shape, 1) is None
    assert Table("a GPU").choose(A, 1) is None


def test_a_rule_of_inputs_with_a_scale_a_row_is_none_for_scales_of_blocks():
    qkv, down = (
        Shape(n, k, E4M3, scales=scales) for n, k, scales in ((6144, 4096, "rows"), (4096, 8192, "blocks"))
    )
    measured = Table("a GPU", (Rule(qkv, (Choice(512, "xla"),)),))
    out_proj = measured.choose(dataclasses.replace(qkv, n=4096), 512)
    assert out_proj and out_proj.kernel == "xla"
    assert (
        measured.choose(down, 512) is None
        and measured.choose(dataclasses.replace(qkv, scales="blocks"), 512) is None
    )
    assert HopperGemm(measured).choose(product_of(down, 512)).kernel == "fp8"
    assert HopperGemm(measured).choose(product_of(qkv, 512)).kernel == "xla"
    head = Product(8, Shape(128256, 4096), "bfloat16", "float32")
    assert HopperGemm(Table("a GPU", (Rule(head.shape, (Choice(8, "xla"),)),))).choose(head).kernel == "flat"


@pytest.mark.parametrize(
    ("rows", "bias", "chosen"), [(64, True, "flat"), (64, False, "xla"), (65, True, "xla")]
)
def test_a_card_gives_flat_gemm_products_with_a_bias(rows, bias, chosen, monkeypatch):
    card = dataclasses.replace(default_card(), flat_bias_max_rows=64)
    monkeypatch.setattr(api, "card_of", lambda _: card)
    monkeypatch.setattr(api, "kernel", lambda choice: lambda *_, **__: choice.kernel)
    x, w, b = (jnp.zeros(shape, jnp.bfloat16) for shape in ((rows, 128), (256, 128), (256,)))
    gemm = HopperGemm(Table("a GPU", (Rule(Shape(256, 128), (Choice(2048, "xla"),)),)))
    assert gemm(x, w, b if bias else None) == chosen


@given(
    st.lists(
        st.tuples(st.sampled_from(["flat", "dense", "xla"]), st.sampled_from([(), (("rows", 64),)])),
        min_size=1,
        max_size=12,
    )
)
def test_merged_choices_choose_what_was_best_where_it_was_measured(best):
    measured = [Choice(2**i, *each) for i, each in enumerate(best)]
    rule = Rule(A, table.choices(measured))
    assert [(c.kernel, c.tile) for c in map(rule.choose, (c.rows for c in measured))] == best
    assert all(
        a.rows < b.rows and (a.kernel, a.tile) != (b.kernel, b.tile)
        for a, b in zip(rule.choices, rule.choices[1:], strict=False)
    )


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c", "xla"]), st.floats(1.0, 100.0), min_size=1),
    st.sampled_from([None, *"abc", "xla"]),
)
def test_noise_changes_no_kernel_and_ours_must_gain_something(us, before):
    name = tune_rules.best_of(us, before)
    assert us[name] <= min(us.values()) * (1 + tune_rules.TIE)
    assert name in (before, "xla") or us[name] == min(us.values())
    assert name == before or name == "xla" or us[name] * (1 + tune_rules.TIE) < us.get("xla", float("inf"))


def test_new_times_replace_old_times_of_the_same_rows():
    def file(**rules):
        times = {
            "fast": {"flat": 1.0, "xla": 2.0},
            "slow": {"flat": 3.0, "flat rows=64": 4.0, "xla": 2.0},
            "tile": {"flat rows=64": 1.0, "xla": 2.0},
        }
        return {
            "schema": 1,
            "rules": [
                tune_rules.rule_of({"n": n}, [{"rows": m, "us": times[t]} for m, t in at])
                for n, at in rules.items()
            ],
        }

    old = file(a=[(8, "fast")], b=[(64, "fast"), (2048, "slow")])
    assert tune_rules.merged(old, file(b=[(4, "tile"), (64, "slow")])) == file(
        a=[(8, "fast")], b=[(4, "tile"), (64, "slow"), (2048, "slow")]
    )
    assert tune_rules.merged(old, file(b=[(4, "tile")]))["rules"][1]["choices"] == [
        {"rows": 4, "kernel": "flat", "tile": {"rows": 64}},
        {"rows": 64, "kernel": "flat"},
        {"rows": 2048, "kernel": "xla"},
    ]
    assert tune_rules.merged(None, file(b=[(4, "slow")])) == file(b=[(4, "slow")])


@given(st.permutations(["flat", "dense", "xla"]), st.permutations(["flat", "dense", "xla"]))
def test_each_objective_chooses_by_its_own_cost(by_time, by_joules):
    """The first of each order has the least. A merge keeps it, and other objectives lack the shape."""
    us = {name: 10.0 * (i + 1) for i, name in enumerate(by_time)}
    joules = {name: 1e-3 * (i + 1) for i, name in enumerate(by_joules)}
    for objective in tune_rules.OBJECTIVES:
        row = {"rows": 8, "us": us} | (
            {} if objective == "time" else {"objective": objective, "joules": joules}
        )
        rule = tune_rules.rule_of(dataclasses.asdict(A), [row])
        best = by_joules if objective == "energy" else by_time
        assert rule["choices"] == [{"rows": 8, "kernel": best[0]}]
        old = tune_rules.merged(None, {"rules": [rule]})
        assert old["rules"] == [rule]
        for other in tune_rules.OBJECTIVES:
            assert tune_rules.missing([A], [8], old, other) == ([] if other == objective else [A])


@pytest.mark.parametrize("objective", tune_rules.OBJECTIVES)
def test_an_objective_at_the_cap_has_windows_of_two_seconds_and_needs_joules(monkeypatch, objective):
    asked = []

    def timed(ways, *, calls, seconds, rounds):
        asked.append(seconds / rounds)
        return {
            way: Timing(1e3 + i, 0.0, 1500.0, 700.0, watts and watts * 1e-3 - i * 1e-2, 1.0)
            for i, way in enumerate(ways)
        }

    class Pool:
        def map(self, _, jobs):
            return [lambda: None for _ in jobs]

    watts = 700.0
    monkeypatch.setattr(tune, "make_weights", lambda shape: [None] * 8)
    monkeypatch.setattr(tune, "make_inputs", lambda p, ws: tune.Inputs([], ws, 10))
    monkeypatch.setattr(tune, "interleaved", timed)
    settings = {"seconds": 6.0, "others": False, "pool": Pool(), "progress": lambda _: None}
    (row,) = tune.measure(A, [2048], **settings, objective=objective)["measured"]
    assert asked == [2.0] and ("joules" in row) == (objective != "time")
    assert row.get("objective", "time") == objective
    watts = None
    if objective == "energy":
        with pytest.raises(tune.NoJoules):
            tune.measure(A, [2048], **settings, objective=objective)


def test_tuning_leaves_out_what_does_not_fit_its_time_and_goes_on_from_there(monkeypatch, tmp_path, capsys):
    measured, clock = [], iter(range(0, 1000, 10))

    def measure(shape, rows, **_):
        measured.append(f"{shape.k}x{shape.n}")
        return tune_rules.rule_of(dataclasses.asdict(shape), [{"rows": m, "us": {"xla": 1.0}} for m in rows])

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tune.time, "monotonic", lambda: float(next(clock)))
    file = tmp_path / "table.json"
    command = ["tune", "--output", str(file), "--rows", "1", "8", "--shapes", "64x128", "64x256", "64x512g64"]
    for limit, done in (("45", ["64x128", "64x256"]), ("1000", ["64x512"]), ("1000", [])):
        measured.clear()
        monkeypatch.setattr("sys.argv", [*command, "--time_limit_s", limit])
        tune.main()  # a shape takes 10 s on this clock
        assert measured == done
        assert ("left out after 45 s: --shapes 64x512g64" in capsys.readouterr().out) == (limit == "45")
    assert len(json.loads(file.read_text("utf-8"))["rules"]) == 3
    monkeypatch.setattr("sys.argv", [*command, "--rows", "16", "1", "1"])  # other numbers of rows
    tune.main()
    assert len(measured) == 3
    rules = json.loads(file.read_text("utf-8"))["rules"]
    assert [[one["rows"] for one in rule["measured"]] for rule in rules] == [[1, 8, 16]] * 3
    for rows in (["0", "8"], []):
        monkeypatch.setattr("sys.argv", [*command, "--rows", *rows])
        with pytest.raises(SystemExit):
            tune.main()
        assert "--rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--lock", "{folder}/none/lock"],
            "--lock {folder}/none/lock: accepted is a file in an existing, writable folder",
        ),
        (["--seconds", "0"], "--seconds 0: accepted are numbers above 0"),
        (["--seconds", "nan"], "--seconds nan: accepted are numbers above 0"),
        (
            ["--objective", "energy", "--seconds", "1"],
            "--seconds 1: accepted are numbers from 6, for --objective energy",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_measuring(monkeypatch, tmp_path, capsys, arguments, said):
    monkeypatch.setattr(tune, "measure", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    given = [argument.format(folder=tmp_path) for argument in arguments]
    monkeypatch.setattr(
        "sys.argv", ["tune", "--output", str(tmp_path / "t.json"), "--shapes", "64x128", *given]
    )
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert capsys.readouterr().err == f"error: {said.format(folder=tmp_path)}\n"


def test_a_product_without_a_program_ends_the_run_with_the_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "make_weights", lambda *_: [])
    monkeypatch.setattr(tune, "make_inputs", lambda *_: tune.Inputs([], [], 1))
    monkeypatch.setattr(tune, "compiled", lambda *_: "XlaRuntimeError: out of memory")
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        "sys.argv", ["tune", "--output", str(tmp_path / "t.json"), "--shapes", "64x128", "--rows", "8"]
    )
    with pytest.raises(SystemExit, match="1"):
        tune.main()
    said = "error: 64x128, 8 rows: no program compiles (XlaRuntimeError: out of memory)\n"
    assert said in capsys.readouterr().err and not (tmp_path / "t.json").exists()


def test_a_merge_names_missing_files(monkeypatch, tmp_path, capsys):
    good, absent, out = (str(tmp_path / name) for name in ("good.json", "absent.json", "t.json"))
    (tmp_path / "good.json").write_text(json.dumps({"schema": table.SCHEMA, "device": "one", "rules": []}))
    monkeypatch.setattr("sys.argv", ["tune", "--merge", good, absent, "--output", out])
    tune.main()
    assert capsys.readouterr().err == f"these files do not exist and are not in {out}: {absent}\n"
    monkeypatch.setattr("sys.argv", ["tune", "--merge", absent, "--output", out])
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert (
        capsys.readouterr().err == f"error: --merge {absent}: no file exists; accepted is at least one file\n"
    )


def test_a_file_that_is_no_table_of_this_device_is_refused(monkeypatch, tmp_path, capsys):
    good, out = {"schema": table.SCHEMA, "device": "one", "rules": []}, tmp_path / "out.json"
    (tmp_path / "good.json").write_text(json.dumps(good))
    for text in (
        "{}",
        "[]",
        '{"schema"',
        json.dumps(good | {"schema": 1}),
        json.dumps(good | {"rules": [{}]}),
    ):
        (tmp_path / "bad.json").write_text(text)
        for files in (["bad"], ["good", "bad"]):
            monkeypatch.setattr(
                "sys.argv",
                [
                    "tune",
                    "--output",
                    str(out),
                    "--merge",
                    *(str(tmp_path / f"{name}.json") for name in files),
                ],
            )
            with pytest.raises(SystemExit):
                tune.main()
            assert "bad.json: not a table" in capsys.readouterr().err and not out.exists()
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("sys.argv", ["tune", "--output", str(tmp_path / "good.json"), "--shapes", "64x128"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "good.json is a table of one: accepted is a table of this device, cpu" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--merge", "{good}"], ["--shapes", "64x128"]])
def test_an_unwritable_output_is_refused_before_measuring(monkeypatch, tmp_path, capsys, arguments):
    (tmp_path / "good.json").write_text(json.dumps({"schema": table.SCHEMA, "device": "one", "rules": []}))
    monkeypatch.setattr(tune, "measure", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    for output in (tmp_path / "none" / "t.json", tmp_path):
        given = [argument.format(good=tmp_path / "good.json") for argument in arguments]
        monkeypatch.setattr("sys.argv", ["tune", "--output", str(output), *given])
        with pytest.raises(SystemExit, match="2"):
            tune.main()
        assert (
            capsys.readouterr().err
            == f"error: --output {output}: accepted is a file in an existing, writable folder\n"
        )


@pytest.mark.parametrize(
    ("xla_flags", "rival"),
    [
        ("", "cublas or triton"),
        ("--xla_some=false", "cublas or triton"),
        ("--xla_gpu_enable_triton_gemm", "cublas or triton"),
        ("--xla_some=1 --xla_gpu_enable_triton_gemm=false", "cublas"),
        ("--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_triton_gemm=true", "cublas or triton"),
    ],
)
def test_a_row_records_the_kind_of_xlas_product(xla_flags, rival):
    assert tune_rules.rival(xla_flags) == rival


def test_the_kind_of_xlas_product_is_merged_and_checked(tmp_path):
    def file(name: str, *rows: dict):
        shape = {"n": 128, "k": 64, "weights": "bfloat16", "gate_block": 0, "scales": ""}
        rule = tune_rules.rule_of(shape, [{"us": {"xla": 1.0}} | row for row in rows])
        path = tmp_path / name
        path.write_text(json.dumps({"schema": table.SCHEMA, "device": "one", "rules": [rule]}))
        return str(path)

    before = file("before.json", {"rows": 1}, {"rows": 8})  # a table without the rival's name
    new = file("new.json", {"rows": 8, "xla": "cublas"}, {"rows": 64, "xla": "cublas or triton"})
    tune_rules.merge([before, new], str(tmp_path / "t.json"))
    (rule,) = tune_rules.read(tmp_path / "t.json")["rules"]
    assert [one.get("xla") for one in rule["measured"]] == [None, "cublas", "cublas or triton"]
    with pytest.raises(
        ValueError,
        match=r"bad.json: not a table .*xla='triton' of .* at 8 rows: accepted are 'cublas', 'cublas or "
        r"triton', or no entry",
    ):
        tune_rules.read(file("bad.json", {"rows": 8, "xla": "triton"}))


def test_a_rule_without_times_stays_until_it_is_measured():
    bare = {"shape": {"n": 1}, "choices": [{"rows": 8, "kernel": "flat"}]}
    new = tune_rules.rule_of({"n": 1}, [{"rows": 8, "us": {"xla": 1.0}}])
    assert tune_rules.merged({"rules": [bare]}, {"rules": []})["rules"] == [bare]
    assert tune_rules.merged({"rules": [bare]}, {"rules": [new]})["rules"] == [new]
    assert tune_rules.merged({"rules": []}, {"rules": [bare]})["rules"] == [bare]


def test_a_table_of_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema=7"):
        table.parse({"schema": 7, "device": "x", "rules": []})


_SHAPE = {"n": 128, "k": 64, "weights": "bfloat16", "gate_block": 0, "scales": ""}
_RULE = {
    "shape": _SHAPE,
    "choices": [{"rows": 8, "kernel": "flat"}],
    "measured": [{"rows": 8, "us": {"flat": 1.0}}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"choices": []},
        {"choices": [{"rows": None, "kernel": "flat"}]},
        {"shape": _SHAPE | {"k": 0}},
        {"shape": _SHAPE | {"gate_block": None}},
        {"shape": {"m": 1}},
    ],
)
def test_a_damaged_table_is_named_where_a_kernel_set_loads_it(monkeypatch, tmp_path, change):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    path = table.file_of("Some GPU")
    for text in (json.dumps({"schema": table.SCHEMA, "device": "x", "rules": [_RULE | change]}), '{"schema"'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"some-gpu.json: not a table"):
            table.load.__wrapped__("Some GPU")


@pytest.mark.parametrize(
    "change", [{"rows": None}, {"rows": [8]}, {"us": {}}, {"us": [1.0]}, {"us": {"flat": None}}, {"us": None}]
)
def test_damaged_times_are_named(tmp_path, change):
    path = tmp_path / "bad.json"
    rule = _RULE | {"measured": [_RULE["measured"][0] | change]}
    path.write_text(json.dumps({"schema": table.SCHEMA, "device": "x", "rules": [rule]}))
    with pytest.raises(ValueError, match=r"bad.json: not a table"):
        tune_rules.read(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_choice_costs_no_more_than_a_tie_where_it_was_measured(path):
    for rule, found in zip(tune_rules.read(path)["rules"], table.load(path.stem).rules, strict=True):
        for one in rule.get("measured", ()):
            costs = tune_rules.costs(one)
            label = tune_rules.label(found.choose(one["rows"]))
            assert costs[label] <= (1 + tune_rules.TIE) * min(costs.values()), (found.shape, one["rows"])


def test_shipped_tables_name_kernels_that_take_their_products():
    for path in SHIPPED:
        shipped = table.parse(json.loads(path.read_text("utf-8")))
        assert table.file_of(shipped.device) == path
        for rule in shipped.rules:
            for choice in rule.choices:
                assert choice.kernel in eligible_kernels(product_of(rule.shape, choice.rows)), rule
                assert callable(kernel(choice))
            assert rule.shape.scales in (("",) if rule.shape.weights != E4M3 else ("rows", "blocks"))


@pytest.mark.parametrize(("weights", "quantization"), [("bfloat16", None), (E4M3, "fp8")])
def test_the_shapes_are_those_of_the_models(weights, quantization):
    for name, ops in known_shapes(weights).items():
        model, _, tp = name.partition(" tp ")
        config = open_checkpoint(model, load_format="dummy").model_config
        tree = leaves(config, int(tp), quantization=quantization)
        for op, (k, n, *gates) in ops.items():
            leaf = tree["lm_head"] if op == "logits" else tree["layers"][0][op]
            split = [
                size // (int(tp) if axis == TP else 1)
                for size, axis in zip(leaf.shape, (*leaf.spec, None), strict=False)
            ]
            assert split == [n, k], (name, op)
            assert gates == ([config.gate_block] if op == "up_gate" else [])


@pytest.mark.parametrize(
    ("text", "shape"),
    [("4096x6144", Shape(6144, 4096)), ("4096x28672g64", Shape(28672, 4096, gate_block=64))],
)
def test_shapes_are_written_k_by_n(text, shape):
    assert tune_shapes.parse_shape(text, "bfloat16") == shape
    assert tune_shapes.format_shape(shape) == text


def test_e4m3_shapes_say_how_their_input_is_scaled_and_what_is_quantised_behind_them():
    assert tune_shapes.parse_shape("4096x6144", E4M3) == Shape(6144, 4096, E4M3, scales="rows")
    down = tune_shapes.parse_shape("14336x4096b", E4M3)
    assert (
        down == Shape(4096, 14336, E4M3, scales="blocks") and tune_shapes.format_shape(down) == "14336x4096b"
    )
    with pytest.raises(ValueError, match="--shapes"):
        tune_shapes.parse_shape("14336x4096b", "bfloat16")
    of_model = tune_shapes.shapes_of(["llama-3.1-8b tp 1"], E4M3)
    assert [shape.scales for shape in of_model] == [
        "rows",
        "rows",
        "rows",
        "blocks",
    ]  # and no head, which stays as it is
    assert [product_of(shape, 8).out_dtype for shape in of_model] == [
        "bfloat16",
        "bfloat16",
        E4M3,
        "bfloat16",
    ]
    x = tune.make_inputs(product_of(Shape(64, 256, E4M3, scales="blocks"), 8), [None])
    assert x.xs[0].scale.shape == (8, 2)


@pytest.mark.parametrize(
    "text",
    ["4096", "4096x", "axb", "4096x6144x2", "4096x6144g", "0x64", "64x0", "64x128g0", "64x160g64", "100x64b"],
)
def test_a_malformed_shape_is_named(text):
    with pytest.raises(ValueError, match=f"--shapes '{text}'"):
        tune_shapes.parse_shape(text, E4M3 if text.endswith("b") else "bfloat16")
    with pytest.raises(ValueError, match="--models"):
        tune_shapes.shapes_of(["no such model"], "bfloat16")


@pytest.mark.parametrize("gate_block", [0, 64])
def test_tiles_to_try_are_the_kernels_own_and_others_that_fit(gate_block):
    p = Product(32, Shape(28672, 4096, gate_block=gate_block), "bfloat16")
    assert tune.tiles("dense", p, True) == tune.tiles("flat", p, False) == [()]
    own, *others = tune.tiles("flat", p, True)
    assert own == () and len(set(others)) == len(others) == (2 if gate_block else 6)
    for tile in others:
        bound = kernel(Choice(32, "flat", tile)).keywords["tile"]  # type: ignore[attr-defined]
        assert bound.stages >= 2 and dict(tile)["rows"] == bound.rows
        assert bound.rows == 128 or not gate_block

"""Timing: loops that XLA keeps, refusal of impossible times, and merged tables of several processes."""

import contextlib
import functools
import json
import time

import h200
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gemm.api import Product, kernel
from pallas_kernels.gemm.tuned_table import SCHEMA, Choice, Shape
from pallas_kernels.measure import sensor, timing
from pallas_kernels.measure.peaks import ImpossibleTime, Least, refuse_impossible
from pallas_kernels.measure.script import parse_share
from pallas_kernels.measure.timing import Timing, looped
from pallas_kernels.tune import __main__ as tune

SHAPE = Shape(4096, 4096)


@pytest.mark.parametrize(
    ("name", "rows", "kernels"), [("flat", 1, 1), ("dense", 4, 1), ("xla", 128, 2)]
)  # untuned XLA cuts K, and adds up
def test_the_tunes_loop_makes_every_product_in_every_round(name, rows, kernels):
    made = []

    def inputs():
        made.append(tune.make_inputs(Product(rows, SHAPE, "bfloat16"), [None] * tune.rotated(SHAPE)))
        return made[0].xs

    xs = jax.eval_shape(inputs)
    ws = [jax.ShapeDtypeStruct((SHAPE.n, SHAPE.k), jnp.bfloat16)] * len(xs)
    program = looped(jax.jit(kernel(Choice(rows, name))), made[0].rounds)
    found = h200.compile_for_h200(program, *h200.abstract(h200.h200_mesh(), (xs, ws)))
    (loop,) = [i for i, thunk in enumerate(found.thunks) if thunk.kind == "kWhile"]
    assert f'"known_trip_count":{{"n":"{made[0].rounds}"}}' in found.hlo
    work = [
        thunk
        for thunk in found.thunks[loop:]
        if thunk.depth and (thunk.kind == "kCustomCall" or "dot" in thunk.name or "reduce" in thunk.name)
    ]
    assert len(work) == kernels * len(xs) == kernels * 8
    before = [thunk for thunk in found.thunks[:loop] if thunk.kind == "kCustomCall" or "dot" in thunk.name]
    assert not before  # nothing was moved out of the loop


def test_an_impossible_time_is_an_error_with_the_case():
    product = tune.least(Product(4, Shape(6144, 4096), "bfloat16"))
    assert product.us("NVIDIA H200") == pytest.approx(6144 * 4096 * 2 / 4.8e6 / 1.2)
    refuse_impossible("x", 15.3, product, "NVIDIA H200")
    refuse_impossible("x", 1.0, product, "another card")
    with pytest.raises(ImpossibleTime, match=r"4096 x 6144 M 4 dense: 1\.00 us for 50\.3 MB"):
        refuse_impossible("4096 x 6144 M 4 dense", 1.0, product, "NVIDIA H200")
    with pytest.raises(ImpossibleTime, match=r"103\.1 GFLOP of bfloat16"):
        refuse_impossible("x", 80.0, Least(flop=2.0 * 2048 * 6144 * 4096), "NVIDIA H200")
    assert Least(flop=1e12, dtype="float8_e4m3fn").us("NVIDIA H100 80GB HBM3") < Least(flop=1e12).us(
        "NVIDIA H100 80GB HBM3"
    )


def test_the_tune_writes_no_row_of_an_impossible_time_and_measures_when_all_is_compiled(monkeypatch):
    class Pool:
        compiled = 0

        def map(self, _, jobs):
            self.compiled += len(jobs)
            return [lambda: None for _ in jobs]

    def timed(ways, **_):
        assert pool.compiled == compiled + len(ways)
        return {way: Timing(us[0], 0.0, None, None, None, 0.1) for way in ways}

    pool, compiled = Pool(), 0
    monkeypatch.setattr(tune, "make_weights", lambda shape: [None] * 8)
    monkeypatch.setattr(tune, "make_inputs", lambda p, ws: tune.Inputs([], ws, 10))
    monkeypatch.setattr(tune, "interleaved", timed)
    monkeypatch.setattr(tune.jax, "devices", lambda: [type("Device", (), {"device_kind": "NVIDIA H200"})])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    us = [20.0]
    settings = {"seconds": 0.1, "others": False, "pool": pool, "progress": lambda _: None}
    assert tune.measure(SHAPE, [8], **settings)["measured"] == [
        {"rows": 8, "us": {"flat": 20.0, "xla": 20.0, "dense": 20.0}, "xla": "cublas"}
    ]
    us[0], compiled = 0.9, pool.compiled
    with pytest.raises(ImpossibleTime, match=r"4096 x 4096 M 8 flat: 0\.90 us"):
        tune.measure(SHAPE, [8], **settings)


def test_shares_are_all_shapes_once_and_their_tables_become_one(tmp_path, monkeypatch):
    shapes = tune.shapes_of([], "bfloat16")
    parts = [shapes[i::n] for i, n in (parse_share(f"{i}/3") for i in range(3))]
    assert sorted(map(str, shapes)) == sorted(str(shape) for part in parts for shape in part)
    for i in range(2):
        rules = [{"shape": {"n": i + 1, "k": 1}, "choices": [{"rows": 8, "kernel": "xla"}], "measured": []}]
        (tmp_path / f"{i}.json").write_text(json.dumps({"schema": SCHEMA, "device": "a GPU", "rules": rules}))
    monkeypatch.setattr(
        "sys.argv",
        [
            "tune",
            "--merge",
            *(str(tmp_path / f"{i}.json") for i in range(3)),
            "--output",
            str(tmp_path / "t.json"),
        ],
    )
    tune.main()
    assert [rule["shape"]["n"] for rule in json.loads((tmp_path / "t.json").read_text())["rules"]] == [1, 2]
    (tmp_path / "2.json").write_text(json.dumps({"schema": SCHEMA, "device": "another", "rules": []}))
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    for wrong in ("4/4", "1", "a/b"):
        with pytest.raises(ValueError, match="--share"):
            parse_share(wrong)


def test_joules_are_those_of_all_cards(monkeypatch):
    @contextlib.contextmanager
    def sample(cards):
        yield sensor.Readings([sensor.CardReadings([100.0 * (i + 1)], [1500.0]) for i in range(cards)])

    monkeypatch.setattr(timing, "sample", sample)
    run = functools.partial(time.sleep, 0.001)
    for cards, watts in ((1, 100.0), (2, 150.0), (4, 250.0)):
        found = timing.interleaved({"": run}, seconds=0.01, rounds=1, cards=cards)[""]
        assert found.watts == watts
        assert found.joules == pytest.approx(cards * watts * found.us / 1e6)

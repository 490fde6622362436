"""The kernel bench: its cases trace, its report is complete, and it requires a GPU."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxflow.bench.kernels import compare as kernels
from jaxflow.bench.kernels import compare as kernels_report
from jaxflow.bench.kernels import groups as kernel_groups
from jaxflow.bench.kernels import workers as kernels_worker
from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from pallas_kernels.gemm.int4 import mma as int4_mma
from pallas_kernels.gemm.tuned_table import load
from pallas_kernels.measure import timing
from pallas_kernels.measure.sensor import CardReadings, Readings
from pallas_kernels.measure.timing import Timing

BY_NAME = {group.name: group for group in kernels.GROUPS}


@pytest.mark.parametrize("name", [name for name in BY_NAME if not name.startswith("decode_step")])
def test_a_case_of_each_group_can_be_traced(name):
    """Inputs, implementations and rivals, all but the running; whole steps have tests of their own."""
    case = BY_NAME[name].cases[-1]
    implementations = lambda: [
        jax.tree.leaves(implementation.run())
        for name, implementation in case.prepare().items()
        if name != "cudnn"
    ]
    shapes = jax.eval_shape(implementations)
    assert shapes and all(shapes)


@pytest.mark.parametrize(("rows", "implementations"), [(1, ["flat", "xla", "fma"]), (16, ["flat", "xla"])])
def test_products_of_one_row_are_also_timed_on_cuda_cores(rows, implementations):
    """As an engine has some of one row; last, so that a row's ratio and the
    summary stay flat GEMM's to XLA.
    """
    (case,) = (case for case in BY_NAME["flat_gemm"].cases if case.name == f"70B/tp4 out_proj M {rows}")
    found: list[str] = []
    jax.eval_shape(lambda: found.extend(case.prepare()))
    assert found == implementations


def test_int4_of_one_row_is_timed_as_in_the_engine(monkeypatch):
    """int4 uses `mma` with the kernel's own tile: the shipped table names the kernel and no tile."""
    (case,) = (case for case in BY_NAME["int4_gemm"].cases if case.name == "70B/tp4 out_proj M 1")
    multiply_add, calls = int4_mma.multiply_add, []
    monkeypatch.setattr(int4_mma, "multiply_add", lambda *refs: calls.append(refs) or multiply_add(*refs))
    jax.eval_shape(lambda: jax.tree.leaves(case.prepare()["int4"].run()))
    assert calls
    assert {choice.tile for of, choice in shipped_choices() if of.weights == "int4"} == {()}


def shipped_choices():
    return [(rule.shape, choice) for rule in load("NVIDIA H200").rules for choice in rule.choices]


def test_only_selects_groups_and_cases():
    names = [(group.name, case.name) for group in kernels.GROUPS for case in group.cases]
    assert len(set(names)) == len(names)
    assert not any(
        "," in part or "/" in group for group, case in names for part in (group, case.replace("/tp4", ""))
    )
    assert [case.name for _, case in kernels.chosen(["ceilings"])] == [
        case.name for case in BY_NAME["ceilings"].cases
    ]
    assert {case.name for _, case in kernels.chosen(["dense_gemm/8B up_gate"])} == {
        f"8B up_gate M {m}" for m in (256, 512, 1024, 2048)
    }
    asked = [group.name for group in kernels.GROUPS if group.on_request]
    assert {(group.name, case.name) for group, case in kernels.chosen([])} == {
        name for name in names if name[0] not in asked
    }
    assert kernels.chosen(asked) and {group.name for group, _ in kernels.chosen(asked)} == set(asked)
    with pytest.raises(ValueError, match=r"only='dense_gemm/nothing' is not supported: .*; groups: ceilings"):
        kernels.chosen(["dense_gemm/nothing"])


def test_the_first_case_of_each_group_comes_before_the_second_of_any():
    order = [(BY_NAME[group.name].cases.index(case), group.name) for group, case in kernels.chosen([])]
    assert [place for place, _ in order] == sorted(place for place, _ in order)
    assert [name for _, name in order[:3]] == ["ceilings", "ceiling_gemm", "decode_attention"]
    assert set(kernel_groups._FIRST) <= set(BY_NAME)


def measured(
    monkeypatch, us: dict[str, float], implementations: dict[str, Implementation], **targets
) -> dict:
    def interleaved(runs, *, calls, seconds):
        assert {name: implementation.calls for name, implementation in implementations.items()} == calls
        return {name: Timing(us[name], 0.02, 1500.0, 600.0, 0.1, seconds) for name in runs}

    monkeypatch.setattr(kernels_worker, "interleaved", interleaved)
    return kernels_worker.measure(
        KernelGroup("some", "TB/s", ()),
        KernelCase("one", lambda: implementations, **targets),
        implementations,
        0.5,
    )


def implementation(amount: float, work: float | None = None) -> Implementation:
    return Implementation(lambda: jnp.zeros(1), 2, amount, work)


@pytest.mark.parametrize(
    ("targets", "reached"),
    [
        ({}, None),
        ({"rate": 2e12}, True),
        ({"rate": 2.1e12}, False),
        ({"ratio": 2.0}, True),
        ({"ratio": 2.1}, False),
        ({"rate": 1.0, "ratio": 3.0}, False),
    ],
)
def test_a_row_has_rates_ratios_and_its_target(monkeypatch, targets, reached):
    row = measured(
        monkeypatch,
        {"ours": 10.0, "rival": 20.0},
        {"ours": implementation(2e7), "rival": implementation(2e7)},
        **targets,
    )
    assert row["implementations"]["ours"]["rate"] == pytest.approx(2e12)
    assert row["ratios"] == {"rival": pytest.approx(2.0)}
    assert row["reached"] is reached
    lines = list(kernels_report.text(row))
    assert (
        len(lines) == 2
        and ("missed" in lines[0]) is (reached is False)
        and "2.000 TB/s" in lines[0]
        and "x2.000" in lines[1]
    )


def test_an_implementation_without_clock_and_watts_is_measured_again_and_then_refused(monkeypatch):
    asked = []

    def interleaved(runs, *, calls, seconds):
        asked.append(list(runs))
        seen = len(asked) % 2 == 0 and "never" not in runs
        return {
            name: Timing(10.0, 0.0, 1500.0 if seen else None, 600.0 if seen else None, None, 0.013)
            for name in runs
        }

    monkeypatch.setattr(kernels_worker, "interleaved", interleaved)
    assert kernels_worker.timed({"ours": implementation(1.0)}, 0.5)["ours"].mhz == 1500.0 and len(asked) == 2
    with pytest.raises(kernels_worker.NoReading, match="no clock or watts for never: measured 13 ms"):
        kernels_worker.timed({"never": implementation(1.0)}, 0.5)


def test_implementations_that_move_different_bytes_are_compared_by_work(monkeypatch):
    row = measured(
        monkeypatch,
        {"fp8": 6.0, "bf16": 12.0},
        {"fp8": implementation(1e7, 1.0), "bf16": implementation(2e7, 1.0)},
    )
    assert row["ratios"] == {"bf16": pytest.approx(2.0)}


def test_a_summary_is_of_a_groups_first_rival():
    rows = [
        {"group": "flat_gemm", "case": str(i), "ratios": {"xla": r, "other": 9.0}}
        for i, r in enumerate((0.5, 2.0))
    ]
    rows += [
        {"group": "flat_gemm", "case": "x", "failed": "it did"},
        {"group": "ceilings", "case": "y", "ratios": {}},
    ]
    assert kernels_report.summaries(rows, kernels.GROUPS) == [
        {
            "group": "flat_gemm",
            "rival": "xla",
            "cases": 2,
            "geomean": pytest.approx(1.0),
            "least": 0.5,
            "target": 1.1,
        }
    ]
    assert list(kernels_report.text(rows[2])) == [f"{'flat_gemm':18} {'x':28} failed: it did"]


def test_kernels_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels.flags, "FLAGS", type("Flags", (), {"only": [], "merge": [], "share": "0/1"}))
    with pytest.raises(ValueError, match="JAX backend='cpu' is not supported: gpu, for bench kernels"):
        kernels.run()


@contextlib.contextmanager
def sample(_):
    yield Readings([CardReadings(clock_mhz=[1500, 1600, 1700], watts=[300.0, 500.0])])


def test_implementations_take_turns_and_are_timed_by_call(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "sample", sample)
    monkeypatch.setattr(timing, "seconds_of_one", lambda run: 0.1)
    monkeypatch.setattr(timing, "repeat", lambda run, times: order.append((run(), times)))
    found = timing.interleaved(
        {"a": lambda: "a", "b": lambda: "b"}, calls={"a": 1, "b": 4}, seconds=0.6, rounds=3
    )
    assert order == [("b", 2), ("a", 2), ("a", 2), ("b", 2)] * 2
    assert found["a"].mhz == 1600 and found["a"].watts == 400.0
    assert all(t.joules == pytest.approx(400e-6 * t.us) for t in found.values())


@pytest.mark.parametrize("times", [1, 3, 7])
def test_every_program_of_a_window_is_waited_for(times):
    """A clock that stops before the last step ends measures the time to enqueue."""
    waited = []

    class Output:
        def block_until_ready(self):
            waited.append(self)

        def is_deleted(self):
            return False

    timing.repeat(lambda: [Output()], times)
    assert len(waited) == times


def test_runs_that_donate_their_last_result_are_waited_for():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = [jnp.zeros(4)]

    def run():
        state[0] = step(state[0])
        return state[0]

    timing.repeat(run, 20)
    assert state[0].tolist() == [20.0] * 4


def test_a_looped_program_makes_every_product_once_a_round():
    calls = []

    def one(x, w):
        jax.debug.callback(lambda x: calls.append(float(x)), x[0, 0])
        return x @ w.T

    xs, ws = [jnp.full((2, 4), float(i)) for i in range(3)], [jnp.ones((5, 4)) for _ in range(3)]
    outs = timing.looped(one, 2)(xs, ws)
    jax.effects_barrier()
    assert sorted(calls) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert all((out == 4 * i).all() for i, out in enumerate(outs))

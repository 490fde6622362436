"""The processes of the kernel bench: who compiles what and when, that nobody compiles while one times, shares
and their one report.
"""

import itertools
import json
import sys

import jax.numpy as jnp
import pytest

from jaxflow.bench.kernels import compare as kernels
from jaxflow.bench.kernels import compare as kernels_report
from jaxflow.bench.kernels import workers as kernels_pool
from jaxflow.bench.kernels import workers as kernels_worker
from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from jaxflow.config import ConfigError
from pallas_kernels.measure.peaks import Least
from pallas_kernels.measure.provenance import KEYS
from pallas_kernels.measure.timing import Timing

ALL = kernels.chosen([group.name for group in kernels.GROUPS if group.together or not group.on_request])
NAMES = [f"{group.name}/{case.name}" for group, case in ALL]


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_every_case_runs_in_one_process_and_first_cases_run_first(processes):
    plan = kernels_pool.rounds(ALL, processes)
    assert sorted(NAMES) == sorted(name for turn in plan for names in turn for name in names)
    assert all(len(turn) == processes for turn in plan)
    place = {
        name: (i, worker)
        for i, turn in enumerate(plan)
        for worker, names in enumerate(turn)
        for name in names
    }
    for group in kernels.GROUPS:
        if group.together:  # in one round of one process: the model is made once
            assert len({place[f"{group.name}/{case.name}"] for case in group.cases}) == 1
    if processes == 8:
        firsts = {
            f"{group.name}/{group.cases[0].name}"
            for group in kernels.GROUPS
            if not group.on_request and not group.together
        }
        assert all(place[name][0] == 0 for name in firsts)


def test_shares_hold_every_case_once_and_keep_groups_together():
    parts = [kernels.shared(ALL, f"{i}/3") for i in range(3)]
    assert sorted(NAMES) == sorted(f"{group.name}/{case.name}" for part in parts for group, case in part)
    for group in kernels.GROUPS:
        assert (
            not group.together
            or sum(any(other.name == group.name for other, _ in part) for part in parts) == 1
        )
    for wrong in ("3/3", "1", "a/b", ""):
        with pytest.raises(ValueError, match="share="):
            kernels.shared(ALL, wrong)


class Fake(kernels_pool.Worker):
    """A worker in this process that records its commands."""

    def __init__(self, told, ends_at=None, compiles_all=True):
        self.told, self.ends_at, self.compiles_all, self.last = told, ends_at, compiles_all, {}

    def tell(self, **order):
        self.last = order
        self.told.append((self, order))

    def answer(self, limit_s=None):
        self.told.append((self, "answered"))
        if (self.ends_at and self.last.get("measure") == self.ends_at) or (
            "compile" in self.last and not self.compiles_all
        ):
            return "its process ended"
        return {"row": self.last["measure"]} if "measure" in self.last else {}


def test_no_worker_compiles_during_a_measurement_and_an_ended_worker_is_reported():
    told = []
    workers = [Fake(told), Fake(told, "g/d")]
    rows = dict(
        kernels_pool.measured([[["g/a", "g/b"], ["g/c", "g/d"]], [["g/e"], []]], workers, 0.1, float("inf"))
    )
    assert rows.pop("g/d") == {"group": "g", "case": "d", "failed": "its process ended"}
    assert rows == {name: {"row": name} for name in ("g/a", "g/b", "g/c", "g/e")}
    open_orders = set()
    for worker, what in told:
        if what == "answered":
            open_orders.discard(id(worker))
            continue
        if "measure" in what or "tune" in what:
            assert not open_orders  # the GPU is this one's
        open_orders.add(id(worker))


def test_a_worker_that_ends_while_compiling_fails_only_its_cases():
    rows = dict(
        kernels_pool.measured(
            [[["g/a"], ["g/c", "g/d"]]], [Fake([]), Fake([], compiles_all=False)], 0.1, float("inf")
        )
    )
    assert rows["g/a"] == {"row": "g/a"}
    assert {rows[f"g/{name}"]["failed"] for name in "cd"} == {"its process ended; order: compile g/c, g/d"}


def test_cases_beyond_the_time_limit_are_left_out():
    clock = itertools.count(0.0, 10.0)  # looking at it takes 10 s, and so does everything
    plan = [[["g/a", "g/b", "g/c"]], [["g/d"]]]
    rows = list(kernels_pool.measured(plan, [Fake([])], 0.1, 45.0, clock=lambda: next(clock)))
    assert [name for name, row in rows if row] == ["g/a"] and [name for name, row in rows if row is None] == [
        "g/b",
        "g/c",
        "g/d",
    ]


def cases(monkeypatch, us=20.0):
    def fails():
        raise RuntimeError("it does not compile")

    def interleaved(implementations, **_):
        return {name: Timing(us, 0.02, 1500.0, 600.0, 0.1, 0.1) for name in implementations}

    ran = []
    implementations = {
        name: Implementation(lambda name=name: ran.append(name) or jnp.zeros(1), 1, 4e7, tuned=name == "xla")
        for name in ("ours", "xla")
    }
    monkeypatch.setattr(kernels_worker, "interleaved", interleaved)
    monkeypatch.setattr(
        kernels_worker.jax, "devices", lambda: [type("Device", (), {"device_kind": "NVIDIA H200"})]
    )
    group = KernelGroup("g", "TB/s", (KernelCase("good", lambda: implementations), KernelCase("bad", fails)))
    return kernels_worker.Cases([group]), ran


def test_a_worker_compiles_then_tunes_and_a_failed_case_stops_no_other(monkeypatch):
    made, ran = cases(monkeypatch)
    made.obey({"compile": ["g/good", "g/bad"]})
    assert ran == ["ours"]
    made.obey({"tune": True})
    assert ran == ["ours", "xla"]
    good, bad = (made.obey({"measure": f"g/{name}", "seconds": 0.1}) for name in ("good", "bad"))
    assert good["ratios"] == {"xla": 1.0} and good["implementations"]["ours"]["rate"] == pytest.approx(2e12)
    assert bad == {"group": "g", "case": "bad", "failed": "RuntimeError: it does not compile"}
    made.obey({"drop": True})
    assert made.obey({"measure": "g/good", "seconds": 0.1})["failed"] == "case not compiled"


def test_an_impossible_time_is_a_failed_row(monkeypatch):
    made, _ = cases(monkeypatch, us=1.0)
    made.obey({"compile": ["g/good"]})
    row = made.obey({"measure": "g/good", "seconds": 0.1})
    assert (
        row["failed"].startswith("ImpossibleTime: g/good ours: 1.00 us for 40.0 MB")
        and "implementations" not in row
    )


def test_products_must_read_their_weights_whatever_their_unit():
    assert Implementation(lambda: None, 1, 5.0).least_work("TB/s") == Least(moved=5.0)
    assert Implementation(lambda: None, 1, 5.0).least_work("tok/s") == Least()
    assert Implementation(lambda: None, 1, 5.0).least_work("TFLOP/s") == Least(flop=5.0)
    assert Implementation(lambda: None, 1, 5.0, dtype="float8_e4m3fn").least_work("TFLOP/s") == Least(
        flop=5.0, dtype="float8_e4m3fn"
    )
    assert Implementation(lambda: None, 1, 5.0, least=Least(7.0)).least_work("TFLOP/s") == Least(7.0)


def test_a_worker_answers_orders_until_its_stdin_ends():
    worker = kernels_pool.Worker()
    worker.tell(compile=[])
    assert worker.answer() == {}
    worker.tell(measure="ceilings/read 2 GiB", seconds=0.1)
    assert worker.answer() == {"group": "ceilings", "case": "read 2 GiB", "failed": "case not compiled"}
    worker.end()
    assert worker._process.returncode == 0


def test_an_ended_or_hung_worker_is_replaced(monkeypatch):
    ends = (
        "import sys; [print('{}', flush=True) if 'good' in line else sys.exit() if 'ends' in line else "
        "None for line in sys.stdin]"
    )
    monkeypatch.setattr(kernels_pool, "COMMAND", (sys.executable, "-c", ends))
    worker = kernels_pool.Worker()
    for order, wanted in (
        ("good", {}),
        ("ends", "its process ended"),
        ("good", {}),
        ("waits", "no answer within 0.1 s"),
        ("good", {}),
    ):
        worker.tell(measure=order)
        assert worker.answer(0.1 if order == "waits" else None) == wanted
    worker.end()


def test_xla_products_use_cublas_by_default():
    ours = kernels_pool.environment({"XLA_FLAGS": "--xla_some=1"})
    assert (
        ours["XLA_FLAGS"] == "--xla_some=1 --xla_gpu_enable_triton_gemm=false"
        and ours["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    )
    assert kernels_pool.environment({})["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=false"
    given = "--xla_gpu_enable_triton_gemm=true"
    assert kernels_pool.environment({"XLA_FLAGS": given})["XLA_FLAGS"] == given


GOOD = dict.fromkeys(KEYS, "") | {"command_name": "kernels", "device": "a GPU", "left_out": [], "rows": []}


def test_reports_of_shares_are_merged(tmp_path):
    def row(case, **more):
        return {"group": "flat_gemm", "case": case, "ratios": {"xla": 2.0}} | more

    first, second = (case.name for case in next(g for g in kernels.GROUPS if g.name == "flat_gemm").cases[:2])
    failed = {"group": "flat_gemm", "case": first, "failed": "it did"}
    for i, rows in enumerate(([row(second), failed], [row(first)])):
        part = GOOD | {
            "command": f"share {i}",
            "rows": rows,
            "left_out": [f"flat_gemm/{first}", "flat_gemm/third"][: 2 * i or 1],
        }
        (tmp_path / f"{i}.json").write_text(json.dumps(part))
    made = kernels_report.merged([str(tmp_path / f"{i}.json") for i in range(2)], kernels.GROUPS)
    assert [(r["case"], "failed" in r) for r in made["rows"]] == [(first, False), (second, False)]
    assert made["left_out"] == ["flat_gemm/third"] and made["command"] == "share 0 && share 1"
    assert made["summaries"][0]["cases"] == 2
    (tmp_path / "1.json").write_text(json.dumps(GOOD | {"device": "another"}))
    with pytest.raises(ValueError, match="one device"):
        kernels_report.merged([str(tmp_path / f"{i}.json") for i in range(2)], kernels.GROUPS)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "{}",
        json.dumps(GOOD | {"command_name": "latency"}),
        *(json.dumps({k: v for k, v in GOOD.items() if k != key}) for key in ("rows", "left_out", "commit")),
        json.dumps(GOOD | {"rows": [{"group": "flat_gemm"}]}),
        json.dumps(GOOD | {"rows": [1]}),
    ],
)
def test_another_file_than_a_kernels_report_is_refused_by_its_name(tmp_path, text):
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"merge='.*bad.json' is not supported: reports of `bench kernels`"):
        kernels_report.merged([str(tmp_path / f"{name}.json") for name in ("good", "bad")], kernels.GROUPS)


def test_a_removed_group_keeps_its_summary(tmp_path):
    row = {"group": "gone", "case": "one", "ratios": {"xla": 2.0}}
    (tmp_path / "old.json").write_text(json.dumps(GOOD | {"rows": [row]}))
    (summary,) = kernels_report.merged([str(tmp_path / "old.json")], kernels.GROUPS)["summaries"]
    assert summary["group"] == "gone" and summary["target"] is None and summary["cases"] == 1

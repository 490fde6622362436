"""`bench collectives` over virtual devices: its bytes, its calls, and its report."""

import contextlib
import json

import jax
import numpy as np
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.kernels.collectives import OPTIONS, WAYS, Sizes, program
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.exchanged_experts import pieces_of
from jaxflow.parallel.mesh import make_rank_mesh

DEVICES = 2


@pytest.fixture(scope="module")
def sizes():
    return Sizes(open_checkpoint("mixtral-8x7b", load_format="dummy").model_config, DEVICES, 3)


def test_bytes_of_an_exchange_are_those_of_its_pieces(sizes):
    counts = np.array([np.bincount(own.ravel(), minlength=8) for own in np.split(sizes.experts, DEVICES)])
    there = [np.asarray(pieces_of(counts, 1, device)[0].sizes).sum(1) for device in range(DEVICES)]
    sent = [sum(rows[other] for other in range(DEVICES) if other != i) for i, rows in enumerate(there)]
    assert sizes.sent_bytes("exchange") == 2 * max(sent) * sizes.row_bytes


@pytest.mark.parametrize("way", WAYS)
def test_each_call_of_a_loop_has_its_collective(sizes, way):
    mesh = make_rank_mesh(DEVICES)
    run = program(sizes, WAYS[way], 5, mesh, OPTIONS.get(way))
    body = run.func.lower(*run.args).compile().as_text().split("ENTRY")[0]
    assert any(name in body for name in ("all-gather", "reduce-scatter", "all-reduce"))


def test_a_report_has_a_row_for_each_way_and_a_failure_leaves_the_others(no_flags, tmp_path, monkeypatch):
    def failing(*_):
        raise jax.errors.JaxRuntimeError("too large")

    path = tmp_path / "out.json"
    monkeypatch.setitem(WAYS, "gather", failing)
    few = ["--models", "mixtral-8x7b", "--tokens", "1", "--seconds", "0.01"]
    assert main(["bench", "collectives", *few, "--output_json", str(path)]) == 0
    found = json.loads(path.read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert found["rows_missing"] == 0
    assert list(rows) == list(WAYS) and rows.pop("gather")["error"] == "too large"
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in rows.values())


def test_a_run_that_a_time_limit_ends_says_how_many_rows_are_missing(no_flags, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    path = tmp_path / "out.json"
    monkeypatch.setitem(WAYS, list(WAYS)[2], interrupted)
    few = ["--models", "mixtral-8x7b", "--tokens", "1,2", "--seconds", "0.01"]
    with contextlib.suppress(KeyboardInterrupt):
        main(["bench", "collectives", *few, "--output_json", str(path)])
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2 and found["rows_missing"] == 2 * len(WAYS) - 2


def test_a_wrong_number_of_tokens_is_refused(no_flags, capsys):
    assert main(["bench", "collectives", "--tokens", "few"]) == 1
    assert "tokens" in capsys.readouterr().err

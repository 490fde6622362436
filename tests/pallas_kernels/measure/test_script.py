"""The command line of the check scripts: exit status, and refusals before any work."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.measure import script
from pallas_kernels.measure.provenance import KEYS


@pytest.mark.parametrize(
    ("ok", "status"), [(False, 1), (np.False_, 1), (jnp.array(False), 1), (np.True_, 0), (None, 0)]
)
def test_a_failed_row_fails_the_script_for_any_type_of_ok(monkeypatch, tmp_path, capsys, ok, status):
    """A numpy bool is not Python's bool. None: a row without `ok`."""

    def check(rows, *_):
        script.record(rows, what="a kernel", **({} if ok is None else {"ok": ok}))

    monkeypatch.setattr("sys.argv", ["script", "--json", str(tmp_path / "x.json")])
    monkeypatch.setattr(script.jax, "default_backend", lambda: "gpu")
    with pytest.raises(SystemExit) as caught:
        script.main(None, {"check": check})
    assert caught.value.code == status and ("all checks passed" in capsys.readouterr().out) == (status == 0)
    report = json.loads((tmp_path / "x.json").read_text())
    assert set(report) == {*KEYS, "rows"} and report["clock_mhz"] is None
    (row,) = report["rows"]
    assert row.get("ok") == (None if ok is None else bool(ok))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "error: these checks need a GPU; JAX's backend is 'cpu'\n"),
        (
            ["--json", "{folder}/none/x.json"],
            2,
            "--json {folder}/none/x.json: accepted is a file in an existing, writable folder\n",
        ),
        (["--json", "{folder}"], 2, "--json {folder}: accepted is a file in an existing, writable folder\n"),
        (["--only", "other"], 2, "--only 'other': accepted are check\n"),
        (["--share", "2/2"], 2, "--share '2/2': accepted is i/n with i below n, for example 0/4\n"),
    ],
)
def test_wrong_arguments_are_refused_before_any_part_runs(
    monkeypatch, tmp_path, capsys, arguments, status, message
):
    monkeypatch.setattr("sys.argv", ["script", *(argument.format(folder=tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit) as caught:
        script.main(None, {"check": lambda *_: pytest.fail("it began")})
    assert caught.value.code == status
    assert capsys.readouterr().err.endswith(message.format(folder=tmp_path))

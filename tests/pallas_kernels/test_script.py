"""The command line that the checking scripts share: what it refuses before anything runs."""

import pytest

from pallas_kernels.checks import script


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "error: these checks need a GPU: JAX's backend here is 'cpu'\n"),
        (["--json", "{folder}/none/x.json"], 2, "--json {folder}/none/x.json: a file, in a folder that exists and can be written\n"),
        (["--json", "{folder}"], 2, "--json {folder}: a file, in a folder that exists and can be written\n"),
        (["--only", "other"], 2, "--only 'other': check\n"),
        (["--share", "2/2"], 2, "--share '2/2': i/n with i below n, as 0/4\n"),
    ],
)
def test_what_cannot_run_is_refused_before_it_begins(monkeypatch, tmp_path, capsys, arguments, status, message):
    monkeypatch.setattr("sys.argv", ["script", *(argument.format(folder=tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit) as caught:
        script.main("script", None, {"check": lambda *_: pytest.fail("it began")})
    assert caught.value.code == status
    assert capsys.readouterr().err.endswith(message.format(folder=tmp_path))

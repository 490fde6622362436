"""Lines of progress in a log: one at the end, and some before it."""

import re

import pytest

from jaxflow.cli import progress
from jaxflow.cli.progress import progress_of


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, 4), (60.0, 1)])
def test_a_log_has_lines_with_the_steps_done(every_s, lines, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_EVERY_S", every_s)
    with progress_of("Placing", 3, "layer", shown=True) as steps:
        for _ in range(3):
            steps.update()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert re.fullmatch(r"Placing: 3 of 3 layers in \d+\.\d s", told[-1])


def test_a_fault_is_not_hidden_and_unshown_steps_are_silent(capsys):
    with pytest.raises(ZeroDivisionError), progress_of("Compiling", None, "program", shown=True) as steps:
        steps.update()
        raise ZeroDivisionError
    assert capsys.readouterr().err.startswith("Compiling: 1 programs in ")
    with progress_of("Placing", 3, "layer", shown=False) as steps:
        steps.update(3)
    assert not capsys.readouterr().err

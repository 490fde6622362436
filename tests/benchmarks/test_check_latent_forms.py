"""Two forms of latent attention agree up to rounding. Another token, and equal bits, are found."""

import pytest

from benchmarks import check_latent_forms
from benchmarks.check_latent_forms import ANSWER, agree, compare
from jaxflow.request import Logprob


def scores(shift: float = 0.0, rank: int = 1, best: float = -1.0) -> dict[str, list[list[Logprob]]]:
    """Return the scores of a request whose tokens are ranked first, but for its last one."""
    usual = [Logprob(-1.0 + shift, 1)] * 2
    return {"a": [usual] * (2 * ANSWER) + [[Logprob(-1.0 + shift, rank), Logprob(best + shift, 1)]]}


@pytest.mark.parametrize(
    ("by_head", "absorbed", "compilations", "good"),
    [
        (scores(0.01), scores(), 0, True),
        (scores(0.01), scores(rank=2, best=-0.9), 0, True),  # a tie but for rounding
        (scores(0.01), scores(rank=9, best=-0.1), 0, False),
        (scores(0.3), scores(), 0, False),
        (scores(), scores(), 0, False),  # the other form never ran
        (scores(0.01), scores(), 1, False),
    ],
)
def test_forms_agree_up_to_rounding(by_head, absorbed, compilations, good):
    found = compare(by_head, absorbed) | {"compilations_after_warmup": {"by_head": compilations}}
    assert agree(found) == good


def test_a_device_without_both_forms_is_refused_before_an_engine_starts(monkeypatch, capsys):
    monkeypatch.setattr(check_latent_forms, "make_executor", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr("sys.argv", ["check_latent_forms"])
    assert check_latent_forms.main() == 2
    assert "kernels" in capsys.readouterr().err

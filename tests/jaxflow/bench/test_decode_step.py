"""`bench decode_step` on a tiny model: ways of launching are timed, give the same bits, and kernels are listed."""

import functools
import types

import paths
import pytest
from absl import flags

from jaxflow.bench import decode_step


@pytest.fixture
def given(monkeypatch):
    """The command's flags, apart from those that other commands' tests have left in this process."""
    own = flags.FlagValues()
    defines = {name: functools.partial(getattr(flags, name), flag_values=own) for name in dir(flags) if name.startswith("DEFINE_")}
    monkeypatch.setattr(decode_step, "flags", types.SimpleNamespace(FLAGS=own, **defines))
    decode_step.define_flags()
    own.mark_as_parsed()
    return own


def test_every_way_is_timed_and_gives_the_same_bits(given, capsys, monkeypatch):
    monkeypatch.setattr(decode_step, "WAYS", {name: decode_step.WAYS[name] for name in ("graph and chunks", "early")})
    given.model, given.requests, given.context, given.seconds = str(paths.MODELS / "tiny-llama"), ["3"], 40, 0.0
    given.smallest = ["4"]
    result = decode_step.run()
    (step,) = result["steps"]
    assert step["requests"] == 3 and step["tokens"] == 4 and list(step["ways"]) == list(decode_step.WAYS)
    assert all(way["us"] > 0 and way["enqueue_us"] > 0 and way["same_bits"] for way in step["ways"].values())
    assert "3 requests in 4, early" in capsys.readouterr().out
    for profile in step["profiles"].values():
        assert profile["launches"] == sum(kernel["runs"] for kernel in profile["kernels"]) > 0
        assert profile["kernels_us"] == pytest.approx(sum(kernel["us"] for kernel in profile["kernels"]))

"""`bench decode_step` on a tiny model: launches of launching are timed, give the same bits, and kernels are
listed; many steps are compared.
"""

import functools
import types

import jax.numpy as jnp
import numpy as np
import paths
import pytest
from absl import flags

from jaxflow.bench.kernels import decode_step, graph_steps


@pytest.fixture
def given(monkeypatch):
    """The command's flags, apart from those that other commands' tests have left in this process."""
    own = flags.FlagValues()
    defines = {
        name: functools.partial(getattr(flags, name), flag_values=own)
        for name in dir(flags)
        if name.startswith("DEFINE_")
    }
    monkeypatch.setattr(decode_step, "flags", types.SimpleNamespace(FLAGS=own, **defines))
    decode_step.define_flags()
    own.mark_as_parsed()
    return own


@pytest.fixture
def anywhere(monkeypatch):
    """The steps of a tiny model run on the CPU."""
    monkeypatch.setattr(decode_step.machine, "need_gpu", lambda command: None)


def test_decode_step_needs_a_gpu(given, monkeypatch):
    monkeypatch.setattr(decode_step, "_executor", lambda *_: pytest.fail("a model was made"))
    with pytest.raises(ValueError, match="JAX backend='cpu' is not supported: gpu, for bench decode_step"):
        decode_step.run()


def test_every_launch_is_timed_and_gives_the_same_bits(given, anywhere, capsys, monkeypatch):
    monkeypatch.setattr(
        decode_step, "LAUNCHES", {name: decode_step.LAUNCHES[name] for name in ("graph and chunks", "pdl")}
    )
    given.model, given.requests, given.context, given.seconds = (
        str(paths.MODELS / "tiny-llama"),
        ["3"],
        40,
        0.0,
    )
    given.min_bucket = ["4"]
    result = decode_step.run()
    (step,) = result["steps"]
    assert (
        step["requests"] == 3 and step["tokens"] == 4 and list(step["launches"]) == list(decode_step.LAUNCHES)
    )
    assert all(
        launch["us"] > 0 and launch["enqueue_us"] > 0 and launch["same_bits"]
        for launch in step["launches"].values()
    )
    assert "3 requests in 4, pdl" in capsys.readouterr().out
    for profile in step["profiles"].values():
        assert profile["launches"] == sum(kernel["runs"] for kernel in profile["kernels"]) > 0
        assert profile["kernels_us"] == pytest.approx(sum(kernel["us"] for kernel in profile["kernels"]))


def test_many_steps_of_each_launch_are_compared(given, anywhere, capsys, monkeypatch):
    monkeypatch.setattr(
        graph_steps, "LAUNCHES", {name: graph_steps.LAUNCHES[name] for name in ("graph", "one by one")}
    )
    given.model, given.requests, given.context, given.steps = str(paths.MODELS / "tiny-llama"), ["3"], 40, 20
    result = decode_step.run()
    assert result["same"] and [(row["decodes"], row["chunk"]) for row in result["compared"]] == [
        (3, 0),
        (3, 5),
    ]
    assert all(
        row["first_difference"] == {"one by one": None} and row["distinct_tokens_drawn"] > 10
        for row in result["compared"]
    )
    assert "a chunk of   5: first to differ of 20 steps" in capsys.readouterr().out


def test_digest_finds_a_difference_at_any_place():
    one = np.zeros((4, 2), np.uint32), np.zeros((4, 3), np.int32)
    other = tuple(a.copy() for a in one)
    assert graph_steps._first_difference(one, other) is None
    other[1][2, 1] = 5
    assert graph_steps._first_difference(one, other) == 2
    hidden = jnp.arange(12.0).reshape(3, 4)
    assert (graph_steps.digest(hidden, 2) == graph_steps.digest(hidden.at[2].set(9), 2)).all()
    assert (graph_steps.digest(hidden, 3) != graph_steps.digest(hidden[:, ::-1], 3)).any()

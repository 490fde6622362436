"""Interpolation errors of a profile along each axis."""

import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.profile.measure import interpolation_errors
from search.profile.op_times import OpTime, Profile, held_out_errors, in_words, load_profile

LLAMA = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config


def test_interpolation_is_stated_along_each_axis_that_the_search_interpolates_on():
    """Seconds are linear in tokens and keys, and rates are linear in SMs. Other shapes give an error."""

    def profile(tokens=(128, 256, 512), keys=(100, 200, 300), sms=(24, 40, 132), slower=lambda t, k, s: 1.0):
        times = (
            OpTime("decode_attention", t, k, s, slower(t, k, s) * t * k / (10 + s) * 1e-9)
            for t in tokens
            for k in keys
            for s in sms
        )
        return Profile("H200", {}, "toy", 1, "bfloat16", "bfloat16", 132, "drawn", tuple(times))

    assert held_out_errors(profile()) == pytest.approx({"tokens": 0, "keys": 0, "sms": 0}, abs=1e-9)
    for axis, at in (("tokens", 256), ("keys", 200), ("sms", 40)):
        bent = profile(
            slower=lambda t, k, s, axis=axis, at=at: (
                2.0 if {"tokens": t, "keys": k, "sms": s}[axis] == at else 1.0
            )
        )
        expected = {"tokens": 0.0, "keys": 0.0, "sms": 0.0} | {axis: 0.5}
        assert held_out_errors(bent) == pytest.approx(expected, abs=1e-9)
    waves = held_out_errors(
        profile(slower=lambda t, k, s: 2.0 if s == 40 else 1.0),
        lambda op, tokens, sms: 0.5 if sms == 40 else 1.0,
    )
    assert waves["sms"] == pytest.approx(0, abs=1e-9)
    few = held_out_errors(profile(tokens=(128,), sms=(24, 132)))
    assert few == {"tokens": None, "keys": pytest.approx(0, abs=1e-9), "sms": None}
    assert in_words(few).endswith(
        "0.0% along keys; not known along tokens, SMs, where no point lies between others"
    )


def test_a_shipped_profile_states_its_error_on_shares_and_between_contexts():
    found = interpolation_errors(
        load_profile(paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json"), LLAMA
    )
    assert found == pytest.approx({"tokens": 0.069, "keys": 0.038, "sms": 0.059}, abs=6e-4)

"""YaRN keeps fast planes, interpolates slow planes and blends between the two borders."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import Rope
from jaxflow.model.rope import inverse_frequencies

# The rotary embedding of gpt-oss: 32 planes, extended from 4,096 tokens to 131,072.
GPT_OSS = Rope(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)


@given(
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    original=st.integers(256, 131072),
    slow=st.floats(0.5, 8.0),
    times=st.floats(1.5, 64.0),
    truncate=st.booleans(),
)
def test_yarn_blends_by_turns_in_the_original_context(theta, factor, original, slow, times, truncate):
    rope = Rope(
        theta, "yarn", factor, original_max_position=original, beta_fast=slow * times, beta_slow=slow,
        truncate=truncate,
    )  # fmt: skip
    found, plain = inverse_frequencies(rope, 64), inverse_frequencies(Rope(theta), 64)
    ratio, turns = found / plain, original * plain / (2 * math.pi)
    kept, interpolated = turns >= slow * times, turns <= slow
    if not truncate:  # whole planes move both borders by up to a plane
        np.testing.assert_allclose(ratio[kept], 1.0, rtol=1e-5)
        np.testing.assert_allclose(ratio[interpolated], 1 / factor, rtol=1e-5)
    assert ((ratio <= 1.0 + 1e-5) & (ratio >= 1 / factor - 1e-5)).all()
    assert (np.diff(ratio) <= 1e-5).all()


def test_borders_between_planes_are_exact_without_truncation():
    """Borders of gpt-oss by the paper's formula: planes 8.09 and 17.40, so plane 12 is
    blended by (12 - 8.09) / 9.31.
    """
    first, last = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000.0) for turns in (32, 1))
    blend = (12 - first) / (last - first)
    ratio = inverse_frequencies(GPT_OSS, 64) / inverse_frequencies(Rope(150000.0), 64)
    assert ratio[12] == pytest.approx((1 - blend) + blend / 32, rel=1e-5)
    whole = dataclasses.replace(GPT_OSS, truncate=True)
    ratio = inverse_frequencies(whole, 64) / inverse_frequencies(Rope(150000.0), 64)
    assert ratio[12] == pytest.approx((1 - 4 / 10) + 4 / 10 / 32, rel=1e-5)

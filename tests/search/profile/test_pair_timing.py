"""Pairs of a product and attention with the number of keys that makes both end together."""

from types import SimpleNamespace

import msgspec
import pytest

from search.profile.clock import ClockScaling, of_pair
from search.profile.entries import PAIR_KEYS, OpPair
from search.profile.measure import equal_ends, timed_pair
from search.profile.op_bench import PHASES, OpCase
from search.profile.op_times import OpTime, Profile, seconds
from search.profile.sustain import Sustained

PRODUCT_S, A_KEY_S, BESIDE = 400e-6, 1e-6, 1.13


def alone_s(keys: float) -> float:
    return 20e-6 + A_KEY_S * keys


def ends(keys: float) -> tuple[float, float]:
    """Return the ends of product and attention. Each one is slower while the other runs."""
    a, b = PRODUCT_S, alone_s(keys)
    both = BESIDE * min(a, b)
    return (both, both + b - a) if a < b else (both + a - b, both)


@pytest.mark.parametrize("guess", [250, 380, 600])
def test_both_end_within_two_percent(guess):
    tried = []

    def together_s(keys):
        tried.append(keys)
        return max(ends(keys))

    keys = equal_ends(together_s, alone_s, guess, 16, 4096)
    first, second = ends(keys)
    assert len(tried) == 4
    assert second == pytest.approx(first, rel=0.02)
    assert first == pytest.approx(BESIDE * PRODUCT_S, rel=0.02)


def test_it_stays_where_attention_was_timed():
    tried = []

    def together_s(keys):
        tried.append(keys)
        return max(ends(keys))

    assert 240 <= equal_ends(together_s, alone_s, 200, 16, 256) <= 256 == max(tried)
    assert 512 <= equal_ends(together_s, alone_s, 600, 512, 4096) <= 530


def test_a_pair_says_what_both_took_to_their_own_end():
    """The product takes 400 us on its SMs and 300 us alone. Attention takes equal times on both."""
    times = [OpTime("down", 1024, 0, sms, took) for sms, took in ((100, PRODUCT_S), (132, 300e-6))]
    times += [
        OpTime("decode_attention", 256, keys, sms, alone_s(keys)) for sms in (32, 132) for keys in (100, 4096)
    ]
    profile = Profile("toy", {}, "toy", 1, "bfloat16", "bfloat16", 132, "drawn", tuple(times))
    layer = SimpleNamespace(batch=lambda case, most_keys: case.keys)
    entry = OpPair(OpCase("down", 1024, sms=100), OpCase("decode_attention", 256, PAIR_KEYS, 32))

    def run(given, seconds):
        return Sustained(PHASES * max(ends(given["batch"])), 700.0, 1500.0, PHASES * 0.3, 0.1)

    pair = timed_pair(profile, layer, entry, {}, run, 0.4)
    assert (pair.first_sms, pair.second_sms, pair.first_tokens, pair.second_tokens) == (100, 32, 1024, 256)
    assert pair.seconds == pytest.approx(BESIDE * PRODUCT_S, rel=0.02) and pair.joules == pytest.approx(0.3)
    assert pair.first_performance == pytest.approx(300e-6 / pair.seconds)
    assert pair.second_performance == pytest.approx(
        seconds(profile, "decode_attention", 256, pair.keys) / pair.seconds
    )
    assert pair.second_performance == pytest.approx(1 / BESIDE, rel=0.02)
    graph = SimpleNamespace(layers=())
    assert of_pair(
        profile, ClockScaling(graph, profile), msgspec.structs.replace(pair, clock_mhz=None)
    ) == pytest.approx(BESIDE, rel=0.02)

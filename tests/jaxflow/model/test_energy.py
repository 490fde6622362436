"""Energy as the fourth resource: the bound lies below whatever was measured,
and says which resource binds.
"""

import dataclasses
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import SCHEMA_VERSION, Power, bound, known_rate, shipped_power
from jaxflow.model.graph import Work

H200 = DEVICES["H200"]
POWER = shipped_power("H200")
assert POWER is not None

# A layer of Llama-3.1-8B with 870,000 cached tokens, or twice as many for 4096, as two nano-batches. Values:
# the best microseconds of any arrangement, sequential and overlapped, in two rounds each.
LAYERS = {2048: (870_000, (2114, 2018)), 4096: (1_740_000, (4241, 3906))}
PARAMETERS = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336

amounts = st.floats(0, 1e15)


@pytest.mark.parametrize("tokens", LAYERS)
def test_below_every_time_of_a_whole_layer(tokens):
    keys, microseconds = LAYERS[tokens]
    layer = Work(2 * tokens * PARAMETERS, weight_bytes=2 * PARAMETERS, kv_bytes=keys * 2 * 8 * 128 * 2)
    found = bound(layer, H200, POWER)
    assert found.binding == "energy"
    assert 0.65 * min(microseconds) < 1e6 * found.longest_s < min(microseconds)


def test_each_resource_binds_where_it_should():
    assert bound(Work(flops=1e12, weight_bytes=1e6), H200, POWER).binding == "energy"
    assert bound(Work(flops=1e9, kv_bytes=1e10), H200, POWER).binding == "memory"
    assert bound(Work(flops=1e9, network_bytes=1e10), H200, POWER).binding == "network"
    uncapped = msgspec.structs.replace(POWER, cap_w=1e5)
    assert bound(Work(flops=1e12), H200, uncapped).longest_s == pytest.approx(1e12 / (132 * 4096 * 1.98e9))


@given(amounts, amounts, st.floats(1.0, 2.0))
def test_more_work_or_fewer_watts_never_take_less(flops, moved, factor):
    work = Work(flops, kv_bytes=moved)
    base = bound(work, H200, POWER)
    assert bound(work * factor, H200, POWER).longest_s >= base.longest_s
    weaker = msgspec.structs.replace(POWER, cap_w=POWER.idle_w + (POWER.cap_w - POWER.idle_w) / factor)
    assert bound(work, H200, weaker).longest_s >= base.longest_s
    assert math.isclose(
        bound(work * factor, H200, POWER).energy_s, base.energy_s * factor, rel_tol=1e-6, abs_tol=1e-30
    )


@given(st.floats(1e6, 1e15), amounts, amounts, st.sampled_from(["bfloat16", "float8_e4m3fn"]))
def test_no_work_with_these_flops_is_faster_than_the_optimum(flops, moved, sent, dtype):
    rate = known_rate(H200, dtype)
    assert rate is not None
    least_s = bound(Work(flops, kv_bytes=moved, network_bytes=sent), H200, POWER, dtype).longest_s
    assert least_s >= flops / rate.flops_per_s * (1 - 1e-9)


@given(amounts, amounts)
def test_overlap_saves_energy_but_never_beats_the_larger_half(flops, moved):
    """Check the bounds of the gain from overlapping two pieces of work."""
    first, second = Work(flops), Work(kv_bytes=moved)
    together = bound(first + second, H200, POWER).longest_s
    apart = [bound(work, H200, POWER).longest_s for work in (first, second)]
    assert max(apart) <= together * (1 + 1e-9)
    assert together <= sum(apart) * (1 + 1e-2) or together == pytest.approx(
        bound(first + second, H200, POWER).energy_s
    )


def test_float8_takes_less_than_bfloat16():
    work = Work(flops=1e13, weight_bytes=1e9)
    assert bound(work, H200, POWER, "float8_e4m3fn").energy_s < 0.7 * bound(work, H200, POWER).energy_s


def test_a_device_without_a_fit_has_no_joules():
    assert shipped_power("A100-80GB") is None
    assert POWER.schema_version == SCHEMA_VERSION
    assert isinstance(POWER, Power) and dataclasses.is_dataclass(bound(Work(1.0), H200, POWER))

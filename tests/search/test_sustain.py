"""Watts, clock and joules beside a time, from cards that are not here."""

import time

import jax
import jax.numpy as jnp
import pynvml
import pytest

from search.sustain import by_counter, sustain

WATTS, STEP_S = 600.0, 0.02


@pytest.fixture
def card(monkeypatch):
    """A card that draws 600 W; its energy counter moves in steps."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    start = time.perf_counter()
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: "card",
        "nvmlDeviceGetFieldValues": lambda handle, fields: [unsupported()],
        "nvmlDeviceGetPowerUsage": lambda handle: 1e3 * WATTS,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1500 if kind == pynvml.NVML_CLOCK_SM else 0,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: int((time.perf_counter() - start) / STEP_S) * 1e3 * STEP_S * WATTS,
    }.items():
        monkeypatch.setattr(pynvml, name, value)


def unsupported():
    value = pynvml.c_nvmlFieldValue_t()
    value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
    return value


def work():
    time.sleep(0.004)
    return jnp.zeros(1)


def test_joules_are_the_energy_counters_between_two_of_its_steps(card):
    found = sustain(work, 0.2)
    assert found.joules is not None and found.energy_step_s is not None
    assert (found.watts, found.clock_mhz) == (WATTS, 1500)
    assert found.joules == pytest.approx(WATTS * found.seconds, rel=0.5)  # of 0.2 s, on a machine that does other things, too
    assert found.energy_step_s == pytest.approx(STEP_S, rel=0.5)


def test_a_card_without_the_counter_has_watts_alone(card, monkeypatch):
    def absent(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", absent)
    found = sustain(work, 0.05)
    assert (found.watts, found.joules, found.energy_step_s) == (WATTS, None, None)


def test_how_coarse_the_counter_is_does_not_matter_where_its_steps_are_seen():
    assert by_counter([(0.1, 50.0), (0.2, 110.0), (0.3, 170.0)]) == (pytest.approx(600.0), pytest.approx(0.1))
    assert by_counter([(0.1, 50.0)]) == by_counter([]) == (None, None)

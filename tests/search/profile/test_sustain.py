"""Watts, clock and joules of a timed run on simulated cards."""

import threading
import types

import jax
import jax.numpy as jnp
import pynvml
import pytest

from pallas_kernels.measure import sensor, timing
from pallas_kernels.measure.sensor import power_by_counter
from search.profile import sustain as module
from search.profile.sustain import sustain

WATTS, STEP_S = 600.0, 0.02
RUN_S = 0.004


class Card:
    """A card of 600 W with an energy counter that moves in steps.

    Time is the sum of the runs' times, so that a busy machine changes nothing.
    """

    def __init__(self, monkeypatch):
        self.now, self.asked = 0.0, None
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        for each in (module, sensor, timing):
            monkeypatch.setattr(each, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        for name, value in {
            "nvmlInit": lambda: setattr(self, "asked", threading.Semaphore(0)),
            "nvmlShutdown": lambda: setattr(self, "asked", None),
            "nvmlDeviceGetHandleByIndex": lambda index: "card",
            "nvmlDeviceGetFieldValues": lambda handle, fields: [unsupported()],
            "nvmlDeviceGetPowerUsage": lambda handle: 1e3 * WATTS,
            "nvmlDeviceGetTemperature": lambda handle, which: 61,
            "nvmlDeviceGetClockInfo": lambda handle, kind: 1500 if kind == pynvml.NVML_CLOCK_SM else 0,
            "nvmlDeviceGetTotalEnergyConsumption": self.counter,
        }.items():
            monkeypatch.setattr(pynvml, name, value)

    def counter(self, handle):
        if self.asked is not None:
            self.asked.release()
        return int(self.now / STEP_S) * 1e3 * STEP_S * WATTS

    def work(self):
        """Run once. The counter is read twice before the end."""
        self.now += RUN_S
        if self.asked is not None:
            while self.asked.acquire(blocking=False):
                pass
            assert self.asked.acquire(timeout=60) and self.asked.acquire(timeout=60)
        return jnp.zeros(1)


@pytest.fixture
def card(monkeypatch):
    return Card(monkeypatch)


def unsupported():
    value = pynvml.c_nvmlFieldValue_t()
    value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
    return value


def test_joules_are_the_energy_counters_between_two_of_its_steps(card):
    found = sustain(card.work, 0.6)
    assert found.joules is not None and found.energy_step_s is not None
    assert (found.watts, found.clock_mhz) == (WATTS, 1500) and found.seconds == pytest.approx(RUN_S)
    # Each step of the counter is seen within two runs of 0.6 s.
    assert found.joules == pytest.approx(WATTS * RUN_S, rel=0.05)
    assert found.energy_step_s == pytest.approx(STEP_S, abs=2 * RUN_S)


def test_a_card_without_the_counter_has_watts_alone(card, monkeypatch):
    def absent(handle):
        card.counter(handle)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", absent)
    found = sustain(card.work, 0.05)
    assert (found.watts, found.joules, found.energy_step_s) == (WATTS, None, None)


def test_how_coarse_the_counter_is_does_not_matter_where_its_steps_are_seen():
    assert power_by_counter([(0.1, 50.0), (0.2, 110.0), (0.3, 170.0)]) == (
        pytest.approx(600.0),
        pytest.approx(0.1),
    )
    assert power_by_counter([(0.1, 50.0)]) == power_by_counter([]) == (None, None)

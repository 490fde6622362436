"""The sampler of power, clock and energy on a fake NVML with several cards."""

import itertools
import time

import pynvml
import pytest

from pallas_kernels.measure.sensor import power_by_counter, sample

WATTS = {0: 600.0, 1: 400.0, 2: 100.0}


@pytest.fixture
def nvml(monkeypatch):
    """Three cards of 600, 400 and 100 W. Their energy counters advance by 1 J at each read."""
    counters = {card: itertools.count(step=1000) for card in WATTS}

    def fields(card, _):
        value = pynvml.c_nvmlFieldValue_t()
        value.nvmlReturn, value.value.uiVal = pynvml.NVML_SUCCESS, int(1e3 * WATTS[card])
        return [value]

    for name, function in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(WATTS),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetPowerUsage": lambda card: pytest.fail("a mean of the last second was read"),
        "nvmlDeviceGetClockInfo": lambda card, kind: 1500 + 100 * card,
        "nvmlDeviceGetTemperature": lambda card, kind: 60,
        "nvmlDeviceGetTotalEnergyConsumption": lambda card: next(counters[card]),
    }.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def sampled(**settings):
    with sample(every_s=0.001, **settings) as readings:
        while not readings.cards or min(len(card.watts) for card in readings.cards) < 3:
            time.sleep(0.001)
    return readings


@pytest.mark.parametrize(
    ("cards", "watts", "mhz"), [(1, 600.0, 1500), (2, 1000.0, 1550), (None, 1100.0, 1600)]
)
def test_watts_are_instant_power_summed_over_the_cards_in_use(nvml, cards, watts, mhz):
    readings = sampled(cards=cards)
    assert readings.watts == watts and readings.clock_mhz == mhz
    assert readings.watts_by_card == list(WATTS.values())[:cards]
    assert len(readings.clock_mhz_by_card) == len(readings.cards)
    assert sum(readings.clock_mhz_by_card) == mhz * len(readings.cards)
    assert readings.watts_by_counter is None


def test_the_counters_of_all_cards_are_added(nvml):
    readings = sampled(cards=2, counter_reads=4)
    each = [power_by_counter(card.energy)[0] for card in readings.cards]
    assert None not in each and readings.watts_by_counter == sum(each)


def test_no_driver_gives_no_readings(monkeypatch):
    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with sample(cards=2) as readings:
        pass
    assert readings.watts is readings.clock_mhz is readings.watts_by_counter is None
    assert readings.watts_by_card == readings.clock_mhz_by_card == []

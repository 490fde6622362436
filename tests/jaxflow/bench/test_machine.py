"""The machine part of a report, for cards that are absent here."""

import time

import pynvml
import pytest

from jaxflow.bench.report import machine, optimum
from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.model.cost import dense_parameters
from pallas_kernels.measure.provenance import KEYS
from pallas_kernels.measure.sensor import CardReadings

LLAMA = ModelConfig("llama", 128256, 4096, 32, 8, 128, 14336, (Layer(rope=Rope(500000.0)),) * 32, 8192)


def instant(milliwatts: int):
    value = pynvml.c_nvmlFieldValue_t()
    value.nvmlReturn, value.value.uiVal = pynvml.NVML_SUCCESS, milliwatts
    return value


@pytest.fixture
def card(monkeypatch):
    """Cards of 600 and 400 watts; yields the handles that were requested."""
    asked = []
    monkeypatch.setattr(machine, "SAMPLE_EVERY_S", 0.002)
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: asked.append("shutdown"),
        "nvmlDeviceGetHandleByIndex": lambda index: asked.append(index) or index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: asked.append(uuid) or "card",
        "nvmlDeviceGetFieldValues": lambda handle, fields: [instant(600_000 if handle == 3 else 400_000)],
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 0,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1500 if kind == pynvml.NVML_CLOCK_SM else 0,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
    }.items():
        monkeypatch.setattr(pynvml, name, value)
    return asked


def test_watts_and_clock_are_sampled_while_a_run_lasts(card, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with machine.watch(2) as readings:
        while min(len(card.temperature_c) for card in readings.cards) < 4:
            time.sleep(0.001)
    found = machine.power_summary(readings)
    assert found is not None
    assert found["watts_by_card"] == [600.0, 400.0] and found["counter_watts"] is None
    assert found["mean_watts"] == found["max_watts"] == 1000.0
    assert found["mean_sm_clock_mhz"] == found["min_sm_clock_mhz"] == 1500
    assert card == [3, 4, "shutdown"]
    taken = len(readings.cards[0].watts)
    time.sleep(0.02)
    assert len(readings.cards[0].watts) == taken


def test_a_process_samples_the_cards_of_all_processes_of_its_engine(card, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setenv("JAXFLOW_ENGINE_GPUS", "3,4,5")
    with machine.watch(2) as readings:
        while min(len(one.temperature_c) for one in readings.cards) < 2:
            time.sleep(0.001)
    assert readings.watts_by_card == [600.0, 400.0] and card == [3, 4, "shutdown"]


def test_a_card_may_be_named_by_its_uuid(card, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    with machine.watch(1):
        pass
    assert card == ["GPU-1234", "shutdown"]


def test_there_are_no_readings_without_a_driver(monkeypatch):
    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with machine.watch() as readings:
        pass
    assert machine.power_summary(readings) is None


def test_a_report_starts_with_its_keys_and_has_its_mean_power():
    report = {"command_name": "plans", **machine.describe()}
    report["plans"] = [{"watts": watts, "sm_clock_mhz": 1500.0, "note": "watts"} for watts in (600.0, 700.0)]
    found = machine.with_power(report, machine.Readings([CardReadings([100.0], [200.0], [50.0])]))
    assert list(found)[:9] == ["command_name", *KEYS]
    assert (found["watts"], found["clock_mhz"]) == (650.0, 1500.0)
    assert found["plans"] == report["plans"] and set(found) == set(report)


def test_a_report_without_power_has_the_mean_of_the_command():
    report = {"command_name": "disk", **machine.describe(), "rates": [1.0]}
    found = machine.with_power(
        report, machine.Readings([CardReadings([100.0, 300.0], [1000.0, 2000.0], [50.0])])
    )
    assert (found["watts"], found["clock_mhz"]) == (200.0, 1500.0)
    assert machine.with_power(report, machine.Readings())["watts"] is None


def test_the_optimum_of_llama_8b_on_an_h200():
    found = optimum.optimal(LLAMA, 1024, 512, dtype="bfloat16", device="H200")
    assert found["optimal_flops_source"] == "H200 bfloat16, at the power cap"
    assert found["optimal_parameters"] == dense_parameters(LLAMA, 1 / 3)
    assert found["optimal_token_throughput"] == pytest.approx(
        found["optimal_flops_per_s"] / 2 / (6.98e9 + 0.525e9 / 3), rel=1e-3
    )
    assert 700e12 < found["optimal_flops_per_s"] < 989e12  # between the sustained and the datasheet's rate
    two = optimum.optimal(LLAMA, 1024, 512, dtype="bfloat16", tp=2, device="H200")
    assert two["optimal_token_throughput"] == 2 * found["optimal_token_throughput"]


def test_the_report_names_optimum_machine_and_command():
    result = machine.describe() | optimum.optimal(LLAMA, 1, 1, dtype="bfloat16", device="H100")
    result |= {
        "fraction_of_optimal": 0.5,
        "fraction_of_bound": 0.6,
        "binding": "energy",
        "power": {
            "mean_watts": 650.4,
            "max_watts": 702.0,
            "mean_sm_clock_mhz": 1500,
            "min_sm_clock_mhz": 1400,
        },
    }
    text = machine.text(result)
    for part in (
        "50.00%",
        "60.00%, by energy",
        "H100 bfloat16, datasheet",
        "650 (702)",
        "1500 (1400)",
        "jax 0.11",
        "Command: python -m jaxflow.bench",
    ):
        assert part in text
    assert "unknown" in machine.text(machine.describe())


def test_an_unknown_device_is_measured():
    best = optimum.peak_rate("float32")
    assert best.flops_per_s > 1e8 and "measured here" in best.source
    with pytest.raises(KeyError, match="int4 on H200"):
        optimum.peak_rate("int4", "H200")

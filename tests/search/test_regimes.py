"""NanoFlow's Tables 1 and 2 and Figures 2 and 3: numbers, the generated page and its pictures."""

import statistics

import paths
import pytest

from jaxflow.model.composition import Composition
from search import regimes as heat_maps
from search.regimes import (
    TABLE_1,
    TABLE_2,
    TODAY,
    largest_batch,
    memory_map,
    network_map,
    rewritten,
    save,
    table_2,
    weight_bytes,
)
from search.regimes import _config as config_of

# The last three columns of Table 1 as printed.
PRINTED = {
    "V100": (0.018, 139, 0.33), "A100 40 GB": (0.026, 200, 0.39), "A100 80 GB": (0.040, 156, 0.30),
    "H100": (0.024, 295, 0.268), "H200 (96 GB)": (0.020, 206, 0.19), "B100": (0.015, 225, 0.23),
    "B200 (120 GB)": (0.015, 281, 0.23), "MI250": (0.038, 107, 0.24), "MI300": (0.036, 246, 0.19),
    "MI325X": (0.043, 218, 0.17), "Gaudi 2": (0.040, 417, 0.25), "Gaudi 3": (0.035, 486, 0.32),
    "Ada 6000": (0.050, 190, 0.067),
}  # fmt: skip
PAGE = paths.ROOT / "docs" / "cost-model.md"


def test_table_1():
    assert [device.name for device in TABLE_1] == list(PRINTED)
    for device in TABLE_1:
        seconds, compute, network = PRINTED[device.name]
        assert device.memory_s == pytest.approx(seconds, abs=6e-4)
        assert device.compute_to_memory == pytest.approx(compute, abs=1)  # some printed values are truncated
        assert device.network_to_memory == pytest.approx(network, abs=6e-3)


def test_table_2():
    ours = table_2()
    for name, (_, *paper, _) in TABLE_2.items():
        if name not in ("UG", "PfAttn"):
            assert ours[name] == pytest.approx(paper, abs=0.02), name
    assert ours["UG"] == pytest.approx((61.67, 6.04 - 0.587, 0), abs=0.01)  # one sum for gate and up
    # The paper counts full squares for prompts, as a causal chunk of twice the length.
    twice = table_2(Composition(chunks=((1365, 0),), decode_tokens=683, decode_keys=1))
    assert (
        ours["PfAttn"][1] == pytest.approx(0.13, abs=0.005) and twice["PfAttn"][0] > 0.37 > ours["PfAttn"][0]
    )
    total = [sum(column) for column in zip(*ours.values(), strict=True)]
    assert total == pytest.approx((114.17 - 0.19, 45.09 - 0.59, 31.33), abs=0.05)


def test_figure_2_large_models_are_bound_by_compute_on_fast_links():
    found = network_map()
    ratio = {
        (row, column): found.values[i][j]
        for i, row in enumerate(found.rows)
        for j, column in enumerate(found.columns)
    }
    for model in ("llama-2-70b", "llama-3-70b", "qwen2-72b"):
        assert all(
            ratio[device, model] < 1
            for device in (
                "V100",
                "A100 40 GB",
                "A100 80 GB",
                "H100",
                "H200",
                "B100",
                "B200",
                "MI300",
                "MI325X",
            )
        )
        assert all(ratio[device, model] > 1.5 for device in ("Ada 6000", "L40S"))
    # The example of §3.5: 31.33 ms of network for 112.7 ms of products. A ring keeps an eighth at home.
    assert ratio["A100 80 GB", "llama-2-70b"] * 7 / 8 == pytest.approx(31.33 / 112.7, rel=0.01)


def test_figure_3_serving_is_bound_by_compute_but_for_long_outputs_of_a_small_model():
    found = memory_map()
    by_model = dict(zip(found.rows, found.values, strict=True))
    assert found.columns[:3] == ("512-512", "1024-512", "512-1024")
    for model in (
        "llama-3-8b × 1",
        "mixtral-8x7b × 8",
        "llama-2-70b × 8",
        "llama-3-70b × 8",
        "qwen2-72b × 8",
    ):
        values = dict(zip(found.columns, by_model[model], strict=True))
        assert all(
            value < 0.9 for name, value in values.items() if (name, model) != ("512-1024", "llama-3-8b × 1")
        )
        assert max(values, key=values.__getitem__) == "512-1024"
    assert by_model["llama-3-8b × 1"][2] == pytest.approx(1.0, abs=0.25)
    assert statistics.mean(by_model["llama-2-70b × 8"]) < statistics.mean(by_model["llama-3-8b × 1"]) / 3


def test_the_papers_batch():
    """LLaMA-2-70B on eight A100: 1024 decodes and 2048 tokens (§3.3), an eighth without grouped queries."""
    found = largest_batch(config_of("llama-2-70b"), TABLE_1[2].rates, 80e9, 8, 512, 1024)
    assert found is not None and 1024 < found.requests < 2048 and 2048 < found.tokens < 3072
    assert largest_batch(config_of("llama-2-70b"), TABLE_1[2].rates, 80e9, 1, 512, 1024) is None
    assert largest_batch(config_of("llama-2-70b"), TABLE_1[2].rates, 80e9, 8, 512, 0) is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-2-70b", 68.98),
        ("llama-3-70b", 70.55),
        ("qwen2-72b", 72.71),
        ("deepseek-67b", 67.42),
        ("mixtral-8x7b", 46.70),
    ],
)
def test_shipped_models_have_their_published_sizes(name, billions):
    """Sizes count all parameters except norms and biases."""
    assert weight_bytes(config_of(name)) / 2e9 == pytest.approx(billions, abs=0.01)


def test_the_page_has_the_tables_that_are_computed():
    text = PAGE.read_text("utf-8")
    assert rewritten(text) == text
    assert all(f"| {device.vendor} {device.name} |" in text for device in (*TABLE_1, *TODAY))


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("stray", 2)])
def test_the_command_that_writes_them_takes_no_arguments(argument, code, monkeypatch):
    monkeypatch.setattr(heat_maps, "rewritten", lambda _: pytest.fail("the page was written"))
    assert heat_maps.main(["heat_maps", argument]) == code


def test_the_pictures_show_the_numbers(tmp_path):
    for name, shown in (("network-over-compute", network_map()), ("memory-over-compute", memory_map())):
        save(shown, tmp_path / "new.svg")
        texts = [path.read_text("utf-8") for path in (tmp_path / "new.svg", PAGE.parent / f"{name}.svg")]
        numbers = [f">{value:.2f}<" for row in shown.values for value in row if value is not None]
        for text in texts:
            assert all(number in text for number in numbers)
            assert len(text) < 100_000

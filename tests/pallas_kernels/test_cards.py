"""The cards: every constant has a source, files are complete, and device kinds find their card."""

import json

import pytest

from pallas_kernels.cards import FOLDER, card_of, cards, default_card, read_card


def test_every_constant_has_a_value_and_a_source():
    for path in FOLDER.glob("*.json"):
        data = json.loads(path.read_text("utf-8"))
        assert all(
            each["source"] and set(each) == {"value", "source"} for each in data.get("constants", {}).values()
        )
        assert path.stem == "default" or data["hardware"]["source"]
        assert "measured" not in data.get("hardware", {}) or data["hardware"]["measured_source"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("H100", "H100"),
        ("NVIDIA GH200 480GB", ""),
    ],
)
def test_a_device_kind_finds_its_card_or_the_default(kind, name):
    assert card_of(kind).device == name
    assert (card_of(kind) is default_card()) == (not name)


def test_a_device_overrides_the_default_constants(tmp_path):
    file = tmp_path / "x.json"
    change = {"disk_patience": {"value": 2.0, "source": "a test"}}
    file.write_text(json.dumps({"schema_version": 1, "device": "X", "constants": change}))
    card = read_card(file, default_card())
    assert card.disk_patience == 2.0 and card.sources["disk_patience"] == "a test"
    assert card.plan_margin == default_card().plan_margin == cards()["H200"].plan_margin


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version=2"),
        ({"constants": {"speed": {"value": 1, "source": "x"}}}, "speed"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, change, message):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"schema_version": 1, "device": "X"} | change))
    with pytest.raises(ValueError, match=message):
        read_card(file, default_card())

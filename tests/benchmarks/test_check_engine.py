"""The check of an engine against the reference engine, with a tiny model whose layers share keys."""

import json

from paths import MODELS

from benchmarks import check_engine


def test_the_check_runs_for_layers_that_share_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(check_engine, "STEP_SIZES", (8, 64))  # fewer programs
    keys = json.loads((MODELS / "tiny-gemma4_e2b" / "config.json").read_text())
    keys |= {"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(keys))
    words = ["--model", str(config), "--layers", "4", "--longest", "70", "--prompts", "2"]
    report = check_engine.check(check_engine.parse(words))
    assert report["layers"] == 4 and report["compilations_after_warmup"] == 0
    assert check_engine.passes(report)
    assert report["mean_difference_nats"] > 0 and report["largest_difference_of_reference_nats"] < 0.5


def test_an_engine_that_differs_more_than_the_reference_does_not_pass():
    report = {f"{name}_difference_nats": 0.0 for name in ("mean", "largest")}
    report |= {"mean_difference_of_reference_nats": 0.1, "largest_difference_of_reference_nats": 1.0}
    report |= {"mean_loss_of_drawn_tokens_nats": 0.0, "compilations_after_warmup": 0}
    assert check_engine.passes(report)
    for wrong in (
        {"mean_difference_nats": 0.2},
        {"largest_difference_nats": 3.0},
        {"mean_loss_of_drawn_tokens_nats": 0.5},
        {"compilations_after_warmup": 1},
    ):
        assert not check_engine.passes(report | wrong)

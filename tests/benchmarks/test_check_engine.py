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
    mean, largest, share = check_engine.LIMITS[False]
    assert report["mean_difference_nats"] < mean and report["largest_difference_nats"] < largest
    assert report["drawn_tokens_ranked_first_by_reference"] > share

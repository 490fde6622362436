"""`bench skewed_experts`: the router's bias, the balance, and an engine of two devices."""

import json

import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.__main__ import main
from jaxflow.bench.engine.skewed_experts import balances, with_bias

MODEL = str(paths.MODELS / "tiny-qwen3_moe")
ENGINE = [
    *("--max_num_batched_tokens", "32", "--step_sizes", "32", "--max_num_seqs", "8", "--num_kv_pages", "64"),
    *("--block_size", "16", "--num_requests", "4", "--input_len", "9", "--output_len", "6"),
    *("--num_iters_warmup", "1", "--num_iters", "2"),
]


def test_a_bias_makes_zipfs_law_of_normalized_tokens():
    rng, number, width = np.random.default_rng(0), 32, 64
    router = jnp.asarray(rng.normal(size=(number, width)), jnp.float32)
    (layer,) = with_bias({"layers": [{"router": router, "router_bias": jnp.zeros(number)}]}, 1.0, 0)["layers"]
    bias = np.asarray(layer["router_bias"])
    tokens = rng.normal(size=(20_000, width))
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
    first = np.bincount((tokens @ np.asarray(router).T + bias).argmax(axis=1), minlength=number)
    shares = first[np.argsort(-bias)] / len(tokens)
    zipf = 1 / np.arange(1, number + 1)
    assert 0.5 < shares[:4].sum() / (zipf / zipf.sum())[:4].sum() < 1.5


@given(st.integers(0, 99), st.sampled_from([1, 2, 4]))
def test_a_balance_is_at_most_one_and_of_one_device_one(seed, devices):
    tokens = np.random.default_rng(seed).integers(1, 50, (3, 8))
    found = balances(tokens, np.tile(np.arange(8), (3, 1)), devices)
    loads = tokens.reshape(3, devices, -1).sum(axis=2)
    np.testing.assert_allclose(found, loads.mean(axis=1) / loads.max(axis=1))
    assert (found <= 1).all() and (devices > 1 or (found == 1).all())


def test_a_report_of_ranks_whose_experts_move(no_flags, tmp_path):
    path = tmp_path / "out.json"
    eplb = ["--enable_eplb", "--num_redundant_experts", "2", "--eplb_step_interval", "2"]
    command = ["skewed_experts", "--model", MODEL, "--load_format", "dummy", "--data_parallel_size", "2"]
    given = [*ENGINE, *eplb, "--enable_expert_parallel", "--output_json", str(path)]
    assert main(["bench", *command, *given]) == 0
    found = json.loads(path.read_text())
    assert len(found["runs"]) == 3 and not any(run["failed"] for run in found["runs"])
    assert 0.5 <= found["balance_in_order"] <= 1 and 0.5 <= found["balance"] <= 1
    assert sum(found["share_of_pairs_by_expert"]) == pytest.approx(1)
    assert found["runs"][-1]["placements"] > 0
    assert all(run["steps"]["steps"] > 0 for run in found["runs"])


@pytest.mark.parametrize(
    "wrong", [["--model", str(paths.MODELS / "tiny-llama"), "--load_format", "dummy"], ["--model", MODEL]]
)
def test_other_models_are_refused(no_flags, capsys, wrong):
    assert main(["bench", "skewed_experts", *wrong]) == 1
    assert "error:" in capsys.readouterr().err

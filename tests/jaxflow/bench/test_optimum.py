"""The bound of a run, on the work that its requests were."""

import dataclasses

import pytest

from jaxflow.bench.report import optimum
from jaxflow.bench.report import requests as report
from jaxflow.bench.report.requests import Record
from jaxflow.config import EngineConfig, Layer, ModelConfig, Rope
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import bound, shipped_power
from jaxflow.model.graph import BFLOAT16, EXPERT_WIDTHS, model_graph

LLAMA = ModelConfig("llama", 128256, 4096, 32, 8, 128, 14336, (Layer(rope=Rope(500000.0)),) * 32, 8192)
POWER = shipped_power("H200")


def test_mean_step_is_the_mean_of_a_runs_steps():
    """Two requests of 100 + 3 and 60 + 5 tokens, in 4 steps; the first 20 tokens of the first came from
    elsewhere.
    """
    records = [Record(100, 0.0, [(1.0, 3)], 1.0, cached_prompt_tokens=20), Record(60, 0.0, [(1.0, 5)], 1.0)]
    run = report.figures(records, 2.0)
    found = optimum.mean_step(run, 4)
    assert found.tokens * 4 == 80 + 60 + 2 + 4  # the last sampled token is not computed
    assert 4 * found.decode_tokens * found.decode_keys == sum((101, 102)) + sum((61, 62, 63, 64))
    assert 4 * found.count("chunk_pairs") == pytest.approx(sum(range(21, 101)) + sum(range(1, 61)))
    assert 4 * found.count("samples") == 8
    alike = report.figures([Record(100, 0.0, [(1.0, 3)], 1.0, cached_prompt_tokens=20)] * 2, 2.0)
    means = {name: value for name, value in alike.items() if not name.endswith("_keys")}
    assert optimum.mean_step(means, 5) == optimum.mean_step(
        alike, 5
    )  # as reports have it that came before those fields


def test_the_bound_of_a_run_is_the_bound_of_its_steps():
    run = report.figures([Record(1024, 0.0, [(1.0, 512)], 1.0)] * 12, 1.0)
    engine = dataclasses.asdict(EngineConfig("llama-3.1-8b", dtype="bfloat16", kv_cache_dtype="bfloat16"))
    found = optimum.of_run(LLAMA, engine, "NVIDIA H200", run, 9)
    assert POWER is not None
    least = bound(model_graph(LLAMA).work(optimum.mean_step(run, 9)), DEVICES["H200"], POWER)
    assert found == {"fraction_of_bound": pytest.approx(9 * least.energy_s / 1.0), "binding": "energy"}
    fp8 = optimum.of_run(
        LLAMA, engine | {"quantization": "fp8", "kv_cache_dtype": "float8_e4m3fn"}, "H200", run, 9
    )
    assert fp8["fraction_of_bound"] < 0.7 * found["fraction_of_bound"]
    for engine_, device in (
        (engine, "cpu"),
        (engine | {"dtype": "float32"}, "H200"),
        (engine, "NVIDIA H100"),
    ):
        assert optimum.of_run(LLAMA, engine_, device, run, 9) == {"fraction_of_bound": None, "binding": None}


@pytest.mark.parametrize(("quantization", "widths"), EXPERT_WIDTHS.items())
def test_the_bound_counts_the_bytes_of_experts_in_a_format_of_their_own(quantization, widths):
    model = open_checkpoint("qwen3-30b-a3b", load_format="dummy").model_config
    settings = EngineConfig("m", dtype="bfloat16", kv_cache_dtype="bfloat16", quantization=quantization)
    step = Composition(decode_tokens=64, decode_keys=100)
    found = optimum.of_step(model, dataclasses.asdict(settings), "NVIDIA H200", step, 1e4)
    assert POWER is not None
    least = bound(model_graph(model, 1, widths).work(step), DEVICES["H200"], POWER)
    assert found["fraction_of_bound"] == pytest.approx(least.longest_s * 1e4 / 64)


@pytest.mark.parametrize("ranks", [2, 8])
def test_data_parallel_ranks_share_the_work_of_the_experts(ranks):
    """Ranks together do the operations of one device, read the experts once, and the other weights each."""
    model = open_checkpoint("qwen3-30b-a3b", load_format="dummy").model_config
    step = Composition(decode_tokens=512, decode_keys=1280, chunks=((1024.0, 100.0),))
    graph = model_graph(model)
    one, found = graph.work(step), optimum.device_work(model, 1, ranks, BFLOAT16, step)
    experts = sum(op.work(step).weight_bytes for op in graph.ops() if op.experts)
    assert ranks * found.flops == pytest.approx(one.flops)
    others = one.weight_bytes - experts
    assert ranks * found.weight_bytes == pytest.approx(
        experts + ranks * others, rel=1e-3
    )  # a token has one embedding
    settings = EngineConfig(
        "m",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        data_parallel_size=ranks,
        enable_expert_parallel=True,
    )
    reached = optimum.of_step(model, dataclasses.asdict(settings), "NVIDIA H200", step, 1e4)
    assert POWER is not None
    assert reached["fraction_of_bound"] == bound(found, DEVICES["H200"], POWER).longest_s * 1e4 / step.tokens

"""Experts spread whole over devices give the tokens of one device, wherever the router sends them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import paths
import pytest
import toy
from jax.sharding import PartitionSpec
from test_goldens import ONE_SIZE, check, requests

from jaxflow.config import ConfigError, EngineConfig, ParallelConfig
from jaxflow.model import ops, weights
from jaxflow.model.checkpoints import mxfp4
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.fingerprint import kv_fingerprint
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.routing import Routing, by_token
from jaxflow.model.weight_spec import QUANTIZED_EXPERTS, assemble, shard_maker
from jaxflow.parallel.mesh import TP, make_mesh, over_shards
from jaxflow.pipeline import plan as plans
from jaxflow.pipeline.handwritten import two_nano_batch_plan
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.kernel_set import REFERENCE
from pallas_kernels.pointwise.quantize.reference import quantize_rows

MIXTURES = ["tiny-qwen3_moe", "tiny-mixtral", "tiny-gpt_oss", "tiny-glm4_moe", "tiny-deepseek_v3"]
EXPERTS, CHOSEN = 8, 3


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("model", MIXTURES)
def test_goldens(model, devices, goldens):
    golden = goldens(model)
    engine = toy.loop(model, tp=devices, budget=ONE_SIZE, ep=True)
    check(golden, toy.run(engine, requests(golden)))
    layer = engine.executor.weights["layers"][-1]
    for leaf in weights.EXPERT_LEAVES:
        if leaf in layer:
            (whole, *rest) = layer[leaf].shape
            assert layer[leaf].addressable_shards[0].data.shape == (whole // devices, *rest)


def test_goldens_of_stages(goldens):
    golden = goldens("tiny-mixtral")
    check(golden, toy.run(toy.staged_loop("tiny-mixtral", 2, tp=2, ep=True), requests(golden)))


def test_goldens_of_nano_batches(goldens, tmp_path):
    golden, model = goldens("tiny-mixtral"), open_checkpoint(str(paths.MODELS / "tiny-mixtral")).model_config
    plans.save(two_nano_batch_plan(model, ONE_SIZE, 6, tp=2), tmp_path / "plan.json")
    engine = toy.loop("tiny-mixtral", tp=2, budget=ONE_SIZE, ep=True, plan=str(tmp_path / "plan.json"))
    check(golden, toy.run(engine, requests(golden)))


CONFIG = open_checkpoint(str(paths.MODELS / "tiny-gpt_oss")).model_config  # its experts have biases


@functools.cache
def layer(devices: int, quantization: str | None = None) -> Any:
    """Return a function from (weights, h, experts, router weights, by tokens) to
    the sum of the experts' outputs.
    """
    mesh = make_mesh(devices)
    alone, spread = (
        weights.leaves(CONFIG, number, expert_parallel=number > 1, quantization=quantization)["layers"][0]
        for number in (1, devices)
    )
    specs = {name: spread[name].specs for name in weights.EXPERT_LEAVES}
    assert all(spread[name].shape == alone[name].shape for name in specs)
    site = functools.partial(Site, Context(CONFIG, REFERENCE, TP, expert_axis=TP if devices > 1 else None))

    def run(by_tokens: bool, w: Any, h: Any, experts: Any, shares: Any) -> Any:
        c = Context(CONFIG, REFERENCE, None) if devices == 1 else site(w).c
        routing = Routing(experts, shares, ops._groups(c, w, experts))
        rows = ops.expert_up_gate(Site(c, w), h, routing)
        if by_tokens:  # a plan's ops over other ranges of tokens
            rows, routing = by_token(rows), by_token(routing)
        y = ops.expert_down(Site(c, w), rows, routing)
        return y if devices == 1 else jax.lax.psum(y, TP)

    everywhere = PartitionSpec()
    shapes = (specs, everywhere, everywhere, everywhere)
    return jax.jit(
        lambda by_tokens, *given: over_shards(functools.partial(run, by_tokens), mesh, shapes, everywhere)(
            *given
        ),
        static_argnums=0,
    )


def given_layer(tokens: int, experts: np.ndarray) -> tuple[Any, ...]:
    rng = np.random.default_rng(tokens)
    tree = weights.leaves(CONFIG)["layers"][0]
    w = {
        name: jnp.asarray(rng.normal(size=tree[name].shape) / 8, jnp.float32)
        for name in weights.EXPERT_LEAVES
    }
    h = jnp.asarray(rng.normal(size=(tokens, CONFIG.hidden_size)), jnp.float32)
    return w, h, jnp.asarray(experts, jnp.int32), jnp.asarray(rng.random((tokens, CHOSEN)), jnp.float32)


@pytest.mark.parametrize(("tokens", "by_tokens"), [(1, False), (700, False), (9, True)])
@pytest.mark.parametrize("routing", ["even", "skewed", "one device", "one expert a device"])
def test_the_sum_over_devices_is_the_layer_of_one(routing, tokens, by_tokens):
    """One device: all tokens choose experts 0 to 2 of 8, so the third and the fourth device have no row."""
    if routing in ("even", "skewed"):
        rng = np.random.default_rng(3)
        experts = draw_routing(rng, tokens, EXPERTS, CHOSEN, 2.0 if routing == "skewed" else 0.0)
    else:
        experts = np.tile([0, 1, 2] if routing == "one device" else [7, 2, 5], (tokens, 1))
    arguments = given_layer(tokens, experts)
    wanted = np.asarray(layer(1)(by_tokens, *arguments))
    for devices in (2, 4):
        found = np.asarray(layer(devices)(by_tokens, *arguments))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(wanted).max() > 0.1


def test_experts_of_8_bits_are_spread_with_their_scales():
    w, *rest = given_layer(9, draw_routing(np.random.default_rng(3), 9, EXPERTS, CHOSEN))
    w |= {name: quantize_rows(w[name]) for name in QUANTIZED_EXPERTS}
    wanted = np.asarray(layer(1, "fp8")(False, w, *rest), np.float32)
    found = np.asarray(layer(4, "fp8")(False, w, *rest), np.float32)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(
        wanted
    )  # the sum over devices is of bfloat16


@pytest.mark.parametrize(
    ("model", "changes", "devices", "setting", "accepted"),
    [
        ("tiny-mixtral", {"num_heads": 16}, 16, "tensor_parallel_size=16", "a divisor of the 8"),
        ("tiny-mixtral", {"num_experts": 6}, 4, "tensor_parallel_size=4", "a divisor of the 6"),
        ("tiny-llama", {}, 2, "enable_expert_parallel=True", "False for a model without experts"),
    ],
    ids=["more devices than experts", "a remainder", "no experts"],
)  # fmt: skip
def test_experts_that_do_not_divide_are_refused_before_a_weight_is_read(
    model, changes, devices, setting, accepted, monkeypatch
):
    checkpoint = open_checkpoint(str(paths.MODELS / model))
    checkpoint = dataclasses.replace(
        checkpoint, model_config=dataclasses.replace(checkpoint.model_config, **changes)
    )
    monkeypatch.setattr(type(checkpoint.source), "read", lambda *_: pytest.fail("a weight was read"))
    mesh = jax.sharding.AbstractMesh((devices,), (TP,))
    with pytest.raises(ConfigError, match=f"{setting} is not supported: {accepted}"):
        checkpoint.load("float32", mesh, expert_parallel=True, progress=False)


def test_an_expert_of_any_width_can_be_spread_whole():
    """Tensor parallelism would cut the 34 columns of an expert into four parts."""
    config = dataclasses.replace(CONFIG, expert_intermediate_size=34, intermediate_size=34)
    with pytest.raises(ConfigError, match="MLP width 34"):
        weights.leaves(config, 4)
    assert weights.leaves(config, 4, expert_parallel=True)["layers"][0]["expert_down"].shape == (8, 64, 34)


def test_pages_and_plans_name_the_spread_experts(tmp_path):
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-mixtral"))
    settings = EngineConfig("m", tensor_parallel_size=2, max_num_batched_tokens=16, max_num_seqs=4)
    spread = dataclasses.replace(settings, enable_expert_parallel=True)
    assert (settings.parallel, spread.parallel) == (ParallelConfig(tp=2), ParallelConfig(tp=2, ep=2))
    assert kv_fingerprint(spread, checkpoint) != kv_fingerprint(settings, checkpoint)
    kind = ("auto", "auto")
    target = plans.Target("m", "cpu", spread.parallel, *kind, 8, 8, 64)
    assert target.fits("m", "cpu", spread.parallel, *kind)
    assert not target.fits("m", "cpu", settings.parallel, *kind)
    plan = msgspec.structs.replace(two_nano_batch_plan(checkpoint.model_config, 16, 8, tp=2), target=target)
    plans.save(plan, tmp_path / "plan.json")
    assert plans.load(tmp_path / "plan.json").target == target


def test_a_process_reads_only_its_experts():
    """A process makes the shards of its own devices. Each expert has tensors of its own."""
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-qwen3_moe"))
    source = checkpoint.source
    for name in ("expert_up_gate", "expert_down"):
        leaf, read = weights.leaves(checkpoint.model_config, 4, expert_parallel=True)["layers"][0][name], []
        index = (slice(2, 4), slice(None), slice(None))

        def record(tensor: str, read=read) -> np.ndarray:
            read.append(tensor.rpartition(".experts.")[2].partition(".")[0])
            return source.read(tensor)

        whole = assemble(leaf, source.read, np.float32)
        found = shard_maker(leaf, record, np.float32)(index)
        np.testing.assert_array_equal(found, whole[2:4])
        assert set(read) == {"2", "3"}


def test_a_process_decodes_only_its_experts(monkeypatch):
    """The tensors of gpt-oss hold all experts, in MXFP4."""
    checkpoint, decoded, decode = open_checkpoint(str(paths.MODELS / "tiny-gpt_oss")), [], mxfp4.dequantize
    for name in ("expert_up_gate", "expert_down", "expert_up_gate_bias"):
        leaf = weights.leaves(CONFIG, 4, expert_parallel=True)["layers"][0][name]
        whole = assemble(leaf, checkpoint.source.read, np.float32)
        with monkeypatch.context() as patch:
            patch.setattr(mxfp4, "dequantize", lambda *parts: decoded.append(1) or decode(*parts))
            index = (slice(2, 4), *[slice(None)] * (whole.ndim - 1))
            source = checkpoint.source
            found = shard_maker(leaf, source.read, np.float32, source.read_experts)(index)
        np.testing.assert_array_equal(found, whole[2:4])
    assert len(decoded) == 2 * 2  # two experts of two matrices

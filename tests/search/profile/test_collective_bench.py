"""Measurement of one device's shard of a layer, and of its collectives on all devices."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import paths
import pytest
from h200 import compile_for_h200, h200_mesh

from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.kernel_set import REFERENCE, KernelSet, kernel_set_for
from search.profile import measure as command
from search.profile.clock import shipped_card
from search.profile.collective_bench import collective, concurrent
from search.profile.entries import entries
from search.profile.measure import TimeBudget, chosen_ops, this_device
from search.profile.modelled import copied
from search.profile.op_bench import LayerBench, OpCase, one_shard
from search.profile.op_times import PAIR_TOKENS, load_profile, seconds

NAME = str(paths.MODELS / "tiny-llama")
TINY = open_checkpoint(NAME).model_config
LLAMA = open_checkpoint("llama-3-70b", load_format="dummy").model_config
TP = 2
# The profile gives copies, or they are unknown.
NO_COPIES = msgspec.structs.replace(shipped_card("H200"), exchange_s=None)


def layer_of(fp8: bool = False, kernels=REFERENCE, config=TINY, tp: int = TP, dtype="float32") -> LayerBench:
    kv = "float8_e4m3fn" if fp8 else dtype
    return LayerBench(
        config,
        kernels,
        dtype=dtype,
        kv_dtype=kv,
        fp8=fp8,
        platform="gpu" if config is LLAMA else "cpu",
        tp=tp,
    )


@pytest.mark.parametrize("model", ["llama-3-70b", "gemma-2-9b", "qwen2-72b", "mixtral-8x7b", "gpt-oss-20b"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_shard_has_what_one_device_has(model, tp):
    config = open_checkpoint(model, load_format="dummy").model_config
    config = dataclasses.replace(config, layers=config.layers[:1])
    mesh = make_mesh(1)  # the specs do not depend on the mesh
    whole, specs = shapes(config, tp, jnp.bfloat16)["layers"][0], shardings(config, mesh)["layers"][0]
    cut = {
        name: tuple(
            size // (tp if axis == "tp" else 1)
            for size, axis in zip(leaf.shape, (*specs[name], *[None] * 3), strict=False)
        )
        for name, leaf in whole.items()
    }
    assert cut == {
        name: leaf.shape for name, leaf in shapes(one_shard(config, tp), 1, jnp.bfloat16)["layers"][0].items()
    }


@pytest.mark.parametrize(
    ("op", "fp8"),
    [*itertools.product(["attn_reduce", "attn_scatter", "attn_gather"], [False, True]), ("exchange", False)],
)
def test_a_program_makes_what_its_collective_makes(op, fp8):
    program = collective(layer_of(fp8), OpCase(op, 8), make_mesh(TP))
    given, kept = program.drawn(1)
    made = program.compile()(given, kept)
    for x, *results in zip(jax.tree.leaves(given), *(jax.tree.leaves(one) for one in made), strict=True):
        rows = np.asarray(x).astype(np.float32).reshape(TP, -1, *x.shape[1:])
        if op == "attn_gather":
            wanted = np.tile(rows.reshape(-1, *x.shape[1:]), (TP, *[1] * (x.ndim - 1)))
        elif op == "exchange":
            wanted = rows[::-1].reshape(-1, *x.shape[1:])
        else:
            wanted = np.tile(rows.sum(0), (TP, 1)) if op == "attn_reduce" else rows.sum(0)
        for result in results:
            np.testing.assert_allclose(np.asarray(result).astype(np.float32), wanted, rtol=1e-6)


def test_a_profile_of_two_devices_is_continued_where_two_are(tmp_path):
    """Continue a profile of one shard with its sums. All ops of both forms are timed."""
    path = tmp_path / "two.json"
    layer, profile = this_device(NAME, TINY, "auto", "auto", TP)
    alone = [name for name, op in layer.ops.items() if op.kind != "network"]
    for names in (alone, ["network"]):
        wanted = entries(chosen_ops(layer, names), (8,), (16,), (), 1)
        profile, left = command.measure(
            command.resumed(path, profile), layer, wanted, path, TimeBudget(300), seconds_each=0.003
        )
        assert not left
    assert load_profile(path) == profile and profile.tensor_parallel_size == TP
    for scattered in (False, True):
        for op in model_graph(TINY, TP, scattered=scattered).layers[1]:
            assert 0 < seconds(profile, op.name, 8, 16) < 1
    assert seconds(profile, "attn_reduce", 8) == seconds(profile, "mlp_reduce", 8)


@pytest.mark.parametrize("sent", ["attn_reduce", "exchange"])
def test_a_product_beside_a_sum_makes_what_both_make(sent):
    """Four devices run the ops in the order of a plan's step."""
    layer, mesh = layer_of(tp=4), make_mesh(4)
    program = concurrent(layer, OpCase("down", 8), OpCase(sent, 8), mesh, phases=2)
    given, _ = program.drawn(1)
    summed, product, again = program.compile()(given, None)
    rows, (x,) = np.asarray(given["sent"]).reshape(4, 8, -1), given["inputs"]
    # Two phases give the sum of sums, or all rows.
    wanted = np.tile(4 * rows.sum(0), (4, 1)) if sent == "attn_reduce" else rows.reshape(32, -1)
    np.testing.assert_allclose(summed, wanted, rtol=1e-5, atol=1e-5)
    w = np.asarray(given["weights"][0]["down"]).reshape(4, -1, x.shape[-1])
    each = [one @ part.T for one, part in zip(np.asarray(x).reshape(4, 8, -1), w, strict=True)]
    np.testing.assert_allclose(product, np.concatenate(each), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(product, again)


def test_pairs_of_products_and_sums_are_measured(tmp_path):
    """Each product is timed together with a kernel's sum and with a copy,
    after the times of each op alone.
    """
    path = tmp_path / "pairs.json"
    layer, empty = this_device(NAME, TINY, "auto", "auto", TP)
    ops = chosen_ops(layer, ["attn_reduce", "exchange", "down"])
    profile, left = command.measure(
        empty, layer, entries(ops, (8, 64), (16,), (), 1), path, TimeBudget(300), seconds_each=0.003
    )
    assert not left and load_profile(path) == profile
    assert {(pair.first, pair.second, pair.second_sms, pair.keys) for pair in profile.pairs} == {
        ("down", "attn_reduce", 1, 0),
        ("down", "exchange", 0, 0),
    }
    for pair in profile.pairs:
        assert pair.seconds and pair.first_tokens == pair.second_tokens == PAIR_TOKENS
        assert pair.first_performance == min(1.0, seconds(profile, "down", PAIR_TOKENS) / pair.seconds)
    copies = copied(profile, model_graph(TINY, TP), NO_COPIES)
    assert seconds(copies, "attn_reduce", 64, sms=0) == seconds(profile, "exchange", 64)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        layer_of(tp=3)
    with pytest.raises(ConfigError, match="ops='silence'"):
        chosen_ops(layer_of(), ["silence"])
    with pytest.raises(ConfigError, match="ops='network'"):
        chosen_ops(layer_of(tp=1), ["network"])
    with pytest.raises(ValueError, match="tokens=7"):
        collective(layer_of(), OpCase("attn_scatter", 7), make_mesh(TP))
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(ConfigError, match="at most the 1 devices here, unless --ops leaves out attn_gather"):
        chosen_ops(layer_of(), [])
    assert set(chosen_ops(layer_of(), ["qkv"])) == {"qkv"}


def on_an_h200() -> KernelSet:
    heads, dtypes = (
        {"head_dim": 128, "queries_per_kv_head": 8, "page_size": 64},
        {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    )
    return kernel_set_for("gpu", "9.0", **heads, **dtypes, device="NVIDIA H200")


@pytest.mark.parametrize("op", ["attn_norm", "attn_reduce", "attn_scatter"])
def test_every_call_is_in_the_loop_for_the_h200(op):
    """The loop holds all calls. XLA merges calls on equal inputs if no result is used."""
    layer, mesh = layer_of(kernels=on_an_h200(), config=LLAMA, tp=4, dtype="bfloat16"), h200_mesh((4,))
    if op == "attn_norm":
        program, kind = layer.alone(OpCase(op, 64)), "kCustomCall"
        program = dataclasses.replace(
            program, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )
        calls = program.calls // layer.rounds(OpCase(op, 64), 2)[1]
    else:
        program, kind = (
            collective(layer, OpCase(op, 64), mesh),
            {"attn_reduce": "kCollectiveKernel", "attn_scatter": "kReduceScatter"}[op],
        )
        calls = 8
    found = compile_for_h200(program.function, *program.structs, donate_argnums=(1,))
    assert calls > 4 and collections.Counter(thunk.kind for thunk in found.thunks)[kind] == calls


def test_a_sum_is_on_its_way_while_the_product_runs():
    layer, mesh = layer_of(kernels=on_an_h200(), config=LLAMA, tp=4, dtype="bfloat16"), h200_mesh((4,))
    program = concurrent(layer, OpCase("out_proj", 128), OpCase("exchange", 512), mesh, phases=2)
    found = compile_for_h200(program.function, *program.structs, options=program.options)
    kinds = [thunk.kind for thunk in found.thunks if not thunk.depth]
    starts, dones = (
        [at for at, kind in enumerate(kinds) if kind == wanted] for wanted in ("kAsyncStart", "kAsyncDone")
    )
    assert len(starts) == len(dones) == 2 and starts[0] < dones[0] < starts[1] < dones[1]
    assert (
        all(done > start + 1 for start, done in zip(starts, dones, strict=True))
        and found.copies((512, LLAMA.hidden_size)) == 0
    )

"""Measuring one device's shard of a layer, and its collectives on all devices."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from h200 import compile_for_h200, h200_mesh

from jaxflow.config import ConfigError
from jaxflow.mesh import make_mesh
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.model.weights import shapes, shardings
from pallas_kernels.kernel_set import REFERENCE, kernel_set_for
from search import measure as command
from search.budget import Budget
from search.collective_bench import collective
from search.entries import entries
from search.measure import chosen_ops, this_device
from search.op_bench import Case, Layer, one_shard
from search.op_times import load_profile, seconds

NAME = str(paths.MODELS / "tiny-llama")
TINY = open_checkpoint(NAME).model_config
LLAMA = open_checkpoint("llama-3-70b", load_format="dummy").model_config
TP = 2


def layer_of(fp8: bool = False, kernels=REFERENCE, config=TINY, tp: int = TP, dtype="float32") -> Layer:
    kv = "float8_e4m3fn" if fp8 else dtype
    return Layer(config, kernels, dtype=dtype, kv_dtype=kv, fp8=fp8, platform="gpu" if config is LLAMA else "cpu", tp=tp)


@pytest.mark.parametrize("model", ["llama-3-70b", "gemma-2-9b", "qwen2-72b", "mixtral-8x7b"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_shard_has_what_one_device_has(model, tp):
    config = open_checkpoint(model, load_format="dummy").model_config
    config = dataclasses.replace(config, layers=config.layers[:1])
    mesh = make_mesh(1)  # of specs, which do not depend on it
    whole, specs = shapes(config, tp, jnp.bfloat16)["layers"][0], shardings(config, mesh)["layers"][0]
    cut = {
        name: tuple(size // (tp if axis == "tp" else 1) for size, axis in zip(leaf.shape, (*specs[name], *[None] * 3), strict=False))
        for name, leaf in whole.items()
    }
    assert cut == {name: leaf.shape for name, leaf in shapes(one_shard(config, tp), 1, jnp.bfloat16)["layers"][0].items()}


@pytest.mark.parametrize("op", ["attn_reduce", "attn_scatter", "attn_gather"])
@pytest.mark.parametrize("fp8", [False, True], ids=["wide", "fp8"])
def test_a_program_makes_what_its_collective_makes(op, fp8):
    program = collective(layer_of(fp8), Case(op, 8), make_mesh(TP))
    given, kept = program.drawn(1)
    made = program.compile()(given, kept)
    for x, *results in zip(jax.tree.leaves(given), *(jax.tree.leaves(one) for one in made), strict=True):
        rows = np.asarray(x).astype(np.float32).reshape(TP, -1, *x.shape[1:])
        if op == "attn_gather":
            wanted = np.tile(rows.reshape(-1, *x.shape[1:]), (TP, *[1] * (x.ndim - 1)))
        else:
            wanted = np.tile(rows.sum(0), (TP, 1)) if op == "attn_reduce" else rows.sum(0)
        for result in results:
            np.testing.assert_allclose(np.asarray(result).astype(np.float32), wanted, rtol=1e-6)


def test_a_profile_of_two_devices_is_continued_where_two_are(tmp_path):
    """Its shard's ops first, as on a machine with one; then the sums. All that a plan of either form has is timed."""
    path = tmp_path / "two.json"
    layer, profile = this_device(NAME, TINY, "auto", "auto", TP)
    alone = [name for name, op in layer.ops.items() if op.kind != "network"]
    for names in (alone, ["network"]):
        wanted = entries(chosen_ops(layer, names), (8,), (16,), (), 1)
        profile, left = command.measure(command.resumed(path, profile), layer, wanted, path, Budget(300), seconds_each=0.003)
        assert not left
    assert load_profile(path) == profile and profile.tensor_parallel_size == TP
    for scattered in (False, True):
        for op in model_graph(TINY, TP, scattered=scattered).layers[1]:
            assert 0 < seconds(profile, op.name, 8, 16) < 1
    assert seconds(profile, "attn_reduce", 8) == seconds(profile, "mlp_reduce", 8)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        layer_of(tp=3)
    with pytest.raises(ConfigError, match="ops='silence'"):
        chosen_ops(layer_of(), ["silence"])
    with pytest.raises(ConfigError, match="ops='network'"):
        chosen_ops(layer_of(tp=1), ["network"])
    with pytest.raises(ValueError, match="tokens=7"):
        collective(layer_of(), Case("attn_scatter", 7), make_mesh(TP))
    monkeypatch.setattr(jax, "devices", lambda: [None])
    with pytest.raises(ConfigError, match="at most the 1 devices here, unless --ops leaves out attn_gather"):
        chosen_ops(layer_of(), [])
    assert set(chosen_ops(layer_of(), ["qkv"])) == {"qkv"}


@pytest.mark.parametrize("op", ["attn_norm", "attn_reduce", "attn_scatter"])
def test_every_call_is_in_the_loop_for_the_h200(op):
    """Calls on equal inputs are as many when compiled: XLA makes one of those whose results nobody keeps."""
    kernels = kernel_set_for("gpu", "9.0", head_dim=128, queries_per_kv_head=8, page_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    layer, mesh = layer_of(kernels=kernels, config=LLAMA, tp=4, dtype="bfloat16"), h200_mesh((4,))
    if op == "attn_norm":
        program, kind = layer.alone(Case(op, 64)), "kCustomCall"
        program = dataclasses.replace(program, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        calls = program.calls // layer.rounds(Case(op, 64), 2)[1]
    else:
        program, kind = collective(layer, Case(op, 64), mesh), {"attn_reduce": "kCollectiveKernel", "attn_scatter": "kReduceScatter"}[op]
        calls = 8
    found = compile_for_h200(program.function, *program.structs, donate_argnums=(1,))
    assert calls > 4 and collections.Counter(thunk.kind for thunk in found.thunks)[kind] == calls

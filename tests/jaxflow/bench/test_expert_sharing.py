"""Mixtures over devices that share the experts: laws of the ops, the rates and the times."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxflow.bench.pipeline.expert_sharing import (
    EXCHANGES,
    GROUPED,
    RateShares,
    Sharing,
    balances_of,
    exchange_bytes_per_s,
    op_rates,
    shared_graph,
    shares_of,
    slots_with_copies,
)
from jaxflow.bench.pipeline.fleets import FleetSetting, run_layout
from jaxflow.bench.pipeline.splits import DeviceSplit
from jaxflow.bench.pipeline.stage_time import COUNTS, StageTimer
from jaxflow.config import Layer, ModelConfig
from jaxflow.model import ops, weights
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES
from jaxflow.model.exchanged_experts import list_sent, pieces_of
from jaxflow.model.graph import BFLOAT16, model_graph
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.routing import Routing
from jaxflow.parallel.mesh import TP, make_mesh
from pallas_kernels.cards import card_of
from pallas_kernels.kernel_set import REFERENCE

RATES = DEVICES["H200"].rates
FULL = RateShares()
MIXTURE = ModelConfig(
    "mixtral",
    32000,
    1024,
    16,
    16,
    64,
    2816,
    (Layer(),) + (Layer(experts=True),) * 3,
    2048,
    num_experts=64,
    experts_per_token=4,
    expert_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
SIZES = st.sampled_from([2, 4, 8, 16, 32, 64])
BALANCES = st.floats(0.2, 1.0)


def seconds(sharing, step, tp=1, outside=43e9, shares=FULL, overlapped=False, rates=RATES):
    timer = StageTimer(
        MIXTURE,
        (MIXTURE.num_layers,),
        tp,
        rates,
        graph=shared_graph(MIXTURE, tp, BFLOAT16, sharing),
        op_rates=op_rates(MIXTURE, sharing, rates, shares, outside),
        choosers=sharing.choosers,
        kernel_s=3e-6,
        collective_s=3.3e-5,
        hidden=EXCHANGES if overlapped else (),
    )
    (found,) = timer(np.array([step.count(what) for what in COUNTS]))
    return found


STEPS = st.builds(
    lambda decodes, keys, chunk: Composition(decodes, keys, ((chunk, 0),) if chunk else ()),
    st.integers(1, 600),
    st.integers(1, 4000),
    st.integers(0, 900),
)


@given(step=STEPS, exchanged=st.booleans())
def test_one_device_is_the_model_without_expert_parallelism(step, exchanged):
    alone = Sharing(1, exchanged, slots=64)
    assert shared_graph(MIXTURE, 1, BFLOAT16, alone) == model_graph(MIXTURE, 1)
    (plain,) = StageTimer(MIXTURE, (4,), 1, RATES, kernel_s=3e-6, collective_s=3.3e-5)(
        np.array([step.count(what) for what in COUNTS])
    )
    assert seconds(alone, step) == plain


@given(step=STEPS, tp=st.sampled_from([2, 4, 8]))
def test_even_whole_experts_take_the_time_of_their_columns(step, tp):
    assert seconds(Sharing(tp), step, tp) == pytest.approx(seconds(Sharing(), step, tp))


@given(devices=SIZES, chosen=st.integers(1, 4))
def test_devices_hold_all_experts_once_and_a_token_meets_its_own(devices, chosen):
    config = dataclasses.replace(MIXTURE, experts_per_token=chosen)
    whole = model_graph(config, 1)
    graph = shared_graph(config, 1, BFLOAT16, Sharing(devices, True))
    for op, shared in zip(
        (op for op in whole.ops() if op.name in GROUPED),
        (op for op in graph.ops() if op.name in GROUPED),
        strict=True,
    ):
        (_, weights), (_, rows) = op.demand
        (_, own), (_, same) = shared.demand
        assert own.weight_bytes * devices == pytest.approx(weights.weight_bytes) and same == rows
    sent = [op for op in graph.ops() if op.name in EXCHANGES]
    assert [op.name for op in sent] == list(EXCHANGES) * 3  # three mixture layers
    counted = [dict(op.demand)["step"].network_bytes > 0 for op in sent[::2]]
    assert counted == [devices > chosen] * 3  # a gather sends no counts of rows


def gathered_bytes(jaxpr: Any, devices: int) -> float:
    """Return the bytes that a device sends in the collectives of a traced function, but for ragged ones."""
    sent = 0.0
    for equation in jaxpr.eqns:
        size = sum(one.aval.size * one.aval.dtype.itemsize for one in equation.invars if hasattr(one, "aval"))
        if equation.primitive.name == "all_gather":
            sent += (devices - 1) * size
        elif equation.primitive.name == "reduce_scatter":
            sent += (devices - 1) / devices * size
        elif equation.primitive.name != "cond":  # a ragged all-to-all, by platform
            inner = [getattr(one, "jaxpr", one) for one in equation.params.values()]
            sent += sum(gathered_bytes(one, devices) for one in inner if hasattr(one, "eqns"))
    return sent


@pytest.mark.parametrize("devices", [2, 4])
def test_a_layer_sends_the_bytes_that_the_engine_sends(devices):
    """Two devices gather, since a token has three experts. Four exchange pairs, which are even here."""
    config, tokens = open_checkpoint(str(paths.MODELS / "tiny-gpt_oss")).model_config, 16
    number, chosen, width = config.num_experts, config.experts_per_token, config.hidden_size
    split = {
        name: leaf
        for name, leaf in weights.leaves(config, devices, expert_parallel=True)["layers"][0].items()
        if name in weights.EXPERT_LEAVES
    }
    context, rows = Context(config, REFERENCE, expert_axis=TP), PartitionSpec(TP)

    def layer(w, h, experts, shares):
        groups = None if devices <= chosen else list_sent(experts, number, None)
        routing = Routing(experts, shares, groups)
        site = Site(context, w)
        rows = ops.expert_up_gate(site, ops.expert_dispatch(site, h, routing), routing)
        return ops.expert_combine(site, ops.expert_down(site, rows, routing), routing)

    specs = {name: leaf.spec for name, leaf in split.items()}
    run = jax.shard_map(
        layer, mesh=make_mesh(devices), in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False
    )
    total = devices * tokens
    traced = jax.make_jaxpr(run)(
        {name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) for name, leaf in split.items()},
        jax.ShapeDtypeStruct((total, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((total, chosen), jnp.int32),
        jax.ShapeDtypeStruct((total, chosen), jnp.float32),
    )
    sent = gathered_bytes(traced.jaxpr, devices)
    if devices > chosen:
        counts = np.full((devices, number), tokens * chosen // number)
        for pieces in pieces_of(jnp.asarray(counts), 1, 0):
            sent += np.asarray(pieces.sizes)[1:].sum() * width * 2
    graph, step = shared_graph(config, 1, BFLOAT16, Sharing(devices, True)), Composition(tokens, 1)
    assert sent == sum(op.work(step).network_bytes for op in graph.layers[0] if op.name in EXCHANGES) > 0


@given(devices=SIZES, bytes_=st.floats(1.0, 2.0))
def test_ops_of_a_shared_layer_read_what_others_make(devices, bytes_):
    graph = shared_graph(MIXTURE, 1, BFLOAT16, Sharing(devices, True, sent_bytes=bytes_))
    for layer in graph.layers:
        made = {"x", "y", "kv"}  # arrays of the layer before
        for op in layer:
            assert set(op.inputs) <= made
            made |= set(op.outputs)


@given(step=STEPS, devices=SIZES, balance=BALANCES, less=st.floats(0.1, 1.0), overlapped=st.booleans())
def test_uneven_loads_never_make_a_step_shorter(step, devices, balance, less, overlapped):
    even = Sharing(devices, True, balance=balance)
    uneven = dataclasses.replace(even, balance=balance * less)
    assert seconds(uneven, step, overlapped=overlapped) >= seconds(even, step, overlapped=overlapped)


@given(step=STEPS, devices=SIZES, outside=st.floats(1e9, 400e9), more=st.floats(1, 20), fast=st.floats(1, 4))
def test_more_bandwidth_never_makes_a_step_longer(step, devices, outside, more, fast):
    sharing = Sharing(devices, True, balance=0.9)
    slow = seconds(sharing, step, outside=outside)
    assert seconds(sharing, step, outside=outside * more) <= slow
    rates = dataclasses.replace(
        RATES,
        memory_bytes_per_s=RATES.memory_bytes_per_s * fast,
        network_bytes_per_s=RATES.network_bytes_per_s * fast,
    )
    assert seconds(sharing, step, outside=outside, rates=rates) <= slow * (1 + 1e-12)


@given(step=STEPS, devices=SIZES, share=st.floats(0.1, 1.0))
def test_faster_products_never_make_a_step_longer(step, devices, share):
    sharing = Sharing(devices, True, balance=0.9)
    slow = seconds(sharing, step, shares=RateShares(share, share, share))
    assert seconds(sharing, step) <= slow


@given(step=STEPS, devices=SIZES, outside=st.floats(1e9, 400e9))
def test_overlap_hides_no_more_than_the_exchanges(step, devices, outside):
    sharing = Sharing(devices, True)
    shown = seconds(sharing, step, outside=outside)
    hidden = seconds(sharing, step, outside=outside, overlapped=True)
    instant = dataclasses.replace(RATES, network_bytes_per_s=1e30)
    free = seconds(sharing, step, outside=1e30, rates=instant) - 6 * 3.3e-5
    assert free * (1 - 1e-12) <= hidden <= shown
    assert shown / 2 * (1 - 1e-12) <= hidden


@given(devices=SIZES, chosen=st.integers(1, 8), inside=st.floats(1e11, 9e11), outside=st.floats(1e9, 5e10))
def test_a_row_for_each_host_never_takes_longer_than_a_row_for_each_expert(devices, chosen, inside, outside):
    pairs = Sharing(devices, True)
    hosts = dataclasses.replace(pairs, once_a_host=True)
    each = exchange_bytes_per_s(chosen, pairs, inside, outside)
    once = exchange_bytes_per_s(chosen, hosts, inside, outside)
    assert once >= each * (1 - 1e-9) if devices > 8 else once == pytest.approx(each)
    assert devices > 8 or each == pytest.approx(inside)  # all rows stay inside the host


def test_more_devices_are_less_even_and_have_room_for_25_percent_of_copies():
    found = balances_of(64, 4, (2, 8, 32), 512)
    assert 1 >= found[2] > found[8] > found[32] > 0
    assert [slots_with_copies(64, devices) for devices in found] == [40, 10, 3]


def test_the_shares_of_an_h200_are_those_of_the_report():
    report = json.loads((paths.ROOT / "benchmarks/h200/kernels/grouped.json").read_text())
    rates = {
        row["case"]: {name: each["rate"] for name, each in row["implementations"].items()}
        for row in report["rows"]
        if row["group"] == "grouped_gemm"
    }
    many, few = rates["mixtral-8x7b T 2048 even"], rates["mixtral-8x7b T 256 even"]
    own = ("swapped", "tiles of 128")
    shares = shares_of(card_of("H200"))
    assert shares.grouped_flops == pytest.approx(
        max(many[name] for name in own) / many["dense, one weight"], abs=1e-3
    )
    assert shares.grouped_bytes == pytest.approx(
        max(few[name] for name in own) / RATES.memory_bytes_per_s, abs=1e-3
    )
    assert shares_of(card_of("A100-80GB")) == RateShares()


def test_a_layout_of_a_mixture_has_the_balance_and_the_rate_of_all_its_devices():
    fleet = FleetSetting(models=("qwen3-30b-a3b:bf16",), devices=(4,), steps=6)
    names = ("dp4", "dp4+overlap", "4x1", "4x1+ep", "dp5")
    fleet = dataclasses.replace(fleet, layouts=tuple(map(DeviceSplit.parse, names)))
    rows = {name: run_layout(fleet, "qwen3-30b-a3b:bf16", DeviceSplit.parse(name)) for name in names}
    assert rows["dp5"] is None  # 5 does not divide 128
    assert rows["4x1"]["expert_balance"] == 1.0 and rows["4x1"]["expert_slots"] is None
    assert rows["dp4"]["expert_balance"] == rows["4x1+ep"]["expert_balance"] < 1
    assert rows["dp4"]["expert_slots"] == 40
    assert rows["dp4"]["tokens_per_s"] == pytest.approx(4 * rows["dp4"]["tokens_per_s_per_device"])
    assert rows["dp4+overlap"]["tokens_per_s"] >= rows["dp4"]["tokens_per_s"]
    assert rows["4x1"]["tokens_per_s"] > rows["4x1+ep"]["tokens_per_s"]  # columns are even

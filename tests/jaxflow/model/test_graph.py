"""The ops of a layer and their work, against NanoFlow's Table 2 and against counting by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.model.composition import Composition
from jaxflow.model.graph import FP8, Widths, Work, dependences, layer_ops, model_graph

LLAMA_2_70B = ModelConfig(
    "llama", 32000, 8192, 64, 8, 128, 28672, (Layer(rope=Rope(10000.0)),) * 80, 4096, eos_token_ids=(2,)
)
TOY = ModelConfig("llama", 512, 64, 4, 2, 16, 128, (Layer(rope=Rope(10000.0)),) * 2, 256)
MIXTURE = dataclasses.replace(
    TOY, layers=(Layer(experts=True),) * 2, num_experts=8, experts_per_token=2, expert_intermediate_size=32
)
SHARED = dataclasses.replace(MIXTURE, shared_expert_intermediate_size=64)
GEMMA = dataclasses.replace(TOY, post_norms=True, layers=(Layer(window=16), Layer()))
PROMPT, OUTPUT = 512, 1024  # the request lengths that give Table 2's KV traffic
TABLE_2 = Composition.steady_state(2048, PROMPT, OUTPUT)


def total(config, name, step, **kwargs):
    """Work of one op over all layers, in the table's units: GFLOP, GB, GB."""
    work = sum(
        (op.work(step) for layer in model_graph(config, **kwargs).layers for op in layer if op.name == name),
        Work(),
    )
    return work.flops / 1e9, work.memory_bytes / 1e9, work.network_bytes / 1e9


@pytest.mark.parametrize(
    ("name", "gflop", "gigabytes"),
    [("qkv", 27487.8, 19.5), ("out_proj", 21990.2, 16.1), ("down", 76965.8, 49.7)],
)
def test_dense_ops_are_those_of_nanoflows_table_2(name, gflop, gigabytes):
    flops, memory, network = total(LLAMA_2_70B, name, TABLE_2)
    assert flops == pytest.approx(gflop, abs=0.05)
    assert memory == pytest.approx(gigabytes, abs=0.05)
    assert network == 0


@given(st.integers(2, 16), st.sampled_from([MIXTURE, SHARED]))
def test_ranks_compute_what_one_rank_computes_and_send_rows(ranks, config):
    """Each rank sends a row of each token to each other rank with its experts and their weights, or a row of
    each expert of the token after the counts for each expert. It reads its share of the experts.
    """
    step, others, chosen = Composition(decode_tokens=3, decode_keys=30), ranks - 1, config.experts_per_token
    alone, shared = (model_graph(config, ranks=n).work(step) for n in (1, ranks))
    rows = min(others, chosen * others / ranks)
    numbers = step.tokens * others * 2 * chosen if ranks <= chosen else others * config.num_experts
    sent = len(config.layers) * (2 * step.tokens * rows * config.hidden_size * 2 + numbers * 4)
    experts = sum(op.work(step).weight_bytes for op in model_graph(config).ops() if op.experts)
    assert shared.flops == alone.flops
    assert shared.weight_bytes == pytest.approx(alone.weight_bytes - experts * others / ranks)
    assert alone.network_bytes == 0 and shared.network_bytes == pytest.approx(sent)
    needed = dependences(model_graph(config, ranks=ranks).layers[1])
    assert "expert_dispatch" in needed["expert_up_gate"] and "expert_down" in needed["expert_combine"]


def test_up_gate_is_that_of_table_2_but_for_the_fused_activation():
    flops, memory, _ = total(LLAMA_2_70B, "up_gate", TABLE_2)
    assert flops == pytest.approx(153931.6, abs=0.05)
    unwritten = 2048 * 28672 * 2 * 80 / 1e9  # the paper writes gate and up; ours writes their product
    assert memory + unwritten == pytest.approx(96.6, abs=0.05)


def test_decode_attention_is_that_of_table_2():
    flops, memory, _ = total(LLAMA_2_70B, "decode_attention", TABLE_2)
    assert flops == pytest.approx(3665.9, rel=1e-3)
    assert memory == pytest.approx(462.2, rel=1e-3)


def test_chunk_attention_is_the_causal_half_of_table_2():
    flops, _, _ = total(LLAMA_2_70B, "chunk_attention", TABLE_2)
    assert flops == pytest.approx(916.3 / 2, rel=3e-3)


def test_the_network_of_eight_devices_is_that_of_table_2():
    for name in ("attn_reduce", "mlp_reduce"):
        flops, memory, network = total(LLAMA_2_70B, name, TABLE_2, tp=8)
        assert 8 * network == pytest.approx(75.2 / 2, abs=0.05)
        assert memory == network
        assert 8 * flops == pytest.approx(18.8 / 2, abs=0.05)


def test_op_names_and_order_of_a_dense_a_mixture_and_a_gemma_layer():
    def names(config, tp=1):
        return [op.name for op in layer_ops(config, 1, tp)]

    attention = ["attn_norm", "qkv", "rope_append", "chunk_attention", "decode_attention", "out_proj"]
    assert names(TOY) == [*attention, "mlp_norm", "up_gate", "down"]
    assert names(TOY, 2) == [*attention, "attn_reduce", "mlp_norm", "up_gate", "down", "mlp_reduce"]
    assert names(MIXTURE) == [*attention, "mlp_norm", "router", "expert_up_gate", "expert_down"]
    assert names(SHARED) == [*names(MIXTURE), "shared_up_gate", "shared_down"]
    assert names(GEMMA, 2) == [
        *attention, "attn_reduce", "post_attn_norm", "mlp_norm", "up_gate", "down", "mlp_reduce",
        "post_mlp_norm",
    ]  # fmt: skip
    graph = model_graph(TOY)
    assert [op.name for op in graph.before] == ["embed"]
    assert [op.name for op in graph.after] == ["final_norm", "logits", "sample"]


@pytest.mark.parametrize("config", [TOY, MIXTURE, SHARED, GEMMA])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_value_is_made_once_and_before_it_is_read(config, tp):
    graph = model_graph(config, tp)
    for index, ops in enumerate(graph.layers):
        known = {"x", "y", "kv"} if index else {"x", "kv"}
        for op in ops:
            assert set(op.inputs) <= known, op.name
            made = set(op.outputs) - {"kv"}
            assert not made & known, op.name
            known |= made
        assert set(graph.leaves(index)) <= known
        read = {value for op in ops for value in op.inputs} | set(graph.leaves(index))
        assert known <= read, "a value that nothing reads"


def test_dependences_of_a_layer():
    found = dependences(layer_ops(TOY, 1))
    assert found["attn_norm"] == ()
    assert found["decode_attention"] == found["chunk_attention"] == ("rope_append",)
    assert set(found["out_proj"]) == {"chunk_attention", "decode_attention"}
    assert set(found["mlp_norm"]) == {"attn_norm", "out_proj"}
    assert found["down"] == ("up_gate",)


steps = st.builds(
    Composition,
    decode_tokens=st.integers(0, 64),
    decode_keys=st.integers(1, 200).map(float),
    chunks=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 100)), max_size=3).map(tuple),
)


@given(steps, st.sampled_from([TOY, GEMMA]))
def test_devices_share_the_flops_weights_and_cache_of_layers(step, config):
    for one, two in zip(
        layer_ops(config, 0, 1), [op for op in layer_ops(config, 0, 2) if op.kind != "network"], strict=True
    ):
        assert one.name == two.name
        if one.kind in ("dense", "attention"):
            a, b = one.work(step), two.work(step)
            assert (a.flops, a.weight_bytes, a.kv_bytes) == pytest.approx(
                (2 * b.flops, 2 * b.weight_bytes, 2 * b.kv_bytes)
            )


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_chunk_counts_are_those_of_a_causal_window(tokens, start, window):
    step = Composition(chunks=((tokens, start),))
    seen = [
        [k for k in range(p + 1) if window is None or k > p - window] for p in range(start, start + tokens)
    ]
    assert step.count("chunk_pairs", window) == sum(map(len, seen))
    assert step.count("chunk_keys", window) == len({k for keys in seen for k in keys})


@given(st.integers(1, 4096), st.integers(1, 2000), st.integers(1, 2000))
def test_steady_state_has_the_mean_step_of_a_request(tokens, prompt, output):
    step = Composition.steady_state(tokens, prompt, output)
    share = tokens / (prompt + output)  # requests' worth of work in a step
    assert step.tokens == pytest.approx(tokens)
    assert step.count("samples") == pytest.approx(share * output)
    assert step.count("chunk_pairs") == pytest.approx(share * prompt * (prompt + 1) / 2)
    keys = sum(prompt + i for i in range(1, output + 1))
    assert step.count("decode_keys") == pytest.approx(share * keys)
    assert all(start >= 0 for _, start in step.chunks)


@given(steps, st.integers(2, 5))
def test_work_is_linear_in_the_batch(step, factor):
    many = dataclasses.replace(step, decode_tokens=step.decode_tokens * factor, chunks=step.chunks * factor)
    for op in layer_ops(GEMMA, 0):
        one, all_ = op.work(step), op.work(many)
        assert all_.weight_bytes == one.weight_bytes  # read once, however large the batch
        assert all_.kv_bytes == pytest.approx(factor * one.kv_bytes)
        assert all_.flops == pytest.approx(factor * one.flops)


def test_an_empty_step_is_no_work():
    for config in (TOY, MIXTURE, GEMMA):
        assert model_graph(config, 2).work(Composition()) == Work()


def test_few_tokens_read_few_experts_and_many_read_all():
    up = next(op for op in layer_ops(MIXTURE, 0) if op.name == "expert_up_gate")
    all_experts = 8 * 64 * 2 * 32 * 2
    assert up.work(Composition(1, 1)).weight_bytes == pytest.approx(all_experts * 2 / 8)
    assert up.work(Composition(500, 1)).weight_bytes == pytest.approx(all_experts)
    assert up.work(Composition(500, 1)).flops == 500 * 2 * 2 * 64 * 2 * 32
    assert up.rows(Composition(1, 1)) == pytest.approx(1)
    assert up.rows(Composition(400, 1)) == pytest.approx(100)


def test_widths_scale_the_bytes():
    step, narrow = Composition(8, 100, ((32, 5),)), Widths(1.0, 0.5, 2.0)
    for wide, small in zip(layer_ops(TOY, 1), layer_ops(TOY, 1, 1, narrow), strict=True):
        a, b = wide.work(step), small.work(step)
        assert (b.flops, b.weight_bytes, b.kv_bytes, b.activation_bytes) == (
            a.flops, a.weight_bytes / 2, a.kv_bytes / 4, a.activation_bytes
        )  # fmt: skip


def test_fp8_narrows_what_it_narrows():
    """Four products of a layer, those of experts, and the cache. Tables and routers are as wide as ever."""
    step = Composition(8, 100, ((32, 5),), samples=8)
    for model in (TOY, MIXTURE):
        for wide, small in zip(model_graph(model).ops(), model_graph(model, 1, FP8).ops(), strict=True):
            a, b = wide.work(step), small.work(step)
            narrow = wide.name.removeprefix("expert_") in ("qkv", "out_proj", "up_gate", "down")
            assert (b.weight_bytes, b.kv_bytes) == (a.weight_bytes / (2 if narrow else 1), a.kv_bytes / 2), (
                wide.name
            )


def test_window_layers_read_only_their_window():
    step = Composition(4, 100)
    window, full = (
        {op.name: op for op in layer_ops(GEMMA, i)}["decode_attention"].work(step) for i in (0, 1)
    )
    assert window.kv_bytes * 100 == full.kv_bytes * 16


def test_fewer_kv_heads_than_devices_are_copied():
    one, many = (next(op for op in layer_ops(TOY, 0, tp) if op.name == "rope_append") for tp in (2, 4))
    step = Composition(4, 10)
    assert (
        one.work(step).kv_bytes == many.work(step).kv_bytes
    )  # 2 kv heads: one a device on 2 and on 4 devices

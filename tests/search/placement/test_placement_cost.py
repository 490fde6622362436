"""The cost model: FlexGen's equations on OPT, and other model families."""

import dataclasses
import json
from typing import Any

import msgspec
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.flexgen.policy import Policy, Shares
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import (
    TERMS,
    BlockChoice,
    TierShares,
    decode_terms,
    memory_bytes,
    predict,
    prefill_terms,
    resources,
)
from search.placement.machine_curves import CURVES, Machine, MachineError, TimeCurve, load_machine
from search.placement.workload import BYTES, workload

RATES: dict[str, float] = {
    "host_to_device": 11e9,
    "device_to_host": 12e9,
    "disk_to_host": 2e9,
    "host_to_disk": 1e9,
    "device_products": 4e13,
    "device_attention": 2e13,
    "device_memory": 1e18,  # bound by compute only, as in the paper
    "host_attention": 3e10,
}
CONSTANTS: dict[str, Any] = {name: TimeCurve(0.0, RATES[name]) for name in CURVES}
MACHINE = Machine(name="drawn", method="round numbers", **CONSTANTS)


def config(name):
    return open_checkpoint(name, load_format="dummy").model_config


OPT = workload("opt-30b", config("opt-30b"), 512, 32)


def thirds(draw):
    a, b = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    return (a, b - a, 1 - b)


placements = st.composite(lambda draw: TierShares(*(thirds(draw) for _ in range(3))))()
choices = st.builds(BlockChoice, st.integers(1, 64), st.integers(1, 20), host_attention=st.booleans())


@given(placements, choices)
def test_the_terms_are_those_of_appendix_a3(placed, choice):
    """The terms in the paper's letters. `+` marks terms of FlexGen's runtime that the paper omits."""
    h1, h2, s, n, bls = 7168, 4 * 7168, 512, 32, choice.block_size
    (_, wc, wd), (cg, cc, cd), (_, hc, hd) = placed.weights, placed.kv, placed.activations
    away, w = cc + cd, 8 * h1**2 + 4 * h1 * h2
    host = choice.host_attention
    crossing = 2 * h1 * bls * away if host else 0  # + queries down, outputs up
    prefill = {
        "host to device": (w * (wc + wd) + 2 * (hc + hd) * s * h1 * bls) / 11e9,
        "device to host": (4 * away * s * h1 * bls + 2 * (hc + hd) * s * h1 * bls) / 12e9,
        "disk to host": (w * wd + 2 * hd * s * h1 * bls) / 2e9,
        "host to disk": (4 * cd * bls * s * h1 + 2 * hd * s * h1 * bls) / 1e9,
        # attention is causal: half of the paper's 4 bls s² h1
        "device compute": bls * (8 * s * h1**2 + 4 * s * h1 * h2) / 4e13 + 2 * bls * s * (s + 1) * h1 / 2e13,
        "host attention": 0,
    }
    keys = s + n / 2
    decode = {
        "host to device": (
            w * (wc + wd) + 2 * (hc + hd) * h1 * bls + (crossing if host else 4 * away * bls * keys * h1)
        )
        / 11e9,
        "device to host": (2 * (hc + hd) * h1 * bls + crossing + 4 * away * bls * h1)
        / 12e9,  # + the new token's KV
        "disk to host": (4 * cd * bls * keys * h1 + w * wd + 2 * hd * h1 * bls) / 2e9,
        "host to disk": (4 * cd * bls * h1 + 2 * hd * h1 * bls) / 1e9,
        "device compute": bls * (8 * h1**2 + 4 * h1 * h2) / 4e13
        + (cg if host else 1) * 4 * bls * keys * h1 / 2e13,
        "host attention": away * 4 * bls * keys * h1 / 3e10 if host else 0,  # bytes of KV a second
    }
    assert prefill_terms(OPT, MACHINE, choice, placed) == pytest.approx(prefill, rel=1e-9, abs=1e-15)
    assert decode_terms(OPT, MACHINE, choice, placed) == pytest.approx(decode, rel=1e-9, abs=1e-15)
    assert tuple(prefill) == tuple(decode) == TERMS


@given(placements, choices)
def test_every_byte_has_a_home_and_peaks_are_those_of_appendix_a3(placed, choice):
    h1, s, n, layers, bls = 7168, 512, 32, 48, choice.block_size
    w = 24 * h1**2
    used = memory_bytes(OPT, choice, placed)
    for tier in (0, 1, 2):
        home = layers * w * placed.weights[tier] + 2 * s * h1 * bls * placed.activations[tier]
        home += 4 * (s + n) * h1 * bls * layers * placed.kv[tier]
        assert used[tier] >= home * (1 - 1e-9)
        assert tier < 2 or used[tier] == pytest.approx(home)
    # The device's working memory holds two layers' weights and the widest product of a batch (mlp_1).
    working = 2 * (1 - placed.weights[0]) * w + 2 * choice.gpu_batch_size * s * 5 * h1
    assert used[0] >= working
    everything = layers * w + 2 * s * h1 * bls + 4 * (s + n) * h1 * bls * layers
    assert sum(used) >= everything * (1 - 1e-9)


def test_a_group_of_64_in_four_bits():
    assert BYTES[4] * 64 == 32 + 2 * 2
    choice = BlockChoice(4, 2)
    home = TierShares(*[(0.0, 1.0, 0.0)] * 3)
    small = [
        memory_bytes(OPT, dataclasses.replace(choice, **bits), home)[1]
        for bits in ({}, {"weight_bits": 4}, {"kv_bits": 4})
    ]
    assert small[0] - small[1] == pytest.approx(48 * OPT.weights * (2 - BYTES[4]))
    assert small[0] - small[2] == pytest.approx(48 * 8 * 544 * OPT.kv * (2 - BYTES[4]))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "gemma-2-9b", "mixtral-8x7b", "opt-175b"])
def test_sizes_of_any_family(name):
    made, model = config(name), workload(name, config(name), 512, 32)
    assert model.kv == 2 * made.num_kv_heads * made.head_dim
    assert model.weights * model.layers + model.ends == pytest.approx(PARAMETERS[name] * 1e9, rel=0.02)
    assert model.linear_flops <= 2 * model.weights  # a token uses at most all weights
    short = workload(name, made, 8, 8)
    assert short.keys(10) == 10 and short.prompt_pairs == 36


PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "qwen2.5-7b": 7.62,
    "gemma-2-9b": 9.24,
    "mixtral-8x7b": 46.7,
    "opt-175b": 174.6,
}


def test_a_window_bounds_what_is_kept():
    gemma = workload("gemma-2-9b", config("gemma-2-9b"), 7000, 1000)
    assert gemma.keys(8000) == (8000 + 4096) / 2


def policy(weights, kv, activations, **changes):
    fields: dict[str, Any] = {
        "model": "opt-30b",
        "prompt_tokens": 512,
        "output_tokens": 32,
        "gpu_batch_size": 48,
        "num_gpu_batches": 3,
    }
    return Policy(weights=weights, kv=kv, activations=activations, **(fields | changes))


HOST = Shares(host=100.0)


def test_throughput_and_what_binds():
    found = predict(OPT, MACHINE, policy(Shares(20.0, 80.0), HOST, HOST, host_attention=True))
    assert found.tokens_per_s * found.latency_s == pytest.approx(144 * 32)
    assert found.binding == ("device compute", "host to device")
    assert found.link_tokens_per_s > found.tokens_per_s
    slower = predict(OPT, MACHINE, policy(Shares(20.0, 80.0), HOST, HOST, host_attention=True), overlap=False)
    assert slower.tokens_per_s < found.tokens_per_s
    assert predict(OPT, MACHINE, policy(Shares(20.0, 80.0), HOST, HOST)).tokens_per_s < found.tokens_per_s


def test_every_square_takes_the_driver_some_time():
    """A fixed time per batch and layer makes small batches slow. Predictions for an H200 need this time."""
    slow = msgspec.structs.replace(MACHINE, batch_layer_s=0.01)
    asked = policy(Shares(20.0, 80.0), HOST, HOST)
    for without, found in zip(
        *((p.prefill, p.decode) for p in (predict(OPT, one, asked) for one in (MACHINE, slow))), strict=True
    ):
        more = asked.num_gpu_batches * 0.01
        assert found == without | {"device compute": pytest.approx(without["device compute"] + more)}
    with pytest.raises(MachineError, match="batch_layer_s=-1"):
        Machine(name="drawn", method="", batch_layer_s=-1.0, **CONSTANTS)


@pytest.mark.parametrize("report", ["16-bit", "4-bit-by-hand", "4-bit-three-policies", "4-bit"])
def test_blocks_that_an_h200_ran_are_predicted_within_3_percent(report):
    """Errors stay below 1 % for the constants that were fitted to four of the reports."""
    work = dataclasses.replace(OPT, page_size=64)
    rows = [
        row
        for row in json.loads(
            (paths.ROOT / "benchmarks" / f"h200/opt-30b/offload-{report}.json").read_text()
        )["rows"]
        if "failed" not in row
    ]
    assert rows
    for row in rows:
        policy = msgspec.convert(row["policy"], Policy)
        made = predict(work, load_machine("h200"), policy)
        assert made.latency_s == pytest.approx(row["latency_s"], rel=0.03), row["name"]
        corrected = predict(
            work, load_machine(paths.ROOT / "benchmarks" / "settings" / "h200-machine-corrected.json"), policy
        )
        assert corrected.latency_s == pytest.approx(row["latency_s"], rel=0.01), row["name"]


def ablations() -> list[dict[str, Any]]:
    reports = (
        paths.ROOT / "benchmarks" / f"h200/opt-30b/offload-{bits}-bit-ablations.json" for bits in (4, 16)
    )
    return [row for report in reports for row in json.loads(report.read_text())["rows"]]


def test_the_ablations_that_an_h200_ran_are_predicted_and_the_search_wins():
    """Predictions of held-out blocks. Without overlap the error in 4 bits exceeds the goal of 20 %.

    The cause is the wait for each store.
    """
    found = {(row["policy"]["weight_bits"], row["name"]): row for row in ablations()}
    most = {"no search": 0.11, "no overlap": 0.22}
    assert len(found) == 9
    for (bits, name), row in found.items():
        made = predict(
            dataclasses.replace(OPT, page_size=64),
            load_machine("h200"),
            msgspec.convert(row["policy"], Policy),
            overlap=row["overlap"],
        )
        assert made.latency_s == pytest.approx(row["latency_s"], rel=most.get(name, 0.03)), name
        assert row["tokens_per_s"] <= found[bits, "all optimisations"]["tokens_per_s"]


def test_where_the_device_is_the_host_their_times_add_up():
    terms = dict(zip(TERMS, (1.0, 2.0, 40.0, 8.0, 16.0, 32.0), strict=True))
    one = Machine(name="a CPU", method="round numbers", one_processor=True, **CONSTANTS)
    assert resources(one, BlockChoice(1, 1), terms) == [51.0, 40.0, 8.0]  # type: ignore
    assert resources(MACHINE, BlockChoice(1, 1), terms) == list(terms.values())  # type: ignore
    policy = Policy("opt-30b", 512, 32, 8, 2, *[Shares(host=100.0)] * 3)  # type: ignore
    assert predict(OPT, one, policy).latency_s == pytest.approx(
        predict(OPT, one, policy, overlap=False).latency_s
    )
    assert predict(OPT, MACHINE, policy).latency_s < predict(OPT, MACHINE, policy, overlap=False).latency_s

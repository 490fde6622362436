"""Offloaded tokens: with any placement of the tensors and any order of the steps, the tokens equal the
engine's.
"""

import itertools

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from offloaded import DEVICE, DISK, HOST, MIXED, changed, goldens, requests, run, runtime

from jaxflow.flexgen.policy import PolicyError, Shares
from jaxflow.request import Request, SamplingParams

ORDERS = list(itertools.product(("zigzag", "row", "diagonal"), (True, False)))


@pytest.mark.parametrize(
    "host_attention", [True, False], ids=["attends on the host", "attends on the device"]
)
def test_opt_on_all_tiers_in_every_order(host_attention, tmp_path):
    prompts, expected = goldens(
        "tiny-opt", copies=3
    )  # 9 sequences: a whole block, and one of 2 batches with 3 rows empty
    with runtime(
        "tiny-opt", tmp_path, weights=MIXED, kv=MIXED, activations=MIXED, host_attention=host_attention
    ) as made:
        for schedule, overlap in ORDERS:
            changed(made, schedule=schedule, overlap=overlap)
            assert run(made, requests(prompts)) == expected, (schedule, overlap)
            seconds = {verb: one.seconds for verb, one in made.stats[-1].traffic.items() if one.seconds > 0}
            assert (
                seconds == {}
                if overlap
                else seconds.keys()
                >= {"fetch_layer", "compute", "store_kv", "store_activation", "load_activation"}
            )
        runs = {"zigzag": [36, 18], "row": [36, 18], "diagonal": [54]}  # a diagonal is one block
        assert [stats.tokens for stats in made.stats] == [n for order in ORDERS for n in runs[order[0]]]


def test_llama_in_4_bits_equals_the_engine_with_the_same_weights(tmp_path):
    prompts, _ = goldens("tiny-llama")
    engine = toy.loop("tiny-llama", budget=16, quantization="int4")
    plain = toy.run(engine, requests(prompts))
    with runtime("tiny-llama", tmp_path, weight_bits=4, weights=MIXED, kv=HOST) as made:
        assert run(made, requests(prompts)) == [plain[f"r{i}"].tokens for i in range(len(prompts))]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_4_bit_kv_gives_the_same_tokens_on_every_tier_and_sharded(devices, tmp_path):
    prompts, wide = goldens("tiny-llama")
    found = []
    for kv, tp in ((DEVICE, 1), (MIXED, devices)):
        with runtime("tiny-llama", tmp_path, tp=tp, kv_bits=4, kv=kv, num_gpu_batches=1) as made:
            found.append(run(made, requests(prompts)))
    assert found[0] == found[1] != wide


shares = st.sampled_from([DEVICE, HOST, DISK, MIXED, Shares(50.0, 50.0), Shares(0.0, 60.0, 40.0)])


@given(
    weights=shares, kv=shares, activations=shares, host_attention=st.booleans(),
    num_gpu_batches=st.integers(1, 3), order=st.sampled_from(ORDERS),
)  # fmt: skip
@settings(max_examples=2)
def test_drawn_policies(tmp_path_factory, order, **changes):
    prompts, expected = goldens("tiny-llama", copies=1)
    with runtime("tiny-llama", tmp_path_factory.mktemp("disk"), **changes) as made:
        changed(made, schedule=order[0], overlap=order[1])
        assert run(made, requests(prompts)) == expected


def test_windows_caps_and_post_norms(tmp_path):
    """Gemma 2 has two kinds of layers: two sets of programs, and windows in the host's attention."""
    prompts, expected = goldens("tiny-gemma2")
    with runtime(
        "tiny-gemma2", tmp_path, weights=HOST, kv=Shares(0.0, 50.0, 50.0), host_attention=True
    ) as made:
        assert run(made, requests(prompts)) == expected


FAMILIES = [
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gemma2",
    "tiny-gemma3_text",
    "tiny-mixtral",
    "tiny-qwen3_moe",
    "tiny-gpt_oss",
]


WAYS = {
    "disk": (1, DISK, False),
    "two devices": (2, HOST, False),
    "two devices, attends on the host": (2, HOST, True),
}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        (name, way)
        for name in FAMILIES
        for way in WAYS
        if (name, way)
        not in (
            ("tiny-gemma2", "disk"),  # that one is above
            ("tiny-gpt_oss", "two devices, attends on the host"),  # refused
        )
    ],
)
def test_every_other_family(model, way, tmp_path):
    """KV in one split keeps the programs few; the combination of splits does not depend on the family."""
    prompts, expected = goldens(model, copies=1)
    tp, kv, host_attention = WAYS[way]
    with runtime(model, tmp_path, tp=tp, weights=MIXED, kv=kv, host_attention=host_attention) as made:
        assert run(made, requests(prompts)) == expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"host_attention": True, "kv": HOST}, "host_attention"),
        ({"value_top_k_percent": 50.0}, "value_top_k_percent"),
    ],
)
def test_attention_that_has_no_sinks_is_refused_for_gpt_oss(changes, field, tmp_path):
    with (
        pytest.raises(PolicyError, match=f"{field}=.*attention sinks"),
        runtime("tiny-gpt_oss", tmp_path, **changes),
    ):
        pass


@pytest.mark.parametrize("host_attention", [False, True])
def test_batches_that_end_early_leave_a_diagonal(host_attention, tmp_path):
    """Sequences end after one to six tokens. The batches after them get the engine's tokens."""
    prompts, greedy = goldens("tiny-opt", copies=4)
    asked = [
        Request(
            f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=1 + i // 3 % 3 * 2, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]
    with runtime("tiny-opt", tmp_path, kv=MIXED, activations=MIXED, host_attention=host_attention) as made:
        changed(made, schedule="diagonal")
        found = run(made, asked)
    assert found == [ids[: request.sampling.max_tokens] for ids, request in zip(greedy, asked, strict=True)]


def test_sampling_equals_the_engines(tmp_path):
    """Seeds, filters, penalties, several sequences of a request, stop tokens and log-probabilities give the
    same events.
    """
    prompts, _ = goldens("tiny-opt", copies=1)
    biased = SamplingParams(
        temperature=0.7, seed=9, logit_bias={5: 50.0}, min_tokens=3, stop_token_ids=[5], max_tokens=6
    )
    asked = [
        Request("plain", prompts[0], SamplingParams(temperature=0.9, seed=7, max_tokens=6, ignore_eos=True)),
        Request(
            "filters",
            prompts[1],
            SamplingParams(temperature=1.2, seed=8, top_k=40, top_p=0.9, n=2, max_tokens=5, logprobs=3),
        ),
        Request(
            "penalties",
            prompts[2],
            SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0, max_tokens=6),
        ),
        Request("bias", prompts[0], biased),
    ]
    plain = toy.run(toy.loop("tiny-opt", budget=16), asked)
    found = {request.request_id: toy.Result() for request in asked}
    with runtime("tiny-opt", tmp_path, kv=HOST) as made:
        for event in itertools.chain.from_iterable(made.generate(asked)):
            found[event.request_id].take(event)
    for name, result in found.items():
        assert result.token_ids == plain[name].token_ids, name
        assert {i: end.reason for i, end in result.finished.items()} == {
            i: end.reason for i, end in plain[name].finished.items()
        }
    ours, theirs = (
        np.array([p.logprob for d in r["filters"].logprobs[1] for p in d.values()]) for r in (found, plain)
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-4)

"""Offloading on two devices: tensors sharded over devices, on every tier, give the tokens of one device."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloaded import MIXED, changed, goldens, requests, run, runtime
from test_offloaded_tokens import ORDERS, shares

from jaxflow.flexgen.accounting import account
from jaxflow.flexgen.geometry import place
from jaxflow.parallel.mesh import make_mesh


@pytest.mark.parametrize(
    ("model", "host_attention"),
    [("tiny-llama", True), ("tiny-opt", False)],
    ids=["attends on the host", "attends on the devices"],
)
def test_two_devices_give_the_tokens_of_one_in_every_order(model, host_attention, tmp_path):
    prompts, expected = goldens(model)
    with runtime(
        model, tmp_path, tp=2, weights=MIXED, kv=MIXED, activations=MIXED, host_attention=host_attention
    ) as made:
        for schedule, overlap in ORDERS:
            changed(made, schedule=schedule, overlap=overlap)
            assert run(made, requests(prompts)) == expected, (schedule, overlap)
        one = dataclasses.replace(made.geometry, mesh=make_mesh(1))
        whole = account(one, place(one), 0)
        assert all(
            made.account.total(tier) == whole.total(tier) for tier in ("host", "disk")
        )  # nothing lies there twice


@given(
    weights=shares,
    kv=shares,
    activations=shares,
    host_attention=st.booleans(),
    gpu_batch_size=st.integers(1, 4),
)
@settings(max_examples=1)
def test_drawn_policies_on_four_devices_with_repeated_heads(tmp_path_factory, **changes):
    prompts, expected = goldens("tiny-llama", copies=1)
    with runtime("tiny-llama", tmp_path_factory.mktemp("disk"), tp=4, **changes) as made:
        assert run(made, requests(prompts)) == expected

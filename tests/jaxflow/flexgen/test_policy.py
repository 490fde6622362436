"""Policies: written, read back, and refused if invalid."""

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.flexgen.policy import Policy, PolicyError, Shares, load_policy, save_policy

HOST = Shares(host=100.0)


def policy(**changes) -> Policy:
    fields: dict[str, Any] = {
        "model": "toy",
        "prompt_tokens": 8,
        "output_tokens": 4,
        "gpu_batch_size": 2,
        "num_gpu_batches": 3,
    }
    fields |= {"weights": Shares(20.0, 80.0), "kv": HOST, "activations": HOST}
    return Policy(**(fields | changes))


def test_a_policy_is_read_back(tmp_path):
    path = tmp_path / "policy.json"
    save_policy(policy(), path)
    assert load_policy(path, model="toy") == policy()
    assert policy().block_size == 6


@given(st.floats(0, 100, width=16), st.floats(0, 100, width=16))
def test_shares_sum_to_100_or_are_refused(device, host):
    disk = 100 - device - host
    if disk >= 0:
        assert sum(policy(kv=Shares(device, host, disk)).kv) == pytest.approx(100)
    elif disk < -1e-3:
        for wrong in (Shares(device, host, disk), Shares(device, host)):
            with pytest.raises(PolicyError, match=r"kv=Shares\(.*sum to 100"):
                policy(kv=wrong)


@pytest.mark.parametrize("kind", ["weights", "kv", "activations"])
@pytest.mark.parametrize(
    "wrong", [Shares(20.0, 90.0), Shares(math.nan, 90.0), Shares(130.0, -30.0), (20, 80, 0), None], ids=str
)
def test_wrong_shares_are_refused_by_kind(kind, wrong):
    words = (
        f"{kind}={wrong}; accepted are three percentages that sum to 100, each 0 to 100, for example "
        f"Shares(device=20.0, host=80.0, disk=0.0)"
    )
    with pytest.raises(PolicyError, match=f"^{re.escape(words)}$"):
        policy(**{kind: wrong})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_batch_size": 0}, "gpu_batch_size=0"),
        ({"num_gpu_batches": -1}, "num_gpu_batches=-1"),
        ({"weight_bits": 3}, "weight_bits=3; accepted is 16 or 4"),
        (
            {"kv_bits": 4, "host_attention": True},
            "host_attention=True with kv_bits=4; accepted is kv_bits=16",
        ),
    ],
)
def test_invalid_policies_are_refused(changes, words):
    with pytest.raises(PolicyError, match=words):
        policy(**changes)


def test_files_of_other_models_or_fields_are_refused(tmp_path):
    path = tmp_path / "policy.json"
    save_policy(policy(), path)
    with pytest.raises(PolicyError, match="opt-30b"):
        load_policy(path, model="opt-30b")
    fields = msgspec.to_builtins(policy())
    for change, word in (
        ({"schema_version": 7}, "schema_version=7"),
        ({"weights": {"device": 130.0}}, r"weights=Shares\(device=130"),
        ({"kv": {"device": 30.0}}, "kv=.*sum to 100"),
        ({"colour": "red"}, "colour"),
    ):
        path.write_bytes(msgspec.json.encode(fields | change))
        with pytest.raises(PolicyError, match=word):
            load_policy(path)
    with pytest.raises(PolicyError, match="absent"):
        load_policy(tmp_path / "absent.json")

"""Predicted decode steps of a mixture over many devices: laws of the layouts and of the assumptions."""

import dataclasses
import json

import paths
import pytest

from jaxflow.bench.pipeline.decode_fleet import Decode, bound, measure, measured, predict, text
from jaxflow.bench.pipeline.splits import DeviceSplit

SMALL = Decode(
    "qwen3-30b-a3b:fp8", devices=16, sequences=64, prompt_tokens=500, output_tokens=500, target=9e3
)
LATENT = Decode("deepseek-v3:fp8_all")
BASE = measured("H200")
DP64 = DeviceSplit.parse("dp64")


def rate(decode=LATENT, split=DP64, **changed):
    row = predict(decode, split, dataclasses.replace(BASE, **{"balance": 0.9} | changed), {})
    return row["tokens_per_s_per_device"]


@pytest.mark.parametrize("overlapped", [False, True])
def test_more_bandwidth_better_balance_and_faster_kernels_never_cost_tokens(overlapped):
    def rates(**changed):
        return [
            rate(overlapped=overlapped, **{name: value})
            for name, values in changed.items()
            for value in values
        ]

    for rising in (
        rates(outside_bytes_per_s=(1e10, 2.5e10, 4.3e10, 5e10, 1e11, 4e11)),
        rates(balance=(0.2, 0.5, 0.8, 0.9, 1.0)),
        rates(sent_bytes=(2.0, 1.5, 1.0)),
        rates(once_a_host=(False, True)),
        *(
            rates(shares=[dataclasses.replace(BASE.shares, **{share: value}) for value in (0.2, 0.5, 1.0)])
            for share in ("grouped_flops", "grouped_bytes", "latent_flops")
        ),
    ):
        assert rising == sorted(rising) and rising[0] > 0
    assert rate(overlapped=True) >= rate()


def test_one_device_that_shares_with_none_is_a_plain_layout():
    small = dataclasses.replace(SMALL, devices=1)
    one, plain = (predict(small, DeviceSplit.parse(name), BASE, {}) for name in ("dp1", "1x1"))
    assert one == plain


def test_tensor_parallelism_keeps_latent_vectors_on_all_devices_and_so_holds_fewer_sequences():
    rows = {
        name: predict(LATENT, DeviceSplit.parse(name), BASE, {8: 0.9, 64: 0.9})
        for name in ("8x1", "dp64", "1x1")
    }
    assert rows["1x1"] is None  # the weights do not fit
    assert rows["8x1"]["sequences_per_device"] < rows["dp64"]["sequences_per_device"] == 256
    assert rows["8x1"]["one_batch_s"]["all_to_alls"] == 0 < rows["dp64"]["one_batch_s"]["all_to_alls"]


def test_all_to_alls_inside_a_host_are_the_cheapest():
    inside, outside = (
        predict(LATENT, DeviceSplit.parse(name), BASE, {8: 0.9, 64: 0.9})["one_batch_s"]["all_to_alls"]
        for name in ("dp8x8", "dp64")
    )
    assert inside < outside / 3


@pytest.mark.parametrize("decode", [SMALL, LATENT])
def test_no_step_is_faster_than_its_longest_resource(decode):
    split = DeviceSplit(dp=decode.devices)
    assert rate(decode, split, balance=1.0) <= min(bound(decode, split, BASE).values())


def test_the_report_has_each_layout_and_what_reaches_the_target():
    names = ("dp16", "dp16+overlap", "8x1", "8x1+ep", "1x16")
    report = measure(SMALL, [DeviceSplit.parse(name) for name in names])
    assert [row["layout"] for row in report["layouts"]] == list(names) and not report["do_not_fit"]
    assert report["changed"]["latent attention 1.0"] == report["layouts"][0]["tokens_per_s_per_device"]
    assert report["changed"]["overlap 1"] == report["layouts"][1]["tokens_per_s_per_device"]
    assert set(report["sent_in_e4m3"]) == {"dp16", "dp16+overlap"}
    network = report["needed"]["False"]["outside_bytes_per_s"]
    balance = report["layouts"][0]["expert_balance"]
    reached, missed = (
        rate(SMALL, DeviceSplit(dp=16), balance=balance, outside_bytes_per_s=network * factor)
        for factor in (1.0, 0.99)
    )
    assert missed < SMALL.target <= reached
    assert all(name in text(report) for name in names)


def test_the_committed_report_has_the_conditions_and_the_order_of_the_public_figure():
    report = json.loads((paths.ROOT / "benchmarks/cpu/deepseek-v3/decode-fleet-h200.json").read_text())
    assert report["decode"] == dataclasses.asdict(Decode())
    rates = {row["layout"]: row["tokens_per_s_per_device"] for row in report["layouts"]}
    assert (
        rates["8x1"] < rates["8x8"] < rates["dp64"] < rates["dp32"] < rates["dp16"]
    )  # as the public 32, 72, 96
    assert all(rates[name + "+overlap"] >= rates[name] for name in ("dp64", "dp32", "dp16", "dp8x8"))
    changed = report["changed"]
    for names in (
        [f"network {rate} GB/s" for rate in (25, 50, 100, 200)],
        [f"balance {balance}" for balance in (0.8, 0.9, 1.0)],
        ["grouped products 0.7", "grouped products 1.0"],
        ["latent attention 0.55", "latent attention 0.94, FlashMLA", "latent attention 1.0"],
        ["rows sent in e4m3", "e4m3, once a host", "e4m3, once a host, overlap 1"],
    ):
        assert [changed[name] for name in names] == sorted(changed[name] for name in names)
    assert changed["overlap 1"] == rates["dp64+overlap"] > report["decode"]["target"]
    assert max(rates[name] for name in ("dp64", "dp32")) < report["decode"]["target"]
    assert report["public"]["output_tokens_per_s_per_device"]["32"] < report["sent_in_e4m3"]["dp32"]

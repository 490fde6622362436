"""Profiles: files, refusals, and interpolation between measured points."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES
from jaxflow.model.graph import model_graph
from search.profile.modelled import modelled_profile
from search.profile.op_times import (
    OpTime,
    Pair,
    Profile,
    ProfileError,
    load_profile,
    save_profile,
    seconds,
    with_collectives,
)

CONFIG = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
MODELLED = modelled_profile("llama-3.1-8b", CONFIG, DEVICES["H200"], sms=(24, 108, 132))


def profile(op_times):
    return Profile("H200", {"jax": "0.11.2"}, "toy", 1, "bfloat16", "bfloat16", 132, "drawn", tuple(op_times))


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "h200.json"
    save_profile(MODELLED, path)
    assert load_profile(path, device="H200", model="llama-3.1-8b") == MODELLED


def test_what_does_not_belong_is_refused(tmp_path):
    path = tmp_path / "p.json"
    save_profile(MODELLED, path)
    for asked, word in (({"device": "B200"}, "B200"), ({"model": "other"}, "other")):
        with pytest.raises(ProfileError, match=word):
            load_profile(path, **asked)
    fields = msgspec.to_builtins(MODELLED)
    first, pair = (
        fields["op_times"][0],
        msgspec.to_builtins(Pair("qkv", "decode_attention", 92, 40, 0.7, 0.5)),
    )
    for change, word in (
        ({"schema_version": 0}, "schema_version=0"),
        ({"total_sms": "many"}, "total_sms"),
        ({"total_sms": 0}, "total_sms"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"dtype": "int3"}, r"float8_e4m3fn.*`\$\.dtype`"),
        ({"op_times": []}, "op_times"),
        ({"op_times": [{}]}, "op_times"),
        ({"op_times": [first | {"seconds": 0.0}]}, "seconds"),
        ({"op_times": [first | {"seconds": -1e-5}]}, "seconds"),
        ({"op_times": [first | {"clock_mhz": 0}]}, "clock_mhz"),
        ({"pairs": [pair | {"first_performance": -0.1}]}, "first_performance"),
    ):
        path.write_bytes(msgspec.json.encode(fields | change))
        with pytest.raises(ProfileError, match=word):
            load_profile(path)
    with pytest.raises(ProfileError, match="absent"):
        load_profile(tmp_path / "absent.json")
    with pytest.raises(ProfileError, match="108"):
        seconds(MODELLED, "qkv", 128, sms=77)


def test_a_model_in_a_folder_may_be_elsewhere(tmp_path):
    """The profile is measured on one machine and used on another."""
    path = tmp_path / "p.json"
    save_profile(msgspec.structs.replace(MODELLED, model="/there/llama-3-8b"), path)
    for name in ("/there/llama-3-8b", "here/llama-3-8b/", "llama-3-8b"):
        assert load_profile(path, model=name).model == "/there/llama-3-8b"
    with pytest.raises(ProfileError, match="model='/there/llama-3-8b', but it is asked about '/there/other'"):
        load_profile(path, model="/there/other")


def test_collectives_as_they_were_measured():
    """Measured collectives replace modelled ones for any number of SMs in their file."""
    model = open_checkpoint("llama-3-70b", load_format="dummy").model_config
    modelled = modelled_profile("llama-3-70b", model, DEVICES["H200"], tp=4, tokens=(256, 1024), keys=(256,))
    times = tuple(
        OpTime(op, tokens, 0, 1, 7e-5) for op in ("attn_reduce", "mlp_reduce") for tokens in (64, 4096)
    )
    measured = msgspec.structs.replace(modelled, op_times=(OpTime("qkv", 64, 0, 1, 5.0), *times), total_sms=1)
    found = with_collectives(modelled, measured)
    assert seconds(found, "attn_reduce", 1000) == seconds(found, "mlp_reduce", 64) == 7e-5
    for op in ("qkv", "attn_scatter", "decode_attention"):
        assert seconds(found, op, 300, 200) == seconds(modelled, op, 300, 200)
    for change, word in (
        ({"device": "cpu"}, "device='cpu' of the collectives: 'H200' is needed"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size=8"),
        ({"dtype": "float32"}, "float32"),
        ({"op_times": ()}, "none|no "),
    ):
        with pytest.raises(ProfileError, match=word):
            with_collectives(modelled, msgspec.structs.replace(measured, **change))
    assert with_collectives(modelled, msgspec.structs.replace(measured, device="NVIDIA H200")) == found


points = st.lists(
    st.tuples(st.integers(1, 4096), st.floats(1e-6, 1.0)), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


@given(points, st.integers(1, 8192))
def test_at_the_points_exact_and_between_them_between(drawn, tokens):
    made = profile(OpTime("qkv", t, 0, 132, s) for t, s in drawn)
    for t, s in drawn:
        assert math.isclose(seconds(made, "qkv", t), s)
    found = seconds(made, "qkv", tokens)
    values = [s for _, s in drawn]
    if tokens <= max(t for t, _ in drawn):
        assert min(values) * (1 - 1e-9) <= found <= max(values) * (1 + 1e-9)
    assert seconds(made, "qkv", 0) == 0


def test_keys_are_interpolated_too():
    made = profile(
        OpTime("decode_attention", t, k, 132, t * k * 1e-9) for t in (128, 256) for k in (1000, 3000)
    )
    assert seconds(made, "decode_attention", 192, 2000) == pytest.approx(192 * 2000e-9)
    assert seconds(made, "decode_attention", 512, 6000) == pytest.approx(512 * 6000e-9)


def test_an_op_that_the_whole_device_lacks_is_told_with_its_sms():
    profile = Profile("toy", {}, "toy", 1, "float32", "float32", 7, "drawn", (OpTime("down", 16, 0, 4, 1.0),))
    with pytest.raises(
        ProfileError, match=r"op='down' on sms=7 was not measured for toy on toy; it was on \[4\]"
    ):
        seconds(profile, "down", 16)


def test_a_modelled_profile_sums_to_the_cost_models_step():
    step = Composition(decode_tokens=1024, decode_keys=1024, chunks=())
    ours = sum(
        seconds(MODELLED, op.name, 1024, 1024)
        for op in model_graph(CONFIG).layers[1]
        if op.name != "chunk_attention"
    )
    bound = sum(
        op.work(step).flops / 700e12 + op.work(step).kv_bytes / 4.6e12 for op in model_graph(CONFIG).layers[1]
    )
    assert 0.95 * bound < ours < 1.3 * bound
    assert seconds(MODELLED, "up_gate", 1024, sms=108) > seconds(MODELLED, "up_gate", 1024)

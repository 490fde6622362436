"""The random weights for vLLM, with numpy arrays in the place of PyTorch's tensors."""

import importlib.metadata
import sys
import types

import numpy as np
import pytest

from benchmarks import vllm_weights
from benchmarks.vllm_plugin import GROUP, announce
from benchmarks.vllm_weights import BLOCK_SCALE, GROUP_EXPONENT, fill


class Tensor:
    """The part of a PyTorch tensor that `fill` calls. `written`: something was written."""

    def __init__(self, shape, dtype=np.float32, device="cuda"):
        self.values, self.device = np.zeros(shape, dtype), types.SimpleNamespace(type=device)
        self.dtype, self.shape, self.ndim = self.values.dtype, self.values.shape, self.values.ndim
        self.data, self.written = self, False

    def numel(self):
        return self.values.size

    def _write(self, values):
        self.values[...] = values
        self.written = True

    def fill_(self, value):
        self._write(value)

    def copy_(self, other):
        self._write(other.values)

    def normal_(self, mean, size):
        self._write(np.random.default_rng(0).normal(mean, size, self.shape))

    def random_(self, low, high):
        self._write(np.random.default_rng(0).integers(low, high, self.shape))

    def to(self, dtype):
        made = Tensor(self.shape, dtype)
        made._write(self.values)
        return made


def randn(shape, dtype, device):
    made = Tensor(shape)
    made.normal_(0, 1)
    return made


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    """Put a stand-in in the place of PyTorch. An 8-bit float is a float16 here."""
    made = types.SimpleNamespace(
        uint8=np.uint8,
        bfloat16=np.float32,
        is_floating_point=lambda tensor: tensor.dtype.kind == "f",
        finfo=lambda dtype: types.SimpleNamespace(bits=8 if dtype == np.float16 else 16),
        randn=randn,
    )
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.mark.parametrize("name", ["mlp.experts.w13_weight", ""])
@pytest.mark.parametrize("shape", [(64, 256), (3, 64, 256)])
def test_a_product_of_random_weights_keeps_the_size_of_its_input(name, shape):
    tensor = Tensor(shape)
    fill(name, tensor)
    out = np.random.default_rng(1).normal(size=(100, shape[-1])) @ np.swapaxes(tensor.values, -1, -2)
    assert out.std() == pytest.approx(1, rel=0.1)


def test_norms_are_ones_and_biases_zeros():
    for name, value in (("input_layernorm.weight", 1), ("qkv_proj.bias", 0), ("attn.sinks", 0)):
        tensor = Tensor(8)
        tensor.values[...] = 7
        fill(name, tensor)
        assert (tensor.values == value).all()


def test_packed_weights_are_random_bytes_with_one_scale():
    packed, scale = Tensor((4, 64), np.uint8), Tensor((4, 2), np.uint8)
    fill("w13_weight", packed)
    fill("w13_weight_scale", scale)
    assert len(np.unique(packed.values)) > 100 and (scale.values == GROUP_EXPONENT).all()


def test_eight_bit_floats_have_their_scale_beside_them():
    weight, scale = Tensor((128, 128), np.float16), Tensor((2, 2))
    fill("weight", weight)
    fill("weight_scale_inv", scale)
    assert weight.values.std() == pytest.approx(1, rel=0.1) and np.allclose(scale.values, BLOCK_SCALE)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weight", Tensor((4, 4), device="meta")),
        ("attn._k_scale", Tensor(())),
        ("input_scale", Tensor(1)),
        ("places", Tensor(4, np.int32)),
    ],
)
def test_what_stays_as_it_is(name, tensor):
    fill(name, tensor)
    assert not tensor.written


def test_the_plugin_is_found_and_replaces_both_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for _ in range(2):
        announce(tmp_path, vllm_weights)
    [point] = [one for one in importlib.metadata.entry_points(group=GROUP) if one.name == vllm_weights.NAME]
    loaders = [types.SimpleNamespace(), types.SimpleNamespace()]
    for name, loader in zip(("weight_utils", "dummy_loader"), loaders, strict=True):
        monkeypatch.setitem(sys.modules, f"vllm.model_executor.model_loader.{name}", loader)
    point.load()()
    for loader in loaders:
        tensors = {"a_norm": Tensor(4), "weight": Tensor((8, 8))}
        loader.initialize_dummy_weights(types.SimpleNamespace(state_dict=lambda t=tensors: t), None)
        assert (tensors["a_norm"].values == 1).all() and tensors["weight"].written
        one = Tensor((8, 8))
        loader.initialize_single_dummy_weight(one)
        assert one.written

"""The block types of GGUF files, against code that does one weight at a time."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxflow.model.checkpoints import gguf_file
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.gguf_file import TYPES


def f16(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def nibbles(data: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def fifth_bits(data: bytes) -> list[int]:
    return [16 * (data[i // 8] >> (i % 8) & 1) for i in range(32)]


def q4_0(b: bytes) -> list[float]:
    return [f16(b, 0) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [f16(b, 0) * q + f16(b, 2) for q in nibbles(b[4:])]


def q5_0(b: bytes) -> list[float]:
    return [f16(b, 0) * (q + high - 16) for q, high in zip(nibbles(b[6:]), fifth_bits(b[2:6]), strict=True)]


def q5_1(b: bytes) -> list[float]:
    return [
        f16(b, 0) * (q + high) + f16(b, 2) for q, high in zip(nibbles(b[8:]), fifth_bits(b[4:8]), strict=True)
    ]


def q8_0(b: bytes) -> list[float]:
    return [f16(b, 0) * q for q in np.frombuffer(b[2:], np.int8).tolist()]


def six_bit_scales(b: bytes) -> tuple[list[int], list[int]]:
    """Eight scales and eight minimums of 6 bits, in 12 bytes."""
    scales = [b[i] & 63 for i in range(4)] + [b[8 + i] & 15 | (b[i] >> 6) << 4 for i in range(4)]
    minimums = [b[4 + i] & 63 for i in range(4)] + [b[8 + i] >> 4 | (b[4 + i] >> 6) << 4 for i in range(4)]
    return scales, minimums


def q4_k(b: bytes) -> list[float]:
    (d, dmin), (scales, minimums), out = (f16(b, 0), f16(b, 2)), six_bit_scales(b[4:16]), []
    for i in range(256):
        byte, sub = b[16 + 32 * (i // 64) + i % 32], i // 32
        out.append(d * scales[sub] * (byte >> 4 if sub % 2 else byte & 15) - dmin * minimums[sub])
    return out


def q5_k(b: bytes) -> list[float]:
    (d, dmin), (scales, minimums), out = (f16(b, 0), f16(b, 2)), six_bit_scales(b[4:16]), []
    for i in range(256):
        byte, sub = b[48 + 32 * (i // 64) + i % 32], i // 32
        q = (byte >> 4 if sub % 2 else byte & 15) + 16 * (b[16 + i % 32] >> sub & 1)
        out.append(d * scales[sub] * q - dmin * minimums[sub])
    return out


def q6_k(b: bytes) -> list[float]:
    d, scales, out = f16(b, 208), np.frombuffer(b[192:208], np.int8).tolist(), []
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        low = b[64 * half + 32 * (quarter % 2) + lane] >> (4 if quarter >= 2 else 0) & 15
        high = b[128 + 32 * half + lane] >> (2 * quarter) & 3
        out.append(d * scales[i // 16] * ((low | high << 4) - 32))
    return out


BLOCKS: dict[Kind, Callable[[bytes], list[float]]] = {
    Kind.Q8_0: q8_0,
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q5_0: q5_0,
    Kind.Q5_1: q5_1,
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
}


def test_every_supported_type_is_tested() -> None:
    assert {*BLOCKS, Kind.F32, Kind.F16, Kind.BF16} == {*TYPES}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_of_each_type_are_read_right(kind: Kind, tmp_path: Path) -> None:
    """Make a model of one layer with embeddings of random blocks of the type.

    All other tensors are float32.
    """
    rng = np.random.default_rng(3)
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    d, v, h = 256, 70, 64
    raw = rng.integers(0, 256, (v, d // size, block_bytes), np.uint8)
    for at in {Kind.Q8_0: [0], Kind.Q4_0: [0], Kind.Q5_0: [0], Kind.Q6_K: [208]}.get(kind, [0, 2]):
        raw[..., at : at + 2] = (
            rng.uniform(-1, 1, (v, d // size, 1)).astype("<f2").view(np.uint8)
        )  # no NaN among the scales
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": d,
        "feed_forward_length": d,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", d // h)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", raw.reshape(v, -1), raw_dtype=kind)
    matrices = [
        f"blk.0.{name}.weight"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    ]
    for name in matrices:
        writer.add_tensor(name, np.zeros((d, d), np.float32))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    embed = np.asarray(open_checkpoint(str(tmp_path / "model.gguf")).load("float32")["embed"])
    expected = np.array([[value for block in row for value in BLOCKS[kind](block.tobytes())] for row in raw])
    np.testing.assert_allclose(embed[:v], expected, rtol=2e-6, atol=1e-6)
    assert not embed[v:].any()


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 3), (700, 1), (3, 400)])
def test_parts_of_a_tensor_are_its_rows(kind, rows, blocks, monkeypatch):
    """A tensor that is dequantized in several parts, the last one shorter, and a
    row that is larger than a part.
    """
    monkeypatch.setattr(gguf_file, "CACHED_VALUES", 2**13)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(rows).integers(0, 256, (rows, blocks * size), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_array_equal(gguf_file.dequantized(data, kind), gguf.dequantize(data, kind))

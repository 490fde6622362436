"""The fast reader of GGUF's keys against the gguf package's, and against files that are broken."""

import struct

import gguf
import numpy as np
import pytest
import toy_vocabularies
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.text.gguf_metadata import GgufError, read_metadata

METADATA = {
    "general.name": "héllo ☃",
    "a.bool": True,
    "a.int": 4_000_000_000,
    "a.float": 0.5,
    "a.strings": ["", "x", "你好"],
    "a.ints": np.array([-1, 2**31 - 1], np.int32),
    "a.floats": np.array([0.25, -3.0], np.float32),
    "a.wide": np.array([-(2**40)], np.int64),
    "a.bytes": np.arange(5, dtype=np.uint8),
}


def _same(ours, theirs) -> bool:
    return (
        ours.tolist() == theirs
        if isinstance(ours, np.ndarray)
        else ours == theirs and type(ours) is type(theirs)
    )


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> bytes:
    return toy_vocabularies.write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", METADATA).read_bytes()


def test_every_type_of_value(tmp_path, small_file):
    (tmp_path / "a.gguf").write_bytes(small_file)
    read = read_metadata(tmp_path / "a.gguf")
    assert set(read) == {*METADATA, "general.architecture"}
    for key, value in METADATA.items():
        assert np.array_equal(read[key], value) if isinstance(value, np.ndarray) else read[key] == value


def test_reads_what_the_gguf_package_reads(tmp_path, small_file):
    (tmp_path / "a.gguf").write_bytes(small_file)
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    theirs = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    ours = read_metadata(tmp_path / "a.gguf")
    assert list(ours) == list(theirs)
    assert [name for name in ours if not _same(ours[name], theirs[name])] == []


def test_the_default_model_s_file(smollm2_gguf):
    read = read_metadata(smollm2_gguf)
    assert len(read) == 33
    assert (
        read["llama.block_count"],
        read["llama.rope.freq_base"],
        read["general.quantization_version"],
    ) == (30, 100_000.0, 2)
    assert [len(read[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type", "merges")] == [
        49152,
        49152,
        48900,
    ]


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path, small_file):
    path = tmp_path / "cut.gguf"
    # Only tensors follow the last key, and this file has none.
    end = small_file.rindex(bytes(range(5))) + 5
    for size in range(end):
        path.write_bytes(small_file[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_metadata(path)
    path.write_bytes(small_file[:end])
    assert "a.bytes" in read_metadata(path)


@given(damage=st.dictionaries(st.integers(0, 300), st.integers(0, 255), min_size=1, max_size=6))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path_factory, small_file, damage):
    data = bytearray(small_file)
    for at, byte in damage.items():
        data[at % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        assert isinstance(read_metadata(path), dict)
    except GgufError as error:
        assert "damaged.gguf" in str(error)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"GGML" + bytes(60), "starts with"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(60),
            "twice",
        ),  # empty keys of type uint8, as many as there is space
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "needs 1152921504606846976 bytes"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**61), "'k'"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "type 77 is unknown"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 0), "array of type 9"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 1) + b"\xff",
            "codec can't decode",
        ),
        (b"", "too few"),
    ],
)
def test_errors_name_the_problem(tmp_path, header, says):
    path = tmp_path / "bad.gguf"
    path.write_bytes(header)
    with pytest.raises(GgufError, match=r"bad\.gguf.*" + says):
        read_metadata(path)

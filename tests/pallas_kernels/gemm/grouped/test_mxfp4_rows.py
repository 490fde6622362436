"""Grouped GEMM of few rows with MXFP4 in blocks: the format, the interpreter against the reference, the code
of a thread by an interpreter of its instructions, and the H200 code.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from ptx import misaligned
from thread_code import LANE, WARP, bfloat16, run_as_thread_code, run_ptx, value

from pallas_kernels.gemm.grouped import gate_pairs, mxfp4_mma, reference, swapped
from pallas_kernels.gemm.grouped.mxfp4_blocks import dequantize_blocks, from_blocks, to_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4
from pallas_kernels.gemm.grouped.mxfp4_operand import SHIFT
from pallas_kernels.gemm.grouped.mxfp4_rows import RowsTile, multiply_rows, rows_tile
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import grouped_gemm, list_groups
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.quantized import Mxfp4, Mxfp4Blocks

in_blocks = jax.jit(to_blocks)


def random_weight(rng, *shape: int, scales=(110, 130)) -> Mxfp4:
    *rows, k = shape
    packed = rng.integers(0, 256, (*rows, k // 2), np.uint8)
    return Mxfp4(jnp.asarray(packed), jnp.asarray(rng.integers(*scales, (*rows, k // 32), np.uint8)))


def test_blocks_have_the_numbers_of_a_checkpoint():
    w = random_weight(np.random.default_rng(0), 3, 48, 192, scales=(0, 256))
    blocks = in_blocks(w)
    assert blocks.shape == w.shape and blocks.words.nbytes == w.packed.nbytes + w.scale.nbytes
    for found, wanted in zip(jax.jit(from_blocks)(blocks), w, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_other_shapes_have_no_blocks():
    with pytest.raises(ValueError, match="N=24, K=64: accepted are multiples of 16 and 64"):
        to_blocks(random_weight(np.random.default_rng(0), 24, 64))


@pytest.mark.parametrize(
    ("tokens", "n", "k", "tile", "epilogue"),
    [
        # Three workers share the items of an expert, and the last stage of K is beyond the weight.
        (9, 192, 192, RowsTile(8, 1, 2, 2, 2), {}),
        # Half of the last item of each expert is beyond the weight. An expert has two tiles.
        (40, 192, 128, RowsTile(16, 2, 1, 1, 2), {}),
        (9, 256, 192, RowsTile(8, 2, 1, 2, 2), {"activation": "clamped_swiglu", "gate_block": 8}),
        # The last item of the last expert is beyond the weight.
        (9, 192, 192, RowsTile(8, 2, 1, 2, 2, by_warps=True), {}),
    ],
    ids=["shared items", "two tiles", "pairs", "copying warps"],
)
def test_each_row_is_multiplied_with_its_experts_weight(tokens, n, k, tile, epilogue):
    rng = np.random.default_rng(tokens)
    w, picked = random_weight(rng, 3, n, k), draw_routing(rng, tokens, 3, 2, 1.2)
    groups = jax.jit(list_groups, static_argnums=(1, 2))(jnp.asarray(picked), 3, tile.rows)
    x = jnp.asarray(rng.normal(size=(tokens, k)), jnp.bfloat16)[groups.pairs // 2]
    if epilogue:
        epilogue["bias"] = jnp.asarray(rng.normal(size=(3, n)) * 4, jnp.bfloat16)
    run = functools.partial(multiply_rows, sms=4, tile=tile, interpret=plgpu.InterpretGPUParams(), **epilogue)
    found = jax.jit(run)(x, in_blocks(w), groups)
    wanted = jax.jit(functools.partial(reference.grouped_gemm, **epilogue))(x.astype(jnp.float32), w, groups)
    found, wanted = (np.asarray(y[groups.places], np.float32) for y in (found, wanted))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 4e-3


@pytest.mark.parametrize(
    ("n", "k", "rows", "epilogue"),
    [
        (192, 192, 24, {}),
        (256, 64, 16, {"activation": "silu", "gate_block": 32}),
        (128, 64, 8, {"activation": "clamped_swiglu", "gate_block": 8}),
    ],
    ids=["plain", "gates", "pairs"],
)
def test_the_kernel_of_any_rows_takes_blocks(n, k, rows, epilogue):
    """The last stage of K is half beyond the weight, and so is the last tile of an expert."""
    rng = np.random.default_rng(rows)
    w, picked = random_weight(rng, 3, n, k), draw_routing(rng, 40, 3, 2, 1.2)
    groups = jax.jit(list_groups, static_argnums=(1, 2))(jnp.asarray(picked), 3, rows)
    x = jnp.asarray(rng.normal(size=(40, k)) / 2**6, jnp.bfloat16)[groups.pairs // 2]
    run = functools.partial(grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams(), **epilogue)
    found = jax.jit(run)(x, in_blocks(w), groups)
    wanted = jax.jit(functools.partial(reference.grouped_gemm, **epilogue))(x.astype(jnp.float32), w, groups)
    found, wanted = (np.asarray(y[groups.places], np.float32) for y in (found, wanted))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 4e-3


@pytest.mark.parametrize(("rows", "k"), [(8, 2880), (16, 2880), (8, 64)])
def test_a_tile_fits_shared_memory(rows, k):
    tile = rows_tile(rows, k)
    ring = tile.warpgroups * tile.stages * 4 * tile.blocks * tile.chunks * 544
    sums = tile.warpgroups * 64 * tile.blocks * rows * 4
    results = tile.warpgroups * 2 * rows * 128
    assert tile.stages >= 2 and ring + sums + results + rows * k * 2 < SMEM_BYTES


def test_the_ptx_makes_the_numbers_of_a_word():
    """Every number in every place, under every scale that a checkpoint may have."""
    rng = np.random.default_rng(0)
    scale = np.arange(34, 161, dtype=np.uint8).repeat(64)
    w = Mxfp4(rng.integers(0, 256, (len(scale) * 16, 32), np.uint8), np.tile(scale[:, None], (16, 2)))
    words = np.asarray(in_blocks(w).words).view(np.uint32).astype(np.uint64)
    exact = np.asarray(dequantize_mxfp4(w, jnp.float32), np.float64)
    for which in range(4):
        factor = run_ptx(mxfp4_mma.FACTOR.format(0x4040 + 0x0101 * which), {"$1": words[..., 128:]})["$0"]
        own = words[..., :128].reshape(-1, 8, 4, 4)[..., which]  # of each row and quad
        found = run_ptx(mxfp4_mma.EIGHT_NUMBERS, {"$4": own, "$5": factor.reshape(-1, 8, 1)})
        half, group = divmod(which, 2)
        wanted = exact.reshape(-1, 2, 8, 2, 4, 4, 2)[:, half, :, group] * 2.0**-SHIFT
        for pair in range(4):
            for odd in range(2):
                number = bfloat16(found[f"${pair}"] >> np.uint64(16 * odd) & np.uint64(0xFFFF))
                np.testing.assert_array_equal(number, wanted[:, :, pair, :, odd])


@pytest.mark.parametrize("chunk", [0, 1])
def test_each_thread_has_its_part_of_the_operand(chunk, monkeypatch):
    """A thread has two neighboring columns of each 8 in rows lane / 4 and lane / 4 + 8 of its warp's rows."""
    w = random_weight(np.random.default_rng(chunk), 64, 128)
    words = np.asarray(in_blocks(w).words).view(np.uint32).astype(np.uint64)
    run_as_thread_code(monkeypatch, mxfp4_mma, read_words=read_words)
    registers = mxfp4_mma._unpack(value(words.reshape(-1), shape=(4, 2, 136)), chunk)
    wanted = np.asarray(dequantize_mxfp4(w, jnp.float32), np.float64) * 2.0**-SHIFT
    for eight, half, odd in np.ndindex(8, 2, 2):
        bits = registers[0, eight, 0, 0, half, 0, 0, 0, 0] >> np.uint64(16 * odd) & np.uint64(0xFFFF)
        row, column = 16 * WARP + 8 * half + LANE // 4, 64 * chunk + 8 * eight + 2 * (LANE % 4) + odd
        np.testing.assert_array_equal(bfloat16(bits), wanted[row.astype(int), column.astype(int)])


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float32])
def test_each_thread_reads_the_bias_of_its_gates_and_ups(kind, monkeypatch):
    """Row r of 128 is a gate where bit 3 of r is 0. Its result is 8 · (r / 16) + r mod 8."""
    bits, first = 8 * jnp.dtype(kind).itemsize, 32
    monkeypatch.setattr(gate_pairs, "i32", None, raising=False)
    run_as_thread_code(
        monkeypatch,
        gate_pairs,
        at=lambda ref, offset, plus: (ref, offset + np.uint64(plus)),
        llvm=types.SimpleNamespace(load=lambda _, address, alignment: address[1] // np.uint64(alignment)),
    )
    names = {
        "utils": types.SimpleNamespace(bitwidth=lambda _: bits),
        "WGMMA_ROW_LAYOUT": mgpu.WGMMA_ROW_LAYOUT,
    }
    vars(gate_pairs.mgpu).update(names)
    row = types.SimpleNamespace(registers=np.array(np.uint64(first)))
    for which in (0, 1):
        read = gate_pairs._read(value(None, element_type=None), row, which)
        for half in (0, 1):
            result = 16 * WARP + 8 * half + LANE // 4
            wanted = first + result // 8 * 16 + 8 * which + result % 8
            np.testing.assert_array_equal(read[0, 0, half, 0, 0], wanted)


def read_words(ref, offset, count, plus):
    at = offset + np.uint64(plus)
    assert (at % (4 * count) == 0).all()
    return [ref.data[(at // 4).astype(int) + i] for i in range(count)]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_warpgroup_multiplies_its_rows(pairs, monkeypatch):
    """The code of a thread runs with integers in place of MLIR values, for the 128 threads of a warpgroup."""
    rng = np.random.default_rng(3)
    height, chunks, m = 2, 3, 16
    w = random_weight(rng, 64 * height, 64 * chunks, scales=(120, 130))
    words = np.asarray(in_blocks(w).words).view(np.uint32).astype(np.uint64)
    x = jnp.asarray(rng.integers(-8, 9, (m, 64 * chunks)), jnp.bfloat16)
    token, column = np.indices(x.shape)
    # TMA's order: tiles of 8 rows of 128 bytes, and 16 bytes lie at their number xor the row.
    piece = (column % 64 // 8) ^ token % 8
    tiles = np.zeros(x.size, np.uint64)
    tiles[((token // 8 * chunks + column // 64) * 8 + token % 8) * 64 + piece * 8 + column % 8] = np.asarray(
        x
    ).view(np.uint16)

    run_as_thread_code(
        monkeypatch,
        mxfp4_mma,
        read_words=read_words,
        at=lambda ref, offset, plus: (ref, offset + np.uint64(plus)),
        llvm=types.SimpleNamespace(ptrtoint=lambda _, at: at, extractelement=lambda two, i: two[int(i)]),
        _pair=lambda first, second: (first, second),
    )
    straight = mxfp4_mma.mgpu.utils.inline_ptx

    def inline_ptx(text, *given, result_types, has_side_effects=False):
        if text.startswith("ldmatrix"):
            return _load_matrices(*given[0])
        if text.startswith("mma"):
            return _multiply_matrices(given[:4], given[4:6], given[6:])
        return straight(text, *given, result_types=result_types)

    monkeypatch.setattr(mxfp4_mma.mgpu.utils, "inline_ptx", inline_ptx)
    monkeypatch.setattr(mxfp4_mma.ir, "F32Type", types.SimpleNamespace(get=lambda: None), raising=False)
    blocks = value(words.reshape(-1), shape=(4 * height, chunks, 136))
    kept = mxfp4_mma._load(blocks, (64, 8 * (height * chunks + 2)), pairs)
    strides = ((8 * 64 * chunks, 8 * 64, 64, 1), 0)
    tokens = value(tiles, shape=(m // 8, chunks, 8, 64), get_strides_and_offset=lambda: strides)
    zeros = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64 * height, m)), dtype=object)
    for index in np.ndindex(zeros.shape):
        zeros[index] = (np.zeros(128), np.zeros(128))
    total = types.SimpleNamespace(registers=zeros, shape=(64 * height, m))
    found = mxfp4_mma._stage(total, types.SimpleNamespace(registers=kept), tokens)

    exact = np.asarray(dequantize_blocks(in_blocks(w), jnp.float32), np.float64) @ np.asarray(x, np.float64).T
    for block, octet, half, odd in np.ndindex(height, m // 8, 2, 2):
        group = 2 * WARP + block if pairs else 4 * block + WARP
        rows = (16 * group + 8 * half + LANE // 4).astype(int)
        columns = (8 * octet + 2 * (LANE % 4) + odd).astype(int)
        sums = found[block, octet, 0, 0, half, 0, 0, 0, 0][odd]
        np.testing.assert_allclose(sums * 2.0**SHIFT, exact[rows, columns], rtol=1e-12)


def _load_matrices(ref, address):
    """Return the registers of ldmatrix with four matrices of 8 rows of 16 bytes, whose rows begin at the
    lanes' addresses.
    """
    registers = []
    for matrix in range(4):
        lines = address.reshape(4, 32)[:, 8 * matrix : 8 * matrix + 8].astype(int)  # of each warp
        assert (lines % 16 == 0).all()
        first = lines[WARP.astype(int), (LANE // 4).astype(int)] // 2 + 2 * (LANE % 4).astype(int)
        registers.append(ref.data[first] | ref.data[first + 1] << np.uint64(16))
    return registers


def _multiply_matrices(a, b, c):
    """Return the registers of mma.m16n8k16: the lanes' sums."""

    def numbers(register):
        return [bfloat16(register >> np.uint64(16 * odd) & np.uint64(0xFFFF)) for odd in range(2)]

    warp, row, quad = WARP.astype(int), (LANE // 4).astype(int), 2 * (LANE % 4).astype(int)
    first, second = np.zeros((4, 16, 16)), np.zeros((4, 16, 8))
    for odd in range(2):
        for i, register in enumerate(a):
            first[warp, row + 8 * (i % 2), quad + 8 * (i // 2) + odd] = numbers(register)[odd]
        for i, register in enumerate(b):
            second[warp, quad + 8 * i + odd, row] = numbers(register)[odd]
    product = first @ second
    return [c[i] + product[warp, row + 8 * (i // 2), quad + i % 2] for i in range(4)]


@pytest.mark.parametrize(
    ("rows", "by_warps", "instruction"),
    [
        (16, False, "mma.sync.aligned.m16n8k16"),
        (16, True, "mma.sync.aligned.m16n8k16"),
        (144, False, "wgmma.mma_async"),
    ],
)
def test_on_an_h200_no_register_is_spilled(rows, by_warps, instruction, tmp_path, monkeypatch):
    """gpt-oss-20b's experts for 64 tokens, with biases and gates."""
    monkeypatch.setattr(swapped, "chosen_tile", functools.partial(rows_tile, by_warps=by_warps))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    picked = jax.ShapeDtypeStruct((64, 4), jnp.int32)
    groups = jax.eval_shape(functools.partial(list_groups, num_experts=32, rows=rows), picked)
    x = jax.ShapeDtypeStruct((len(groups.pairs), 2880), jnp.bfloat16)
    w = Mxfp4Blocks(jax.ShapeDtypeStruct((32, 360, 45, 136), jnp.int32))
    bias = jax.ShapeDtypeStruct((32, 5760), jnp.bfloat16)

    def product(x, w, groups, bias):
        return grouped_gemm(x, w, groups, bias=bias, activation="clamped_swiglu", gate_block=8)

    compiled = compile_for_h200(product, *abstract(h200_mesh(), (x, w, groups, bias)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] and compiled.machine_code
    logs, ptx = (
        "".join(path.read_text(errors="replace") for path in tmp_path.glob(f"grouped_gemm_mxfp4*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill stores", logs)) == {"0"}
    assert "serialized" not in logs and instruction in ptx and not misaligned(ptx)

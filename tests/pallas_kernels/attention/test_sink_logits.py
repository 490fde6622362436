"""Attention sinks: a learned logit of each query head in the denominator of the softmax."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_cases import PAGE, error, exact, paged, queries

from pallas_kernels.attention.chunk import reference as chunk
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.decode import reference as decode
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.tiles import DecodeTile

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 64, 0.25
INTERPRET = plgpu.InterpretGPUParams()
LOGITS = np.array([2.0, 300.0, -1e30, 6.0], np.float32)  # one never has weight, one has all


def by_definition(q, keys, values, end, window):
    """Return [N, H] float64: the output of one query of N heads over the keys before `end`."""
    first = 0 if window is None else max(0, end - window)
    found = []
    for head, row in enumerate(np.asarray(q, np.float64)):
        kv = head // (HEADS // KV_HEADS)
        scores = np.append(keys[kv, first:end] @ row * SCALE, LOGITS[head])
        weights = np.exp(scores - scores.max())
        found.append((weights / weights.sum())[:-1] @ values[kv, first:end])
    return np.array(found)


def of_row(pages, table, row):
    """Return [K, tokens, H] float64 of a sequence's pages."""
    used = [page for page in np.asarray(table)[row] if page < pages.shape[0]]
    return np.concatenate(np.nan_to_num(np.asarray(pages, np.float64))[used], axis=1)


@settings(max_examples=4)
@given(lengths=st.lists(st.integers(1, 200), min_size=3, max_size=3), window=st.sampled_from([None, 1, 30]))
def test_the_references_are_the_definition(lengths, window):
    k, v, table = paged(5, lengths, KV_HEADS, WIDTH)
    q = queries(5, 4, HEADS, WIDTH)
    given = {"scale": SCALE, "window": window, "sink_logits": jnp.asarray(LOGITS)}
    got = exact(decode.decode_attention, q, k, v, table, jnp.asarray(lengths), **given)
    ends = [length - min(length, 2) for length in lengths]  # each chunk is the last one or two tokens
    starts = np.cumsum([0, *(length - end for length, end in zip(lengths, ends, strict=True))])
    rows = zip(starts, lengths, ends, strict=False)
    chunks = jnp.asarray(
        [(start, length - end, i, end) for i, (start, length, end) in enumerate(rows)], jnp.int32
    )
    many = queries(6, int(starts[-1]), HEADS, WIDTH)
    of_chunks = exact(chunk.chunk_attention, many, k, v, table, chunks, **given)
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        keys, values = of_row(k, table, row), of_row(v, table, row)
        np.testing.assert_allclose(got[row], by_definition(q[row], keys, values, length, window), atol=2e-5)
        for i, position in enumerate(range(end, length)):
            wanted = by_definition(many[starts[row] + i], keys, values, position + 1, window)
            np.testing.assert_allclose(of_chunks[starts[row] + i], wanted, atol=2e-5)


CASES = [([330, 0, 70], None), ([200, 130, 5], 100), ([900, 1, 64], None)]


@pytest.mark.parametrize(("lengths", "window"), CASES)
@pytest.mark.parametrize("unified_max", [None, (0.0, 4.0)])
def test_decode_attention_equals_its_reference(lengths, window, unified_max):
    """Several workers share a pair. Only the first worker adds the sink."""
    k, v, table = paged(7, lengths, KV_HEADS, WIDTH)
    q, sized = queries(7, len(lengths) + 1, HEADS, WIDTH), jnp.asarray(lengths, jnp.int32)
    fixed = {"scale": SCALE, "window": window}  # one program of each saves time
    bounds = None if unified_max is None else jnp.asarray(unified_max)
    tile = DecodeTile(3, 4, pages=1)
    kernel = functools.partial(decode_attention, sms=2, tile=tile, interpret=INTERPRET, **fixed)
    got = jax.jit(kernel)(q, k, v, table, sized, unified_max=bounds, sink_logits=LOGITS)
    twin = jax.jit(functools.partial(decode.decode_attention, **fixed))
    want = exact(twin, q, k, v, table, sized, sink_logits=LOGITS)
    assert error(got, want) < 6e-3
    assert np.abs(np.asarray(got, np.float32)[:, 1]).max() < 1e-28  # the sink has the weight of all keys
    assert not np.asarray(got, np.float32)[np.append(np.asarray(lengths) == 0, True)].any()


def test_the_kernel_scales_logits_of_whole_groups_itself():
    """gpt-oss has 8 query heads for each KV head, and logits in bfloat16."""
    k, v, table = paged(7, [130, 5], 2, WIDTH)
    q, logits = queries(8, 2, 16, WIDTH), jnp.asarray(np.random.default_rng(0).normal(size=16), jnp.bfloat16)
    given = q, k, v, table, jnp.asarray([130, 5], jnp.int32)
    kernel = functools.partial(decode_attention, scale=SCALE, sms=1, interpret=INTERPRET, sink_logits=logits)
    twin = functools.partial(decode.decode_attention, scale=SCALE)
    assert error(jax.jit(kernel)(*given), exact(twin, *given, sink_logits=logits)) < 6e-3


@pytest.mark.parametrize(
    ("chunks", "window", "unified_max"),
    [
        ([(3, 20, 0, 310), (24, 2, 1, 5)], None, None),
        ([(0, 8, 0, 322)], 100, None),
        ([(0, 8, 0, 130)], None, (9.0, 0.5)),  # every tile runs again with the running maximum
    ],
)
def test_chunk_attention_equals_its_reference(chunks, window, unified_max):
    ends = [position + tokens for _, tokens, _, position in chunks]
    k, v, table = paged(8, ends, KV_HEADS, WIDTH)
    q, listed = queries(8, 30, HEADS, WIDTH), jnp.asarray(chunks, jnp.int32)
    fixed = {"scale": SCALE, "window": window}  # one program of each saves time
    bounds = None if unified_max is None else jnp.asarray(unified_max)
    kernel = functools.partial(chunk_attention, sms=2, interpret=INTERPRET, **fixed)
    got = jax.jit(kernel)(q, k, v, table, listed, unified_max=bounds, sink_logits=LOGITS)
    twin = jax.jit(functools.partial(chunk.chunk_attention, **fixed))
    assert error(got, exact(twin, q, k, v, table, listed, sink_logits=LOGITS)) < 6e-3


@pytest.mark.parametrize(("kernel", "extra"), [(decode_attention, (2,)), (chunk_attention, (1, 4))])
@pytest.mark.parametrize(
    ("heads", "dtype", "said"),
    [(7, jnp.bfloat16, r"accepted is \[8\]"), (8, jnp.int8, "accepted is bfloat16")],
)
def test_unsupported_sinks_are_named(kernel, extra, heads, dtype, said):
    q, pages = jnp.zeros((2, 8, 64), jnp.bfloat16), jnp.zeros((9, 2, PAGE, 64), dtype)
    scales = {name: jnp.ones((9, 2, PAGE)) for name in ("k_scale", "v_scale")} if dtype == jnp.int8 else {}
    table = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match=said):
        kernel(
            q,
            pages,
            pages,
            table,
            jnp.ones(extra, jnp.int32),
            scale=1.0,
            sink_logits=jnp.zeros(heads),
            **scales,
        )


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 128])
def test_for_the_h200_nothing_spills_with_the_heads_of_gpt_oss(window, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shape = jax.ShapeDtypeStruct
    pages = shape((2**14, 8, PAGE, 64), jnp.bfloat16)
    q, table = shape((256, 64, 64), jnp.bfloat16), shape((256, 64), jnp.int32)
    lengths, chunks, logits = shape((256,), jnp.int32), shape((4, 4), jnp.int32), shape((64,), jnp.bfloat16)

    def step(q, k, v, table, lengths, chunks, logits):
        given = {"scale": 0.125, "window": window, "sink_logits": logits}
        return (
            decode_attention(q, k, v, table, lengths, **given),
            chunk_attention(q, k, v, table, chunks, **given),
        )

    compiled = compile_for_h200(
        step, *abstract(h200_mesh(), (q, pages, pages, table, lengths, chunks, logits))
    )
    assert compiled.machine_code and not compiled.copies(pages.shape)
    for name, most in (("decode_attention", 0), ("chunk_attention", 512)):
        logs = "".join(log.read_text(errors="replace") for log in tmp_path.glob(f"{name}*.ptxas"))
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", logs)]
        assert spilled and max(spilled) <= most
        assert "wgmma" not in logs  # ptxas reports products that wait for each other


@pytest.mark.slow
def test_the_check_for_a_gpu_passes_in_the_interpreter():
    """A process of its own, because the interpreter needs more threads than the tests have."""
    command = ["-m", "pallas_kernels.attention.gpu_check_sinks", "--toy", "--only", "check"]
    ended = subprocess.run([sys.executable, *command], cwd=paths.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok=True") == 2

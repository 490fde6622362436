"""Top-k sparse values: the choice of rows, the same tokens on every tier, and
faults of single rows on disk.
"""

import errno
import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloaded import DEVICE, DISK, HOST, MIXED, goldens, policy, requests, run, runtime

from jaxflow.config import Layer
from jaxflow.flexgen.host_attention import HostAttention
from jaxflow.flexgen.policy import PolicyError
from jaxflow.flexgen.scratch_files import HEADER_BYTES, DiskError, DiskFolder
from jaxflow.flexgen.sparse_values import attend, choose, take_rows, top_count


@given(st.floats(0.01, 100), st.integers(1, 5000))
def test_at_least_one_row_and_at_most_all(percent, keys):
    count = top_count(percent, keys)
    assert 1 <= count <= keys and count >= percent * keys / 100 - 1e-6
    assert count == 1 or count - 1 < percent * keys / 100
    assert top_count(100.0, keys) == keys and top_count(percent, 0) == 0


@pytest.mark.parametrize("wrong", [0.0, -5.0, 100.1, float("nan"), float("inf")])
def test_other_percentages_are_refused(wrong):
    words = f"value_top_k_percent={wrong}; accepted is a number above 0 and up to 100"
    with pytest.raises(PolicyError, match=words):
        policy("toy", value_top_k_percent=wrong)


def by_definition(q, k, v, length, percent, scale, window, cap):
    """Return the attention [N, H] of one sequence in float64. k, v: [K, T, H] with the new token's row."""
    heads = len(k)
    group, out = len(q) // heads, np.zeros(q.shape)
    first = 0 if window is None else max(0, length - window)
    for head in range(heads):
        queries = q[head * group : (head + 1) * group].astype(np.float64)
        scores = scale * queries @ k[head, first:length].T.astype(np.float64)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        cached = length - 1 - first
        top = np.argsort(-weights[:, :cached].sum(0), kind="stable")[: top_count(percent, cached)]
        kept = [*top, cached]  # the new token's row always counts
        out[head * group : (head + 1) * group] = weights[:, kept] @ v[head, first:length][kept]
    return out


class _Sized:
    """The fields of a model's configuration that attention reads."""

    num_heads, num_kv_heads, head_dim, scale = 4, 2, 16, 0.25

    def __init__(self, window, cap):
        self.layers, self.attention_soft_cap = (Layer(window=window),), cap


@pytest.mark.parametrize("percent", [5.0, 37.0, 100.0])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (9, 3.0)])
def test_device_and_host_attend_by_the_definition(percent, window, cap):
    rng, rows, pages, size = np.random.default_rng(2), 5, 3, 8
    q = rng.standard_normal((rows, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((rows * pages, 2, size, 16)).astype(np.float32) for _ in range(2))
    lengths = np.array([1, 24, 0, 13, 7], np.int32)
    by_row = [p.reshape(rows, pages, 2, size, 16).swapaxes(1, 2).reshape(rows, 2, -1, 16) for p in (k, v)]
    expected = np.stack(
        [
            by_definition(q[i], by_row[0][i], by_row[1][i], n, percent, 0.25, window, cap)
            if n
            else np.zeros((4, 16))
            for i, n in enumerate(lengths)
        ]
    )
    live, at = lengths > 0, np.maximum(lengths - 1, 0)
    new = [p[np.arange(rows), :, at] for p in by_row]
    most = top_count(percent, 23 if window is None else 8)
    chosen, weights = choose(
        *map(jnp.asarray, (q, by_row[0], new[0], at, live)),
        percent=percent, most=most, scale=0.25, window=window, soft_cap=cap,
    )  # fmt: skip
    assert (np.asarray(chosen) >= 0).sum((1, 2)).tolist() == [
        2 * top_count(percent, max(0, min(n, window or n) - 1)) for n in lengths.tolist()
    ]
    found = attend(weights, take_rows(jnp.asarray(by_row[1]), chosen), jnp.asarray(new[1]))
    np.testing.assert_allclose(np.asarray(found)[live], expected[live], atol=1e-5)

    attention = HostAttention(_Sized(window, cap), rows, threads=2, percent=percent)  # type: ignore[arg-type]
    out = np.full_like(q, 7)
    values = v if percent == 100 else lambda row, head, position: by_row[1][row, head, position]
    attention(attention._config.layers[0], q, k, values, lengths, out)
    attention.close()
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("host_attention", [False, True])
def test_a_choice_of_all_rows_gives_the_engines_tokens(host_attention, tmp_path):
    """Of fewer than 1000 keys, 99.9 percent are all keys, which take the way of the few."""
    prompts, expected = goldens("tiny-llama")
    changes = {"kv": MIXED, "weights": MIXED, "activations": MIXED, "host_attention": host_attention}
    with runtime("tiny-llama", tmp_path, value_top_k_percent=99.9, **changes) as made:
        assert run(made, requests(prompts)) == expected


PLACES = [
    {"kv": DEVICE},
    {"kv": MIXED, "activations": HOST},
    {"kv": MIXED, "host_attention": True},
    {"kv": HOST, "tp": 2, "num_gpu_batches": 1},
]


@pytest.mark.parametrize(("model", "places"), [("tiny-gemma2", PLACES[1:3]), ("tiny-opt", PLACES)])
def test_few_rows_give_the_same_tokens_on_every_tier(model, places, tmp_path):
    prompts, dense = goldens(model)
    found = []
    for changes in places:
        with runtime(model, tmp_path, value_top_k_percent=20.0, **changes) as made:
            found.append(run(made, requests(prompts)))
    assert found == [found[0]] * len(places) and found[0] != dense


def test_few_rows_in_4_bits_are_the_same_on_every_tier(tmp_path):
    prompts, _ = goldens("tiny-llama")
    found = []
    for kv in (DEVICE, MIXED):
        with runtime("tiny-llama", tmp_path, kv=kv, kv_bits=4, value_top_k_percent=20.0) as made:
            found.append(run(made, requests(prompts)))
    assert found[0] == found[1]


class TestRowsOnDisk:
    def file(self, tmp_path, count=12, width=40):
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 256, (count, width), np.uint8)
        folder = DiskFolder(tmp_path)
        file = folder.create("x", rows.size + 16)
        file.write_rows(16, np.array_split(rows, 3), width)
        return folder, file, rows

    @given(st.data())
    def test_any_rows_come_back_and_no_flipped_bit_is_served(self, tmp_path_factory, data):
        folder, file, rows = self.file(tmp_path_factory.mktemp("disk"))
        asked = np.array(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=20)))
        out = np.empty((len(asked), 40), np.uint8)
        assert file.read_rows(16, asked, out) == out.size
        assert (out == rows[asked]).all()
        bad, at = data.draw(st.sampled_from(asked.tolist())), data.draw(st.integers(0, 39))
        with open(file.path, "r+b") as raw:
            raw.seek(HEADER_BYTES + 16 + bad * 40 + at)
            raw.write(bytes([int(rows[bad, at]) ^ (1 << data.draw(st.integers(0, 7)))]))
        with pytest.raises(DiskError, match=rf"x: bytes {16 + bad * 40} to {56 + bad * 40} differ"):
            file.read_rows(16, asked, out)
        folder.close()

    @pytest.mark.parametrize("fault", ["EIO", "a bit", "cut"])
    @pytest.mark.parametrize("host_attention", [False, True])
    def test_a_fault_of_a_row_ends_the_run(self, fault, host_attention, tmp_path, monkeypatch):
        prompts, _ = goldens("tiny-opt", copies=1)
        changes = {"kv": DISK, "host_attention": host_attention, "value_top_k_percent": 20.0}
        words = {"EIO": "cannot read", "a bit": "differ from the written bytes", "cut": "truncated"}[fault]
        with runtime("tiny-opt", tmp_path, **changes) as made:
            own, calls = os.preadv, 0

            def failing(fd, buffers, at):
                nonlocal calls
                calls += len(buffers) == 1  # a row, or adjacent rows
                if calls < 9 or len(buffers) != 1:
                    return own(fd, buffers, at)
                if fault == "EIO":
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done = own(fd, buffers, at) if fault == "a bit" else 0
                buffers[0][1] ^= 16
                return done

            monkeypatch.setattr(os, "preadv", failing)
            with pytest.raises(DiskError, match=words):
                run(made, requests(prompts))

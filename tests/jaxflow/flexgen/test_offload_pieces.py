"""Placement, scratch files, host buffers and attention on the host, each by itself."""

import errno
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloaded import DISK, goldens, requests, run, runtime

from jaxflow.config import ConfigError, Layer
from jaxflow.flexgen import scratch_files as disk_tier
from jaxflow.flexgen.geometry import place_rows, place_weights
from jaxflow.flexgen.host_attention import HostAttention, head_parts, usable_cores
from jaxflow.flexgen.pinned_memory import Staging, check_views
from jaxflow.flexgen.policy import TIERS, Shares
from jaxflow.flexgen.scratch_files import PREFIX, DiskError, DiskFolder
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.attention.decode.reference import decode_attention


@st.composite
def drawn_shares(draw):
    cuts = sorted(draw(st.lists(st.integers(0, 100), min_size=2, max_size=2)))
    return Shares(float(cuts[0]), float(cuts[1] - cuts[0]), float(100 - cuts[1]))


@given(st.integers(1, 64), drawn_shares())
def test_all_rows_are_placed_within_the_shares_of_faster_tiers(rows, shares):
    counts = place_rows(rows, shares)
    assert sum(counts) == rows and min(counts) >= 0
    slowest = max(i for i, share in enumerate(shares) if share)
    for i, (count, share) in enumerate(zip(counts, shares, strict=True)):
        assert (count <= rows * share / 100 + 1e-6) or i == slowest
        assert count == 0 or share > 0
        assert abs(count - rows * share / 100) < 2


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=12), drawn_shares()
)
def test_tensors_come_within_two_of_the_percentages(layers, shares):
    named = [{f"t{i}": size for i, size in enumerate(layer)} for layer in layers]
    placed = place_weights(named, shares)
    total = sum(map(sum, layers))
    used = {
        tier: sum(
            size
            for layer, at in zip(named, placed, strict=True)
            for name, size in layer.items()
            if at[name] == tier
        )
        for tier in TIERS
    }
    slowest = TIERS[max(i for i, share in enumerate(shares) if share)]
    for tier, share in zip(TIERS, shares, strict=True):
        assert used[tier] <= total * share / 100 + 1e-6 or tier == slowest
        assert share > 0 or used[tier] == 0
    assert place_weights(named, shares) == placed


def test_a_model_of_many_layers_has_the_papers_20_percent():
    opt_30b = [{"qkv": 3, "out_proj": 1, "up_gate": 4, "down": 4}] * 48
    placed = place_weights(opt_30b, Shares(20.0, 80.0))
    on_device = sum(
        layer[name]
        for layer, at in zip(opt_30b, placed, strict=True)
        for name in layer
        if at[name] == "device"
    )
    assert 0.195 < on_device / (48 * 12) <= 0.2


class TestDisk:
    def test_pieces_come_back(self, tmp_path):
        folder = DiskFolder(tmp_path)
        file = folder.create("x", 400)
        rng = np.random.default_rng(0)
        pieces = [rng.integers(0, 9, (10, 3)).astype(np.int32), rng.standard_normal(7), np.zeros((0, 4))]
        assert file.write(12, pieces) == 176
        back = [np.empty_like(piece) for piece in pieces]
        file.read(12, back)
        assert all((a == b).all() for a, b in zip(pieces, back, strict=True))
        assert file.path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ValueError, match="400 bytes"):
            file.write(300, pieces)
        folder.close()
        folder.close()
        assert list(tmp_path.iterdir()) == []

    def test_short_reads_are_continued(self, tmp_path, monkeypatch):
        file = DiskFolder(tmp_path).create("x", 4000)
        data = np.arange(1000, dtype=np.int32)
        monkeypatch.setattr(
            os, "pwritev", lambda fd, buffers, at, own=os.pwritev: own(fd, [buffers[0][:7]], at)
        )
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, at, own=os.preadv: own(fd, [buffers[0][:5]], at)
        )
        file.write(0, [data[:300], data[300:]])
        back = np.empty_like(data)
        file.read(0, [back[:10], back[10:]])
        assert (back == data).all()

    def test_a_full_disk_is_an_error_at_creation_with_the_free_space(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        folder = DiskFolder(tmp_path)
        with pytest.raises(
            DiskError,
            match=r"weights: cannot reserve 2\.000 GB: No space left on device; .* GB are free; lower",
        ):
            folder.create("weights", 2_000_000_000)
        folder.close()
        assert list(tmp_path.iterdir()) == []

    def test_truncated_and_overwritten_files_are_refused(self, tmp_path):
        folder = DiskFolder(tmp_path)
        cut, other = folder.create("cut", 100), folder.create("other", 100)
        for file in (cut, other):
            file.write(0, [np.zeros(100, np.uint8)])
        os.truncate(cut.path, disk_tier.HEADER_BYTES + 50)
        with pytest.raises(DiskError, match=r"cut: the file ends at .*truncated"):
            cut.read(0, [np.empty(100, np.uint8)])
        with open(other.path, "r+b") as file:
            file.write(b"something else")
        with pytest.raises(DiskError, match="the header differs from the written header"):
            other.read(0, [np.empty(100, np.uint8)])
        folder.close()

    @given(
        sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4), cuts=st.integers(1, 500), data=st.data()
    )
    @settings(max_examples=25)
    def test_no_flipped_bit_is_served(self, tmp_path_factory, sizes, cuts, data):
        """Records of any sizes are complete, and a flipped bit spoils its record only."""
        folder = DiskFolder(tmp_path_factory.mktemp("disk"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk_tier, "_CHUNK", cuts)
            self.flip_one(folder, sizes, data)
        folder.close()

    def flip_one(self, folder, sizes, data):
        file = folder.create("x", sum(sizes))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        rng = np.random.default_rng(0)
        records = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        for start, record in zip(starts, records, strict=True):
            file.write(start, np.array_split(record, 3))
        bad = data.draw(st.integers(0, len(sizes) - 1))
        at = disk_tier.HEADER_BYTES + starts[bad] + data.draw(st.integers(0, sizes[bad] - 1))
        with open(file.path, "r+b") as raw:
            raw.seek(at)
            byte = raw.read(1)[0] ^ (1 << data.draw(st.integers(0, 7)))
            raw.seek(at)
            raw.write(bytes([byte]))
        for i, (start, record) in enumerate(zip(starts, records, strict=True)):
            back = np.empty_like(record)
            if i == bad:
                with pytest.raises(
                    DiskError, match=rf"x: bytes {start} to {start + sizes[i]} differ from the written bytes"
                ):
                    file.read(start, np.array_split(back, 2))
            else:
                file.read(start, np.array_split(back, 2))
                assert (back == record).all()

    def test_unwritten_offsets_are_refused(self, tmp_path):
        file = DiskFolder(tmp_path).create("x", 100)
        file.write(0, [np.ones(40, np.uint8)])
        for offset, size in ((0, 30), (10, 30), (50, 10)):
            with pytest.raises(ValueError, match="written bytes"):
                file.read(offset, [np.empty(size, np.uint8)])

    def test_a_killed_run_leaves_nothing_for_the_next(self, tmp_path):
        script = (
            f"import os, sys; from jaxflow.flexgen.scratch_files import DiskFolder; "
            f"DiskFolder({str(tmp_path)!r}).create('x', 10); os._exit(9)"
        )
        subprocess.run([sys.executable, "-c", script], check=False)
        assert [path.name.startswith(PREFIX) for path in tmp_path.iterdir()] == [True]
        first, second = DiskFolder(tmp_path), DiskFolder(tmp_path)
        disk_tier.sweep(tmp_path)  # folders of live processes stay
        assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
        first.close()
        second.close()

    def test_no_folder(self, tmp_path):
        with pytest.raises(ConfigError, match="disk_path="):
            DiskFolder(tmp_path / "missing")
        with pytest.raises(DiskError, match=r"missing: the free space is unknown: No such file or directory"):
            disk_tier.free_bytes(tmp_path / "missing")

    def test_a_full_disk_of_unknown_free_space(self, tmp_path, monkeypatch):
        def fails(number):
            def fail(*_):
                raise OSError(number, os.strerror(number))

            return fail

        folder = DiskFolder(tmp_path)
        monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        monkeypatch.setattr(os, "statvfs", fails(errno.ESTALE))
        with pytest.raises(DiskError, match=r"No space left on device; lower the policy's disk shares"):
            folder.create("weights", 2_000_000_000)
        folder.close()

    @pytest.mark.parametrize(
        ("call", "fault", "words", "changes"),
        [
            (
                "preadv",
                errno.EIO,
                "cannot read .*Input/output error",
                {"weights": DISK, "kv": DISK, "host_attention": True},
            ),
            ("preadv", None, "weights: bytes .* differ from the written bytes", {"weights": DISK}),
            (
                "preadv",
                None,
                "kv: bytes .* differ from the written bytes",
                {"kv": DISK, "host_attention": True},
            ),
            ("preadv", "cut", "activation: the file ends at .*truncated", {"activations": DISK}),
            ("pwritev", errno.ENOSPC, "cannot write .*GB are free", {"kv": DISK}),
        ],
        ids=["EIO", "a bit of weights", "a bit of KV", "a short file", "ENOSPC"],
    )
    def test_an_error_within_a_block_ends_the_run_and_leaves_nothing(
        self, tmp_path, monkeypatch, call, fault, words, changes
    ):
        prompts, _ = goldens("tiny-opt")
        with runtime("tiny-opt", tmp_path, **changes) as made:
            calls, own = 0, getattr(os, call)

            def failing(fd, buffers, at):
                nonlocal calls
                calls += 1
                if calls == 5 and fault == "cut":
                    return 0
                if calls == 5 and fault is not None:
                    raise OSError(fault, os.strerror(fault))
                done = own(fd, buffers, at)
                if calls == 5:
                    buffers[0][len(buffers[0]) // 2] ^= 4
                return done

            monkeypatch.setattr(os, call, failing)
            with pytest.raises(DiskError, match=rf"{PREFIX}.*{words}"):
                run(made, requests(prompts))
            with pytest.raises(RuntimeError, match="close the runtime"):
                run(made, requests(prompts))


class TestHost:
    @pytest.mark.parametrize("devices", [1, 2])
    def test_views_share_the_bytes_of_the_array(self, devices):
        check_views(make_mesh(devices))

    def test_staging_waits_for_a_buffer_until_closed(self):
        staging, here = Staging(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
        struct = jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=here)
        staging.reserve([struct, struct])
        one, two = staging.take(struct), staging.take(struct)
        assert one is not two and sum(view.nbytes for taken in (one, two) for view in taken.views) == 16
        staging.give(two, jnp.ones(3))
        assert staging.take(struct) is two
        with pytest.raises(ValueError, match="accepted are the shapes"):
            staging.take(jax.ShapeDtypeStruct((5,), jnp.bfloat16, sharding=here))
        staging.close()
        with pytest.raises(RuntimeError, match="closed"):
            staging.take(struct)

    @pytest.mark.parametrize(("window", "cap", "dtype"), [(None, None, "float32"), (9, 30.0, "bfloat16")])
    def test_attention_equals_the_reference(self, window, cap, dtype):
        config = _Sized(window, cap)
        rng, rows, pages, size = np.random.default_rng(1), 5, 3, 8
        q = rng.standard_normal((rows, 4, 16)).astype(dtype)
        k, v = (rng.standard_normal((rows * pages, 2, size, 16)).astype(dtype) for _ in range(2))
        lengths = np.array([1, 24, 0, 13, 7], np.int32)
        table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
        expected = decode_attention(
            jnp.asarray(q),
            jnp.asarray(k),
            jnp.asarray(v),
            table,
            jnp.asarray(lengths),
            scale=0.25,
            window=window,
            soft_cap=cap,
        )
        attention = HostAttention(config, rows, threads=2)  # type: ignore[arg-type]
        out = np.full_like(q, 7)
        attention(config.layers[0], q, k, v, lengths, out)
        attention.close()
        np.testing.assert_allclose(
            out.astype(np.float32),
            np.asarray(expected, np.float32),
            atol=1e-5 if dtype == "float32" else 2e-2,
        )

    @pytest.mark.parametrize(
        ("rows", "heads", "threads", "parts"), [(20, 56, 16, 4), (48, 56, 16, 1), (3, 56, 2, 2), (1, 1, 8, 1)]
    )
    def test_rows_are_split_by_heads_for_idle_threads(self, rows, heads, threads, parts):
        assert head_parts(rows, heads, threads) == parts
        assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


class _Sized:
    """The fields of a model's configuration that attention reads."""

    num_heads, num_kv_heads, head_dim, scale = 4, 2, 16, 0.25

    def __init__(self, window, cap):
        self.layers, self.attention_soft_cap = (Layer(window=window),), cap

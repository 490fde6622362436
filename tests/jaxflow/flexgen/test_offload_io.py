"""Traffic and memory of a run, against Theorem 4.1 and the account."""

import errno
import functools
import gc
import os
import threading

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloaded import DISK, HOST, MIXED, OUTPUT, PROMPT, changed, goldens, policy, requests, run, runtime
from zigzag import Sizes, largest_block, least_weight_loads, row_by_row, traffic, zigzag

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.flexgen.accounting import DoesNotFit, account, check_fits, together
from jaxflow.flexgen.block import block_order
from jaxflow.flexgen.block_loop import RunningBlock
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.geometry import device_bytes, place
from jaxflow.flexgen.pinned_memory import HostArray, PinnedPool
from jaxflow.flexgen.policy import TIERS
from jaxflow.flexgen.pool_limits import least_limit, usable_bytes
from jaxflow.flexgen.scratch_files import PREFIX, DiskError
from jaxflow.flexgen.start import make_geometries, prepare, start
from jaxflow.flexgen.weight_store import WeightStore
from jaxflow.kv.tiers.host_machine import near_cpus
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import crossing_bytes
from search.placement.workload import workload

MODEL = "stories260K"
LAYERS, BATCHES = 5, 2
POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def test_the_order_of_steps_equals_the_reference_schedule():
    assert list(map(tuple, block_order(3, 4, 2).steps)) == list(map(tuple, zigzag(3, 4, 2, 3)))
    assert list(map(tuple, block_order(3, 4, 2, "row").steps)) == list(map(tuple, row_by_row(3, 4, 2)))


def test_weight_traffic_is_within_theorem_4_1(tmp_path):
    prompts = [[i + 1] * PROMPT for i in range(6)]
    sizes = Sizes(weights=1.0, kv=1.0, activation=1.0, prompt_tokens=PROMPT)
    with runtime(MODEL, tmp_path, weights=HOST) as made:
        away = sum(made._runner._setup.weights.placed.bytes_of(0, tier) for tier in ("host", "disk"))  # type: ignore
        moved = {}
        for schedule in ("zigzag", "row"):
            changed(made, schedule=schedule)
            run(made, requests(prompts))
            moved[schedule] = made.stats[-1].traffic["fetch_layer"]
    counted = traffic(zigzag(BATCHES, LAYERS, OUTPUT, BATCHES), sizes, LAYERS, OUTPUT)
    assert moved["zigzag"].times == counted.weight_loads == LAYERS * OUTPUT
    assert moved["zigzag"].link_down_bytes == counted.weight_loads * away
    assert (
        moved["row"].times == traffic(row_by_row(BATCHES, LAYERS, OUTPUT), sizes, LAYERS, OUTPUT).weight_loads
    )
    assert moved["row"].times == BATCHES * moved["zigzag"].times
    capacity = BATCHES * LAYERS * (PROMPT + OUTPUT - 1) * sizes.kv
    assert counted.peak_kv <= capacity
    assert largest_block(sizes, LAYERS, OUTPUT, capacity) == BATCHES
    least = least_weight_loads(BATCHES, sizes, LAYERS, OUTPUT, capacity)
    assert least <= moved["zigzag"].times <= 2 * least


@pytest.mark.parametrize(("tp", "percent"), [(1, 100.0), (1, 20.0), (2, 100.0)])
def test_the_account_equals_the_allocated_bytes(tmp_path, monkeypatch, tp, percent):
    prompts, _ = goldens("tiny-opt")
    gc.collect()  # arrays of earlier tests would be freed during the run
    before = on_device()
    peak = 0

    def step(self, order, i, own=RunningBlock.step):
        nonlocal peak
        yield from own(self, order, i)
        peak = max(peak, on_device() - before)

    monkeypatch.setattr(RunningBlock, "step", step)
    shares = {"weights": MIXED, "kv": MIXED, "activations": MIXED, "value_top_k_percent": percent}
    with runtime("tiny-opt", tmp_path, tp=tp, **shares) as made:
        setup, lives = made._runner._setup, made.account.lives  # type: ignore
        assert view_bytes(setup.weights._host) == lives["host"]["weights"] > 0
        assert view_bytes(setup.kv._host) == lives["host"]["KV"] > 0
        assert (
            0
            < view_bytes(list(setup.tiers.staging._free.values()))
            <= sum(made.account.passes["host"].values())
        )
        files = [path for path in setup.tiers.folder.path.iterdir() if path.name != "lock"]  # type: ignore
        assert sum(path.stat().st_size for path in files) == made.account.total("disk")
        assert all(path.stat().st_mode & 0o077 == 0 for path in files)
        assert device_bytes(setup.weights.ends) == lives["device"]["embedding and head"]
        assert device_bytes(setup.weights._device) == lives["device"]["weights"]
        assert device_bytes(setup.kv.home) == lives["device"]["KV"]
        peak = 0
        run(made, requests(prompts))
        small = 16 << 10  # positions, tokens and the like
        assert sum(lives["device"].values()) < peak <= made.account.total("device") + small


@pytest.mark.parametrize(
    ("kv", "host_attention", "percent"),
    [
        (HOST, False, 100.0),
        (DISK, False, 100.0),
        (HOST, True, 100.0),
        (DISK, False, 10.0),
        (DISK, True, 10.0),
    ],
)
def test_the_cost_model_counts_the_traffic(tmp_path, kv, host_attention, percent):
    """The runtime moves KV in complete pages of the model's dtype."""
    prompts = [[i + 1] * PROMPT for i in range(6)]
    changes = {"kv": kv, "host_attention": host_attention, "value_top_k_percent": percent}
    asked = policy(MODEL, **changes)
    config = open_checkpoint(str(offload_model())).model_config
    work = workload(MODEL, config, PROMPT, OUTPUT, wide_bytes=4.0, page_size=16)
    with runtime(MODEL, tmp_path, **changes) as ran:
        run(ran, requests(prompts))
        moved = ran.stats[-1].traffic.values()
    found = {
        "host to device": sum(one.link_down_bytes for one in moved),
        "device to host": sum(one.link_up_bytes for one in moved),
        "disk to host": sum(one.disk_read_bytes for one in moved),
        "host to disk": sum(one.disk_write_bytes for one in moved),
    }
    assert found == pytest.approx(crossing_bytes(work, asked))


def test_a_closed_run_holds_no_memory(tmp_path):
    before = on_device()
    with runtime("tiny-opt", tmp_path, weights=MIXED, kv=MIXED, activations=MIXED) as made:
        setup = made._runner._setup  # type: ignore
        assert on_device() > before
    assert (
        on_device() == before
        and view_bytes([setup.weights._host, list(setup.kv._host.values()), setup.tiers.staging._free]) == 0
    )


def on_device() -> int:
    return device_bytes(
        [
            a
            for a in jax.live_arrays()
            if a.sharding.memory_kind == "device" and jax.devices()[0] in a.sharding.device_set
        ]
    )


def view_bytes(tree) -> int:
    return sum(view.nbytes for a in jax.tree.leaves(tree) if isinstance(a, HostArray) for view in a.views)


def settings(tmp_path, **changes):
    limits = {
        name: changes.pop(name)
        for name in ("gpu_memory_limit", "host_memory_limit", "disk_limit")
        if name in changes
    }
    return OffloadConfig(policy(MODEL, **changes), disk_path=str(tmp_path), **limits)


def begin(offload, **engine):
    folder = open_checkpoint(str(offload_model()))
    return start(
        offload, EngineConfig(model=str(offload_model()), block_size=16, **engine), folder, progress=False
    )


def offload_model():
    import paths

    return paths.MODELS / MODEL


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gpu_memory_limit": 0.0001}, "gpu_memory_limit"),
        ({"host_memory_limit": 0.0001, "weights": HOST}, "host_memory_limit"),
        ({"disk_limit": 0.0001, "weights": DISK}, "disk_limit"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_before_the_load(tmp_path, monkeypatch, changes, field):
    monkeypatch.setattr(
        "jaxflow.model.checkpoints.checkpoint.Checkpoint.stream",
        lambda *_, **__: pytest.fail("something was loaded"),
    )
    with pytest.raises(ConfigError, match=f"{field}='0.0001 GB' is not supported: at least 0.00") as caught:
        begin(settings(tmp_path, **changes))
    assert "weights" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "share", "free"),
    [("host_memory_limit", HOST, "free_host_bytes"), ("disk_limit", DISK, "free_bytes")],
)
def test_limits_above_the_free_memory_do_not_count(tmp_path, monkeypatch, field, share, free):
    monkeypatch.setattr(f"jaxflow.flexgen.start.{free}", lambda *_: 100_000)
    said = (
        f"{field}='0.0001 GB' is not supported: 1000 GB are configured, and 0.0001 GB are free; at least 0.00"
    )
    with pytest.raises(DoesNotFit, match=said) as caught:
        begin(settings(tmp_path, weights=share, **{field: 1000.0}))
    assert caught.value.limit_bytes == 100_000 < caught.value.needed_bytes
    with pytest.raises(
        DoesNotFit, match=f"{field}='5e-05 GB' is not supported: at least 0.00"
    ):  # less than is free
        begin(settings(tmp_path, weights=share, **{field: 0.00005}))


def test_a_home_path_and_the_files_of_a_killed_run(tmp_path, monkeypatch):
    """Files of a killed run are removed before the free space is measured."""
    dead = tmp_path / f"{PREFIX}1-dead"
    dead.mkdir()
    (dead / "lock").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        "jaxflow.flexgen.start.free_bytes", lambda folder: 0 if dead.exists() or folder != tmp_path else 10**9
    )
    with begin(OffloadConfig(policy(MODEL, weights=DISK), disk_path="~")) as made:
        assert made._runner._setup.tiers.folder.path.parent == tmp_path  # type: ignore
    assert list(tmp_path.iterdir()) == []


def test_threads_and_pinned_memory_are_near_the_gpus(tmp_path, monkeypatch):
    before, bound, own = os.sched_getaffinity(0), [], WeightStore.add
    near = {min(before)}
    for node, cpus in enumerate((min(before), 10**4)):  # two sockets, a GPU on the first
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0/numa_node").write_text("0\n")
    monkeypatch.setattr("jaxflow.flexgen.start.on_gpu", lambda: True)
    monkeypatch.setattr("jaxflow.flexgen.start.gpu_bus_ids", lambda count: ["00000000:17:00.0"][:count])
    monkeypatch.setattr(
        "jaxflow.flexgen.start.near_cpus", functools.partial(near_cpus, root=tmp_path / "sys")
    )
    monkeypatch.setattr(
        WeightStore, "add", lambda *a, **k: (bound.append(os.sched_getaffinity(0)), own(*a, **k))
    )
    others = set(threading.enumerate())
    with begin(settings(tmp_path, weights=MIXED, kv=MIXED, host_attention=True)):
        assert bound == [near] * LAYERS and os.sched_getaffinity(0) == before
        started = {
            thread.name: os.sched_getaffinity(thread.native_id)  # type: ignore
            for thread in set(threading.enumerate()) - others
        }
    assert {name.rpartition("_")[0] for name in started} >= {
        "host-attention",
        "host-attention-order",
        "read-weights",
        "write",
        "checksum",
    }
    assert all(cpus == near for cpus in started.values())


def test_the_advised_limit_fits(tmp_path):
    offload = settings(tmp_path, weights=MIXED, kv=MIXED)
    (g,) = make_geometries(
        offload,
        EngineConfig(model=str(offload_model()), block_size=16),
        open_checkpoint(str(offload_model())),
    )
    found = account(g, place(g), 0)
    for tier in ("device", "host", "disk"):
        limits = {tier: found.total(tier) - 1}
        with pytest.raises(ConfigError) as caught:
            check_fits(found, limits)
        advised = float(caught.value.accepted.split()[2])
        check_fits(found, {tier: int(advised * 1e9)})


@given(st.integers(10**6, 10**12), st.sampled_from(TIERS), st.integers(1, 8))
def test_the_advised_limit_of_a_gpu_machine_has_room_and_no_smaller_one_has(needed, tier, pools):
    """XLA's pools on GPUs lose a share to gaps, and a pool of pinned memory has whole GiB."""
    least = least_limit(tier, needed, pools)
    assert usable_bytes(tier, least, pools) >= needed > usable_bytes(tier, least - 1, pools)
    assert usable_bytes(tier, least, pools) <= least


@given(st.integers(1, 3), st.integers(1, 2), st.sampled_from([None, 5.0, 200.0]))
def test_the_pinned_pools_of_all_devices_share_the_host(stages, tp, limit):
    """A pool that grows to twice its need must not take the part of another one."""
    asked = policy(MODEL, pipeline_parallel_size=stages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxflow.flexgen.start.prepare_process", lambda _: None)
        patch.setattr("jaxflow.flexgen.start.free_host_bytes", lambda: 100 * 2**30)
        patch.delenv(POOL_GIB, raising=False)
        engine = EngineConfig(model=MODEL, tensor_parallel_size=tp)
        prepare(OffloadConfig(asked, host_memory_limit=limit), engine)
        pools = stages * tp * int(os.environ.pop(POOL_GIB)) * 2**30
    most = min(90 * 2**30, int((limit or 1e3) * 1e9))
    assert most <= pools < most + stages * tp * 2**30


def test_stages_of_unequal_layers_need_pools_of_the_fullest_one(tmp_path):
    offload = settings(tmp_path, weights=HOST, kv=HOST, pipeline_parallel_size=2)
    folder = open_checkpoint(str(offload_model()))
    geometries = make_geometries(offload, EngineConfig(model=str(offload_model()), block_size=16), folder)
    first, last = (account(g, place(g), 0) for g in geometries)
    found = together([first, last])
    assert found.total("host") == first.total("host") + last.total("host") < found.pooled("host")
    check_fits(found, {"host": 2 * first.total("host")}, pools=2)
    with pytest.raises(DoesNotFit):
        check_fits(found, {"host": found.total("host")}, pools=2)
    check_fits(found, {"host": found.total("host")})  # without a GPU there are no pools


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.randoms())
def test_ended_runs_leave_their_memory_to_the_next(sizes, random):
    pool, running, most = PinnedPool(), [], 0
    for size in sizes:
        running.append((size, pool.take(size)))
        most = max(most, sum(one for one, _ in running))
        if random.random() < 0.6:
            _, end = running.pop(random.randrange(len(running)))
            end()
            end()
        assert pool.free_bytes == most - sum(one for one, _ in running) >= 0


def test_a_disk_that_fills_up_while_layers_are_placed(tmp_path, monkeypatch):
    """Other files may take the space between the account and the placement."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    threads = threading.active_count()
    with pytest.raises(
        DiskError, match=r"layer-00000\.weights: cannot reserve .*lower the policy's disk shares"
    ):
        begin(settings(tmp_path, weights=DISK))
    assert list(tmp_path.iterdir()) == [] and threading.active_count() <= threads


def test_invalid_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"disk_path=None.*weights and kv on disk"):
        OffloadConfig(policy(MODEL, weights=MIXED, kv=DISK))
    with pytest.raises(ConfigError, match=r"disk_path=''.*weights and kv on disk"):
        OffloadConfig(policy(MODEL, weights=MIXED, kv=DISK), disk_path="")
    with pytest.raises(ConfigError, match=r"disk_path=.*an existing folder"):
        begin(OffloadConfig(policy(MODEL, weights=DISK), disk_path=str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3.*a divisor"):
        begin(settings(tmp_path), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8.*at most the 4 devices"):
        begin(settings(tmp_path), tensor_parallel_size=8, max_num_seqs=4)
    with pytest.raises(ConfigError, match="quantization='fp8'"):
        begin(settings(tmp_path), quantization="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8'"):
        begin(settings(tmp_path), kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"prompt_tokens.*at most 512"):
        begin(settings(tmp_path, prompt_tokens=510))
    with pytest.raises(ValueError, match="model='other'"):
        begin(OffloadConfig(policy("other")))
    assert os.listdir(tmp_path) == []

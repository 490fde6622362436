"""Conversations against a small engine with all tiers of the KV hierarchy: over gRPC, and as the commands of
the bench.
"""

import asyncio
import dataclasses
import json
import threading

import paths
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.engine import serve
from jaxflow.bench.kv import hierarchy
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.conversations import synthetic
from jaxflow.bench.workload.grpc_backend import GrpcBackend
from jaxflow.config import EngineConfig
from jaxflow.kv.tiers import policy as tier_policy
from jaxflow.llm import LLM
from pallas_kernels.cards import default_card
from serving.client import Client
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc.server import Server

MODEL = str(paths.MODELS / "stories260K")
ENGINE = {
    "block_size": 16,
    "max_num_batched_tokens": 64,
    "step_sizes": "64",  # all steps are one program
    "max_num_seqs": 4,
    "num_kv_pages": 32,
    "kv_offloading_size": 0.01,
    "kv_disk_size": 0.1,
}


@pytest.fixture(scope="module")
def always_load():
    """The decision to load depends on the load of the machine at start."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tier_policy.FetchCosts, "pays", lambda *_: True)
    patch.setattr(tier_policy, "this_card", lambda: dataclasses.replace(default_card(), disk_patience=1e9))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def served(always_load, tmp_path_factory):
    """(target, admin target) of a server with a host and a disk."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(step):
        return asyncio.run_coroutine_threadsafe(step, loop).result(60)

    with LLM(MODEL, progress=False, kv_disk_path=str(tmp_path_factory.mktemp("pages")), **ENGINE) as llm:
        server = Server(ServedModel(ServerConfig(port=0, admin_port=0)))
        run(server.start())
        run(server.served.serve(llm))
        yield f"127.0.0.1:{server.port}", f"127.0.0.1:{server.admin_port}"
        run(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def bench(no_flags):
    """The command line in this process."""
    return lambda *arguments: main(["bench", *arguments])


def test_every_tier_is_found_over_grpc(served):
    """More conversations than the device has pages for: later rounds come from wherever theirs are."""

    async def measured():
        async with Client(served[0]) as client, Client(served[1]) as admin:
            talks = synthetic(workload.constant(8, 90, 8), workload.constant(16, 16, 8), 512, max_tokens=512)
            return await serve.measure_conversations(GrpcBackend(client), talks, admin=admin)

    result = asyncio.run(measured())
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["total_input_tokens"] == 8 * (90 + 114 + 138)
    assert result["reusable_input_tokens"] == 8 * (98 + 122)
    assert result["first_round"]["completed"] == 8 and result["first_round"]["reused_input_tokens"] == 0
    assert result["later_rounds"]["completed"] == 16
    tiers = result["reused_input_tokens_by_tier"]
    assert (
        sum(tiers.values())
        == result["reused_input_tokens"]
        == result["cached_input_tokens"]
        == 8 * (96 + 112)
    )
    assert tiers["host"] > 0


def test_serve_command_with_rounds(bench, served, tmp_path, capsys):
    path = tmp_path / "out.json"
    work = [
        "--rounds",
        "3",
        "--num_requests",
        "3",
        "--input_len",
        "40",
        "--next_input_len",
        "10",
        "--output_len",
        "6",
        "--workload_seed",
        "9",
    ]
    arguments = [
        "--target",
        served[0],
        "--admin_target",
        served[1],
        "--model",
        MODEL,
        *work,
        "--think_time_s",
        "0.01",
    ]
    assert bench("serve", *arguments, "--request_rate", "50", "--output_json", str(path)) == 0
    result = json.loads(path.read_text())
    assert result["workload"]["kind"] == "conversations" and result["completed"] == 9
    assert result["later_rounds"]["reused_input_tokens"] == result["reused_input_tokens"] > 0
    out = capsys.readouterr().out
    assert "Reuse of KV" in out and "Later rounds:" in out and "from the disk:" in out


def test_serve_command_with_a_trace_of_shared_blocks(bench, served, tmp_path, capsys):
    """A system's block in all, two conversations of two and three rounds, and a request of its own."""
    rounds = [[0, 1, 2], [0, 5], [0, 1, 2, 3], [0, 7, 8], [0, 7, 8, 9], [0, 1, 2, 3, 4]]
    lines = [
        {"timestamp": 400 * i, "input_length": 512 * len(ids) - 100, "output_length": 128, "hash_ids": ids}
        for i, ids in enumerate(rounds)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = ["--trace", str(tmp_path / "trace.jsonl"), "--trace_shrink", "16", "--arrivals", "trace"]
    path = tmp_path / "out.json"
    assert bench("serve", "--target", served[0], "--model", MODEL, *trace, "--output_json", str(path)) == 0
    result = json.loads(path.read_text())
    assert (
        result["completed"] == 6
        and result["first_round"]["completed"] == 3
        and result["later_rounds"]["completed"] == 3
    )
    assert result["reusable_input_tokens"] == 32 * (0 + 1 + 3 + 1 + 3 + 4)
    assert 32 * 2 <= result["reused_input_tokens"] <= result["reusable_input_tokens"]
    assert "reused_input_tokens_by_tier" not in result and "Reuse of KV" in capsys.readouterr().out


def test_hierarchy_command_compares_the_tiers(bench, always_load, tmp_path, capsys):
    path = tmp_path / "out.json"
    engine = [f"--{name}={value}" for name, value in ENGINE.items()]
    work = [
        "--rounds=3",
        "--num_requests=5",
        "--input_len=90",
        "--next_input_len=16",
        "--output_len=8",
        "--repeats=1",
    ]
    work += ["--only", "recompute", "--only", "disk", "--only", "disk, restarted"]
    assert (
        bench(
            "hierarchy",
            "--model",
            MODEL,
            *engine,
            f"--kv_disk_path={tmp_path}",
            *work,
            "--output_json",
            str(path),
        )
        == 0
    )
    lowest_tiers = json.loads(path.read_text())["lowest_tiers"]
    assert list(lowest_tiers) == ["recompute", "disk", "disk, restarted"]
    assert (
        lowest_tiers["recompute"]["conversations"]["reused_input_tokens"]
        == 0
        == lowest_tiers["recompute"]["conversations"]["compute_saved"]
    )
    disk, restarted = (lowest_tiers[name]["conversations"] for name in ("disk", "disk, restarted"))
    assert disk["first_round"]["reused_input_tokens"] == 0
    assert (
        restarted["reused_input_tokens_by_tier"]["disk"] >= 5 * 80
        and restarted["first_round"]["reused_input_tokens"] == 5 * 80
    )
    assert disk["completed"] == restarted["completed"] == 15
    assert all(len(tier["no_reuse"]["total_token_throughput"]) == 1 for tier in lowest_tiers.values())
    assert [
        tier["conversations"]["engine_stats"]["compilations_after_warmup"] for tier in lowest_tiers.values()
    ] == [
        0,
        0,
        0,
    ]
    assert "KV hierarchy, stories260K on cpu" in capsys.readouterr().out


def test_only_needs_an_engine_with_configured_tiers(bench, capsys):
    assert bench("hierarchy", "--model", MODEL, "--only", "host") == 1
    assert "only='host'" in capsys.readouterr().err.replace('"', "'")


def test_disk_command(bench, tmp_path, capsys):
    path = tmp_path / "out.json"
    settings = [
        "--block_size=16",
        "--kv_offloading_size=0.01",
        f"--kv_disk_path={tmp_path}",
        "--kv_disk_size=0.001",
        "--output_json",
        str(path),
    ]
    assert bench("disk", "--model", MODEL, *settings, "--pages=20") == 0
    result = json.loads(path.read_text())
    assert (
        result["same_bytes"] is True
        and result["page_bytes"] == 5 * 2 * 4 * 16 * 8 * 4
        and result["pages"] == 20
    )
    assert all(result[name] > 0 for name in result if name.endswith("_per_s"))
    assert "Read into host memory (GB/s):" in capsys.readouterr().out and not list(tmp_path.rglob("*.kv"))


def test_a_disk_too_small_is_refused(bench, tmp_path, capsys):
    settings = [
        "--block_size=16",
        "--kv_offloading_size=0.01",
        f"--kv_disk_path={tmp_path}",
        "--kv_disk_size=0.001",
    ]
    assert bench("disk", "--model", MODEL, *settings, "--pages=400") == 1
    assert "--pages 400" in capsys.readouterr().err


def test_engines_are_compared_for_configured_tiers():
    whole = EngineConfig(
        "m", kv_offloading_size=1.0, kv_disk_path="/tmp", kv_disk_size=2.0, enable_prefix_caching=False
    )
    found = hierarchy.lowest_tiers(whole)
    assert list(found) == ["recompute", "device", "host", "disk", "disk, restarted"]
    assert [tier.enable_prefix_caching for tier in found.values()] == [False, True, True, True, True]
    assert [tier.kv_offloading_size for tier in found.values()] == [0, 0, 1, 1, 1]
    assert [tier.kv_disk_path for tier in found.values()] == [None, None, None, "/tmp", "/tmp"]
    assert list(hierarchy.lowest_tiers(EngineConfig("m", kv_offloading_size=1.0))) == [
        "recompute",
        "device",
        "host",
    ]


def test_rounds_of_a_trace_are_refused(bench, served, capsys):
    trace = ["--trace", str(paths.TRACES / "mooncake_conversation_200.jsonl"), "--trace_shrink", "64"]
    assert bench("serve", "--target", served[0], *trace, "--rounds", "2") == 1
    assert "a trace has its own" in capsys.readouterr().err

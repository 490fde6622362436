"""Memory of programs, and the room left for KV: the command on a small model, and its arithmetic."""

import json

import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.__main__ import main
from jaxflow.bench.engine.memory import room, three_buffers
from jaxflow.engine.program_memory import Need, together
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

sizes = st.builds(Need, st.integers(0, 10**9), st.integers(0, 10**7))
needs = st.fixed_dictionaries(dict.fromkeys(("step", "plain", "full", "prompt"), sizes))


@given(largest=needs, smallest=needs, free=st.integers(0, 10**12))
def test_room_grows_as_less_memory_is_reserved(largest, smallest, free):
    found = room(free + 10**6, 10**6, 131072.0, 45056.0, largest, smallest)
    assert found["none"] == free // 131072
    assert found["none"] >= found["largest"] >= found["summed"]
    assert found["lent"] == max(0, (free - together(smallest.values())) // 131072)
    assert found["whole_prompt"] == free // (131072 + 45056)


def test_needs_add_the_results_of_two_steps_to_the_largest_program():
    assert together([Need(100, 3), Need(70, 0), Need(20, 1)]) == 108


@pytest.fixture
def bench(no_flags):
    """The command line in this process."""
    return lambda **settings: main(
        ["bench", "memory", *(f"--{name}={value}" for name, value in settings.items())]
    )


def test_the_command(bench, tmp_path, capsys):
    folder, path = paths.MODELS / "tiny-llama", tmp_path / "memory.json"
    engine = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 128}
    assert bench(model=folder, **engine, buckets=8, layers=1, memory_gib="0.001,1", output_json=path) == 0
    found = json.loads(path.read_text())
    model = open_checkpoint(str(folder)).model_config
    assert [one["tokens"] for one in found["programs"]] == [8, 16] and found["layers"] == 1
    assert (
        found["programs"][1]["three_buffers"]
        == three_buffers(model, 16, "bfloat16")
        == 16 * (64 + 64 + 128) * 2
    )
    for one in found["programs"]:
        assert one["together"] == together(Need(**need) for need in one["needs"].values()) > 0
    layer = 2 * (4 + 2 * 2) * 16 * 64 * 2 // 2 + 64 * 64 * 2 + 3 * 64 * 128 * 2 + 2 * 64 * 2
    tables = found["weight_bytes"] - len(model.layers) * layer - 64 * 2
    assert tables == 512 * 64 * 2 * (1 if model.tie_word_embeddings else 2)
    assert found["kv_bytes_per_token"] == 2 * len(model.layers) * 2 * 16 * 2
    small, large = found["room"]
    assert small["tokens"]["largest"] == 0 < large["tokens"]["largest"] < large["tokens"]["none"]
    assert "three buffers" in capsys.readouterr().out


def test_buckets_beyond_the_largest_step_are_refused(bench, capsys):
    assert (
        bench(model=paths.MODELS / "tiny-llama", max_num_batched_tokens=16, max_num_seqs=8, max_model_len=128)
        == 1
    )
    assert "buckets" in capsys.readouterr().err


@pytest.mark.parametrize(("tp", "wanted"), [(1, 45056), (4, 23552)])
def test_three_buffers_of_a_shard(tp, wanted):
    model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    assert three_buffers(model, 1, "bfloat16", tp) == wanted

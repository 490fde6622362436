"""The default number of running sequences."""

import math
import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import EngineConfig
from jaxflow.engine import settings, step_plans
from jaxflow.engine.default_seqs import (
    EXPERT_ROWS,
    MOST_STEP_TOKENS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    STEP_TOKENS,
    TILE_ROWS,
    default_max_num_seqs,
    default_step_tokens,
)
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import token_buckets
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, step_timer
from jaxflow.model.graph import model_graph

STEPS = st.integers(1, 1 << 17)
BYTES = st.floats(-1e12, 1e13)
SEQ = st.floats(1.0, 1e10)
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@given(STEPS, BYTES, SEQ)
def test_the_step_and_the_memory_hold_the_sequences(step, held, each):
    seqs = default_max_num_seqs(step, held, each)
    assert 1 <= seqs <= step
    assert seqs == 1 or seqs * each <= held


@given(STEPS, BYTES, BYTES, SEQ)
def test_more_memory_never_means_fewer_sequences(step, one, other, each):
    less, more = sorted((one, other))
    assert default_max_num_seqs(step, less, each) <= default_max_num_seqs(step, more, each)


@given(STEPS, STEPS, BYTES, SEQ)
def test_a_larger_step_never_means_fewer_sequences(one, other, held, each):
    less, more = sorted((one, other))
    assert default_max_num_seqs(less, held, each) <= default_max_num_seqs(more, held, each)


@given(st.integers(256, 1 << 14), BYTES, SEQ)
def test_many_sequences_fill_whole_tiles(step, held, each):
    seqs = default_max_num_seqs(step, held, each)
    assert seqs % TILE_ROWS == 0 or (seqs < TILE_ROWS and seqs & (seqs - 1) == 0)


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 64))
def test_a_step_gives_each_expert_its_rows_within_bounds(experts, chosen, ranks):
    tokens = default_step_tokens(experts, chosen, ranks)
    assert STEP_TOKENS <= tokens <= MOST_STEP_TOKENS
    rows = tokens * ranks * chosen / experts
    assert tokens == STEP_TOKENS or rows <= EXPERT_ROWS
    assert tokens == MOST_STEP_TOKENS or rows > EXPERT_ROWS - chosen * ranks


def test_a_dense_model_has_the_smallest_default_step():
    assert default_step_tokens(0, 0, 1) == STEP_TOKENS


@pytest.mark.parametrize("step", [1024, 2048, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_cost_model_ends_no_more_requests_with_other_numbers(step, dtype):
    """Fewer sequences end as many requests at best, by a cost model in which small steps lose nothing.

    More end fewer.
    """
    model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    timer = step_timer(model_graph(model, 1), DEVICES["H200"].rates, dtype)
    prompts_per_output = PROMPT_TOKENS / OUTPUT_TOKENS

    def requests_per_s(decodes):
        """Each request needs its prompt's prefill and its decodes; the scarcer one decides."""
        prefill = min(step - decodes, decodes * prompts_per_output)
        pieces = math.ceil(prefill / PROMPT_TOKENS)
        size = prefill / max(1, pieces)
        chunks = ((size, (PROMPT_TOKENS - size) / 2),) * pieces
        work = Composition(decodes, PROMPT_TOKENS + OUTPUT_TOKENS / 2, chunks)
        return min(decodes / OUTPUT_TOKENS, prefill / PROMPT_TOKENS) / timer(work).sequential_s

    chosen = default_max_num_seqs(step, 1e15, 1.0)
    best = requests_per_s(chosen)
    assert all(requests_per_s(fewer) < 1.01 * best for fewer in range(TILE_ROWS, chosen, TILE_ROWS))
    assert all(requests_per_s(more) < 0.99 * best for more in range(chosen + 2 * TILE_ROWS, step, TILE_ROWS))


class TestOnAnH200:
    """Resolve the settings of engines on a simulated H200 with the memory of a real one."""

    @pytest.fixture(autouse=True)
    def h200(self, monkeypatch):
        self.bytes_limit = int(0.9 * 143771 * 2**20)  # as nvidia-smi states the memory
        card = types.SimpleNamespace(
            device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": self.bytes_limit}
        )
        for module in (settings, step_plans):
            monkeypatch.setattr(module, "on_gpu", lambda: True)
        monkeypatch.setattr(jax, "devices", lambda *_: [card])
        monkeypatch.setattr(jax, "local_devices", lambda *_: [card])

    def resolved(self, name, **settings):
        model = open_checkpoint(name, load_format="dummy").model_config
        return resolve(EngineConfig(model=name, **settings), model)

    @pytest.mark.parametrize(
        ("name", "settings", "seqs"),
        [
            ("llama-3.1-8b", {}, 640),
            ("llama-3.1-8b", FP8, 640),
            ("qwen3-30b-a3b", {}, 1280),
            ("llama-3-70b", FP8 | {"tensor_parallel_size": 2}, 640),
            ("llama-3-70b", FP8 | {"tensor_parallel_size": 4}, 1280),
            ("llama-3-70b", {"tensor_parallel_size": 2}, 256),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_the_default_follows_the_step_and_the_memory(self, name, settings, seqs):
        assert self.resolved(name, **settings).max_num_seqs == seqs

    def test_a_given_number_wins(self):
        assert self.resolved("llama-3.1-8b", max_num_seqs=7).max_num_seqs == 7
        assert self.resolved("llama-3.1-8b", max_num_batched_tokens=512).max_num_seqs == 128

    def test_little_memory_lowers_the_number(self):
        found = []
        for gib in (16, 18, 20, 24, 48, 80):
            self.bytes_limit = gib << 30
            found.append(self.resolved("llama-3.1-8b").max_num_seqs)
        assert found == sorted(found)
        assert found[0] < 64 and found[-1] == 640

    def test_one_step_size_is_added(self):
        """Each further size makes the first start longer."""
        config = self.resolved("llama-3.1-8b")
        usual = token_buckets(config.max_num_batched_tokens, sparse=False)
        assert set(step_plans.step_sizes(config)) - set(usual) == {config.max_num_seqs}

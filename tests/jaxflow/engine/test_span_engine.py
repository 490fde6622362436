"""Engines with attention spans: the same tokens however requests are batched, and fewer pages."""

import dataclasses
import json

import numpy as np
import paths
import pytest
import toy
from hurry import compile_on_use

from jaxflow.config import ConfigError, EngineConfig, Span
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import open_model
from jaxflow.engine.step_plans import choose_plans
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.start import start_host_tier
from jaxflow.kv.visible import most_pages
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Request, SamplingParams

MODEL, BLOCK = "tiny-llama", 16
FILE = {"schema_version": 1, "model": MODEL, "layers": 2, "kv_heads": 2, "sinks": 5}
# One head sees everything. The others see 20 to 60 tokens of 300, in three groups.
SPANS = FILE | {"alpha": [[20, 512], [12, 30]], "beta": [[0, 0], [0.125, 0.0625]]}
FULL = FILE | {"alpha": [[512, 0], [0, 512]], "beta": [[0, 1], [1, 1]]}


class Engines:
    """Loops over one executor of tiny-llama with the spans of a file."""

    def __init__(self, spans, folder, **changes):
        path = folder / "spans.json"
        path.write_text(json.dumps(spans))
        settings = EngineConfig(
            model=str(paths.MODELS / MODEL), attention_spans=str(path), block_size=BLOCK,
            max_num_batched_tokens=16, max_num_seqs=8, num_kv_pages=96, step_sizes="16", plan="sequential",
            **changes,
        )  # fmt: skip
        checkpoint = open_model(settings)
        self.model = checkpoint.model_config
        self.config = resolve(settings, self.model)
        self.executor = make_executor(
            self.config, checkpoint, choose_plans(self.config, self.model), progress=False
        )
        compile_on_use(self.executor)

    def loop(self, **changes):
        return make_loop(self.config, self.model, self.executor, **changes)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines(SPANS, tmp_path_factory.mktemp("spans"))


def requests(tokens=24, lengths=(150, 90, 37, 5)):
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    vocabulary = open_checkpoint(str(paths.MODELS / MODEL)).model_config.vocab_size
    return [Request(f"r{i}", rng.integers(3, vocabulary, n), sampling) for i, n in enumerate(lengths)]


def tokens(results):
    return {name: result.tokens for name, result in results.items()}


@pytest.fixture(scope="module")
def alone(engines):
    """Return the tokens of each request by itself, without a prefix cache."""
    found = {}
    for request in requests():
        found |= tokens(toy.run(engines.loop(enable_prefix_caching=False), [request]))
    return found


def test_full_spans_are_the_dense_model_bit_for_bit(tmp_path):
    dense = toy.run(toy.loop(MODEL, budget=16), requests())
    found = toy.run(Engines(FULL, tmp_path).loop(), requests())
    assert tokens(found) == tokens(dense)
    for name, result in found.items():
        assert result.logprobs == dense[name].logprobs


def test_spans_change_the_tokens(alone):
    assert alone != tokens(toy.run(toy.loop(MODEL), requests()))


@pytest.mark.parametrize("budget", [16, 11, 7])
def test_in_a_batch_at_any_chunking(engines, alone, budget):
    loop = engines.loop(token_budget=budget, max_num_seqs=min(8, budget))
    assert tokens(toy.run(loop, requests())) == alone


def test_from_the_prefix_cache(engines, alone):
    loop = engines.loop()
    assert tokens(toy.run(loop, requests())) == alone
    again = toy.run(loop, requests())
    assert tokens(again) == alone
    assert again["r0"].started.cached_prompt_tokens >= 128


def test_after_pre_emption(engines, alone):
    loop = engines.loop(num_pages=(16, 14, 14, 14))
    assert tokens(toy.run(loop, requests(), preempt_at=range(3, 60, 4))) == alone


def test_pages_that_no_head_sees_are_free(engines):
    """Each group holds the pages of its class's span while a sequence runs, and no more."""
    loop = engines.loop(enable_prefix_caching=False)
    [request] = requests(tokens=100, lengths=(200,))
    loop.add(request, 0.0)
    held = []
    while loop.has_work:
        loop.step()
        tables, slots = loop.scheduler.running.tables, loop.scheduler.running.slots
        for slot in np.flatnonzero(slots.taken & slots.decoding).tolist():
            length = int(slots.num_computed[slot])
            held.append([pool.num_pages - pool.available for pool in tables.pools])
            most = [int(most_pages(length, window, BLOCK)) for window in engines.model.windows]
            assert all(count <= limit + 1 for count, limit in zip(held[-1], most, strict=True))
    assert engines.model.windows[0] is None
    assert held[-1][0] == 19  # 299 tokens
    assert all(count <= 7 for count in held[-1][1:])
    sizes = [group.page_bytes(BLOCK, 1) for group in engines.executor.page_groups]
    assert sum(np.multiply(held[-1], sizes)) < 0.5 * 19 * sum(sizes)


def test_the_bytes_of_the_groups_are_those_of_the_dense_cache(engines):
    [dense] = toy.executor(MODEL)[1].page_groups
    sizes = [group.page_bytes(BLOCK, 1) for group in engines.executor.page_groups]
    assert sum(sizes) == dense.page_bytes(BLOCK, 1)
    assert [group.kv_heads for group in engines.executor.page_groups] == [(1,), (1,), (1,), (1,)]


def test_through_the_host(engines, alone):
    """Evicted pages of every group come back."""
    made = engines.executor
    made.add_page_copies(PageCopies(made.page_groups, made.num_pages, BLOCK, made.programs.mesh, (1, 4)))
    config = dataclasses.replace(engines.config, kv_offloading_size=400 * max(made.copies.page_bytes) / 2**30)
    tier = start_host_tier(config, made.page_shapes(), lambda: 1.0, costs=toy.ALWAYS_LOAD)
    loop = make_loop(config, engines.model, made, tier, num_pages=(16, 14, 14, 14))
    try:
        for _ in range(2):
            for request in requests():
                assert tokens(toy.run(loop, [request]))[request.request_id] == alone[request.request_id]
        assert loop.scheduler.running.tiers.counters.host_hit_tokens > 0
    finally:
        loop.close()


def test_in_eight_bits(tmp_path, alone):
    """Heads of a group take their own scales along: an int8 cache is near the wide one."""
    loop = Engines(SPANS, tmp_path, kv_cache_dtype="int8").loop()
    found = tokens(toy.run(loop, requests(tokens=1)))
    assert sum(found[name] == alone[name][:1] for name in found) >= 3


def test_a_command_that_opens_its_own_model_refuses_spans():
    model = open_checkpoint(str(paths.MODELS / MODEL)).model_config
    with pytest.raises(ConfigError, match=r"attention_spans='spans.json'"):
        resolve(EngineConfig("model", attention_spans="spans.json"), model)


def test_a_group_without_room_for_a_sequence_shortens_it(engines):
    """The pages of a span are fewer than those of the text: only groups with fewer pages limit a request."""
    loop = engines.loop(num_pages=(96, 8, 8, 8))
    [request] = requests(tokens=20, lengths=(200,))
    assert len(toy.run(loop, [request])["r0"].tokens) == 20
    assert max(most_pages(220, w, BLOCK) for w in engines.model.windows if isinstance(w, Span)) <= 8

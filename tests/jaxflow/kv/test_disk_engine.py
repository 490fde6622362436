"""Disk tier of a real engine: pages survive a restart, and no error of the disk changes a token."""

import dataclasses
import errno
import os
import shutil
import threading
import types
from typing import Any

import numpy as np
import paths
import pytest
import toy

from jaxflow import LLM
from jaxflow.config import ConfigError
from jaxflow.kv.tiers import page_file
from jaxflow.kv.tiers import policy as tier_policy
from jaxflow.kv.tiers.page_file import FOLDER
from jaxflow.kv.tiers.start import open_disk
from jaxflow.request import Request, SamplingParams
from pallas_kernels.cards import default_card

CASES = {"llama": ("stories260K", 1, "auto"), "windows, 2 devices": ("tiny-gemma3_text", 2, "auto")}
BUDGET = {
    1: 64,
    2: 16,
}  # tokens of a step, by devices: two have steps of one size, since each more is compiled
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request):
    return request.param


def engine(case, folder, *, host_pages=400, fingerprint=b"a model", **more) -> Any:
    """Return an engine with few pages, a host tier and a disk tier."""
    model, tp, kv = case
    numbers = {"tp": tp, "budget": BUDGET[tp], "kv": kv}
    groups = toy.executor(model, **numbers)[1].groups
    more |= {"num_pages": (40,) * groups, "fingerprint": fingerprint, **numbers}
    return toy.offloading_loop(model, host_pages, disk_folder=folder, disk_fingerprint=fingerprint, **more)


def disk_of(loop):
    """Return the disk store of an engine."""
    return loop.scheduler.tiers.store.lower.disk


def first_rounds(case, salt=""):
    """Return requests with a common prefix."""
    model, tp, kv = case
    rng = np.random.default_rng(5)
    vocabulary = toy.executor(model, tp, BUDGET[tp], kv=kv)[1].programs.context.config.vocab_size
    shared = rng.integers(3, vocabulary, 50)
    prompts = [[*shared.tolist(), *rng.integers(3, vocabulary, 40 + i).tolist()] for i in range(4)]
    return [Request(f"r{i}", prompt, GREEDY, cache_salt=salt) for i, prompt in enumerate(prompts)]


def later_rounds(requests, results, salt=""):
    """Return the next requests of the same conversations."""
    return [
        Request(
            r.request_id,
            [*r.prompt_token_ids, *results[r.request_id].tokens, 7, 8, 9],
            GREEDY,
            cache_salt=salt,
        )
        for r in requests
    ]


def settle(loop):
    """Run steps until no page is under way."""
    while loop.has_work or loop.scheduler.tiers._storing_bytes or loop.scheduler.tiers.store.lower.pending:
        loop.step()


def converse(loop, requests):
    """Return the results of requests, and close the engine."""
    results = toy.run(loop, requests)
    settle(loop)
    loop.close()
    return results


def tokens(results):
    return {name: result.token_ids for name, result in results.items()}


def cached(results):
    return [result.started.cached_prompt_tokens for result in results.values()]


@pytest.fixture
def plain(case):
    """Return first and later rounds of conversations, each with the tokens of an engine without tiers."""
    model, tp, kv = case
    one = first_rounds(case)
    answers = toy.run(toy.loop(model, tp=tp, budget=BUDGET[tp], kv=kv), one)
    two = later_rounds(one, answers)
    return one, tokens(answers), two, tokens(toy.run(toy.loop(model, tp=tp, budget=BUDGET[tp], kv=kv), two))


def test_a_later_round_finds_its_pages_after_a_restart(case, plain, tmp_path):
    before = threads()
    one, first, two, second = plain
    loop = engine(case, tmp_path)
    assert tokens(converse(loop, one)) == first
    loop = engine(case, tmp_path)
    results = converse(loop, two)
    assert tokens(results) == second
    counters = loop.scheduler.tiers.counters
    assert min(cached(results)) >= 96, "all whole pages of what was computed before"
    assert (
        counters.disk_hit_tokens
        == counters.host_hit_tokens
        == sum(cached(results)) - counters.device_hit_tokens
        >= 240
    )
    assert disk_of(loop).counters().rejected == 0
    assert threads() == before and not list(tmp_path.rglob("*.tmp"))


def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("jaxflow"))


LLAMA = CASES["llama"]


@pytest.fixture(scope="module")
def answers():
    one = first_rounds(LLAMA)
    found = toy.run(toy.loop(LLAMA[0]), one)
    two = later_rounds(one, found)
    return one, tokens(found), two, tokens(toy.run(toy.loop(LLAMA[0]), two))


def test_a_killed_engine_leaves_its_complete_pages(answers, tmp_path):
    """The folder's content at a moment, with a partial file added, is the state after a kill."""
    one, _, two, second = answers
    loop = engine(LLAMA, tmp_path)
    toy.run(loop, one)
    settle(loop)
    disk_of(loop).flush(30)
    (tmp_path / FOLDER / "00aa.tmp").write_bytes(b"half")
    shutil.copytree(tmp_path / FOLDER, tmp_path / "killed" / FOLDER)
    loop.close()
    loop = engine(LLAMA, tmp_path / "killed")
    results = converse(loop, two)
    assert tokens(results) == second and min(cached(results)) >= 96


def test_tokens_with_a_host_that_is_too_small(answers, tmp_path):
    one, first, two, second = answers
    loop = engine(LLAMA, tmp_path, host_pages=9, staging_pages=4)
    assert tokens(converse(loop, one)) == first
    loop = engine(LLAMA, tmp_path, host_pages=9, staging_pages=4)
    results = toy.run(loop, two)
    assert tokens(results) == second
    assert loop.scheduler.tiers.counters.disk_hit_tokens > 0
    settle(loop)
    loop.close()


@pytest.mark.parametrize("other", [{"salt": "another tenant"}, {"fingerprint": b"another model"}])
def test_other_salts_and_models_find_nothing(answers, tmp_path, other):
    one, first, _, _ = answers
    converse(engine(LLAMA, tmp_path), one)
    loop = engine(LLAMA, tmp_path, fingerprint=other.get("fingerprint", b"a model"))
    results = converse(loop, first_rounds(LLAMA, other.get("salt", "")))
    assert tokens(results) == first
    assert loop.scheduler.tiers.counters.disk_hit_tokens == 0 == disk_of(loop).counters().hits


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_damaged_files_are_computed_again(answers, tmp_path, damage, caplog):
    one, _, two, second = answers
    converse(engine(LLAMA, tmp_path), one)
    for i, file in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(file.read_bytes())
        content[37 * i % len(content)] ^= 1 << i % 8
        file.write_bytes({"flipped": content, "short": content[: len(content) // 2], "empty": b""}[damage])
    loop = engine(LLAMA, tmp_path)
    results = converse(loop, two)
    assert tokens(results) == second and loop.scheduler.tiers.counters.disk_hit_tokens == 0
    assert disk_of(loop).counters().rejected >= 4 and "dropped" in caplog.text


@pytest.mark.parametrize(
    ("operation", "number"), [("write", errno.ENOSPC), ("rename", errno.EROFS), ("readv", errno.EIO)]
)
def test_a_failing_disk_changes_no_token(answers, tmp_path, monkeypatch, caplog, operation, number):
    one, _, two, second = answers
    converse(engine(LLAMA, tmp_path), one[:2])

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    every = {name: getattr(os, name) for name in dir(os)} | {operation: fail}
    monkeypatch.setattr(page_file, "os", types.SimpleNamespace(**every))
    loop = engine(LLAMA, tmp_path)
    results = converse(loop, two)
    assert tokens(results) == second
    assert (
        disk_of(loop).counters().errors
        and len([r for r in caplog.records if "going on without" in r.message]) == 1
    )


def test_a_size_above_the_disk_is_refused_and_above_its_free_space_is_logged(tmp_path, monkeypatch, caplog):
    """Other users may free space, so a server starts on a disk with too little free space."""
    before, (config, made) = threads(), toy.executor("stories260K")
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(total=3 << 30, free=1 << 30))
    config = dataclasses.replace(config, kv_offloading_size=1.0, kv_disk_path=str(tmp_path), kv_disk_size=4.0)
    with pytest.raises(ConfigError, match=r"kv_disk_size=4.0 .*at most 3.00 GiB, the size of .*'s disk"):
        open_disk(config, made.programs.context.config, b"a model")
    disk = open_disk(dataclasses.replace(config, kv_disk_size=2.0), made.programs.context.config, b"a model")
    assert disk is not None and [r.getMessage() for r in caplog.records] == [
        f"kv_disk_size=2.0: {tmp_path} has room for 1.00 GiB now"
    ]
    disk.close()
    assert threads() == before


def test_a_disk_of_unknown_size_leaves_nothing_open(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    before, (config, made) = threads(), toy.executor("stories260K")
    config = dataclasses.replace(
        config, kv_offloading_size=1.0, kv_disk_path=str(tmp_path), kv_disk_size=1e-2
    )
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", fail)
        with pytest.raises(
            ConfigError,
            match=r"kv_disk_path='.*a folder on a disk of known size \(Stale file handle\)",
        ):
            open_disk(config, made.programs.context.config, b"a model")
    assert threads() == before
    disk = open_disk(config, made.programs.context.config, b"a model")  # nobody holds its lock
    assert disk is not None
    disk.close()


def test_the_python_api_after_a_restart(tmp_path, monkeypatch):
    """A later round after a restart is not computed again, and has the same tokens."""
    # The real decision depends on the load of the machine.
    monkeypatch.setattr(tier_policy.FetchCosts, "pays", lambda *_: True)
    monkeypatch.setattr(
        tier_policy, "this_card", lambda: dataclasses.replace(default_card(), disk_patience=1e9)
    )
    settings = {
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "step_sizes": "64",
        "max_num_seqs": 4,
        "num_kv_pages": 40,
        "progress": False,
    }
    settings |= {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_size": 0.1}
    prompt = np.random.default_rng(3).integers(3, 512, 150).tolist()
    with LLM(str(paths.MODELS / LLAMA[0]), **settings) as llm:
        [first] = llm.generate(prompt, GREEDY, use_tqdm=False)
        later = [*prompt, *first.outputs[0].token_ids, 5, 6, 7]
        [expected] = llm.generate(later, GREEDY, use_tqdm=False)
        with pytest.raises(ConfigError, match="kv_disk_path"):
            LLM(str(paths.MODELS / LLAMA[0]), **settings)
    with LLM(str(paths.MODELS / LLAMA[0]), **settings) as llm:
        [found] = llm.generate(later, GREEDY, use_tqdm=False)
        tiers = llm.driver.stats().kv_tiers
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert tiers["disk_hit_tokens"] == found.num_cached_tokens == 160 and tiers["disk_hits"] == 10
    assert not threads()

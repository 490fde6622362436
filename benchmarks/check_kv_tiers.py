"""Check the KV tiers of this device: pages that leave the device cache must come back unchanged.

    python benchmarks/check_kv_tiers.py [--model llama-3.1-8b] [--layers 4] [--output_json check.json]

The first part moves pages of every cache dtype to pinned host memory and back to other places in the
cache, and compares them bit by bit.

The second part runs an engine with few pages and a small host tier. Prefixes leave the device and then the
host, and running requests are pre-empted and swapped in again. The engine answers the same prompts twice. The
check compares the log-probabilities of each answer's first token, which depend on the KV of the entire
prompt, with those of an engine that keeps all pages on the device. Correct engines differ by rounding,
because their batches differ. A wrong page changes log-probabilities by about 1. The check fails if a
pre-emption, a swap, a load or an eviction did not happen.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from typing import Any

import jax
import numpy as np

from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import write_json
from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.loop import Loop
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import choose_plans
from jaxflow.kv.device_cache import make_cache, page_groups
from jaxflow.kv.tiers.offload import Transfers
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.policy import FetchCosts
from jaxflow.kv.tiers.start import start_host_tier
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.parallel.mesh import make_mesh
from jaxflow.request import Delta, Logprob, Request, SamplingParams
from jaxflow.scheduler.admission import OutputLengths
from pallas_kernels.measure.provenance import provenance

HAPPENED = ("preemptions", "swapped_in", "host_pages_loaded", "host_pages_evicted")
ALWAYS = FetchCosts(bytes_per_s=1e15, latency_s=0.0, seconds_per_token=1.0)
MEAN_NATS, MAX_NATS = 0.03, 0.6
DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


def check_pages(
    model: ModelConfig, dtype: str, block_size: int, pages: int = 96, moved: int = 40
) -> dict[str, Any]:
    """Move pages through the host to other places, and compare every page with its expected bits."""
    mesh = make_mesh(1)
    groups = page_groups(model, dtype, 1)
    kv = make_cache(groups, (pages,) * len(groups), block_size, mesh)
    copies = PageCopies(groups, (pages,) * len(groups), block_size, mesh)
    kv = copies.warm_up(kv)
    transfers, rng, same = Transfers(), np.random.default_rng(0), True
    try:
        for group, programs in enumerate(copies.programs):
            drawn = [rng.integers(0, 2**32, (1, programs.words), dtype=np.uint32) for _ in range(pages)]
            kv = copies.scatter(
                kv,
                group,
                range(pages),
                [jax.device_put(page, programs.page_shape().sharding) for page in drawn],
            )
            order = rng.permutation(pages).tolist()
            source, target = order[:moved], order[moved : 2 * moved]
            transfers.to_host.copy([(i, page) for i, page in enumerate(copies.gather(kv, group, source))])
            transfers.to_device.copy(_wait(transfers, transfers.to_host, moved))
            kv = copies.scatter(
                kv, group, target, [page for _, page in _wait(transfers, transfers.to_device, moved)]
            )
            expected = list(drawn)
            for a, b in zip(source, target, strict=True):
                expected[b] = drawn[a]
            found = copies.gather(kv, group, range(pages))
            same &= all(
                np.array_equal(np.asarray(page), wanted) for page, wanted in zip(found, expected, strict=True)
            )
    finally:
        transfers.close()
    return {"dtype": dtype, "page_bytes": list(copies.page_bytes), "pages_moved": moved, "same_bits": same}


def _wait(transfers: Transfers, channel: Any, count: int) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    while len(found) < count:
        transfers.wait(0.01)
        found += channel.done()
    return found


def first_tokens(engine: Loop, requests: list[Request]) -> dict[str, dict[int, Logprob]]:
    """Return the likeliest tokens at the first token of each answer."""
    found: dict[str, dict[int, Logprob]] = {}
    for request in requests:
        engine.add(request, 0.0)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Delta) and event.request_id not in found and event.logprobs:
                found[event.request_id] = event.logprobs[0]
    return found


def check_engine(
    name: str, layers: int, num_kv_pages: int, kv_offloading_size: float, block_size: int
) -> dict[str, Any]:
    """Run the same prompts twice with a host tier and once without, and return their difference in nats."""
    settings = EngineConfig(
        model=name,
        load_format="dummy",
        block_size=block_size,
        max_model_len=32 * block_size,
        max_num_batched_tokens=8 * block_size,
        max_num_seqs=8,
        num_kv_pages=num_kv_pages,
        kv_offloading_size=kv_offloading_size,
    )
    checkpoint = open_checkpoint(name, load_format="dummy")
    model = dataclasses.replace(checkpoint.model_config, layers=checkpoint.model_config.layers[:layers])
    checkpoint = dataclasses.replace(checkpoint, model_config=model)
    config = resolve(settings, model)
    plans = {
        tokens: plan for tokens, plan in choose_plans(config, model).items() if tokens in (8, 8 * block_size)
    }
    executor = make_executor(config, checkpoint, plans, progress=False)
    executor.warm_up()
    rng = np.random.default_rng(1)
    shared = rng.integers(0, model.vocab_size, 6 * block_size)
    lengths = rng.integers(block_size, 6 * block_size, 24)
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * block_size, ignore_eos=False, logprobs=5)
    prompts = [
        np.concatenate([shared[: int(n)], rng.integers(0, model.vocab_size, int(n))]).tolist()
        for n in lengths
    ]
    requests = [Request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    expected = first_tokens(make_loop(config, model, executor, enable_prefix_caching=False), requests)
    tier = start_host_tier(config, executor.page_shapes(), lambda: 1.0, costs=ALWAYS)
    engine = make_loop(config, model, executor, tier)
    engine.scheduler.lengths = OutputLengths(prior=2)  # too low, so that the engine pre-empts
    nats: list[float] = []
    for _ in range(2):
        for request, found in first_tokens(engine, requests).items():
            common = set(found) & set(expected[request])
            nats += [abs(found[token].logprob - expected[request][token].logprob) for token in common] or [
                np.inf
            ]
    stats = engine.stats(0)
    engine.close()
    return {
        "mean_nats": float(np.mean(nats)),
        "max_nats": float(np.max(nats)),
        "preemptions": stats.preemptions,
        "compilations_after_warmup": stats.compilations_after_warmup,
        **stats.kv_tiers,
    }


def main() -> int:
    """Run the check, write its report, and return the exit status: 0 if the check passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--num_kv_pages", type=int, default=40)
    parser.add_argument("--kv_offloading_size", type=float, default=0.06)
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--output_json")
    given = parser.parse_args()
    prepare_process(EngineConfig(model=given.model, kv_offloading_size=given.kv_offloading_size))
    model = open_checkpoint(given.model, load_format="dummy").model_config
    model = dataclasses.replace(model, layers=model.layers[: given.layers])
    head = {
        "command_name": "check_kv_tiers",
        **provenance(shlex.join(["python", "-m", "benchmarks.check_kv_tiers", *sys.argv[1:]])),
    }
    with machine.watch() as readings:
        pages = [check_pages(model, dtype, given.block_size) for dtype in DTYPES]
        engine = check_engine(
            given.model, given.layers, given.num_kv_pages, given.kv_offloading_size, given.block_size
        )
    result = machine.with_power(head | {"pages": pages, "engine": engine}, readings)
    result["passed"] = (
        all(row["same_bits"] for row in result["pages"])
        and engine["mean_nats"] < MEAN_NATS
        and engine["max_nats"] < MAX_NATS
        and all(engine[count] > 0 for count in HAPPENED)
        and engine["compilations_after_warmup"] == 0
    )
    print(json.dumps(result, indent=1))
    if given.output_json:
        write_json(given.output_json, result)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Online requests and a batch on one engine, on a virtual clock: the real scheduler, and
a device that only takes time.

`python tests/jaxflow/scheduler/batch_simulation.py` prints the table of docs/batches.md.
"""

import dataclasses
import math

import numpy as np

from jaxflow.request import BATCH_PRIORITY, Request, SamplingParams
from jaxflow.scheduler.batch_budget import BatchBudget
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler
from jaxflow.scheduler.step_time import StepTime

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
PROMPT, OUTPUT = 512, 128


@dataclasses.dataclass(frozen=True)
class Result:
    """What callers saw.

    Attributes:
      tpot_ms: of each online request, its mean time between tokens.
      ttft_ms: of each online request, its time to the first token.
      batch_tokens_per_s: output tokens of the batch.
      online_tokens: output tokens of online requests.
    """

    tpot_ms: np.ndarray
    ttft_ms: np.ndarray
    batch_tokens_per_s: float
    online_tokens: int

    def p99_tpot_ms(self) -> float:
        return float(np.percentile(self.tpot_ms, 99))


def step_time() -> StepTime:
    """Times like those of an 8B model in bfloat16 on one H200: 4 ms for the
    weights, 70 ms for 2,048 tokens.
    """
    seconds = [max(0.0042, 3.4e-5 * tokens) for tokens in BUCKETS]
    return StepTime(BUCKETS, seconds, key_s=3e-8, pair_s=1e-10)


def simulate(
    *,
    limit_ms: float = math.inf,
    batch: bool,
    rate: float,
    seconds: float = 40.0,
    slower: float = 1.25,
    seed: int = 0,
) -> Result:
    """Run online requests at `rate` a second, beside an endless batch if `batch`,
    until all online requests end.

    seconds: of the arrivals of online requests.
    slower: the device's time over the prediction, which the engine does not know. Noise of 5 % comes on top.
    """
    # Separate draws, so that the online requests are the same with and without a batch.
    online, offline, noise = (np.random.default_rng([seed, i]) for i in range(3))
    truth, predicted = step_time(), step_time()
    config = SchedulerConfig(
        token_budget=2048,
        max_num_seqs=512,
        block_size=64,
        windows=(None,),
        num_pages=(8000,),
        max_model_len=4096,
        buckets=BUCKETS,
        enable_prefix_caching=False,
    )
    limit_s = limit_ms / 1000
    scheduler = Scheduler(config, policy=BatchBudget(limit_s, None if limit_s == math.inf else predicted))
    now, count, batch_tokens, online_tokens, single = 0.0, 0, 0, 0, 0
    next_arrival = float(online.exponential(1 / rate))
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    tpot, ttft = [], []

    def add(priority: int) -> str:
        nonlocal count
        count += 1
        rng = offline if priority else online
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 2 * OUTPUT)), ignore_eos=True, seed=1)
        prompt = np.ones(int(rng.integers(1, 2 * PROMPT)), np.int32)
        scheduler.add(Request(f"r{count}", prompt, sampling, priority))  # type: ignore[arg-type]
        return f"r{count}"

    def under_way() -> bool:
        return len(tpot) + single < len(arrived)

    while now < seconds or under_way():
        while next_arrival <= min(now, seconds):
            arrived[add(0)] = next_arrival
            next_arrival += float(online.exponential(1 / rate))
        while batch and scheduler.num_waiting < 600:
            add(BATCH_PRIORITY)
        work = scheduler.schedule(now)
        if work is None:
            now = min(next_arrival, seconds)
            continue
        keys = int(work.decode_positions.sum()) + len(work.decode_positions)
        pairs = sum(
            chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) // 2 for chunk in work.chunks
        )
        took = truth.seconds(work.num_tokens, keys, pairs) * slower * noise.uniform(0.95, 1.05)
        now += took
        predicted.observe(work, took)
        sampled = work.sampled
        scheduler.commit(sampled, [1] * len(sampled))
        for seq in sampled:
            name = seq.request.request_id
            batch_tokens += seq.is_batch
            online_tokens += not seq.is_batch
            if name in arrived and name not in first:
                first[name] = now
                ttft.append(now - arrived[name])
            if seq.num_known == seq.limit:
                tokens = seq.limit - seq.num_prompt
                if name in arrived and tokens > 1:
                    tpot.append((now - first[name]) / (tokens - 1))
                elif name in arrived:
                    single += 1
                scheduler.finish(seq)
    return Result(1000 * np.array(tpot), 1000 * np.array(ttft), batch_tokens / now, online_tokens)


def main() -> None:
    """Print a table: with and without a batch, at several rates and limits."""
    print("online/s  limit ms  batch  p99 TPOT ms  p50 TPOT ms  p99 TTFT ms  online tokens  batch tok/s")
    for rate in (1.0, 4.0, 8.0):
        for limit, batch in ((math.inf, False), (15.0, True), (25.0, True), (50.0, True), (math.inf, True)):
            r = simulate(limit_ms=limit, batch=batch, rate=rate)
            print(
                f"{rate:8.1f}  {limit:8.1f}  {batch!s:5}  {r.p99_tpot_ms():11.1f}  "
                f"{np.median(r.tpot_ms):11.1f}  "
                f"{np.percentile(r.ttft_ms, 99):11.1f}  {r.online_tokens:13d}  {r.batch_tokens_per_s:11.0f}"
            )


if __name__ == "__main__":
    main()

"""SARATHI's curves from this engine's scheduler and op costs (§4.4, §5.1, §5.2).

Chunked prefill adds decodes to steps with prefill chunks, because these steps read the weights anyway. Let a
step have a chunk of C tokens and B requests. Each of a prompt's P / C chunks then carries B - 1 decodes. All
D decodes run with chunks if P : D = C / (B - 1). At this ratio the gain over prefill-only and decode-only
steps peaks. At lower ratios some decodes run without a chunk. At higher ratios the chunks carry fewer
decodes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxflow.bench.engine.policies import step_policy
from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.lengths import Item, constant
from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, Rates, step_timer
from jaxflow.model.graph import model_graph
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler
from jaxflow.scheduler.state import StepWork

# The paper's first setting: LLaMA-13B on an A6000, with memory for 18 requests of 1K tokens.
LLAMA_13B = ModelConfig("llama", 32000, 5120, 40, 40, 128, 13824, (Layer(rope=Rope(10000.0)),) * 40, 2048)
RATIOS = (1, 2, 4, 7, 10, 14, 20, 28, 40, 56, 80, 120)
WHOLE = 1 << 14  # token budget of a step without chunking


@dataclasses.dataclass(frozen=True)
class SarathiSetting:
    """A model, device and batch. `tile_rows` is the rows of a GEMM's tile, or None for products without
    tiles."""

    model: ModelConfig = LLAMA_13B
    rates: Rates = DEVICES["RTX A6000"].rates
    tile_rows: int | None = 128
    slots: int = 18  # B
    length: int = 1024  # P + D
    requests: int = 90

    def step_s(self) -> Callable[[Composition], float]:
        """Return the function from a step's composition to its seconds in this setting."""
        times = step_timer(model_graph(self.model), self.rates, tile_rows=self.tile_rows)
        return lambda step: times(step).sequential_s

    def split(self, ratio: float) -> tuple[int, int]:
        """Return (P, D) of the setting's length with P : D nearest to the ratio."""
        output = max(1, round(self.length / (1 + ratio)))
        return self.length - output, output


def tile_chunk(chunk_size: int, slots: int) -> int:
    """Return the prompt tokens of a chunk that fill complete tiles together with B - 1 decodes (§4.4)."""
    return chunk_size - (slots - 1)


def gain_curves(
    setting: SarathiSetting, chunk_sizes: Sequence[int] = (128, 256, 512), ratios: Sequence[float] = RATIOS
) -> dict[str, Any]:
    """Return the throughput of each chunk size over that of prefill-only and decode-only steps, by P : D
    (Fig. 9, 11b)."""
    step_s = setting.step_s()
    curves: dict[str, list[float]] = {str(size): [] for size in chunk_sizes}
    baseline = []
    for ratio in ratios:
        items = constant(setting.requests, *setting.split(ratio))
        baseline.append(
            simulate(items, SimulatedPolicy("request-level", WHOLE), setting.slots, step_s).token_throughput
        )
        for size in chunk_sizes:
            run = simulate(items, SimulatedPolicy("decode-maximal", size), setting.slots, step_s)
            curves[str(size)].append(run.token_throughput / baseline[-1])
    return {
        "kind": "pd_ratio",
        "ratios": list(ratios),
        "baseline_token_throughput": baseline,
        "gain_by_chunk_size": curves,
        "expected_peak_by_chunk_size": {
            str(size): tile_chunk(size, setting.slots) / (setting.slots - 1) for size in chunk_sizes
        },
        **_describe(setting),
    }


def tile_curve(
    setting: SarathiSetting, lengths: Sequence[int] = tuple(range(32, 1025, 16))
) -> dict[str, Any]:
    """Return the time of a prefill step by number of tokens (Fig. 7), including one token more than each full
    tile."""
    step_s = setting.step_s()

    def ms(tokens: int) -> float:
        return 1e3 * step_s(Composition(chunks=((tokens, 0),)))

    tile = setting.tile_rows or 1
    return {
        "kind": "tiles",
        "prefill_tokens": list(lengths),
        "step_ms": [ms(n) for n in lengths],
        "one_token_more": {str(n): ms(n + 1) / ms(n) for n in lengths if n % tile == 0},
        **_describe(setting),
    }


def policy_table(setting: SarathiSetting, chunk_size: int = 256) -> dict[str, Any]:
    """Return the throughput of each policy at the best ratio for the chunk size (Fig. 11a).

    The first row has the setting's length and B requests. The other rows have two and three times the length,
    with 10 / 18 and 6 / 18 of B. The paper's memory limit gives these batch sizes.
    """
    shapes = [
        (factor * setting.length, max(2, round(setting.slots * share)))
        for factor, share in ((1, 1), (2, 10 / 18), (3, 6 / 18))
    ]
    step_s = setting.step_s()
    rows = []
    for length, slots in shapes:
        here = dataclasses.replace(setting, length=length, slots=slots, requests=5 * slots)
        prompt, output = here.split(tile_chunk(chunk_size, slots) / (slots - 1))
        items = constant(here.requests, prompt, output)
        runs = {
            policy.name: simulate(items, policy, slots, step_s)
            for policy in (
                SimulatedPolicy("request-level", WHOLE),
                SimulatedPolicy("orca-worst", WHOLE),
                SimulatedPolicy("prefill-first", WHOLE),
                SimulatedPolicy("orca-best", length + slots),
                SimulatedPolicy("hybrid", chunk_size + slots, tile_chunk(chunk_size, slots)),
                SimulatedPolicy("decode-maximal", chunk_size),
            )
        }
        found = {name: run.token_throughput for name, run in runs.items()}
        rows.append(
            {
                "length": length,
                "slots": slots,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "token_throughput": found,
            }
        )
    return {"kind": "policies", "chunk_size": chunk_size, "rows": rows, **_describe(setting)}


def _describe(setting: SarathiSetting) -> dict[str, Any]:
    model = setting.model
    return {
        "model": f"{model.architecture}, {model.num_layers} layers of {model.hidden_size}",
        "tile_rows": setting.tile_rows,
        "slots": setting.slots,
        "length": setting.length,
        "requests": setting.requests,
        "bfloat16_flops_per_s": setting.rates.flops_per_s["bfloat16"],
        "memory_bytes_per_s": setting.rates.memory_bytes_per_s,
    }


BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class SimulatedPolicy:
    """A policy for filling steps.

    `chunk_size` applies to the policies that use chunks. `budget` limits the tokens of any step.
    """

    name: str
    budget: int
    chunk_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulation: a record of each item on the simulated clock, and the composition of each
    step."""

    records: list[Record]
    duration_s: float
    steps: list[Composition]

    @property
    def token_throughput(self) -> float:
        """Return the prompt and output tokens per second."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.records) / self.duration_s


def composition(work: StepWork) -> Composition:
    """Return the composition of a scheduled step for the cost model. Padding rows count as decodes without
    keys."""
    rows = work.bucket - sum(chunk.tokens for chunk in work.chunks)
    keys = float(work.decode_positions.sum() + len(work.decode_positions)) / rows if rows else 0.0
    chunks = tuple((chunk.tokens, chunk.start) for chunk in work.chunks)
    return Composition(rows, keys, chunks, len(work.sampled))


def simulate(
    items: Sequence[Item], policy: SimulatedPolicy, slots: int, step_s: Callable[[Composition], float]
) -> Simulation:
    """Simulate all items from their arrival times, with at most `slots` running at once and unlimited KV.

    step_s: returns the seconds of a step.
    """
    longest = max(item.prompt_tokens + item.output_tokens for item in items)
    scheduler = Scheduler(
        SchedulerConfig(
            token_budget=policy.budget,
            max_num_seqs=slots,
            block_size=BLOCK_SIZE,
            windows=(None,),
            num_pages=(slots * (-(-longest // BLOCK_SIZE) + 1),),
            max_model_len=longest,
            buckets=tuple(range(1, policy.budget + 1)),  # the cost model rounds to tiles itself
            enable_prefix_caching=False,
            max_waiting=len(items),
        ),
        policy=step_policy(policy.name, policy.chunk_size),
    )
    coming = sorted(range(len(items)), key=lambda i: items[i].arrival_s, reverse=True)
    records = [Record(item.prompt_tokens, item.arrival_s) for item in items]
    now, steps = 0.0, []
    left = len(items)
    while left:
        while coming and items[coming[-1]].arrival_s <= now:
            i = coming.pop()
            sampling = SamplingParams(temperature=0.0, max_tokens=items[i].output_tokens, ignore_eos=True)
            scheduler.add(Request(str(i), np.zeros(items[i].prompt_tokens, np.int32).tolist(), sampling))
        work = scheduler.schedule(now)
        if work is None:
            now = items[coming[-1]].arrival_s
            continue
        steps.append(composition(work))
        now += step_s(steps[-1])
        sampled = [seq for seq in work.sampled if not seq.finished]
        scheduler.commit(sampled, [0] * len(sampled))
        for seq in sampled:
            record = records[int(seq.request.request_id)]
            record.deliveries.append((now, 1))
            if len(record.deliveries) == seq.request.sampling.max_tokens:  # one token each
                record.finished_s = now
                scheduler.finish(seq)
                left -= 1
    return Simulation(records, now, steps)

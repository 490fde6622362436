"""Prefill apart from decode, simulated: the same number of replicas, of which some
compute prompts for the others.

  python -m jaxflow.bench prefill_apart --replicas 8 --prefill_replicas 0,2,4 --request_rate 60

The engine's scheduler decides the steps of each replica, and the cost model gives their times. The rule of
`serving.cluster.apart` decides for each prompt. The KV pages of a prompt that is computed apart travel at
--transfer_gb_per_s, all copies together, and beside the steps. The requests are the
conversations of `bench router`.
"""

import array
import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.pipeline.stage_time import StageTimer
from jaxflow.bench.report import machine
from jaxflow.bench.router.command import chats, cluster_of
from jaxflow.bench.router.simulate import BLOCK_SIZE, Cluster, SimulatedReplica
from jaxflow.bench.workload.lengths import Item, poisson_arrivals, prompts
from jaxflow.config import ConfigError
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.kv.pages import PagePool
from jaxflow.kv.prefix import page_names
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.config import prefix_salt
from jaxflow.scheduler.state import Sequence as Row
from serving.cluster.apart import ApartRule, Load, Prompt, saves_time
from serving.cluster.router import Router


def define_flags() -> None:
    """Define the flags of `bench prefill_apart`."""
    flags.DEFINE_string("model", "llama-3.1-8b", "Model: a shipped config's name, or a folder.")
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "Device of the cost model, one for each replica.")
    flags.DEFINE_integer("replicas", 8, "Replicas of both kinds together.", lower_bound=2)
    flags.DEFINE_list("prefill_replicas", ["0", "2", "4"], "Numbers of prefill replicas to compare.")
    flags.DEFINE_enum_class(
        "prefill_rule", ApartRule.PREDICTED, ApartRule, "As of `python -m serving.cluster`."
    )
    flags.DEFINE_float("transfer_gb_per_s", 10.0, "Rate of the KV pages between two replicas.", 0.001)
    flags.DEFINE_integer("max_num_seqs", 256, "Running sequences of a replica.", lower_bound=1)
    flags.DEFINE_integer("max_num_batched_tokens", 2048, "Most tokens of a step.", lower_bound=1)
    flags.DEFINE_integer("num_requests", 2000, "Requests of all replicas.", lower_bound=8)
    flags.DEFINE_float("request_rate", 60.0, "Mean requests per second.", 0.001)
    flags.DEFINE_float("report_s", 0.25, "Seconds between two reports of a replica.", 0.001)
    flags.DEFINE_float("layer_us", 15.0, "Microseconds of a layer beyond the roofline of its ops.", 0.0)
    flags.DEFINE_integer("seed", 0, "Seed of requests, arrivals and the router.", lower_bound=0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


@dataclasses.dataclass(frozen=True)
class ApartRun:
    """The result of a simulation.

    Attributes:
      ttft_s: seconds to the first token of each request, [n].
      tpot_s: mean seconds between the tokens of each request, nan for an answer of one token, [n].
      gaps_s: seconds between any two tokens of a request, of all requests.
      apart: the requests whose prompts were computed apart, bool [n].
      computed: tokens that each replica computed, [replicas].
    """

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    gaps_s: np.ndarray
    apart: np.ndarray
    computed: np.ndarray


class _Kind:
    """The replicas of one kind, their router, and the prompt tokens that wait at them, by request.

    begin: the number of the first one among all replicas.
    """

    def __init__(self, number: int, begin: int, cluster: Cluster, longest: int, seed: int):
        self.replicas = [SimulatedReplica(cluster, longest) for _ in range(number)]
        self.router = Router(max(1, number), cluster.pages, BLOCK_SIZE, seed=seed, candidates=None)
        self.begin = begin
        self.waiting: dict[int, int] = {}
        self.fetching = [collections.Counter[int]() for _ in range(number)]  # tokens to compute, by request

    def report(self) -> None:
        for r, one in enumerate(self.replicas):
            self.router.report(r, one.outstanding + self.fetching[r].total(), one.received)

    @property
    def queued(self) -> float:
        """Prompt tokens that wait at a replica, on average."""
        return sum(self.waiting.values()) / len(self.replicas)


def take_pages(pool: PagePool, names: Sequence[bytes]) -> None:
    """Put pages into a prefix cache as if they had been computed, as many as it can hold."""
    missing = [name for name in names if pool.find(name) < 0][: pool.available]
    pages = pool.allocate(len(missing))
    for page, name in zip(pages, missing, strict=True):
        pool.register(page, name)
    pool.release(reversed(pages))


def simulate_apart(
    items: Sequence[Item],
    prompts: Sequence[np.ndarray],
    cluster: Cluster,
    prefills: int,
    step_s: Callable[[np.ndarray], np.ndarray],
    *,
    rule: ApartRule = ApartRule.PREDICTED,
    token_s: float,
    moved_token_s: float,
    seed: int = 0,
) -> ApartRun:
    """Simulate requests that arrive at `Item.arrival_s`.

    Args:
      prompts: token ids of each item, int32.
      prefills: how many of the replicas compute prompts for the others.
      step_s: seconds of a step by its counts, as `StageTimer` returns them for one stage.
      token_s, moved_token_s: see `saves_time`. A transfer takes `moved_token_s` a token.
    """
    count = len(items)
    longest = max(item.prompt_tokens + item.output_tokens for item in items)
    here = _Kind(cluster.replicas - prefills, 0, cluster, longest, seed)
    there = _Kind(prefills, cluster.replicas - prefills, cluster, longest, seed + 1)
    replicas = here.replicas + there.replicas
    config = replicas[0].scheduler.config
    salt = prefix_salt(config, Request("", (0,)), 0)
    assert salt is not None
    names = [page_names(prompt.tolist(), salt, BLOCK_SIZE) for prompt in prompts]
    full = [(len(prompt) - 1) // BLOCK_SIZE for prompt in prompts]
    mean_output = float(np.mean([item.output_tokens for item in items]))
    first, last, apart = np.full(count, np.nan), np.full(count, np.nan), np.zeros(count, bool)
    gaps = array.array("d")
    # By request: the replica that answers, and the first page that moves.
    moving: dict[int, tuple[int, int]] = {}
    skipped: dict[int, int] = {}  # pages that need no transfer, by request
    report, arrive, moved, end = range(4)
    events: list[tuple[float, int, int]] = [(item.arrival_s, arrive, i) for i, item in enumerate(items)]
    events.append((min(events)[0], report, -1))
    heapq.heapify(events)

    def start(r: int, now: float) -> None:
        seconds = replicas[r].begin_step(now, step_s)
        if seconds is not None:
            heapq.heappush(events, (now + seconds, end, r))

    def add(r: int, i: int, prompt: np.ndarray, output: int, now: float) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=0)
        one = replicas[r]
        [one.rows[str(i)]] = one.scheduler.add(Request(str(i), prompt.tolist(), sampling))
        if one.running is None:
            start(r, now)

    def send(kind: _Kind, i: int, tokens: int, output: float) -> int:
        """Choose a replica, and enter the request into the books. Return the replica's number in its kind."""
        route = kind.router.route(names[i][: tokens // BLOCK_SIZE], tokens, output)
        kind.replicas[route.replica].received += 1
        kind.waiting[i] = tokens - route.expected_hit_tokens
        return route.replica

    def prompt_of(i: int) -> Prompt | None:
        """Return the prompt of a request that a prefill replica can compute."""
        skip = here.router.longest_hit(names[i][: full[i]])
        if not prefills or skip == full[i]:
            return None
        skipped[i] = skip
        tokens, hit = len(prompts[i]), there.router.longest_hit(names[i][: full[i]])
        return Prompt(
            together=tokens - skip * BLOCK_SIZE,
            apart=(full[i] - hit) * BLOCK_SIZE,
            moved=(full[i] - skip) * BLOCK_SIZE,
            rest=tokens - full[i] * BLOCK_SIZE,
        )

    def load() -> Load:
        running = sum(one.scheduler.num_running for one in here.replicas) / len(here.replicas)
        return Load(here.queued, there.queued, running)

    def arrived(i: int, now: float) -> None:
        prompt = prompt_of(i)
        always = rule is ApartRule.ALWAYS
        if prompt is not None and (always or saves_time(prompt, load(), token_s, moved_token_s)):
            apart[i] = True
            tokens = full[i] * BLOCK_SIZE
            add(there.begin + send(there, i, tokens, 0.0), i, prompts[i][:tokens], 1, now)
        else:
            add(send(here, i, len(prompts[i]), mean_output), i, prompts[i], items[i].output_tokens, now)

    def sampled(r: int, row: Row, now: float) -> None:
        one, i = replicas[r], int(row.request.request_id)
        if r >= there.begin:
            there.waiting.pop(i)
            chosen = send(here, i, len(prompts[i]), mean_output)
            here.fetching[chosen][i] = len(prompts[i]) + items[i].output_tokens
            moving[i] = chosen, skipped[i]
            seconds = moved_token_s * (full[i] - skipped[i]) * BLOCK_SIZE
            heapq.heappush(events, (now + seconds, moved, i))
        elif row.num_known == row.num_prompt + 1:
            here.waiting.pop(i)
            first[i] = last[i] = now
        else:
            gaps.append(now - last[i])
            last[i] = now
        if row.num_known == row.limit:
            one.scheduler.finish(row)
            del one.rows[row.request.request_id]

    while events:
        now, kind, number = heapq.heappop(events)
        if kind == report:
            here.report()
            there.report()
            if events:
                heapq.heappush(events, (now + cluster.report_s, report, -1))
        elif kind == arrive:
            arrived(number, now)
        elif kind == moved:
            r, skip = moving.pop(number)
            del here.fetching[r][number]
            take_pages(here.replicas[r].scheduler.running.tables.pools[0], names[number][skip : full[number]])
            add(r, number, prompts[number], items[number].output_tokens, now)
        else:
            one = replicas[number]
            assert one.running is not None
            rows = one.running.sampled
            one.scheduler.commit(rows, np.zeros(len(rows), np.int32))
            for row in rows:
                sampled(number, row, now)
            start(number, now)
    more = np.array([item.output_tokens - 1 for item in items], np.float64)
    tpot = np.divide(last - first, more, out=np.full(count, np.nan), where=more > 0)
    arrivals = np.array([item.arrival_s for item in items])
    computed = np.array([one.computed for one in replicas])
    return ApartRun(first - arrivals, tpot, np.array(gaps), apart, computed)


def figures(run: ApartRun) -> dict[str, float]:
    """Return the figures of a run."""

    def milliseconds(values: np.ndarray, percent: float) -> float:
        return 1e3 * float(np.nanpercentile(values, percent))

    return {
        "apart_share": float(run.apart.mean()),
        "median_ttft_ms": milliseconds(run.ttft_s, 50),
        "p99_ttft_ms": milliseconds(run.ttft_s, 99),
        "median_tpot_ms": milliseconds(run.tpot_s, 50),
        "p99_tpot_ms": milliseconds(run.tpot_s, 99),
        "p99_itl_ms": milliseconds(run.gaps_s, 99),
    }


def text(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    names = [name for name in report["runs"][0] if name != "prefill_replicas"]
    lines = ["prefill replicas".ljust(18) + "".join(name.rjust(16) for name in names)]
    for run in report["runs"]:
        cells = "".join(f"{run[name]:16.3f}" for name in names)
        lines.append(f"{run['prefill_replicas']}".ljust(18) + cells)
    return "\n".join(lines)


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError."""
    f = flags.FLAGS
    wanted = f.prefill_replicas
    if not wanted or not all(one.isdigit() and int(one) < f.replicas for one in wanted):
        accepted = f"numbers from 0 to {f.replicas - 1}, separated by commas: fewer than --replicas"
        raise ConfigError("prefill_replicas", ",".join(wanted), accepted)
    model = open_checkpoint(f.model, load_format="dummy").model_config
    device = DEVICES[f.device]
    sizes = {"slots": f.max_num_seqs, "token_budget": f.max_num_batched_tokens, "report_s": f.report_s}
    cluster = cluster_of(model, device, replicas=f.replicas, **sizes)
    timer = StageTimer(model, (model.num_layers,), 1, device.rates, layer_s=1e-6 * f.layer_us)
    budget = float(f.max_num_batched_tokens)
    pairs = budget * (budget + 1) / 2
    token_s = float(timer(np.array([1, budget, 1, 0, 0, budget, budget, pairs])).sum()) / budget
    page = sum(page_bytes(page_groups(model, np.dtype("bfloat16"), 1), BLOCK_SIZE, 1))
    moved_token_s = page / BLOCK_SIZE / (1e9 * f.transfer_gb_per_s)
    items = poisson_arrivals(chats(f.num_requests, f.seed), f.request_rate, f.seed)
    ids = prompts(items, 32_000, f.seed)
    times = {"token_s": token_s, "moved_token_s": moved_token_s}
    runs = []
    for number in map(int, wanted):
        found = simulate_apart(items, ids, cluster, number, timer, rule=f.prefill_rule, seed=f.seed, **times)
        runs.append({"prefill_replicas": number, **figures(found)})
    report = {
        "command_name": "prefill_apart",
        "model": f.model,
        **machine.describe(),
        "cost_model_of": device.name,
        "workload": {
            "requests": len(items),
            "request_rate": f.request_rate,
            "mean_prompt_tokens": float(np.mean([item.prompt_tokens for item in items])),
            "mean_output_tokens": float(np.mean([item.output_tokens for item in items])),
        },
        "cluster": dataclasses.asdict(cluster),
        "rule": str(f.prefill_rule),
        "transfer_gb_per_s": f.transfer_gb_per_s,
        **times,
        "seed": f.seed,
        "runs": runs,
    }
    print(text(report))
    return report

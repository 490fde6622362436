"""SARATHI's curves from this engine's scheduler and op costs (§4.4, §5.1, §5.2).

Chunked prefill lets decodes ride along with prefill chunks, whose weights are read anyway. With chunks of C
tokens and B requests at a time each of a prompt's P / C chunks carries B - 1 decodes, so all D decodes ride
if P : D = C / (B - 1). There the gain over prefill-only and decode-only steps peaks: at lower ratios decodes
are left over, at higher ones chunks carry fewer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxflow.bench.simulate import Policy, simulate
from jaxflow.bench.workload import constant
from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, Rates, step_timer
from jaxflow.model.graph import model_graph

# The paper's first setting: LLaMA-13B on an A6000, where 18 requests of 1K tokens fit.
LLAMA_13B = ModelConfig("llama", 32000, 5120, 40, 40, 128, 13824, (Layer(rope=Rope(10000.0)),) * 40, 2048)
RATIOS = (1, 2, 4, 7, 10, 14, 20, 28, 40, 56, 80, 120)
WHOLE = 1 << 14  # a step's tokens where no chunk is cut


@dataclasses.dataclass(frozen=True)
class Setting:
    """`tile_rows`: rows of a GEMM's tile, None for products without tiles."""

    model: ModelConfig = LLAMA_13B
    rates: Rates = DEVICES["RTX A6000"].rates
    tile_rows: int | None = 128
    slots: int = 18  # B
    length: int = 1024  # P + D
    requests: int = 90

    def step_s(self) -> Callable[[Composition], float]:
        """Seconds of a step on this setting."""
        times = step_timer(model_graph(self.model), self.rates, tile_rows=self.tile_rows)
        return lambda step: times(step).sequential_s

    def split(self, ratio: float) -> tuple[int, int]:
        """(P, D) of the setting's length with P : D nearest to the ratio."""
        output = max(1, round(self.length / (1 + ratio)))
        return self.length - output, output


def tile_chunk(chunk_size: int, slots: int) -> int:
    """The prompt tokens of a chunk that fill whole tiles together with B - 1 decodes (§4.4)."""
    return chunk_size - (slots - 1)


def gain_curves(
    setting: Setting, chunk_sizes: Sequence[int] = (128, 256, 512), ratios: Sequence[float] = RATIOS
) -> dict[str, Any]:
    """Throughput of each chunk size over that of prefill-only and decode-only steps, against P : D (Fig. 9,
    11b).
    """
    step_s = setting.step_s()
    curves: dict[str, list[float]] = {str(size): [] for size in chunk_sizes}
    baseline = []
    for ratio in ratios:
        items = constant(setting.requests, *setting.split(ratio))
        baseline.append(
            simulate(items, Policy("request-level", WHOLE), setting.slots, step_s).token_throughput
        )
        for size in chunk_sizes:
            run = simulate(items, Policy("decode-maximal", size), setting.slots, step_s)
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


def tile_curve(setting: Setting, lengths: Sequence[int] = tuple(range(32, 1025, 16))) -> dict[str, Any]:
    """Time of one step that prefills so many tokens (Fig. 7), and one token more than each whole tile."""
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


def policy_table(setting: Setting, chunk_size: int = 256) -> dict[str, Any]:
    """Throughput of each policy at the best ratio for the chunk size (Fig. 11a).

    For the setting's length with B requests at a time, and for two and three times the length with 10 / 18
    and 6 / 18 of B, as the paper fits them in memory.
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
                Policy("request-level", WHOLE),
                Policy("orca-worst", WHOLE),
                Policy("prefill-first", WHOLE),
                Policy("orca-best", length + slots),
                Policy("hybrid", chunk_size + slots, tile_chunk(chunk_size, slots)),
                Policy("decode-maximal", chunk_size),
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


def _describe(setting: Setting) -> dict[str, Any]:
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

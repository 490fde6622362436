"""Which resource binds serving: NanoFlow's classification of devices, models and workloads (§3.2 and 3.3,
Tables 1 and 2, Figures 2 and 3).

  python -m search.heat_maps      writes the tables of docs/cost-model.md and its two heat maps anew

Compute, bandwidths and sizes are datasheets'; nothing here is measured.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxflow.config import ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import (
    GIGA,
    TERA,
    Rates,
    compute_time_s,
    dense_parameters,
    memory_time_s,
    network_time_s,
    work_times,
)
from jaxflow.model.graph import BFLOAT16, Widths, Work, model_graph

DOCS = Path(__file__).parent.parent / "docs"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A row of Table 1: network both ways, compute of dense 16-bit products."""

    vendor: str
    name: str
    year: int
    memory_gb: float
    memory_gb_per_s: float
    network_gb_per_s: float
    gflops_per_s: float

    @property
    def memory_s(self) -> float:
        """Eq. 1."""
        return self.memory_gb / self.memory_gb_per_s

    @property
    def compute_to_memory(self) -> float:
        return self.gflops_per_s / self.memory_gb_per_s

    @property
    def network_to_memory(self) -> float:
        return self.network_gb_per_s / self.memory_gb_per_s

    @property
    def rates(self) -> Rates:
        return Rates(
            {"bfloat16": self.gflops_per_s * 1e9},
            self.memory_gb_per_s * GIGA,
            self.network_gb_per_s * GIGA / 2,
        )


TABLE_1 = (
    Accelerator("NVIDIA", "V100", 2017, 16, 900, 300, 125_000),
    Accelerator("NVIDIA", "A100 40 GB", 2020, 40, 1_555, 600, 312_000),
    Accelerator("NVIDIA", "A100 80 GB", 2021, 80, 2_000, 600, 312_000),
    Accelerator("NVIDIA", "H100", 2023, 80, 3_352, 900, 989_000),
    Accelerator("NVIDIA", "H200 (96 GB)", 2024, 96, 4_800, 900, 989_000),
    Accelerator("NVIDIA", "B100", 2024, 120, 8_000, 1_800, 1_800_000),
    Accelerator("NVIDIA", "B200 (120 GB)", 2024, 120, 8_000, 1_800, 2_250_000),
    Accelerator("AMD", "MI250", 2021, 128, 3_352, 800, 362_000),
    Accelerator("AMD", "MI300", 2023, 192, 5_300, 1_024, 1_307_000),
    Accelerator("AMD", "MI325X", 2024, 256, 6_000, 1_024, 1_307_000),
    Accelerator("Intel", "Gaudi 2", 2022, 96, 2_400, 600, 1_000_000),
    Accelerator("Intel", "Gaudi 3", 2024, 128, 3_700, 1_200, 1_800_000),
    Accelerator("NVIDIA", "Ada 6000", 2022, 48, 960, 64, 182_000),
)
TODAY = (  # datasheets, where the paper has another memory or nothing
    Accelerator("NVIDIA", "H200", 2024, 141, 4_800, 900, 989_000),
    Accelerator("NVIDIA", "GH200", 2024, 144, 4_900, 900, 989_000),
    Accelerator("NVIDIA", "B200", 2025, 180, 8_000, 1_800, 2_250_000),
    Accelerator("NVIDIA", "B300", 2025, 288, 8_000, 1_800, 2_250_000),
    Accelerator("AMD", "MI355X", 2025, 288, 8_000, 1_075, 2_516_000),
    Accelerator("Google", "TPU v6e", 2024, 32, 1_640, 896, 918_000),
    Accelerator("Google", "TPU7x", 2025, 192, 7_380, 1_200, 2_307_000),
    Accelerator("NVIDIA", "L40S", 2023, 48, 864, 64, 362_000),
)
# Figure 3's models on the devices that the paper gives them, and today's.
SERVED = (
    ("llama-3-8b", 1), ("mixtral-8x7b", 8), ("llama-2-70b", 8), ("llama-3-70b", 8), ("qwen2-72b", 8), ("deepseek-67b", 8),
    ("llama-3.1-8b", 1), ("qwen3-8b", 1), ("qwen3-30b-a3b", 1),
)  # fmt: skip
WORKLOADS = {  # mean prompt and output
    "512-512": (512, 512), "1024-512": (1024, 512), "512-1024": (512, 1024),
    "Splitwise": (1155, 211), "LMSYS": (102, 222), "ShareGPT": (246, 322),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Batch:
    """The largest batch that the memory holds, on the average: Eq. 1's and 2's assumption (§3.1)."""

    tokens: float  # B_Dense
    requests: float  # that decode
    memory_s: float
    compute_s: float

    @property
    def ratio(self) -> float:
        """T_R of Eq. 4: below 1 serving is bound by compute."""
        return self.memory_s / self.compute_s


def weight_bytes(config: ModelConfig, widths: Widths = BFLOAT16) -> float:
    """Of the whole model, all experts and the embedding."""
    everything = Composition(decode_tokens=1e9, decode_keys=1)  # many tokens touch every expert
    products = sum(
        op.work(everything).weight_bytes for op in model_graph(config, 1, widths).ops() if op.kind == "dense"
    )
    return products + (
        0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * widths.wide_weights
    )


def request_bytes(config: ModelConfig, prompt: float, output: float, widths: Widths = BFLOAT16) -> float:
    """What the cache holds of a request of so many tokens, in the mean over its outputs: p + d / 2 tokens, on
    all devices together.
    """
    return sum(2 * config.num_kv_heads * config.head_dim * widths.kv for _ in config.layers) * (
        prompt + output / 2
    )


def largest_batch(
    config: ModelConfig, rates: Rates, memory_bytes: float, gpus: int, prompt: float, output: float, *, widths: Widths = BFLOAT16,
    dtype: str = "bfloat16",
) -> Batch | None:  # fmt: skip
    """Requests of p prompt and d output tokens fill the memory; each holds p + d / 2 tokens in the mean. None
    if the model alone does.

    rates and memory_bytes: of one device.
    """
    left = gpus * memory_bytes - weight_bytes(config, widths)
    if left <= 0 or not output:
        return None
    requests = left / request_bytes(config, prompt, output, widths)
    tokens = requests * (prompt + output) / output
    parameters = dense_parameters(config, output / (prompt + output))
    return Batch(
        tokens,
        requests,
        memory_time_s(memory_bytes, rates.memory_bytes_per_s),
        compute_time_s(tokens, parameters, gpus * rates.flops_per_s[dtype]),
    )


def network_ratio(config: ModelConfig, accelerator: Accelerator, gpus: int = 8) -> float:
    """T_Net / T_Compute (§3.3), whatever the batch: below 1 the network is not what binds."""
    rates = accelerator.rates
    sent = network_time_s(gpus, 1, config.hidden_size, 2, config.num_layers, gpus * rates.network_bytes_per_s)
    return sent / compute_time_s(1, dense_parameters(config), gpus * rates.flops_per_s["bfloat16"])


@dataclasses.dataclass(frozen=True)
class Map:
    """A heat map: its title, and a value of each row and column, None where a model does not fit."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


def network_map(
    models: Sequence[str] = tuple(dict.fromkeys(name for name, gpus in SERVED if gpus > 1)),
) -> Map:
    """Figure 2: network over compute, 8 devices."""
    configs = [_config(name) for name in models]
    values = tuple(
        tuple(network_ratio(config, device) for config in configs) for device in (*TABLE_1, *TODAY)
    )
    return Map(
        "T_net / T_compute on 8 devices",
        tuple(device.name for device in (*TABLE_1, *TODAY)),
        tuple(models),
        values,
    )


def memory_map(accelerator: Accelerator = TABLE_1[2], served: Sequence[tuple[str, int]] = SERVED) -> Map:
    """Figure 3: memory over compute at the largest batch."""

    def ratio(name: str, gpus: int, lengths: tuple[int, int]) -> float | None:
        found = largest_batch(_config(name), accelerator.rates, accelerator.memory_gb * GIGA, gpus, *lengths)
        return None if found is None else found.ratio

    values = tuple(
        tuple(ratio(name, gpus, lengths) for lengths in WORKLOADS.values()) for name, gpus in served
    )
    return Map(
        f"T_mem / T_compute on {accelerator.name}",
        tuple(f"{name} × {gpus}" for name, gpus in served),
        tuple(WORKLOADS),
        values,
    )


def _config(name: str) -> ModelConfig:
    return open_checkpoint(name, load_format="dummy").model_config


# Table 2, in ms: LLaMA-2-70B on eight A100, 2048 tokens a step: op -> (ours, T_comp, T_mem, T_net, measured).
TABLE_2 = {
    "KQV": (("qkv",), 11.01, 1.22, 0.0, 16.08),
    "O": (("out_proj",), 8.81, 1.01, 0.0, 16.01),
    "UG": (("up_gate",), 61.67, 6.04, 0.0, 69.92),
    "D": (("down",), 30.84, 3.11, 0.0, 34.96),
    "DecAttn": (("decode_attention",), 1.47, 28.89, 0.0, 35.60),
    "PfAttn": (("chunk_attention",), 0.37, 0.13, 0.0, 4.56),
    "Net": (("attn_reduce", "mlp_reduce"), 0.01, 4.70, 31.33, 47.92),
}


def table_2(step: Composition | None = None) -> dict[str, tuple[float, float, float]]:
    """The model's own T_comp, T_mem and T_net of Table 2's rows, in ms, over all layers and all devices as
    one.
    """
    step, config = step or Composition.steady_state(2048, 512, 1024), _config("llama-2-70b")
    eight = Rates({"bfloat16": 8 * 312 * TERA}, 8 * 2.0 * TERA, 8 * 300 * GIGA)
    found = {}
    for name, (ops, *_) in TABLE_2.items():
        tp = 8 if name == "Net" else 1  # activations count once
        graph = model_graph(config, tp)
        times = work_times(
            sum((op.work(step) for layer in graph.layers for op in layer if op.name in ops), Work()) * tp,
            eight,
        )
        found[name] = (1e3 * times.compute_s, 1e3 * times.memory_s, 1e3 * times.network_s)
    return found


def tables() -> dict[str, str]:
    """docs/cost-model.md's tables, in Markdown, by name."""
    first = [
        f"| {a.vendor} {a.name} | {a.year} | {a.memory_gb:,g} | {a.memory_gb_per_s:,g} | {a.network_gb_per_s:,g} | {a.gflops_per_s:,.0f} "
        f"| {a.memory_s:.3f} | {a.compute_to_memory:.0f} | {a.network_to_memory:.2f} |"
        for a in (*TABLE_1, *TODAY)
    ]
    ours = table_2()
    second = [
        (
            f"| {name} | {', '.join(f'`{op}`' for op in ops)} | {_three(paper)} | {_three(ours[name])} | "
            f"{real:.2f} |"
        )
        for name, (ops, *paper, real) in TABLE_2.items()
    ]
    h200 = TODAY[0]
    third = []
    for name, gpus in (
        ("llama-3.1-8b", 1),
        ("qwen3-30b-a3b", 1),
        ("mixtral-8x7b", 2),
        ("llama-3-70b", 4),
        ("qwen2-72b", 4),
    ):
        for label in ("1024-512", "512-1024"):
            found = largest_batch(_config(name), h200.rates, h200.memory_gb * GIGA, gpus, *WORKLOADS[label])
            assert found is not None
            third.append(
                f"| {name} | {gpus} | {label} | {found.tokens:,.0f} | {found.requests:,.0f} | {1e3 * found.memory_s:.1f} "
                f"| {1e3 * found.compute_s:.1f} | {found.ratio:.2f} |"
            )
    heads = {
        "table 1": (
            "| device | year | GB | GB/s | network GB/s | GFLOP/s | size / bandwidth, s | compute / "
            "memory | network / memory |"
        ),
        "table 2": (
            "| the paper's op | ours | paper: compute, memory, network, ms | ours, ms | measured there, ms |"
        ),
        "today": "| model | H200s | in-out | B_dense | decodes | T_mem, ms | T_compute, ms | T_R |",
    }
    return {
        name: "\n".join((head, "|" + " --- |" * (head.count("|") - 1), *lines))
        for (name, head), lines in zip(heads.items(), (first, second, third), strict=True)
    }


def _three(times: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in times)


def rewritten(text: str) -> str:
    """docs/cost-model.md with its tables as they are computed now."""
    for name, table in tables().items():
        text = re.sub(
            rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)",
            lambda _, table=table: table,
            text,
            flags=re.S,
        )
    return text

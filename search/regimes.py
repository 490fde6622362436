"""The resource that binds serving: NanoFlow's classification of devices, models and workloads.

The tables and heat maps follow NanoFlow §3.2 and 3.3 (Tables 1 and 2, Figures 2 and 3):

  python -m search.regimes      writes the tables and the two heat maps of docs/cost-model.md

Compute, bandwidths and sizes come from datasheets; no number here is measured.
"""

import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

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
    """A row of Table 1: network bandwidth in both directions, compute of dense 16-bit products."""

    vendor: str
    name: str
    year: int
    memory_gb: float
    memory_gb_per_s: float
    network_gb_per_s: float
    gflops_per_s: float

    @property
    def memory_s(self) -> float:
        """Return the seconds to read the whole memory once (Eq. 1)."""
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
TODAY = (  # datasheets of devices that the paper lacks or lists with another memory
    Accelerator("NVIDIA", "H200", 2024, 141, 4_800, 900, 989_000),
    Accelerator("NVIDIA", "GH200", 2024, 144, 4_900, 900, 989_000),
    Accelerator("NVIDIA", "B200", 2025, 180, 8_000, 1_800, 2_250_000),
    Accelerator("NVIDIA", "B300", 2025, 288, 8_000, 1_800, 2_250_000),
    Accelerator("AMD", "MI355X", 2025, 288, 8_000, 1_075, 2_516_000),
    Accelerator("Google", "TPU v6e", 2024, 32, 1_640, 896, 918_000),
    Accelerator("Google", "TPU7x", 2025, 192, 7_380, 1_200, 2_307_000),
    Accelerator("NVIDIA", "L40S", 2023, 48, 864, 64, 362_000),
)
# Figure 3's models on the paper's device counts, and newer models.
SERVED = (
    ("llama-3-8b", 1), ("mixtral-8x7b", 8), ("llama-2-70b", 8), ("llama-3-70b", 8), ("qwen2-72b", 8),
    ("deepseek-67b", 8),
    ("llama-3.1-8b", 1), ("qwen3-8b", 1), ("qwen3-30b-a3b", 1),
)  # fmt: skip
WORKLOADS = {  # mean prompt and output
    "512-512": (512, 512), "1024-512": (1024, 512), "512-1024": (512, 1024),
    "Splitwise": (1155, 211), "LMSYS": (102, 222), "ShareGPT": (246, 322),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that the memory holds, on average: the assumption of Eq. 1 and 2 (§3.1)."""

    tokens: float  # B_Dense
    requests: float  # decoding requests
    memory_s: float
    compute_s: float

    @property
    def ratio(self) -> float:
        """Return T_R of Eq. 4; below 1, compute binds serving."""
        return self.memory_s / self.compute_s


def weight_bytes(config: ModelConfig, widths: Widths = BFLOAT16) -> float:
    """Return the bytes of the full model, with all experts and the embedding."""
    everything = Composition(decode_tokens=1e9, decode_keys=1)  # so many tokens reach every expert
    products = sum(
        op.work(everything).weight_bytes for op in model_graph(config, 1, widths).ops() if op.kind == "dense"
    )
    return products + (
        0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * widths.wide_weights
    )


def request_bytes(config: ModelConfig, prompt: float, output: float, widths: Widths = BFLOAT16) -> float:
    """Return the KV bytes of one request, averaged over its output: p + d / 2 tokens, on all devices
    together.
    """
    cached = sum(config.for_layer(config.layers[i]).kv_width for i in config.cached_layers) * widths.kv
    return cached * (prompt + output / 2)


def largest_batch(
    config: ModelConfig, rates: Rates, memory_bytes: float, gpus: int, prompt: float, output: float, *,
    widths: Widths = BFLOAT16, dtype: str = "bfloat16",
) -> LargestBatch | None:  # fmt: skip
    """Return the largest batch of requests with p prompt and d output tokens, or None if the weights do not
    fit.

    A request holds p + d / 2 tokens on average. rates and memory_bytes: of one device.
    """
    left = gpus * memory_bytes - weight_bytes(config, widths)
    if left <= 0 or not output:
        return None
    requests = left / request_bytes(config, prompt, output, widths)
    tokens = requests * (prompt + output) / output
    parameters = dense_parameters(config, output / (prompt + output))
    return LargestBatch(
        tokens,
        requests,
        memory_time_s(memory_bytes, rates.memory_bytes_per_s),
        compute_time_s(tokens, parameters, gpus * rates.flops_per_s[dtype]),
    )


def network_ratio(config: ModelConfig, accelerator: Accelerator, gpus: int = 8) -> float:
    """Return T_Net / T_Compute of any batch (§3.3); below 1, the network does not bind."""
    rates = accelerator.rates
    sent = network_time_s(gpus, 1, config.hidden_size, 2, config.num_layers, gpus * rates.network_bytes_per_s)
    return sent / compute_time_s(1, dense_parameters(config), gpus * rates.flops_per_s["bfloat16"])


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """A heat map: its title, and a value for each row and column.

    A value is None where the model does not fit.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


def network_map(
    models: Sequence[str] = tuple(dict.fromkeys(name for name, gpus in SERVED if gpus > 1)),
) -> HeatMap:
    """Return Figure 2: network over compute on 8 devices."""
    configs = [_config(name) for name in models]
    values = tuple(
        tuple(network_ratio(config, device) for config in configs) for device in (*TABLE_1, *TODAY)
    )
    return HeatMap(
        "T_net / T_compute on 8 devices",
        tuple(device.name for device in (*TABLE_1, *TODAY)),
        tuple(models),
        values,
    )


def memory_map(accelerator: Accelerator = TABLE_1[2], served: Sequence[tuple[str, int]] = SERVED) -> HeatMap:
    """Return Figure 3: memory over compute at the largest batch."""

    def ratio(name: str, gpus: int, lengths: tuple[int, int]) -> float | None:
        found = largest_batch(_config(name), accelerator.rates, accelerator.memory_gb * GIGA, gpus, *lengths)
        return None if found is None else found.ratio

    values = tuple(
        tuple(ratio(name, gpus, lengths) for lengths in WORKLOADS.values()) for name, gpus in served
    )
    return HeatMap(
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
    """Return T_comp, T_mem and T_net of Table 2's rows, in ms, over all layers, with all devices as one."""
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
    """Return the tables of docs/cost-model.md in Markdown, by name."""
    first = [
        f"| {a.vendor} {a.name} | {a.year} | {a.memory_gb:,g} | {a.memory_gb_per_s:,g} | "
        f"{a.network_gb_per_s:,g} | {a.gflops_per_s:,.0f} | {a.memory_s:.3f} | {a.compute_to_memory:.0f} | "
        f"{a.network_to_memory:.2f} |"
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
                f"| {name} | {gpus} | {label} | {found.tokens:,.0f} | {found.requests:,.0f} | "
                f"{1e3 * found.memory_s:.1f} | {1e3 * found.compute_s:.1f} | {found.ratio:.2f} |"
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
    """Return the text of docs/cost-model.md with its tables computed anew."""
    for name, table in tables().items():
        text = re.sub(
            rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)",
            lambda _, table=table: table,
            text,
            flags=re.S,
        )
    return text


USAGE = (
    "usage: python -m search.regimes   (writes the tables of docs/cost-model.md and its two pictures "
    "anew; takes no arguments)"
)


def draw(shown: HeatMap) -> Figure:
    """Draw a heat map: yellow is bound by compute, blue by the other resource, with the border at 1."""
    figure = Figure(
        figsize=(1.6 + 0.9 * len(shown.columns), 1.1 + 0.32 * len(shown.rows)), layout="constrained"
    )
    axes = figure.add_subplot()
    values = [[float("nan") if value is None else value for value in row] for row in shown.values]
    axes.imshow(values, cmap="cividis_r", norm=LogNorm(0.1, 10), aspect="auto")
    axes.set_xticks(range(len(shown.columns)), shown.columns, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(shown.rows)), shown.rows, fontsize=8)
    axes.set_title(shown.title, fontsize=10)
    for i, row in enumerate(shown.values):
        for j, value in enumerate(row):
            dark = value is not None and value > 1.5
            axes.text(
                j,
                i,
                "–" if value is None else f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="w" if dark else "k",
            )
    return figure


def save(shown: HeatMap, path: str | Path) -> None:
    """Draw a map into a file; equal maps give equal files."""
    with matplotlib.rc_context({"svg.hashsalt": "jaxflow", "svg.fonttype": "none"}):
        draw(shown).savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def main(argv: list[str]) -> int:
    """Write the page and its pictures anew and return the exit status."""
    if argv[1:]:
        print(USAGE, file=sys.stdout if (helped := argv[1] in ("--help", "-h")) else sys.stderr)
        return 0 if helped else 2
    page = DOCS / "cost-model.md"
    page.write_text(rewritten(page.read_text("utf-8")), "utf-8")
    save(network_map(), DOCS / "network-over-compute.svg")
    save(memory_map(), DOCS / "memory-over-compute.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

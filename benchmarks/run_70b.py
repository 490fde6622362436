"""Run the measurements of Llama-3-70B on two or four H200s. Each measurement is one command.

    python -m benchmarks.run_70b --tensor_parallel_size 4 --only check-fp8,windows-fp8

check-PRECISION compares the tokens of overlapped plans with those of the sequential step, with all 80 layers
(`check_plan`). windows-PRECISION measures plans in long windows at 1024/512, and sharegpt-PRECISION at
lengths like ShareGPT's (`plan_windows`). The survey of both has the plans of the ablation.
end-to-end-PRECISION runs `bench throughput` with the shipped plan and with the sequential one. Two devices in
bf16 run the found plan, because the shipped one is sequential there. offload-PRECISION is the same run with
KV pages that are copied to host memory. A report is benchmarks/h200/llama-3-70b/WHAT-tpN-PRECISION.json.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.named_commands import add_flags, run_all

FOLDER = Path("benchmarks/h200/llama-3-70b")
SHIPPED = Path("jaxflow/pipeline/plans")
PLANS = Path("benchmarks/plans/h200/llama-3-70b")
WHAT = ("check", "windows", "sharegpt", "end-to-end", "offload")
PRECISIONS = ("fp8", "bf16")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of one precision on one number of devices.

    Attributes:
      found: the plan that the search found.
      hand: plans written by hand, with the plans of the ablation.
      checked: the plans whose tokens are compared with the sequential step's.
      other_tokens: the step size that gives the noise floor.
      sizes: tokens of the sequential steps that are measured beside the plans.
      pages: pages of the KV cache.
      sequences: requests of `bench throughput`, and its `max_num_seqs`.
      decode_sizes: step sizes without prefill in `bench throughput`.
      shipped: the plan of `bench throughput` if the engine ships one that is not sequential.
    """

    found: str
    hand: tuple[str, ...]
    checked: tuple[str, ...]
    other_tokens: int
    sizes: tuple[int, ...]
    pages: int
    sequences: int
    decode_sizes: str = "128,256,384,512"
    shipped: Path | None = None


SETTINGS = {
    (2, "fp8"): Setting(
        "searched/tp2-fp8.json",
        (
            "tp2-fp8/products-copied.json",
            "tp2-fp8/sequential-copied.json",
            "tp2-fp8/ablation-nano-batches.json",
            "tp2-fp8/ablation-memory.json",
            "tp2-fp8/four-qkv-copied.json",
        ),
        ("searched/tp2-fp8.json", "tp2-fp8/products-copied.json"),
        1024,
        (1536, 2048, 2560),
        17_000,
        600,
        "128,256,384,512,640",
        SHIPPED / "h200-llama-3-70b-tp2-float8_e4m3fn.json",
    ),
    (2, "bf16"): Setting(
        "searched/tp2-bfloat16.json",
        ("tp2-bf16/two-copied.json", "tp2-bf16/products-copied.json"),
        ("tp2-bf16/two-copied.json", "tp2-bf16/products-copied.json"),
        768,
        (640, 768, 896, 1024),
        6_200,
        256,
        "64,128,256",
    ),
    (4, "fp8"): Setting(
        "searched/tp4-fp8.json",
        (
            "tp4-fp8/two-swapped.json",
            "tp4-fp8/sequential-swapped.json",
            "tp4-fp8/ablation-nano-batches.json",
            "tp4-fp8/ablation-memory.json",
            "tp4-fp8/four-qkv-swapped.json",
        ),
        ("searched/tp4-fp8.json", "tp4-fp8/two-swapped.json"),
        2048,
        (2048, 3072, 4096),
        40_000,
        1200,
        "256,512,768,1024,1280",
        SHIPPED / "h200-llama-3-70b-tp4-float8_e4m3fn.json",
    ),
    (4, "bf16"): Setting(
        "searched/tp4-bfloat16.json",
        (
            "tp4-bf16/two-swapped.json",
            "tp4-bf16/sequential-swapped.json",
            "tp4-bf16/ablation-nano-batches.json",
            "tp4-bf16/ablation-memory.json",
            "tp4-bf16/four-qkv-swapped.json",
        ),
        ("searched/tp4-bfloat16.json", "tp4-bf16/two-swapped.json"),
        1024,
        (1536, 2048, 2560),
        17_500,
        600,
        "128,256,384,512,640",
        SHIPPED / "h200-llama-3-70b-tp4-bfloat16.json",
    ),
}


def files(names: Sequence[str]) -> str:
    """Return plan files as a flag's value."""
    return ",".join(str(PLANS / name) for name in names)


def command(what: str, precision: str, devices: int) -> list[str]:
    """Return the arguments of Python of one measurement. Raises: KeyError for devices without a setting."""
    s, narrow = SETTINGS[devices, precision], precision == "fp8"
    report = f"{what}-tp{devices}-{precision}.json"
    common = ["--model", "llama-3-70b", "--tensor_parallel_size", str(devices)]
    out = ["--output_json", str(FOLDER / report)]
    if what == "check":
        own = ["--plans", files(s.checked), "--other_tokens", str(s.other_tokens)]
        few = [] if narrow and devices > 2 else ["--sequences", "400"]
        module = ["-m", "benchmarks.check_plan"]
        return [*module, *common, *(["--fp8"] if narrow else []), *own, *few, *out]
    kv = ["--quantization", "fp8", "--kv_cache_dtype", "fp8"] if narrow else []
    memory = ["--gpu_memory_utilization", "0.92" if narrow or devices > 2 else "0.95"]
    engine = ["--load_format", "dummy", *common, *kv, *memory, "--num_kv_pages", str(s.pages)]
    if what in ("windows", "sharegpt"):
        like = ["--workload", "lognormal:246/322", "--max_num_seqs", "2560", "--max_model_len", "4096"]
        plans = ["--found", files([s.found]), "--plans", files(s.hand)]
        sizes = ["--tokens", ",".join(map(str, s.sizes))]
        workload = like if what == "sharegpt" else ["--workload", "1024/512"]
        return ["-m", "benchmarks.plan_windows", *engine, *plans, *sizes, *workload, *out]
    lengths = ["--input_len", "1024", "--output_len", "512", "--num_requests", str(s.sequences)]
    seqs = ["--max_num_seqs", str(s.sequences), "--max_model_len", "4096"]
    named = files([s.found]) if s.shipped is None else str(s.shipped)
    plan = ["--plan", named, "--step_sizes", s.decode_sizes, "--compare_sequential"]
    copied = ["--kv_offloading_size", "48", "--enable_prefix_caching"]
    tier = copied if what == "offload" else ["--noenable_prefix_caching"]
    return ["-m", "jaxflow.bench", "throughput", *engine, *lengths, *seqs, *tier, *plan, *out]


def main(arguments: Sequence[str]) -> int:
    kinds = {f"{what}-{precision}": (what, precision) for precision in PRECISIONS for what in WHAT}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor_parallel_size", type=int, required=True, choices=(2, 4))
    add_flags(parser, list(kinds))
    given = parser.parse_args(arguments)
    devices = given.tensor_parallel_size
    return run_all(given, {name: command(*kind, devices) for name, kind in kinds.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

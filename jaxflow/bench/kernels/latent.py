"""Benchmark cases of latent attention: DeepSeek-V3's 128 heads on one device, and its 16 on each of 8."""

import functools

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from pallas_kernels.attention.latent import gpu_check as latent
from pallas_kernels.attention.latent import gpu_check_chunks as latent_chunks
from pallas_kernels.attention.latent import gpu_check_up as prefill

# Of the bound that binds: 55 % of the datasheet's FLOP with 128 heads, 70 % of the stream with 16.
_FLOPS_PER_S, _BYTES_PER_S = 0.55 * latent.FLOPS_PER_S, 0.7 * latent.STREAM_BYTES_PER_S


def _decode(batch: int, mean: int, heads: int, unit: str) -> dict[str, Implementation]:
    """Prepare the kernel and XLA's products. The work of a call is the bytes that it reads, or its FLOP."""
    lengths = latent.lengths_of(batch, mean)
    amount = latent.read_bytes(lengths) if unit == "TB/s" else latent.flop(lengths, heads)
    programs, calls = latent.programs(batch, mean, heads)
    return {name: Implementation(program, calls, amount) for name, program in programs.items()}


def _group(name: str, heads: int, unit: str, rate: float) -> KernelGroup:
    return KernelGroup(
        name,
        unit,
        tuple(
            KernelCase(
                f"{batch} x mean {mean}",
                functools.partial(_decode, batch, mean, heads, unit),
                rate=rate if batch > 1 else None,  # one row is bound by latency
            )
            for batch in latent.BATCHES
            for mean in latent.MEANS
        ),
        on_request=True,
    )


def _chunks(case: str) -> dict[str, Implementation]:
    """Prepare the kernel and XLA's products of a step's chunks. The work of a call is its FLOP."""
    programs, calls = latent_chunks.programs(case)
    amount = latent_chunks.work_of(case)
    return {name: Implementation(program, calls, amount) for name, program in programs.items()}


def _prefill(case: str) -> dict[str, Implementation]:
    """Prepare both forms and XLA's. The work of a call is the FLOP with keys and values by head."""
    amount = prefill.flop(case)["mosaic"]
    return {name: Implementation(run, prefill.CALLS, amount) for name, run in prefill.programs(case).items()}


def _prefill_group(heads: int) -> KernelGroup:
    cases = [case for case, (of_case, _) in prefill.CASES.items() if of_case == heads]
    made = tuple(KernelCase(case, functools.partial(_prefill, case)) for case in cases)
    return KernelGroup(f"latent_prefill_{heads}", "TFLOP/s", made, on_request=True)


GROUPS = (
    _group("latent_decode_128", 128, "TFLOP/s", _FLOPS_PER_S),
    _group("latent_decode_16", 16, "TB/s", _BYTES_PER_S),
    KernelGroup(
        "latent_chunk",
        "TFLOP/s",
        tuple(KernelCase(case, functools.partial(_chunks, case)) for case in latent_chunks.CASES),
        on_request=True,
    ),
    _prefill_group(128),
    _prefill_group(16),
)

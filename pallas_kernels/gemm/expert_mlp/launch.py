"""The launch of the kernel for both products of a mixture's experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp.form import MlpForm
from pallas_kernels.gemm.expert_mlp.form import scratch as scratch_of
from pallas_kernels.gemm.expert_mlp.kernel import multiply
from pallas_kernels.hopper.layouts import LANE
from pallas_kernels.hopper.limits import SMS, sms_of
from pallas_kernels.quantized import BLOCK_ROWS, Quantized
from pallas_kernels.this_device import this_device


def launch(
    form: MlpForm,
    rows: int,
    listed: list[jax.Array],
    arrived: jax.Array | None,
    x: jax.Array | Quantized,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    *,
    sms: int,
    split: bool,
    interpret,
) -> list[jax.Array]:
    """Return the result [rows, D], and the places of few tokens.

    listed: the tiles of rows, or a routing. arrived: a counter of 0 for each tile. split: run a kernel for
    each product, as the interpreter always does.
    """
    assert form.up is not None and form.down is not None  # of both products
    width = form.up.n // 2
    inner = [jax.ShapeDtypeStruct((form.inner_rows * rows, width), form.dtype)]
    if form.quantized:
        inner.append(jax.ShapeDtypeStruct((width // BLOCK_ROWS, rows), jnp.float32))
    results = [jax.ShapeDtypeStruct((rows, form.down.n), jnp.bfloat16)]
    if form.few is not None:
        results.append(jax.ShapeDtypeStruct((form.few.tokens, form.few.chosen), jnp.int32))
    first, second = [*_arrays(x), *_arrays(w_up)], _arrays(w_down)

    def kernel(part: MlpForm, out_type: list, name: str):
        kind = f"{'few_' if form.few else ''}{'fp8_' if form.quantized else ''}"
        return plgpu.kernel(
            functools.partial(multiply, form=part),
            out_type=out_type,
            grid=(sms,),
            grid_names=("worker",),
            num_threads=2,
            thread_name="wg",
            scratch_types=scratch_of(part),
            compiler_params=LANE,
            kernel_name=f"expert_{name}_{kind}{sms}_{form.tile.rows}",
            interpret=interpret,
        )

    if not split and interpret is None:
        assert arrived is not None
        _, *found = kernel(form, [*inner, *results], "mlp")(*listed, arrived, *first, *second)
        return found[len(inner) - 1 :]
    a = kernel(dataclasses.replace(form, down=None), inner, "up_gate")(*listed, *first)
    return list(kernel(dataclasses.replace(form, up=None), results, "down")(*listed, *a, *second))


def resident(sms: int | None) -> int:
    """Return the number of CTAs: as many as may be resident, and no more than the device has SMs."""
    return min(sms_of(sms), this_device().sms or SMS)


def _arrays(one: jax.Array | Quantized) -> list[jax.Array]:
    """Return the matrix of an operand, with the rows of all experts, and its scales in e4m3."""
    if isinstance(one, Quantized):
        return [one.values.reshape(-1, one.shape[-1]), one.scale.reshape(-1)]
    return [one.reshape(-1, one.shape[-1])]

"""Both products of a mixture's experts in one kernel for Hopper: gates, activation and down.

A decode step reads the weights of many experts for few rows each. Two products, with a quantization between
them in e4m3, start and drain two or three times. Here a worker computes its tiles of the first product and
goes on with those of the second one, whose weights it copies before their rows are there.

A tile of the second product waits for all columns of its rows: each worker counts a finished tile of the
first product. All workers must be resident, so the grid has at most as many CTAs as the device has SMs.
"""

from typing import Any

import jax

from pallas_kernels.gemm.expert_mlp.form import DEPTH_BYTES, MlpForm, mlp_tile
from pallas_kernels.gemm.expert_mlp.launch import launch, resident
from pallas_kernels.gemm.expert_mlp.limits import GATE_BLOCKS, TALLEST, supports
from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.grouped.kernel import GroupedForm
from pallas_kernels.gemm.grouped.tiles import check_operands
from pallas_kernels.quantized import BLOCK, Quantized


def expert_mlp(
    x: jax.Array | Quantized,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    split: bool = False,
    depth: int | None = None,
    interpret=None,
) -> jax.Array:
    """Return down(act(gate(x)) · up(x)) of each row's expert, summed in float32.

    The reference implementation is `pallas_kernels.gemm.expert_mlp.reference.expert_mlp`.

    Args:
      x: [M, K] bfloat16, or e4m3 with scales [M]; rows in the order of `groups`.
      w_up: [E, 2 F, K] in x's dtype, in alternating blocks of `gate_block` gates and ups; e4m3 has scales
        [E, 2 F].
      w_down: [E, D, F] in x's dtype; e4m3 has scales [E, D].
      groups: from `sort_rows`, in tiles of at most 32 rows. The kernel changes `arrived`.
      activation: silu, gelu_tanh, relu or None.
      sms: CTAs of the persistent grid, which must all be resident, 1 to 132; None: all.
      depth: columns of a stage in shared memory, a multiple of 128 bytes; None: 256 bytes.
      split: run one kernel for each product, which wait for nothing. The interpreter always does.
    Returns:
      [M, D] bfloat16; rows after the last tile are not written.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    (m, k), (experts, n, _), columns, sms = x.shape, w_up.shape, w_down.shape[1], resident(sms)
    check_operands(x, w_up, activation)
    if (
        not supports(groups.rows, w_up, w_down, gate_block)
        or w_up.shape[2] != k
        or w_down.shape[0] != experts
    ):
        given = f"x {list(x.shape)}, weights {list(w_up.shape)} and {list(w_down.shape)}, {gate_block=}"
        raise ValueError(
            f"{given}, tiles of {groups.rows} rows: accepted are [M, K], [E, 2 F, K] and [E, D, F] in "
            f"bfloat16 or e4m3, K and F multiples of {BLOCK}, D of 64, gate blocks {GATE_BLOCKS}, "
            f"tiles of up to {TALLEST} rows"
        )
    quantized = isinstance(x, Quantized)
    tile = mlp_tile(groups.rows, depth or DEPTH_BYTES // (1 if quantized else 2), quantized)
    form = MlpForm(
        GroupedForm(tile, n, activation, gate_block),
        GroupedForm(tile, columns, None, None),
        quantized=quantized,
        interpret=interpret is not None,
    )
    listed = [groups.experts, groups.starts, groups.ends, groups.count]
    how: dict[str, Any] = {"sms": sms, "split": split, "interpret": interpret}
    (y,) = launch(form, m, listed, groups.arrived, x, w_up, w_down, **how)
    return y

"""Both products of the experts of up to 8 tokens in bfloat16, without a sort of their rows.

Each expert that a token chooses multiplies the rows of all tokens: wgmma has at least 8 columns in any case.
So no row is copied to its experts. Each thread lists the experts itself (`touched`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gemm.expert_mlp.form import DEPTH_BYTES, MlpForm, mlp_tile
from pallas_kernels.gemm.expert_mlp.launch import launch, resident
from pallas_kernels.gemm.expert_mlp.limits import GATE_BLOCKS, MOST_TOKENS, supports_few
from pallas_kernels.gemm.expert_mlp.touched import FewTokens
from pallas_kernels.gemm.grouped.kernel import GroupedForm
from pallas_kernels.gemm.grouped.tiles import ALIGN, check_operands
from pallas_kernels.quantized import BLOCK


def few_expert_mlp(
    x: jax.Array,
    experts: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    used: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    split: bool = False,
    depth: int | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Return down(act(gate(x)) · up(x)) of each token at each of its experts, and the places of these rows.

    The reference implementation is `pallas_kernels.gemm.expert_mlp.reference.few_expert_mlp`.

    Args:
      x: [T, K] bfloat16, 1 to 8 tokens. experts: [T, e] int32, all different in a row.
      w_up: [E, 2 F, K] bfloat16, in alternating blocks of `gate_block` gates and ups. w_down: [E, D, F].
      used: int32, the number of tokens that are used, from the first one; None: all. The rest is padding,
        and its experts are not read.
      activation, sms, split, depth: as for `expert_mlp`.
    Returns:
      Rows [M, D] bfloat16, summed in float32, M = 8 min(T e, E), and the row of each pair [T, e] int32.
      All other rows are undefined. A pair of padding has no row: its place is M.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    (tokens, k), (number, n, _), columns, sms = x.shape, w_up.shape, w_down.shape[1], resident(sms)
    check_operands(x, w_up, activation)
    alike = (w_up.shape[2], w_down.shape[0], experts.shape[0]) == (k, number, tokens)
    if not alike or not supports_few(tokens, w_up, w_down, gate_block):
        given = f"x {list(x.shape)}, weights {list(w_up.shape)} and {list(w_down.shape)}, {gate_block=}"
        raise ValueError(
            f"{given}: accepted are [T, K], [E, 2 F, K] and [E, D, F] in bfloat16, T up to {MOST_TOKENS}, "
            f"K and F multiples of {BLOCK}, D of 64, gate blocks {GATE_BLOCKS}"
        )
    tile = mlp_tile(ALIGN, depth or DEPTH_BYTES // 2, quantized=False)
    few = FewTokens(tokens, experts.shape[1], number, padded=used is not None)
    form = MlpForm(
        GroupedForm(tile, n, activation, gate_block),
        GroupedForm(tile, columns, None, None),
        quantized=False,
        interpret=interpret is not None,
        few=few,
    )
    listed = [experts.astype(jnp.int32)] + ([] if used is None else [used.astype(jnp.int32).reshape(1)])
    # The kernel counts in this array and leaves zeros, so all layers of a step share the array.
    arrived = jnp.zeros(few.most, jnp.int32)
    how: dict[str, Any] = {"sms": sms, "split": split, "interpret": interpret}
    y, places = launch(form, few.most * ALIGN, listed, arrived, x, w_up, w_down, **how)
    return y, places

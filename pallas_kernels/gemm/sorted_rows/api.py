"""The sort of a step's rows by expert for Hopper: the groups of a routing, and their rows.

XLA needs five kernels for the groups of few tokens, and one or two for the gather of the rows. With experts
in e4m3 another kernel quantizes the rows first. One kernel sorts up to 128 tokens (`adds`). Two kernels sort
up to 2,048 (`counted`).

Padding after the last token gets no rows, because its experts' weights would be read for nothing. A step of
one token has a size of 8, and would read up to twice the experts. Nor do the pairs of experts that other
devices hold.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm.grouped import api as grouped
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.tiles import TALLEST
from pallas_kernels.gemm.sorted_rows import reference
from pallas_kernels.gemm.sorted_rows.adds import sort_by_adds
from pallas_kernels.gemm.sorted_rows.counted import sort_counted
from pallas_kernels.gemm.sorted_rows.form import LANES
from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.hopper.row_parts import takes_row
from pallas_kernels.pointwise.quantize import api as quantize_api
from pallas_kernels.pointwise.quantize.reference import quantize_blocks
from pallas_kernels.quantized import Quantized

MOST_TOKENS = 128  # a CTA counts the pairs of all tokens; XLA was faster for 256 tokens of Mixtral-8x7B
MOST_COUNTED = 2048  # tokens that two kernels sort
MOST_EXPERTS = 512  # 4 counts in a thread's registers


def supports(
    tokens: int, chosen: int, num_experts: int, columns: int, most: int = MOST_TOKENS, blocks: bool = False
) -> bool:
    """Return whether the kernels sort rows of so many columns. A tile has at most `TALLEST` rows.

    most: the largest number of tokens. blocks: whether each 128 columns of a row get a scale.
    """
    whole = columns % LANES == 0 if blocks else takes_row(columns)
    few = 0 < tokens <= most and 0 < chosen <= num_experts <= MOST_EXPERTS
    low = tokens * chosen <= TALLEST * num_experts
    return few and low and whole and 0 < columns <= quantize_api.WIDEST


def sort_rows(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    quantize: bool = False,
    blocks: bool = False,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
    sms: int | None = None,
    max_tokens: int = MOST_TOKENS,
    held_max_tokens: int = 0,
    interpret=None,
) -> tuple[Groups, jax.Array | Quantized]:
    """Return the groups of a routing, and the row of x for each row of the groups.

    The reference implementation is `pallas_kernels.gemm.sorted_rows.reference.sort_rows`. The groups suit
    `pallas_kernels.gemm.grouped.api.grouped_gemm`. XLA lists the groups and gathers the rows where `supports`
    is False, and of more tokens than a kernel may sort. Unused rows, pairs and tiles are undefined.

    Args:
      x: [T, D] bfloat16, D a multiple of 64, up to 16,384 with `quantize`.
      experts: [T, e] int32, the chosen experts of each token, all different. num_experts: of the model.
      quantize: return the rows in e4m3 with a scale [M] for each row.
      blocks: return the rows in e4m3 with a scale [M, D / 128] for each 128 columns; not with `quantize`. XLA
        quantizes them, after the sort where the kernel sorts.
      held: the experts that get rows; None: all.
      used: int32, the number of tokens that get rows, from the first one; None: all.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: all.
      max_tokens, held_max_tokens: the largest steps that kernels sort, without and with `held`. Up to
        `MOST_COUNTED`, and with `blocks` up to `MOST_TOKENS`.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    (tokens, columns), chosen, full = x.shape, experts.shape[1], sms_of(sms)
    if x.dtype != jnp.bfloat16 or experts.shape[0] != tokens:
        given = f"x {x.dtype}{list(x.shape)}, experts {list(experts.shape)}"
        raise ValueError(f"{given}: accepted are bfloat16 [T, D] and the experts of T tokens")
    most = min(max_tokens if held is None else held_max_tokens, MOST_TOKENS if blocks else MOST_COUNTED)
    if not supports(tokens, chosen, num_experts, columns, most, blocks):
        return sort_by_xla(
            x,
            experts,
            num_experts,
            quantize=quantize,
            blocks=blocks,
            held=held,
            used=used,
            sms=sms,
            interpret=interpret,
        )
    sort = sort_by_adds if tokens <= MOST_TOKENS else sort_counted
    groups, rows = sort(
        x, experts, num_experts, quantize=quantize, held=held, used=used, sms=full, interpret=interpret
    )
    if quantize:
        return groups, Quantized(*rows)
    return groups, quantize_blocks(rows[0]) if blocks else rows[0]


def sort_by_xla(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    quantize: bool = False,
    blocks: bool = False,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
    sms: int | None = None,
    interpret=None,
) -> tuple[Groups, jax.Array | Quantized]:
    """Return what `sort_rows` returns, with groups and a gather by XLA.
    Unused rows are other tokens' rows.
    """
    groups = grouped.list_groups(experts, num_experts, held, used)
    rows = quantize_blocks(x) if blocks else x
    if quantize:
        rows = quantize_api.quantize_rows(x, sms=sms, interpret=interpret)
    return groups, reference.gather(rows, groups)

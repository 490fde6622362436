"""A draw under min-p, top-k and top-p, for Hopper, without a sort of the vocabulary.

A kernel finds the limit of each row in two passes. A CTA has one row. The first pass counts the logits in
bins of equal width below the row's largest logit. These counts bound the number and the weight of the logits
above each bin. So they name the few bins that can contain the limits. The second pass copies the logits of
these bins to shared memory, and sums the weights of the logits above them. A bisection over the bits of the
limit then finds each limit among the copies.

Some limits lie below all bins, and some rows have more copies than there is room for. `pivots.limit` searches
these rows in more passes. The kernel `draw` then draws from the logits that are not below the limit.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.pointwise.draw.api import draw
from pallas_kernels.pointwise.sample import pivots, reference
from pallas_kernels.pointwise.sample.top import finite

BINS = 2048
_HEATS = 32.0  # the depth of the bins below the largest logit, in temperatures
_LOGITS = 32.0  # the least depth of the bins with top-k, in logits
_UNIT = 128 * 4  # logits that a CTA reads at a time
_TILES = 4  # units whose reads overlap
_ROOM = 64  # copies of a thread
_SLACK = 3e-5  # larger than the rounding of a row's sum of weights
_LOG2E = 1.4426950408889634
_DYNAMIC = -(2**31)  # of a getelementptr: this index is an operand

_FOUR = plgpu.Layout.WG_STRIDED((_UNIT,), 4)
_ONE = plgpu.Layout.WG_STRIDED((128,), 1)


def draw_filtered(
    x: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    interpret=None,
) -> jax.Array:
    """Return the token of the largest x + temperature · noise in each row, among those that the filters keep.

    The reference implementation is `pallas_kernels.pointwise.sample.reference.draw_filtered`, which describes
    the arguments. It also runs here for fewer than 512 columns, and for columns that are not a multiple of 4.
    """
    n = x.shape[1]
    if n < _UNIT or n % 4:
        return reference.draw_filtered(x, temperature, keys, min_p, top_k, top_p)
    peak, heat = finite(x.max(-1)), reference.heat_of(temperature)
    cuts_count = (top_k > 0) & (top_k < n)
    k = jnp.where(cuts_count, top_k, n).astype(jnp.float32)  # a float32 counts a vocabulary exactly
    floor = peak + heat * jnp.log(min_p)  # the logit with min_p times the largest mass
    wanted = (temperature > 0) & (cuts_count | (top_p < 1.0))
    limit = token_limits(x, peak, heat, floor, k, top_p, wanted, interpret=interpret)
    return draw(x, temperature, keys, jnp.where(temperature > 0, limit, -jnp.inf), interpret=interpret)


def token_limits(
    x: jax.Array,
    peak: jax.Array,
    heat: jax.Array,
    floor: jax.Array,
    k: jax.Array,
    p: jax.Array,
    wanted: jax.Array,
    *,
    interpret=None,
) -> jax.Array:
    """Return the smallest logit that min-p, top-k and top-p keep in each row.

    `pallas_kernels.pointwise.sample.limits.token_limits` describes the arguments, and computes the same.

    Args:
      x: [R, V] float32, V a multiple of 4 and at least 512.
      peak, heat, floor, k, p: [R] float32. wanted: [R] bool: rows to search.
    Returns:
      [R] float32; the floor of rows that are not searched.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    rows, n = x.shape
    if n < _UNIT or n % 4 or x.dtype != jnp.float32:
        raise ValueError(
            f"logits are {x.dtype}{list(x.shape)}: accepted is float32 [R, V], V a multiple of 4 and at "
            f"least {_UNIT}"
        )
    return plgpu.kernel(
        functools.partial(_row, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=(
            plgpu.SMEM((BINS + _UNIT,), jnp.int32),
            plgpu.SMEM((_ROOM + 1, 128), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="token_limits",
        interpret=interpret,
    )(x, peak, heat, floor, k, p, wanted.astype(jnp.int32))


def _row(
    x_ref, peak_ref, heat_ref, floor_ref, k_ref, p_ref, wanted_ref, limit_ref, counts, copies, *, interpret
):
    """Write the limit of this CTA's row."""
    row = lax.axis_index("row")
    floor = floor_ref[row]

    @pl.when(wanted_ref[row] == 0)
    def _():
        limit_ref[row] = floor

    @pl.when(wanted_ref[row] != 0)
    def _():
        peak, heat, k, p = peak_ref[row], heat_ref[row], k_ref[row], p_ref[row]
        x = x_ref.at[row]
        limit, known, total = _by_bins(x, peak, heat, floor, k, p, counts, copies, interpret)
        by_pivots = functools.partial(pivots.limit, x, peak, heat, total, floor, k, p)
        limit_ref[row] = lax.cond(known, lambda: limit, by_pivots)


def _by_bins(x_ref, peak, heat, floor, k, p, counts, copies, interpret):
    """Return the limit of a row, whether it is known, and the weight of all logits."""
    n = x_ref.shape[0]
    counts_k, cuts_mass = k < n, p < 1.0
    reach = jnp.maximum(_HEATS * heat, jnp.where(counts_k, _LOGITS, 0.0))
    scale, rate = BINS / reach, _LOG2E / heat

    def bin_of(x):
        """Return the bins of logits; BINS is for logits below all bins."""
        away = jnp.minimum((peak - x) * scale, float(BINS))
        return jnp.maximum(away, 0.0).astype(jnp.int32)

    def weight(x):
        return jnp.exp2((x - peak) * rate)

    total = _count(x_ref, counts, bin_of, weight, interpret)
    below = _Below(counts, rate / scale)

    # The bin of the limit before top-p; BINS if that limit is below all bins.
    k_bin = lax.cond(counts_k, lambda: _first(lambda b: below.count(b) >= k), lambda: jnp.int32(BINS))
    low_bin = jnp.minimum(k_bin, bin_of(floor))
    cut = low_bin < BINS

    def nucleus_bins():
        """Return the first and the last bin in which the limit of top-p may lie."""
        least = jnp.where(cut, below.least(low_bin - 1), total)
        most = jnp.where(cut, below.most(low_bin), total)
        all_least, all_most = below.least(BINS - 1), below.most(BINS - 1)

        def at_most(b):  # the weight of bins 0 to b
            rest = jnp.where(cut, jnp.inf, total - (all_least - below.least(b)))
            return jnp.minimum(below.most(b), rest)

        def at_least(b):
            rest = jnp.where(cut, 0.0, total - (all_most - below.most(b)))
            return jnp.maximum(below.least(b), rest)

        first = _first(lambda b: at_most(b) >= least * p * (1 - _SLACK))
        last = _first(lambda b: at_least(b) >= most * p * (1 + _SLACK))
        last = jnp.minimum(jnp.minimum(last, low_bin), BINS - 1)
        return jnp.minimum(first, last), last

    first, last = lax.cond(cuts_mass, nucleus_bins, lambda: (jnp.int32(BINS + 1), jnp.int32(BINS + 1)))
    above_k = below.count(k_bin - 1)
    low_only = jnp.where(cut, low_bin, -1)
    held, above_low, above_first = _copy(x_ref, copies, bin_of, weight, low_only, first, last, interpret)
    rows = jnp.max(held)
    pick = functools.partial(_pick, copies, jnp.minimum(rows, _ROOM), held, bin_of)

    def ones(x):
        return jnp.full_like(x, 1.0)

    by_count = lax.cond(
        counts_k & (k_bin < BINS) & (k_bin == low_bin),
        lambda: pick(k_bin, k_bin, ones, k - above_k),
        lambda: jnp.float32(-jnp.inf),
    )
    low = jnp.maximum(floor, by_count)

    def nucleus():
        kept = lax.cond(
            cut,
            lambda: above_low + pick.func(*pick.args, low_bin, low_bin, weight, low, sums=True),
            lambda: total,
        )
        return pick(first, last, weight, kept * p - above_first)

    by_mass = lax.cond(cuts_mass, nucleus, lambda: jnp.float32(-jnp.inf))
    fits = rows <= _ROOM
    count_known = ~counts_k | (k_bin < BINS) | cuts_mass
    mass_known = ~cuts_mass | (by_mass > -jnp.inf) | (cut & (last == low_bin))
    return jnp.maximum(low, by_mass), fits & count_known & mass_known, total


class _Below:
    """The numbers and the weights of the logits in bins 0 to b, from the counts of the bins."""

    def __init__(self, counts, width):
        """width: of a bin, in powers of two of a weight."""
        lane = plgpu.broadcasted_iota(jnp.int32, (_UNIT,), 0, layout=_FOUR)
        self._bins = [lane + i * _UNIT for i in range(BINS // _UNIT)]
        starts = [pl.ds(i * _UNIT, _UNIT) for i in range(BINS // _UNIT)]
        self._counts = [plgpu.load(counts.at[at], layout=_FOUR).astype(jnp.float32) for at in starts]
        self._width = width

    def _sum(self, b, of_bin):
        terms = [
            jnp.where(bins <= b, of_bin(bins, counts), 0.0)
            for bins, counts in zip(self._bins, self._counts, strict=True)
        ]
        return jnp.sum(functools.reduce(jnp.add, terms))

    def count(self, b):
        return self._sum(b, lambda _, counts: counts)

    def most(self, b):
        return self._sum(b, lambda bins, counts: counts * jnp.exp2(bins.astype(jnp.float32) * -self._width))

    def least(self, b):
        return self.most(b) * jnp.exp2(-self._width)


def _first(reached):
    """Return the first bin for which a condition holds, which holds for all later ones; BINS for none."""

    def halve(_, state):
        low, high = state
        middle = lax.shift_right_logical(low + high, 1)
        yes = reached(middle)
        return jnp.where(yes, low, jnp.minimum(middle + 1, high)), jnp.where(yes, middle, high)

    return lax.fori_loop(0, BINS.bit_length(), halve, (jnp.int32(0), jnp.int32(BINS)))[0]


def _sweep(x_ref, add, state):
    """Return the state after add(logits [512], state) for all logits of a row, -inf in place of missing
    ones."""
    (n,) = x_ref.shape
    units = n // _UNIT
    tiles = min(_TILES, units)
    groups = units // tiles

    def read(unit):
        return plgpu.load(x_ref.at[pl.ds(unit * _UNIT, _UNIT)], layout=_FOUR)

    def read_group(group):
        return [read(group * tiles + i) for i in range(tiles)]

    def step(i, carry):
        xs, state = carry
        following = read_group(jnp.minimum(i + 1, groups - 1))  # loaded while xs are processed
        for x in xs:
            state = add(x, state)
        return following, state

    _, state = lax.fori_loop(0, groups, step, (read_group(0), state))
    state = lax.fori_loop(groups * tiles, units, lambda i, state: add(read(i), state), state)
    if n % _UNIT:  # the last unit overlaps the unit before it
        x = plgpu.load(x_ref.at[pl.ds(n - _UNIT, _UNIT)], layout=_FOUR)
        seen = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_FOUR) < _UNIT - n % _UNIT
        state = add(jnp.where(seen, -jnp.inf, x), state)
    return state


def _count(x_ref, counts, bin_of, weight, interpret):
    """Count the logits of a row in bins, and return the weight of all."""
    zeros = plgpu.layout_cast(jnp.zeros((_UNIT,), jnp.int32), _FOUR)
    for start in range(0, BINS + _UNIT, _UNIT):
        counts[pl.ds(start, _UNIT)] = zeros
    _meet(interpret)

    def add(x, total):
        _count_bins(counts, bin_of(x), interpret)
        return total + weight(x)

    total = _sweep(x_ref, add, plgpu.layout_cast(jnp.zeros((_UNIT,), jnp.float32), _FOUR))
    _meet(interpret)
    return jnp.sum(total)


def _copy(x_ref, copies, bin_of, weight, low, first, last, interpret):
    """Copy the logits of bin `low` and of bins `first` to `last`.

    Returns: the number of each thread's copies [128], and the weights of the logits above either range.
    """
    zeros = plgpu.layout_cast(jnp.zeros((_UNIT,), jnp.float32), _FOUR)

    def add(x, state):
        held, above_low, above_first = state
        bins, w = bin_of(x), weight(x)
        inside = (bins == low) | ((bins >= first) & (bins <= last))
        held = _append(copies, x, jnp.where(inside, 1, 0), held, interpret)
        return (
            held,
            above_low + jnp.where(bins < low, w, 0.0),
            above_first + jnp.where(bins < first, w, 0.0),
        )

    none = plgpu.layout_cast(jnp.zeros((128,), jnp.int32), _ONE)
    held, above_low, above_first = _sweep(x_ref, add, (none, zeros, zeros))
    _meet(interpret)
    return held, jnp.sum(above_low), jnp.sum(above_first)


def _pick(copies, rows, held, bin_of, first, last, weight, target, sums=False):
    """Return the largest copy v in bins `first` to `last` such that the copies from v on weigh at least the
    target; -inf if all weigh less.

    sums: return instead the weight of these bins' copies of at least `target`.
    """

    def over_copies(of_copies, start, combine):
        def step(i, state):
            x = plgpu.load(copies.at[i], layout=_ONE)
            bins = bin_of(x)
            there = (i < held) & (bins >= first) & (bins <= last)
            return combine(state, of_copies(x, there))

        return lax.fori_loop(0, rows, step, plgpu.layout_cast(jnp.full((128,), start, jnp.float32), _ONE))

    def weigh(value):
        found = over_copies(lambda x, there: jnp.where(there & (x >= value), weight(x), 0.0), 0.0, jnp.add)
        return jnp.sum(found)

    if sums:
        return weigh(target)
    least = jnp.min(over_copies(lambda x, there: jnp.where(there, x, jnp.inf), jnp.inf, jnp.minimum))
    most = jnp.max(over_copies(lambda x, there: jnp.where(there, x, -jnp.inf), -jnp.inf, jnp.maximum))

    def halve(state):
        low, high = state
        middle = low + lax.shift_right_logical(high - low + 1, jnp.int32(1))
        reached = weigh(_value(middle)) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    def search():
        ends = (_order(least), _order(most))
        return _value(lax.while_loop(lambda state: state[0] < state[1], halve, ends)[0])

    return lax.cond(weigh(least) >= target, search, lambda: jnp.float32(-jnp.inf))


def _order(x):
    """Return integers that compare like float32 numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & 0x7FFFFFFF)


def _value(order):
    """Return the float32 number of an integer of `_order`."""
    bits = order ^ (lax.shift_right_arithmetic(order, jnp.int32(31)) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _meet(interpret):
    """Wait for the warpgroup's threads, so that each sees the others' writes to shared memory."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: mgpu.utils.warpgroup_barrier())()


def _element(ref, index, dtype):
    """Return a pointer to an element of a reference in shared memory, counted from its start."""
    base = mgpu.utils.memref_ptr(ref)
    return llvm.getelementptr(base.type, base, [index], [_DYNAMIC], dtype, llvm.GEPNoWrapFlags.none)


def _count_bins(counts, bins, interpret):
    """Add 1 to the count of each bin in bins [512]."""
    if interpret:
        counts[...] = counts[...].at[bins].add(1)
        return

    @plgpu.inline_mgpu(arg_types=(_FOUR, plgpu.RefType()))
    def add(_, bins, ref):
        i32 = ir.IntegerType.get_signless(32)

        def one(b, _):
            llvm.atomicrmw(
                llvm.AtomicBinOp.add, _element(ref, b, i32), mgpu.c(1, i32), llvm.AtomicOrdering.monotonic
            )

        bins.foreach(one)

    add(bins, counts)  # pyright: ignore[reportCallIssue]


def _append(copies, x, inside, held, interpret):
    """Append a thread's logits with inside = 1 to its copies, and return its new number of copies.

    x, inside: [512]. held: [128]. Copies beyond `_ROOM` are lost. A logit that is not inside is stored, too,
    and the next one overwrites it: this takes no branch.
    """
    if interpret:
        lanes, kept = jnp.arange(128), copies[...]
        for i in range(4):
            kept = kept.at[jnp.minimum(held, _ROOM), lanes].set(x.reshape(128, 4)[:, i])
            held = held + inside.reshape(128, 4)[:, i]
        copies[...] = kept
        return held

    @plgpu.inline_mgpu(
        arg_types=(_FOUR, _FOUR, _ONE, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_ONE),
    )
    def put(_, x, inside, held, ref):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pick = lambda register, i: vector.extract(register, [], [i])
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        count = pick(held.registers.item(), 0)
        for values, flags in zip(x.registers.flat, inside.registers.flat, strict=True):
            for i in range(4):
                slot = arith.minui(count, mgpu.c(_ROOM, i32))
                at = arith.addi(arith.muli(slot, mgpu.c(128, i32)), thread)
                llvm.store(pick(values, i), _element(ref, at, f32))
                count = arith.addi(count, pick(flags, i))
        registers = held.registers.copy()
        registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), i32), [count])
        return mgpu.FragmentedArray(_registers=registers, _layout=held.layout, _is_signed=True)

    return put(x, inside, held, copies)  # pyright: ignore[reportCallIssue]

"""Persistent matrix product for Hopper: bfloat16 operands, float32 sums, and what follows the product done before it is stored.

`sms` CTAs work through a table of items (`gemm_tiles.schedule`): whole output tiles, then tiles cut along K so that all CTAs end together.
In a CTA one warpgroup copies the operands through a ring of stages and runs ahead over the borders of tiles; two compute half of the tile's
rows each. Both operands have K contiguous: the weight is wgmma's transposed right-hand side. Where gates and ups alternate, a warpgroup
holds both of a pair in its registers, so act(gate) · up costs no memory. A kernel that has the GPU to itself runs in clusters of two CTAs
whose tiles lie below each other: each brings half of the weight's tile for both, a third less for the L2 cache to send.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm_tiles import FIELDS, GemmPlan, GemmTile, gemm_plan
from pallas_kernels.paged import LANE, LOG2E, rows_of_eight
from pallas_kernels.tiles import SMS

_BOXES = 2  # pieces of a warpgroup's output on their way to memory
_ACTIVATIONS = (None, "silu", "gelu_tanh", "relu")


def supports(m: int, n: int, k: int, gate_block: int | None = None) -> bool:
    """Whether `dense_gemm` takes [m, k] x [n, k]: K and N in whole 128-byte rows of shared memory, any m."""
    gates = gate_block is None or (gate_block in (16, 32, 64) and n % (2 * gate_block) == 0)
    return min(m, n, k) > 0 and n % 64 == 0 and k % 64 == 0 and gates


def dense_gemm(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    out_dtype=None,
    sms: int | None = None,
    plan: GemmPlan | None = None,
    interpret=None,
) -> jax.Array:
    """act(x @ w.T + bias) + residual, summed in float32 (the twin: `reference.gemm`).

    Args:
      x: [M, K] bfloat16, K a multiple of 64. A copy is made where M is no multiple of 8.
      w: [N, K] bfloat16, N a multiple of 64.
      bias: [N], any float.
      residual: [M, N], or [M, N / 2] with gates, of the output's dtype.
      activation: silu, gelu_tanh, relu or None.
      gate_block: columns lie as blocks of so many (16, 32 or 64) gates, then as many ups, alternating; the result is act(gate) · up.
      out_dtype: bfloat16 or float32; None: x's.
      sms: CTAs of the persistent grid: how many SMs the kernel may take; None: all.
      plan: tile and schedule; None: `gemm_plan`'s.
    Returns:
      [M, N], or [M, N / 2] with gates.
    Raises:
      ValueError: for a shape, dtype or activation that the kernel does not take.
    """
    out_dtype, sms = jnp.dtype(out_dtype or x.dtype), sms or SMS
    _check(x, w, residual, activation, gate_block, out_dtype)
    m, x = x.shape[0], rows_of_eight(x)
    residual = None if residual is None else rows_of_eight(residual)
    n, k = w.shape
    plan = plan or gemm_plan(m, n, k, sms, gate_block)
    tile, slots = plan.tile, plan.schedule.slots
    whole_box = 128 // out_dtype.itemsize
    form = _Form(
        tile=tile,
        slots=slots,
        width=whole_box if gate_block is None else min(gate_block, whole_box),
        activation=activation,
        gate_block=gate_block,
        bias=bias is not None,
        residual=residual is not None,
        interpret=interpret is not None,
    )
    out = [jax.ShapeDtypeStruct((x.shape[0], n if gate_block is None else n // 2), out_dtype)]
    if slots:
        out.append(jax.ShapeDtypeStruct((slots * tile.cluster, 2, tile.rows // 2, tile.cols), jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(_multiply, form=form),
        out_type=out,
        grid=(plan.schedule.table.shape[0],),
        grid_names=("worker",),
        cluster=(tile.cluster,),
        cluster_names=("rank",),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(form, out_dtype),
        compiler_params=LANE,
        kernel_name=f"dense_gemm_{sms}_{tile.rows}x{tile.cols}",
        interpret=interpret,
    )
    behind = [v for v in (bias, residual) if v is not None]
    return kernel(jnp.asarray(plan.schedule.table), x, w, *behind)[0][:m]


def _check(x, w, residual, activation, gate_block, out_dtype):
    (m, k), (n, width) = x.shape, w.shape
    if k != width or not supports(m, n, k, gate_block):
        raise ValueError(f"{m=}, {n=}, k={k} and {width}, {gate_block=}: one k, n and k multiples of 64, blocks of 16, 32 or 64 or None")
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16 or out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtypes {x.dtype}, {w.dtype} -> {out_dtype}: bfloat16, to bfloat16 or float32")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{activation=}: one of {_ACTIVATIONS}")
    shape = (m, n if gate_block is None else n // 2)
    if residual is not None and (residual.shape != shape or residual.dtype != out_dtype):
        raise ValueError(f"residual {residual.dtype}{residual.shape}: {out_dtype}{shape}, as the result")


@dataclasses.dataclass(frozen=True)
class _Form:
    """What the kernel is compiled for; `width` columns of the output are stored together."""

    tile: GemmTile
    slots: int
    width: int
    activation: str | None
    gate_block: int | None
    bias: bool
    residual: bool
    interpret: bool

    @property
    def half(self) -> int:
        """Rows of a warpgroup."""
        return self.tile.rows // 2

    def pieces(self) -> list[tuple[int, int]]:
        """(row, column) of the 64 x width pieces of a warpgroup's sums that are stored (or of their gates)."""
        columns = self.width if self.gate_block is None else 2 * self.gate_block
        inside = range(0, columns, self.width) if self.gate_block is None else range(0, self.gate_block, self.width)
        return [(r, c + i) for r in range(0, self.half, 64) for c in range(0, self.tile.cols, columns) for i in inside]


def swizzled(width: int, itemsize: int) -> tuple:
    """The shared-memory form of matrices that TMA copies and wgmma reads: tiles of 8 rows, `width` elements of them together."""
    return (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * itemsize))  # pyright: ignore[reportAbstractUsage]


def _scratch(form: _Form, out_dtype) -> dict:
    tile, operand = form.tile, swizzled(64, 2)
    scratch = dict(  # noqa: C408
        x_s=plgpu.SMEM((tile.stages, tile.rows, tile.depth), jnp.bfloat16, transforms=operand),
        w_s=plgpu.SMEM((tile.stages, tile.cols, tile.depth), jnp.bfloat16, transforms=operand),
        o_s=plgpu.SMEM((2, _BOXES, 64, form.width), out_dtype, transforms=swizzled(form.width, out_dtype.itemsize)),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        # What a pair shares is overwritten when both are done with it.
        empty=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages)
        if tile.cluster == 1
        else plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=2, num_barriers=tile.stages),
    )
    return scratch | ({"read": plgpu.Barrier(num_barriers=2 * _BOXES)} if form.residual else {})


def _multiply(work_ref, x_ref, w_ref, *refs, form, x_s, w_s, o_s, full, empty, read=None):
    refs = list(refs)
    bias_ref = refs.pop(0) if form.bias else None
    residual_ref = refs.pop(0) if form.residual else None
    o_ref, part_ref = refs.pop(0), refs.pop(0) if form.slots else None
    wg = lax.axis_index("wg")
    # The interpreter has no semaphores, and runs the CTAs in an order in which none has to wait.
    given = pl.get_global(plgpu.SemaphoreType.REGULAR((2 * form.slots * form.tile.cluster,))) if form.slots and not form.interpret else None

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")  # 24 + 2 · 240 = 3 · 168, what the CTA was given
        _copy(form.tile, work_ref, x_ref, w_ref, x_s, w_s, full, empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        store = functools.partial(_store, form, wg, o_ref, o_s, part_ref, bias_ref, residual_ref, read)
        _compute(form, wg, work_ref, x_s, w_s, full, empty, part_ref, given, store)
        plgpu.wait_smem_to_gmem(0)


def for_items(work_ref, visit, step):
    """visit(step, *item) -> step for each of this worker's items; an item is read while the one before it is worked on."""
    worker, items = lax.axis_index("worker"), work_ref.shape[1]

    def item(i):
        return tuple(work_ref[worker, jnp.minimum(i, items - 1), field] for field in range(FIELDS))

    def one(i, state):
        own, step = state
        following = item(i + 1)
        return following, lax.cond(own[3] > 0, lambda step: visit(step, *own), lambda step: step, step)

    return lax.fori_loop(0, items, one, (item(0), step))[1]


def _copy(tile, work_ref, x_ref, w_ref, x_s, w_s, full, empty):
    """Brings the operands of every k step, as far ahead as there are stages."""
    stages, depth = jnp.int32(tile.stages), tile.depth
    shared = None if tile.cluster == 1 else "rank"

    def visit(step, row, column, first, count, *_):
        row = row * tile.cluster + lax.axis_index("rank")

        def copy(i, step):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            at = pl.ds((first + i) * depth, depth)
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row * tile.rows, tile.rows), at], x_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(column * tile.cols, tile.cols), at], w_s.at[slot], full.at[slot], collective_axes=shared)
            return step + 1

        return lax.fori_loop(0, count, copy, step)

    steps = for_items(work_ref, visit, jnp.int32(0))

    # Every arrival is waited for, also the last ones (a barrier that nobody watched is an error in the interpreter).
    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])


def _compute(form, wg, work_ref, x_s, w_s, full, empty, part_ref, given, store):
    """Sums this warpgroup's half of every item, and hands it over or stores it."""
    half, stages, cluster = form.half, jnp.int32(form.tile.stages), form.tile.cluster
    rank = lax.axis_index("rank")

    def visit(step, row, column, _, count, give, take, taken):
        def flag(part):
            return given.at[(part * cluster + rank) * 2 + wg]

        def product(acc):
            def multiply(i, step):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, x_s.at[slot, pl.ds(wg * half, half)], w_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(empty.at[lax.rem(step + stages - 1, stages)])

                return step + 1

            end = lax.fori_loop(0, count, multiply, step)
            y = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(end - 1, stages)])
            if not form.slots:
                store(y, row * cluster + rank, column, 0, 0)
                return

            @pl.when(give >= 0)
            def _():
                part_ref[give * cluster + rank, wg] = y
                if given is not None:
                    plgpu.semaphore_signal(flag(give), memory_scope="gpu")

            @pl.when(give < 0)
            def _():
                if given is not None:

                    @pl.loop(take, take + taken)
                    def _(part):
                        plgpu.semaphore_wait(flag(part), memory_scope="gpu")

                store(y, row * cluster + rank, column, take, taken)

        pl.run_scoped(product, plgpu.ACC((half, form.tile.cols), jnp.float32))
        return step + count

    for_items(work_ref, visit, jnp.int32(0))


def _store(form, wg, o_ref, o_s, part_ref, bias_ref, residual_ref, read, y, row, column, take, taken):
    """Adds the parts take .. take + taken to the sums y [half, cols], does what follows the product, and stores the result."""
    width, pieces = form.width, form.pieces()
    first_row, first_column = row * form.tile.rows + wg * form.half, column * form.tile.cols

    def summed(r, c):
        """64 x width of x @ w.T + bias."""
        total = y[r : r + 64, c : c + width]
        if form.slots:

            def add(part, total):
                source = part_ref.at[part * form.tile.cluster + lax.axis_index("rank"), wg, pl.ds(r, 64), pl.ds(c, width)]
                return total + plgpu.load(source, (), layout=plgpu.Layout.WGMMA, optimized=False)

            total = lax.fori_loop(take, take + taken, add, total)
        if bias_ref is None:
            return total
        start = jnp.minimum(first_column + c, bias_ref.shape[0] - width)  # columns beyond the output are not stored
        bias = plgpu.load(bias_ref.at[pl.ds(start, width)], (), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return total + lax.broadcast_in_dim(bias.astype(jnp.float32), total.shape, [1])

    def of(ref, r, c):
        """The place of a piece in the output or the residual."""
        if form.gate_block is not None:  # half of what is before this piece's block are ups
            block, inside = divmod(c, 2 * form.gate_block)
            c, start = block * form.gate_block + inside, lax.div(first_column, jnp.int32(2))
        else:
            start = first_column
        return ref.at[pl.ds(first_row + r, 64), pl.ds(start + c, width)]

    def fetch(i):
        plgpu.copy_gmem_to_smem(of(residual_ref, *pieces[i]), o_s.at[wg, i % _BOXES], read.at[wg * _BOXES + i % _BOXES])

    if form.residual:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(min(_BOXES, len(pieces))):
            fetch(i)
    for i, (r, c) in enumerate(pieces):
        box = o_s.at[wg, i % _BOXES]
        value = _activate(summed(r, c), form.activation)
        if form.gate_block is not None:
            value = value * summed(r, c + form.gate_block)
        if form.residual:
            plgpu.barrier_wait(read.at[wg * _BOXES + i % _BOXES])
            value = value + plgpu.load(box, (), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        else:
            plgpu.wait_smem_to_gmem(_BOXES - 1, wait_read_only=True)
        box[...] = value.astype(box.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(box, of(o_ref, r, c))
        if form.residual and i + _BOXES < len(pieces):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(i + _BOXES)


def _activate(x, activation):
    """silu, gelu_tanh or relu of float32 registers, out of exp2: the hardware's own tanh is good to 11 bits only."""
    if activation is None:
        return x
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    inner = x if activation == "silu" else x * (1.5957691216057308 + 0.0713548162726009 * x * x)  # gelu: 2 sqrt(2 / pi) (x + 0.044715 x³)
    return x / (1.0 + jnp.exp2(inner * -LOG2E))

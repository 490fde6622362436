"""The exchange of a router's CTAs through distributed shared memory."""

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.threads import row_layout

_SCALAR = plgpu.Layout.WG_SPLAT(())


def send_sums(sums: jax.Array, to, part, parts: int) -> None:
    """Store each token's sums in the shared memory of the token's CTA.

    sums: [rows, tokens] in WGMMA's layout, of this CTA's columns. to: [parts, tokens of a CTA, at least
    rows], the sums by sender. Without a cluster `to` gets all tokens.
    """
    if parts == 1:  # in the interpreter
        to[0, :, : sums.shape[0]] = sums.T
        return
    own, wide = to.shape[1:]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SCALAR))
    def send(_, sums, ref, part):
        base, mine = _address(ref), arith.muli(part.registers.item(), _number(own * wide))

        def put(value, at):
            row, token = (arith.index_cast(_i32(), x) for x in at)
            cta, place = arith.divui(token, _number(own)), arith.remui(token, _number(own))
            offset = arith.addi(mine, arith.addi(arith.muli(place, _number(wide)), row))
            _store(arith.addi(base, arith.muli(offset, _number(4))), cta, value, "f32", "f")

        sums.foreach(put)

    send(sums, to, part)  # pyright: ignore[reportCallIssue]


def send_to_all(values: jax.Array, to, place, parts: int) -> None:
    """Store a row of int32 at to[place] in the shared memory of all CTAs of the cluster.

    values: in `row_layout`. to: [tokens, width].
    """
    if parts == 1:
        to[place, :] = values
        return
    width = values.shape[0]

    @plgpu.inline_mgpu(arg_types=(row_layout(width), plgpu.RefType(), _SCALAR))
    def send(_, values, ref, place):
        base = arith.addi(_address(ref), arith.muli(place.registers.item(), _number(4 * width)))

        def put(value, at):
            address = arith.addi(base, arith.muli(arith.index_cast(_i32(), at[0]), _number(4)))
            for cta in range(parts):
                _store(address, _number(cta), value, "b32", "r")

        values.foreach(put)

    send(values, to, place)  # pyright: ignore[reportCallIssue]


def meet(parts: int) -> None:
    """Wait for all CTAs of the cluster; their stores before are visible after."""
    arrive(parts)
    wait(parts)


def arrive(parts: int) -> None:
    """Say to the cluster that this CTA's stores before are done."""
    if parts == 1:
        return plgpu.commit_smem()
    plgpu.inline_mgpu()(lambda _: _run("barrier.cluster.arrive.release.aligned;", "~{memory}"))()


def wait(parts: int) -> None:
    """Wait until all CTAs of the cluster have called `arrive`."""
    if parts > 1:
        plgpu.inline_mgpu()(lambda _: _run("barrier.cluster.wait.acquire.aligned;", "~{memory}"))()


def _store(address, cta, value, kind: str, letter: str) -> None:
    """Store a value of 32 bits at an address of shared memory in another CTA of the cluster."""
    there = llvm.inline_asm(_i32(), [address, cta], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")
    _run(f"st.shared::cluster.{kind} [$0], $1;", f"r,{letter},~{{memory}}", there, value)


def _run(code: str, constraints: str, *operands) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), code, constraints, has_side_effects=True)


def _address(ref) -> ir.Value:
    return llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(ref))


def _number(value: int) -> ir.Value:
    return mgpu.c(value, _i32())


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)

"""What threads of a router's cluster write to places that the data choose."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


def send_sums(sums: jax.Array, to, part, parts: int) -> None:
    """Store each token's sums in the shared memory of the token's CTA, and wait for all CTAs of the cluster.

    sums: [rows, tokens] in WGMMA's layout, of this CTA's columns. to: [parts, tokens of a CTA, at least
    rows], the sums by sender. Without a cluster `to` gets all tokens.
    """
    if parts == 1:  # in the interpreter
        to[0, :, : sums.shape[0]] = sums.T
        return
    own, wide = to.shape[1:]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def send(_, sums, ref, part):
        i32 = ir.IntegerType.get_signless(32)
        number = lambda x: mgpu.c(x, i32)
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
        mine = arith.muli(part.registers.item(), number(own * wide))

        def put(value, at):
            row, token = (arith.index_cast(i32, x) for x in at)
            cta, place = arith.divui(token, number(own)), arith.remui(token, number(own))
            offset = arith.addi(mine, arith.addi(arith.muli(place, number(wide)), row))
            address = arith.addi(base, arith.muli(offset, number(4)))
            there = "mapa.shared::cluster.u32 $0, $1, $2;"
            there = llvm.inline_asm(i32, [address, cta], there, "=r,r,r")
            _run("st.shared::cluster.f32 [$0], $1;", "r,f", there, value)

        sums.foreach(put)
        _run("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "")

    send(sums, to, part)  # pyright: ignore[reportCallIssue]


def put_ranked(
    scores: jax.Array, rank: jax.Array, column: jax.Array, chosen: int, best, at, layout, interpret: bool
) -> None:
    """Store the scores and the columns of the ranks below `chosen` at their ranks.

    scores, rank, column: values in `layout`. best, at: float32 and int32 in shared memory, at least `chosen`
    elements each.
    """
    if interpret:
        for choice in range(chosen):
            best[choice] = jnp.sum(jnp.where(rank == choice, scores, 0.0))
            at[choice] = jnp.sum(jnp.where(rank == choice, column, 0))
        return

    @plgpu.inline_mgpu(arg_types=(layout, layout, layout, plgpu.RefType(), plgpu.RefType()))
    def put(_, scores, rank, column, best, at):
        i32 = ir.IntegerType.get_signless(32)
        places = [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)) for ref in (best, at)]
        code = """{
            .reg .pred p;
            setp.lt.u32 p, $0, $1;
            @p st.shared.f32 [$2], $3;
            @p st.shared.b32 [$4], $5;
            }"""
        for registers in zip(*(each.registers.flat for each in (rank, scores, column)), strict=True):
            for i in range(ir.VectorType(registers[0].type).shape[0]):
                own, score, number = (vector.extract(register, [], [i]) for register in registers)
                offset = arith.muli(own, mgpu.c(4, i32))
                to_score, to_number = (arith.addi(place, offset) for place in places)
                limit = mgpu.c(chosen, i32)
                _run(code, "r,r,r,f,r,r", own, limit, to_score, score, to_number, number)

    put(scores, rank, column, best, at)  # pyright: ignore[reportCallIssue]


def _run(code: str, constraints: str, *operands) -> None:
    """Run PTX that reads and writes memory."""
    constraints = ",".join(part for part in (constraints, "~{memory}") if part)
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), code, constraints, has_side_effects=True)

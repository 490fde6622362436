"""Run the code of a thread with integers in place of MLIR values, for the 128
threads of a warpgroup at once.
"""

import operator
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

_THREAD = np.arange(128, dtype=np.uint64)
WARP, LANE = _THREAD // 32, _THREAD % 32
_OPS = {
    "addi": "add",
    "muli": "mul",
    "xori": "xor",
    "shrui": "rshift",
    "shli": "lshift",
    "andi": "and_",
    "ori": "or_",
    "divui": "floordiv",
    "remui": "mod",
}


def value(data, **described):
    """Return a stand-in for an MLIR value with data and a described type."""
    return types.SimpleNamespace(data=data, type=types.SimpleNamespace(**described))


def bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run_ptx(text: str, given_registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run straight PTX of shifts, masks, byte permutations and arithmetic of
    bfloat16 pairs, for many threads.
    """
    registers = dict(given_registers)

    def of(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.uint64(int(name, 0))

    def permuted(a, b, selector):
        both, found = (b << np.uint64(32)) | a, np.uint64(0)
        for byte in range(4):
            which = selector >> np.uint64(4 * byte) & np.uint64(15)
            assert (which < 8).all()  # the high bit would repeat a sign
            found = found | (both >> (which * np.uint64(8)) & np.uint64(255)) << np.uint64(8 * byte)
        return found

    def looked_up(a, b, c, table):
        found = np.uint64(0)
        for which in range(8):  # a, b and c are the bits of the index
            terms = [x if which >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            if int(table) >> which & 1:
                found = found | (terms[0] & terms[1] & terms[2])
        return found

    def of_pairs(function, rounds=False):
        """Return a function of bfloat16 pairs. rounds: its results may need more bits than bfloat16 has."""

        def run(*pairs):
            halves = []
            for low in (np.uint64(0), np.uint64(16)):
                exact = function(*(bfloat16(pair >> low & np.uint64(0xFFFF)) for pair in pairs))
                near = exact.astype(jnp.bfloat16)
                assert rounds or (near.astype(np.float64) == exact).all()
                halves.append(near.view(np.uint16).astype(np.uint64) << low)
            return halves[0] | halves[1]

        return run

    run = {
        "prmt.b32": permuted,
        "shl.b32": lambda a, n: a << n,
        "shr.u32": lambda a, n: a >> n,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "shf.l.wrap.b32": lambda low, high, n: high << n | low >> np.uint64(32) - n,
        "lop3.b32": looked_up,
        "mov.b32": lambda a: a,
        "mul.rn.bf16x2": of_pairs(operator.mul, rounds=True),
        "sub.rn.bf16x2": of_pairs(operator.sub),
        "fma.rn.bf16x2": of_pairs(lambda a, b, c: a * b + c, rounds=True),
    }
    body = text.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        name, _, operands = line.partition(" ")
        if name != ".reg":
            target, *inputs = (part.strip() for part in operands.split(","))
            registers[target] = run[name](*map(of, inputs)) & np.uint64(0xFFFFFFFF)
    return registers


def run_as_thread_code(monkeypatch: pytest.MonkeyPatch, module: Any, **own: Any) -> None:
    """Replace what a module's thread code calls by functions of integers.

    own: further replacements by name.
    """

    def inline_ptx(text, *inputs, result_types):
        several = isinstance(result_types, list)
        made = len(result_types) if several else 1
        found = run_ptx(text, {f"${made + i}": one for i, one in enumerate(inputs)})
        return [found[f"${i}"] for i in range(made)] if several else found["$0"]

    utils = types.SimpleNamespace(inline_ptx=inline_ptx, bitcast=lambda bits, _: bits)
    no_type = types.SimpleNamespace(get=lambda *_: None)
    stand_ins = {
        "arith": types.SimpleNamespace(**{op: getattr(operator, python) for op, python in _OPS.items()}),
        "ir": types.SimpleNamespace(MemRefType=lambda kind: kind, VectorType=no_type, BF16Type=no_type),
        "mgpu": types.SimpleNamespace(
            WGMMA_LAYOUT=mgpu.WGMMA_LAYOUT, utils=utils, FragmentedArray=lambda _registers, **_: _registers
        ),
        "const": np.uint64,
        "i32": lambda: None,
        "place": lambda: (WARP, LANE // 4, LANE % 4),
    }
    for name, stand_in in (stand_ins | own).items():
        monkeypatch.setattr(module, name, stand_in)

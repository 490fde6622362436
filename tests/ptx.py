"""Prove from a kernel's PTX that no memory access is misaligned. A misaligned access faults on a GPU, and in
no interpreter.

The proof finds for each register the largest power of two that divides its value: Granger's congruences,
restricted to powers of two. An address must be divisible by the alignment of its access: a vector's size, 16
bytes for a matrix row or a bulk copy, 128 bytes in shared memory for a tensor copy.
"""

import re
from collections.abc import Iterator

ANY = 20  # 0 is divided by every power of two; more than this is never asked
_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);", re.M)
_ADDRESS = re.compile(r"\[\s*(%\w+|[\w$]+)\s*(?:\+\s*(-?\d+))?[^\]]*\]")
_SUMS = ("add", "sub", "min", "max", "xor", "or", "selp")


def misaligned(text: str) -> list[str]:
    """Return the accesses of a PTX file without a proven alignment, each with the known facts about its
    address.
    """
    found = []
    for kernel in re.split(r"^\.visible \.entry ", text, flags=re.M)[1:]:
        # All shared memory of a Mosaic kernel is one dynamic array; it begins where the CTA's does, whatever
        # alignment it declares.
        symbols = dict.fromkeys(
            re.findall(r"\.shared \.align \d+ \.b8 ([\w$]*dynamic_shmem[\w$]*)", text), 10
        )
        parameters = {
            name: int(align).bit_length() - 1
            for align, name in re.findall(r"\.ptr \.align (\d+) ([\w$]+)", kernel)
        }
        instructions = [(name, _operands(rest)) for name, rest in _INSTRUCTION.findall(kernel)]
        known = _known(instructions, symbols, parameters)
        for name, operands in instructions:
            for place, wanted in _accesses(name, operands):
                base, offset = _ADDRESS.match(place).groups()  # pyright: ignore[reportOptionalMemberAccess]
                have = min(known.get(base, symbols.get(base, 0)), _power(int(offset or 0)))
                if have < wanted:
                    found.append(
                        f"{name} {', '.join(operands)}: a multiple of {1 << have}, not of {1 << wanted}"
                    )
    return found


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,])+", text)]


def _power(number: int) -> int:
    """Return the exponent of the power of two that divides a number."""
    return min(ANY, (number & -number).bit_length() - 1) if number else ANY


def _accesses(name: str, operands: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (address, required exponent of two) of an instruction's accesses to shared and global memory."""
    if re.match(r"(ld|st)\.(?!param)", name):
        width = (
            int((re.search(r"\.v(\d)", name) or [0, 1])[1]) * int(re.findall(r"\.[bfsu](\d+)", name)[-1]) // 8
        )
        yield next(x for x in operands if x.startswith("[")), _power(width)
    elif re.match(r"(ld|st)matrix", name):
        yield next(x for x in operands if x.startswith("[")), 4
    elif name.startswith("cp.async.bulk.tensor") and operands[0].startswith("["):
        yield next(x for x in operands if x.startswith("[") and "{" not in x), 7
    elif name.startswith(("cp.async.bulk.global", "cp.async.bulk.shared")):
        yield from ((x, 4) for x in operands[:2])


def _known(
    instructions: list[tuple[str, list[str]]], symbols: dict[str, int], parameters: dict[str, int]
) -> dict[str, int]:
    """Return the exponent of two that divides each register on all paths: the largest solution of the
    equations.


    """
    known: dict[str, int] = {}

    def of(operand: str) -> int:
        if operand.startswith("%"):
            return known.get(operand, ANY) if operand in assigned else 0
        if operand in symbols:
            return symbols[operand]
        return _power(int(operand, 0)) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand) else 0

    assigned = {target for _, operands in instructions for target in re.findall(r"%\w+", operands[0])}
    changed = True
    while changed:
        changed = False
        for name, operands in instructions:
            for target in re.findall(r"%\w+", operands[0]) if not operands[0].startswith("[") else ():
                new = min(known.get(target, ANY), _result(name, operands[1:], of, parameters))
                changed |= known.get(target) != new
                known[target] = new
    return known


def _result(name: str, inputs: list[str], of, parameters: dict[str, int]) -> int:
    op, constant = name.partition(".")[0], inputs and re.fullmatch(r"-?\d+", inputs[-1])
    if op == "ld" and ".param" in name:
        return parameters.get(inputs[0].strip("[]"), 0)
    if op in ("mov", "cvta", "cvt") and len(inputs) == 1 and not re.search(r"\.b?f\d+", name):
        return of(inputs[0])
    if op in _SUMS:
        return min(of(x) for x in inputs[:2])
    if op == "and":
        return max(of(x) for x in inputs)
    if op == "mul" and ".hi" not in name:
        return min(ANY, of(inputs[0]) + of(inputs[1]))
    if op == "mad" and ".hi" not in name:
        return min(ANY, of(inputs[0]) + of(inputs[1]), of(inputs[2]))
    if op == "shl" and constant:
        return min(ANY, of(inputs[0]) + int(inputs[1]))
    if op == "shr" and constant:
        return max(0, of(inputs[0]) - int(inputs[1])) if of(inputs[0]) < ANY else ANY
    if op == "lop3":
        return min(of(x) for x in inputs[:3]) if int(inputs[3], 0) % 2 == 0 else 0
    return 0

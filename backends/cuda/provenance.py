"""Which operands of a kernel an address can come from, by following values through the registers.

Values are followed as sets of operand slots: a slot enters where an instruction reads it from the constant bank, and a
result has the slots of all its sources. Whatever came through memory, the stack or an index into the constant bank is
UNKNOWN. Of a 64-bit address only the low register is followed: an address into a tensor has its low word from there.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Container, Iterable, Sequence

from backends.cuda.sass import Instruction, Kernel
from backends.plan.encode import OPERAND_SLOTS

UNKNOWN = -1  # the member of a set that stands for any origin

State = dict[str, frozenset[int]]
_EMPTY: frozenset[int] = frozenset()
_ANY = frozenset({UNKNOWN})
_REGISTER = re.compile(r"\b(U?R\d+)\b")
_CONSTANT = re.compile(r"\bcx?\[([^\]]+)\]\[([^\]]+)\]")
_DESCRIPTOR = re.compile(r"desc\[UR\d+\](?=\[)|,\s*desc\[UR\d+\]$")
_PREDICATE = re.compile(r"!?U?P(?:\d|T|R)")
_NO_RESULT = re.compile(r"\w*SETP2?|FCHK|R2P|ST\w*|RED|REDG|SYNCS|UTMA\w*|UBLK\w*")
_FROM_MEMORY = re.compile(r"LD(?!C)\w*|ATOM\w*|SULD|TEX|TLD\w*")
_CALLED = "CALL"  # stands for all registers once a function was called


def origins(kernel: Kernel, within: Container[int], rows: Sequence[int] = (0,)) -> dict[int, State]:
    """Registers before each of the instructions `within`, along paths that stay there.

    Args:
        kernel: its first parameter must start with an operand row.
        within: indices of instructions, the entry among them.
        rows: byte offsets of the operand rows in the parameters; the slots of row i are numbered from 16 i.
    """
    states: dict[int, State] = {0: {}}
    waiting = deque([0])
    while waiting:
        index = waiting.popleft()
        after = _after(kernel, kernel.instructions[index], states[index], rows)
        for successor in kernel.successors(index) or ():
            if successor not in within:
                continue
            old = states.get(successor)
            new = after if old is None else _joined(old, after)
            if new != old:
                states[successor] = new
                waiting.append(successor)
    return states


def of_address(one: Instruction, state: State) -> frozenset[int]:
    """Slots that the global address of an access can come from: that of the source, for a copy to shared memory."""
    brackets = re.findall(r"\[([^\]]+)\]", _DESCRIPTOR.sub("", one.operands))
    copies = one.base.startswith(("UTMA", "UBLK"))
    address = brackets[1] if copies and len(brackets) > 1 else brackets[0] if brackets else one.operands
    return _union(state.get(name, _EMPTY) for name in (*_REGISTER.findall(address), _CALLED))


def _after(kernel: Kernel, one: Instruction, state: State, rows: Sequence[int]) -> State:
    if one.base == "CALL":
        return state | {_CALLED: _ANY}
    target = _result(one)
    if target is None:
        return state
    register, weak, sources = target
    prefix, number = re.fullmatch(r"(U?R)(\d+)", register).groups()  # type: ignore[union-attr]
    new = dict(state)
    weak = weak or bool(one.guard)
    for step, slots in enumerate(_values(kernel, one, state, sources, rows)):
        name = f"{prefix}{int(number) + step}"
        # Width is guessed from the opcode, so only what is certainly written loses its old slots.
        keeps = weak or (step > 0 and "LDC" not in one.base)
        new[name] = slots | new.get(name, _EMPTY) if keeps else slots
    return new


def _result(one: Instruction) -> tuple[str, bool, str] | None:
    """Result register, whether it may also be a source, and the text of the sources."""
    if _NO_RESULT.fullmatch(one.base):
        return None
    parts = [part.strip() for part in one.operands.split(",")]
    skipped = 0
    while skipped < len(parts) and _PREDICATE.fullmatch(parts[skipped]):
        skipped += 1
    if skipped == len(parts) or not re.fullmatch(r"U?R\d+", parts[skipped]):
        return None
    doubtful = skipped > 0
    return parts[skipped], doubtful, ",".join(parts[skipped + 1 :])


def _values(kernel: Kernel, one: Instruction, state: State, sources: str, rows: Sequence[int]) -> list[frozenset[int]]:
    """Slots of the result registers, lowest first."""
    width = _width(one.opcode)
    if _FROM_MEMORY.fullmatch(one.base):
        return [_ANY] * (width if one.base == "LDG" else max(width, 4))
    constants = _CONSTANT.findall(sources)
    registers = _union(state.get(name, _EMPTY) for name in _REGISTER.findall(_CONSTANT.sub("", sources)))
    if "LDC" in one.base and len(constants) == 1:
        bank, offset = constants[0]
        return [_slot(kernel, bank, offset, 4 * step, rows) for step in range(width)]
    read = _union(_slot(kernel, bank, offset, 0, rows) for bank, offset in constants)
    return [registers | read] * width


def _slot(kernel: Kernel, bank: str, offset: str, step: int, rows: Sequence[int]) -> frozenset[int]:
    if bank != "0x0" or kernel.parameters is None or not re.fullmatch(r"0x[0-9a-f]+", offset):
        return _ANY
    place = int(offset, 16) + step - kernel.parameters
    inside = [(i, place - row) for i, row in enumerate(rows) if 0 <= place - row < OPERAND_SLOTS * 8]
    return frozenset({i * OPERAND_SLOTS + offset_in_row // 8 for i, offset_in_row in inside})


def _width(opcode: str) -> int:
    if ".128" in opcode:
        return 4
    if ".256" in opcode:
        return 8
    return 2 if "64" in opcode or "WIDE" in opcode or opcode.startswith("CS2R") else 1


def _joined(a: State, b: State) -> State:
    return {name: a.get(name, _EMPTY) | b.get(name, _EMPTY) for name in a.keys() | b.keys()}


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return _EMPTY.union(*sets)

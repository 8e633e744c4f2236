"""Proves from machine code that a grid kernel is safe under programmatic dependent launch.

Claim: on every path of every role, an unpredicated ACQBULK (griddepcontrol.wait) is executed before the first access to
global data that another op may write. A wait that is predicated or branched around counts only on the paths through it.

Method. An access is open if the control-flow graph has a path from the entry to it without such an ACQBULK; its
witness is the shortest one. What may be open is a load of constants only: LDG or a TMA load (UTMALDG, UBLKCP) whose
address or tensor map, by the registers along all open paths, comes from operand slots that hold weights, tables that
the op declares early (`OpKind.early_slots`) or plain numbers, and not from numbers alone. This tells the W loader's
copies from the A loader's without knowing which warp is which, and judges a load by what it reads, not by its path: an
early load of mutable data through the read-only cache is caught, a plain early load of a weight is not. Prefetches into
L2 and of tensor maps hand no value to the kernel and are not counted. Everything else that may touch global memory must
be closed: generic loads, every store, atomic and reduction, TMA stores, prefetches into L1, and memory opcodes that
this module does not know.

Limits. Predicates and branch conditions are not evaluated, so code that is safe by correlated conditions fails. Slots
are believed to hold what the op's operand row says, and early slots to be read as their op promises: which pages of a
cache are loaded early is not seen here, and that no op writes these is the plan verifier's part. Calls are believed to
return behind themselves; code that the graph does not reach must hold no access. Indirect branches are not followed:
such a kernel cannot be proved.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.cuda.provenance import UNKNOWN, State, of_address, origins
from backends.cuda.sass import Instruction, Kernel, disassemble
from backends.plan.encode import GRID_HEADER_BYTES, MAP_BYTES, OPERAND_SLOTS, map_specs
from workloads.graph import OpGraph, Role
from workloads.ops.base import Operand, OpKind

_MEMORY = re.compile(r"LD|ST|ATOM|U?RED(?!UX)|UTMA|UBLK|SU(LD|ST|ATOM|RED|QUERY)|TEX|TLD|TXD|CCTL|QSPC|MULTIMEM")
# Constant bank, shared, local and tensor memory, and what only fences or prefetches.
_HARMLESS = re.compile(
    r"(LDCU?|LDS|LDSM|LDL|LDT|LDTM|LDGDEPBAR|STS|STSM|STL|STT|STTM|ATOMS|UTMACCTL|UTMACMDFLUSH|UTMAPF|UBLKPF)(\.|$)"
    r"|CCTL\.(E\.)?(PF2|IVALL)|CCTLL"
)
_TRACEABLE = re.compile(r"(LDG|UTMALDG|UBLKCP\.S\.G)(\.|$)")


@dataclass(frozen=True)
class Finding:
    """An access that could run before the wait.

    Attributes:
        instruction: text of the access.
        address: in the kernel's code.
        reason: what makes it a fault.
        witness: labels along a path from the entry to it that executes no ACQBULK.
    """

    instruction: str
    address: int
    reason: str
    witness: tuple[str, ...]

    def __str__(self) -> str:
        way = " > ".join(self.witness) or "none"
        return f"{self.address:#06x} {self.instruction}: {self.reason}; path {way}"


@dataclass(frozen=True)
class Report:
    """What was seen in a cubin.

    Attributes:
        waits: unpredicated ACQBULK instructions.
        guarded: accesses to global memory that a wait precedes on every path.
        early: loads of constants that may precede it.
        findings: faults; empty when the proof holds.
    """

    waits: int
    guarded: int
    early: int
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        verdict = f"{len(self.findings)} unsafe accesses" if self.findings else "ok"
        return f"{verdict}: {self.waits} waits, {self.guarded} guarded accesses, {self.early} early loads"


@dataclass(frozen=True)
class Slots:
    """Operand slots that may be read before the wait.

    Attributes:
        constants: those that hold the address or the tensor map of a weight, or of what the op may read early.
        numbers: those that hold a plain number.
        rows: byte offset of each operand row in the parameters; the slots of row i are numbered from 16 i.
    """

    constants: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()
    rows: tuple[int, ...] = (0,)


def slots_of(parts: Sequence[tuple[OpKind, Sequence[Operand]]], graph: OpGraph) -> Slots:
    """Which slots hold constants, of the operand rows of the ops that share a launch.

    What a run computes is none, whatever an op declares to read early.
    """
    numbers, constants = set(), set()
    for row, (kind, operands) in enumerate(parts):
        for slot, (name, operand) in enumerate(zip(kind.slots, operands, strict=True), row * OPERAND_SLOTS):
            if isinstance(operand, int):
                numbers.add(slot)
                continue
            role = graph.tensors[operand.tensor].role
            if role is Role.WEIGHT or (name in kind.early_slots and role in (Role.INPUT, Role.STATE)):
                constants.add(slot)
    sizes = [GRID_HEADER_BYTES + MAP_BYTES * max(len(map_specs(operands)), 1) for _, operands in parts]
    return Slots(frozenset(constants), frozenset(numbers), tuple(sum(sizes[:i]) for i in range(len(parts))))


def lint(cubin: Path, slots: Slots) -> Report:
    """Looks at every kernel of a cubin.

    Args:
        cubin: built from a grid source.
        slots: what its ops may read before the wait.

    Raises:
        BuildUnavailable: there is no nvdisasm.
        BuildFailed: nvdisasm refuses the file.
    """
    reports = [lint_kernel(kernel, slots) for kernel in disassemble(cubin)]
    return Report(
        sum(report.waits for report in reports),
        sum(report.guarded for report in reports),
        sum(report.early for report in reports),
        tuple(finding for report in reports for finding in report.findings),
    )


def lint_kernel(kernel: Kernel, slots: Slots) -> Report:
    """Looks at one kernel."""
    opened, reached = _walk(kernel, past_waits=False), _walk(kernel, past_waits=True)
    states = origins(kernel, opened, slots.rows)
    guarded = early = 0
    findings: list[Finding] = []
    for index, one in enumerate(kernel.instructions):
        reason = None
        if index in reached and kernel.successors(index) is None:
            reason = "the branch is indirect, so the code behind it is unknown"
        elif touches_global(one):
            if index not in reached:
                reason = "the control flow to this access is not understood"
            elif index in opened:
                reason = _fault(one, states[index], slots)
                early += reason is None
            else:
                guarded += 1
        if reason is not None:
            way = _witness(kernel, opened if index in opened else reached, index) if index in reached else ()
            findings.append(Finding(str(one), one.address, reason, way))
    return Report(sum(map(is_wait, kernel.instructions)), guarded, early, tuple(findings))


def is_wait(one: Instruction) -> bool:
    """Whether a thread that gets here waits for the kernels that this one depends on."""
    return one.base == "ACQBULK" and not one.guard


def touches_global(one: Instruction) -> bool:
    """Whether an instruction may read or write global memory."""
    return _MEMORY.match(one.opcode) is not None and _HARMLESS.match(one.opcode) is None


def _fault(one: Instruction, state: State, slots: Slots) -> str | None:
    """Why an access must not precede the wait, or None."""
    if _TRACEABLE.match(one.opcode) is None:
        return "no wait before it"
    found = of_address(one, state)
    if UNKNOWN in found:
        return "no wait before it, and its address cannot be traced to an operand"
    mutable = found - slots.constants - slots.numbers
    if mutable:
        return f"no wait before it, and its address comes from operand slot {min(mutable)}, which holds no constant"
    return None if found & slots.constants else "no wait before it, and its address comes from no constant"


def _walk(kernel: Kernel, past_waits: bool) -> dict[int, int]:
    """Instructions that the entry reaches, with the one before each on a shortest path; the entry has itself."""
    before = {0: 0} if kernel.instructions else {}
    waiting = deque(before)
    while waiting:
        index = waiting.popleft()
        if is_wait(kernel.instructions[index]) and not past_waits:
            continue
        for successor in kernel.successors(index) or ():
            if successor not in before:
                before[successor] = index
                waiting.append(successor)
    return before


def _witness(kernel: Kernel, before: Mapping[int, int], index: int) -> tuple[str, ...]:
    """The kernel, then the labels on the path to an instruction."""
    path = [index]
    while path[-1] != 0:
        path.append(before[path[-1]])
    path.reverse()
    names = kernel.labels_at()
    return kernel.name, *(names[step] for step in path[1:] if step in names)

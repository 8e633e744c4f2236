"""Disassembly: a cubin's kernels as instructions with their control flow, by nvdisasm of its wheel or the toolkit."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from backends.errors import BuildFailed, BuildUnavailable

_SECTION = re.compile(r"\s*\.section\s+([^\s,]+),")
_LABEL = re.compile(r"([.$\w]+):\s*$")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\(([^)]+)\)")
_DATA = re.compile(r"/\*[0-9a-f]+\*/\s+\.(byte|short|word)\s+(.+)")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: in its section.
        guard: predicate under which it executes, such as `!P0`; empty when it always does.
        opcode: with modifiers.
        operands: text behind the opcode.
        target: label that it names, or None.
    """

    address: int
    guard: str
    opcode: str
    operands: str
    target: str | None

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    def __str__(self) -> str:
        return f"{f'@{self.guard} ' if self.guard else ''}{self.opcode} {self.operands}".strip()


@dataclass(frozen=True)
class Kernel:
    """The code of one section, with the functions that its kernel calls.

    Attributes:
        name: of the kernel.
        instructions: in program order; the first is the entry.
        labels: label to index of the instruction behind it.
        parameters: where its first parameter lies in constant bank 0, or None when the cubin does not say.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: int | None

    def successors(self, index: int) -> tuple[int, ...] | None:
        """Instructions that may run next in a thread; None where the machine code alone does not tell.

        May name too many, never too few, given that a call returns to the instruction behind it and that predicates
        may have any value. A region that threads reconverge after is followed to its end, which must be where its
        start says; otherwise its start has an edge there too.
        """
        one = self.instructions[index]
        following = (index + 1,) if index + 1 < len(self.instructions) else ()
        if one.base in {"BRX", "BRXU", "JMX", "JMXU"} or (one.base in {"BRA", "JMP", "CALL"} and one.target is None):
            return None
        if one.base in {"EXIT", "RET", "KILL"}:
            return following if one.guard else ()
        target = self.labels.get(one.target) if one.target is not None else None
        if target is None or target == len(self.instructions):
            return None if one.base in {"BRA", "JMP", "CALL"} else following
        if one.base == "BSSY" and self._ends_region(target, one.operands):
            return following
        always = one.opcode in {"BRA", "JMP"} and not one.guard and one.operands.startswith("`")
        return (target,) if always else (*following, target)

    def _ends_region(self, target: int, operands: str) -> bool:
        before = self.instructions[target - 1] if target else None
        return before is not None and before.base == "BSYNC" and before.operands == operands.split(",")[0]

    def labels_at(self) -> dict[int, str]:
        """The last label before each instruction that has one."""
        return {index: label for label, index in self.labels.items()}


@lru_cache(maxsize=1)
def disassembler() -> str | None:
    """Path of nvdisasm, or None."""
    try:
        spec = find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        spec = None
    for place in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        tool = Path(place) / "bin" / "nvdisasm"
        if tool.exists():
            return str(tool)
    return shutil.which("nvdisasm")


def require_disassembler() -> str:
    """Path of nvdisasm.

    Raises:
        BuildUnavailable: there is none.
    """
    tool = disassembler()
    if tool is None:
        raise BuildUnavailable("nvdisasm is not available: install spantune[test] or the CUDA toolkit")
    return tool


def disassemble(cubin: Path) -> list[Kernel]:
    """The kernels of a cubin.

    Raises:
        BuildUnavailable: there is no nvdisasm.
        BuildFailed: nvdisasm refuses the file.
    """
    tool = require_disassembler()
    done = subprocess.run([tool, "-ndf", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"nvdisasm cannot read {cubin}", done.stderr)
    return parse(done.stdout)


def parse(text: str) -> list[Kernel]:
    """Reads what nvdisasm prints about a cubin."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        start = _SECTION.match(line)
        if start:
            lines = sections.setdefault(start[1], [])
        lines.append(line)
    return [
        _kernel(name.removeprefix(".text."), body, sections.get(f".nv.info.{name.removeprefix('.text.')}", []))
        for name, body in sections.items()
        if name.startswith(".text.")
    ]


def _kernel(name: str, body: list[str], info: list[str]) -> Kernel:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body:
        label, found = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            labels[label[1]] = len(instructions)
        elif found:
            target = _TARGET.search(found[4])
            operands = found[4].strip()
            one = Instruction(int(found[1], 16), found[2] or "", found[3], operands, target[1] if target else None)
            instructions.append(one)
    return Kernel(name, tuple(instructions), labels, _parameters(info))


def _parameters(info: list[str]) -> int | None:
    """Base of the parameters in the constant bank plus the offset of the first (its alignment may leave a gap)."""
    bank, parameter = _attribute(info, "EIATTR_PARAM_CBANK"), _attribute(info, "EIATTR_KPARAM_INFO")
    # bank: symbol, offset, size; parameter: index, ordinal, offset, flags
    return int(bank[1], 16) + int(parameter[2], 16) if len(bank) > 1 and len(parameter) > 2 else None


def _attribute(info: list[str], name: str) -> list[str]:
    """Values behind the header (format and length) of the first attribute of that name; of several parameters, the
    attribute of the first stands last, so the last one counts."""
    values: list[str] = []
    inside = False
    for line in info:
        if "//----- nvinfo" in line:
            inside = line.rstrip().endswith(f": {name}")
            if inside:
                values = []
        data = _DATA.search(line)
        if inside and data:
            values.append(data[2].strip())
    return values[2:]

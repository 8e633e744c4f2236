"""What a kernel's machine code rounds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from backends.cuda.sass import disassemble

# Everything that rounds: arithmetic, conversions between floating-point types, special functions, matrix units.
ROUNDING = re.compile(
    r"^(FADD|FMUL|FFMA|FMNMX|MUFU|F2F|F2FP|HADD2|HMUL2|HFMA2|HMMA|HGMMA|QGMMA|QMMA|DADD|DMUL|DFMA|FCHK)"
)


def rounding_kinds(cubin: Path) -> set[str]:
    """Which rounding opcodes (with modifiers) stand in a kernel. How often is left to the unrolling of loops.

    Left out, since they round no value of an op: HFMA2 of zeros and an immediate, which is how the assembler loads a
    constant, and the reciprocal of an integer division, which follows an I2F that rounds up.
    """
    code = [one for kernel in disassemble(cubin) for one in kernel.instructions]
    constant = re.compile(r"\S+, -?RZ, -?RZ, ")
    opcodes = [one.opcode for one in code if not (one.base == "HFMA2" and constant.match(one.operands))]
    found = Counter(opcode for opcode in opcodes if ROUNDING.match(opcode))
    divisions = sum(bool(re.match(r"I2F\S*\.RP$", opcode)) for opcode in opcodes)
    found["MUFU.RCP"] -= min(divisions, found["MUFU.RCP"])
    return {opcode for opcode, count in found.items() if count > 0}

"""Disassembly for tests: instructions of a cubin's kernel, by nvdisasm from its wheel or the toolkit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

# Everything that rounds: arithmetic, conversions between floating-point types, special functions, matrix units.
ROUNDING = re.compile(
    r"^(FADD|FMUL|FFMA|FMNMX|MUFU|F2F|F2FP|HADD2|HMUL2|HFMA2|HMMA|HGMMA|QGMMA|QMMA|DADD|DMUL|DFMA|FSETP|FCHK)"
)


@lru_cache(maxsize=1)
def disassembler() -> str | None:
    """Path of nvdisasm, or None."""
    spec = find_spec("nvidia.cu13")
    for place in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        tool = Path(place) / "bin" / "nvdisasm"
        if tool.exists():
            return str(tool)
    return shutil.which("nvdisasm")


def instructions(cubin: Path) -> list[str]:
    """Opcodes with modifiers and operands, in program order, predicates dropped."""
    tool = disassembler()
    assert tool is not None
    text = subprocess.run([tool, "-c", "-ndf", str(cubin)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", text)
    return [line.strip() for line in found]


def rounding_kinds(cubin: Path) -> Counter[str]:
    """How often each rounding opcode (with modifiers) stands in a kernel.

    Left out, since they round no value of an op: HFMA2 of zeros and an immediate, which is how the assembler loads a
    constant, and the reciprocal of an integer division, which follows an I2F that rounds up.
    """
    lines = [line for line in instructions(cubin) if not re.match(r"HFMA2\S* \S+, -?RZ, -?RZ, ", line)]
    opcodes = [line.split()[0] for line in lines]
    found = Counter(opcode for opcode in opcodes if ROUNDING.match(opcode))
    divisions = sum(bool(re.match(r"I2F\S*\.RP$", opcode)) for opcode in opcodes)
    found["MUFU.RCP"] -= min(divisions, found["MUFU.RCP"])
    return +found

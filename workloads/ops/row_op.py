"""What the row ops share: the math group alone, no pages, binaries that do not depend on the tiling."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from workloads.graph import Op, OpGraph
from workloads.ops.base import OpKind

MATH_WARPS = 8


def float_bits(value: float) -> int:
    """Bits of a number as fp32: how an operand slot carries it."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class RowOp(OpKind):
    """An op on rows, without an MMA and without loaders."""

    loaders = False
    tiled = False

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        return {}

    def weight_bytes(self, op: Op, graph: OpGraph) -> int:
        return sum(graph.tensors[op.reads[role]].bytes for role in op.reads if role.endswith(("weight", "bias")))

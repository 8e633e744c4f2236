"""The op kinds, by name, and the functions that record them in a graph."""

from __future__ import annotations

from workloads.graph import OpGraph
from workloads.ops.base import OpKind
from workloads.ops.gemm_fp8 import GemmFp8Partial, GemmFp8Query

KINDS: dict[str, OpKind] = {kind.name: kind for kind in (GemmFp8Partial(), GemmFp8Query())}


def compulsory_bytes(graph: OpGraph) -> int:
    """Bytes of weights and old cache entries that one run must stream once."""
    return sum(KINDS[op.kind].weight_bytes(op, graph) for op in graph.ops.values())

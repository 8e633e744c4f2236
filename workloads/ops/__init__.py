"""The op kinds, by name, and the functions that record them in a graph."""

from __future__ import annotations

from workloads.graph import OpGraph
from workloads.ops.add_rmsnorm_quant import AddRmsnormQuant
from workloads.ops.base import OpKind
from workloads.ops.bmm_bf16 import BmmBf16
from workloads.ops.gemm_fp8 import GemmFp8Partial, GemmFp8Query
from workloads.ops.head_gate import HeadGate
from workloads.ops.index_key_finalise import IndexKeyFinalise
from workloads.ops.index_query_finalise import IndexQueryFinalise
from workloads.ops.paged_score import PagedScore
from workloads.ops.qkv_finalise import QkvFinalise
from workloads.ops.scale_bias_relu import ScaleBiasRelu

KINDS: dict[str, OpKind] = {
    kind.name: kind
    for kind in (
        AddRmsnormQuant(),
        BmmBf16(),
        GemmFp8Partial(),
        GemmFp8Query(),
        HeadGate(),
        IndexKeyFinalise(),
        IndexQueryFinalise(),
        PagedScore(),
        QkvFinalise(),
        ScaleBiasRelu(),
    )
}


def compulsory_bytes(graph: OpGraph) -> int:
    """Bytes of weights and old cache entries that one run must stream once."""
    return sum(KINDS[op.kind].weight_bytes(op, graph) for op in graph.ops.values())

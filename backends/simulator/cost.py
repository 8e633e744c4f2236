"""What a kernel of a launch plan costs in the model's terms: pure formulas over the op kinds."""

from __future__ import annotations

from dataclasses import dataclass

from backends.plan.launches import KernelNode
from backends.simulator.calibration import Calibration
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import K_BLOCK


@dataclass(frozen=True)
class KernelCost:
    """One kernel, per CTA; all CTAs of a kernel are alike.

    Attributes:
        ctas: of the grid.
        footprint: share of one multiprocessor that a resident CTA takes.
        per_sm: most CTAs of this kernel on one multiprocessor.
        stream_bytes: bytes from HBM of one CTA.
        ahead_bytes: of these, what may be issued before the wait.
        rate_cap: most bytes per microsecond of one CTA, from its bytes in flight.
        set_up_us: before the first copy.
        body_us: after the wait and the stream: compute and stores.
        input_us: after the wait, before the rest of the stream counts.
    """

    ctas: int
    footprint: float
    per_sm: int
    stream_bytes: float
    ahead_bytes: float
    rate_cap: float
    set_up_us: float
    body_us: float
    input_us: float


def kernel_cost(graph: OpGraph, node: KernelNode, calibration: Calibration) -> KernelCost:
    """Cost of one node under a calibration."""
    op = graph.ops[node.op]
    kind, gpu, tiling = KINDS[op.kind], calibration.gpu, node.binary.tiling
    bounds = tiling.ctas_per_sm if kind.tiled else 2
    shared = (node.shared_bytes + gpu.reserved_shared) / gpu.shared_per_sm
    footprint = max(shared, node.threads / gpu.threads_per_sm, 1 / max(bounds, 1) if kind.loaders else 1 / 8)
    stream = kind.weight_bytes(op, graph) / node.ctas
    ring = float(tiling.stages * tiling.rows * K_BLOCK) if kind.loaders else stream
    ahead = min(stream, ring, float(node.w_ahead * tiling.rows * K_BLOCK)) if kind.loaders else stream
    if node.wait != 0:
        ahead = 0.0
    slow = 1.0 + (calibration.unpack_share if tiling.core == "mma_sync" and kind.flops(op, graph) else 0.0)
    waves = max(1.0, node.ctas / gpu.sm_count)
    compute = kind.flops(op, graph) / calibration.mma_flops / waves
    return KernelCost(
        ctas=node.ctas,
        footprint=min(footprint, 1.0),
        per_sm=max(1, int(1 / footprint)),
        stream_bytes=stream * slow,
        ahead_bytes=ahead * slow,
        rate_cap=max(ring, 1.0) / calibration.load_latency_us,
        set_up_us=calibration.set_up_us if kind.loaders else 0.1,
        body_us=(calibration.tail_us if kind.loaders else calibration.row_us) + compute,
        input_us=calibration.input_us if kind.loaders else 0.0,
    )

"""What one CTA of a kernel costs in the model's terms: pure formulas over the op kinds.

Tensor shapes, domains and weight bytes give what moves and what is computed. Kinds of ops without loaders have a fixed
latency each in the calibration; one that it does not name gets the entry for others, which its bytes add to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod

from backends.plan.launches import POINTS, KernelPart, LaunchPlan
from backends.simulator.calibration import OTHER, Calibration
from backends.simulator.slots import Demand
from workloads.graph import DTYPE_BYTES, Op, OpGraph, Role
from workloads.ops import KINDS
from workloads.ops.base import Tiling


@dataclass(frozen=True)
class KernelCost:
    """One kernel, per CTA; all CTAs of a kernel are alike.

    Attributes:
        ctas: of the grid.
        demand: what a resident CTA takes.
        set_up_us: from the first instruction to the first copy.
        stream_bytes: weights and old cache entries.
        ring_bytes: of these, what may be in flight or landed unused.
        ahead_bytes: of these, what may be issued before the wait.
        input_bytes: from L2, what other ops wrote.
        input_latency_us: from the wait to the first of them on chip, nothing queued.
        flow_rate: most bytes per microsecond, from the bytes in flight.
        compute_rate: most bytes per microsecond of a whole multiprocessor that its math keeps up with.
        hbm_share: of the streamed bytes, those that come from HBM; token tiles share weights through L2.
        l2_share: bytes through L2 per streamed byte: one, and the inputs that flow beside it.
        body_us: from the last bytes on chip to the last store, math left out.
        math_us: math on one ring of bytes, alone on its multiprocessor.
        loaders: whether weights and inputs flow side by side.
        finaliser_us: from the last CTA's end to that of the finaliser which its last tile runs.
    """

    ctas: int
    demand: Demand
    set_up_us: float
    stream_bytes: float
    ring_bytes: float
    ahead_bytes: float
    input_bytes: float
    input_latency_us: float
    flow_rate: float
    compute_rate: float
    hbm_share: float
    l2_share: float
    body_us: float
    math_us: float
    loaders: bool
    finaliser_us: float = 0.0


def kernel_cost(graph: OpGraph, part: KernelPart, splits: Mapping[str, int], calibration: Calibration) -> KernelCost:
    """Cost of one op of a launch plan; `splits` as `splits_of` gives them."""
    op, c, tiling = graph.ops[part.op], calibration, part.binary.tiling
    kind = KINDS[op.kind]
    # CTAs of other token tiles read the same weights: the first brings them into L2.
    reuse = part.grid[2] if "weight" in op.reads and kind.flops(op, graph) else 1
    stream = kind.weight_bytes(op, graph) * reuse / part.ctas
    # Loaders run a ring of `stages`; without a split K they hold all of their tile at once. Row ops hold all of theirs.
    stage, ring = stream, stream
    if kind.loaders and part.k_blocks > 1:
        stage = stream / max(1, ceil(part.k_blocks / part.splits))
        ring = min(stream, tiling.stages * stage)
    inputs = _input_bytes(graph, op, replace(tiling, split_k=part.splits), splits)
    flops = kind.flops(op, graph) / part.ctas
    compute = _compute_rate(stream, flops, part, c)
    fixed = c.tail_us if kind.loaders else c.row_us.get(op.kind, c.row_us[OTHER])
    ahead = min(ring, part.w_ahead * stage) if kind.loaders else ring
    return KernelCost(
        ctas=part.ctas,
        demand=_demand(part, kind.loaders, bool(flops), c),
        set_up_us=c.set_up_us if kind.loaders else c.row_set_up_us,
        stream_bytes=stream,
        ring_bytes=ring,
        ahead_bytes=0.0 if part.wait != POINTS["none"] else ahead,
        input_bytes=inputs,
        input_latency_us=c.input_latency_us if kind.loaders else c.row_latency_us,
        flow_rate=max(ring, 1024.0) / (c.load_latency_us if kind.loaders else c.row_latency_us),
        compute_rate=compute,
        hbm_share=1.0 / reuse,
        l2_share=1.0 + (inputs / stream if kind.loaders and stream else 0.0),
        body_us=fixed,
        math_us=ring / compute,
        loaders=kind.loaders,
    )


def finaliser_us(graph: OpGraph, part: KernelPart, splits: Mapping[str, int], calibration: Calibration) -> float:
    """What a finaliser behind its producer takes: a sharer's tiles in turn, each like a kernel without launch."""
    if part.arrival is None:
        return 0.0
    c, starts = calibration, (*part.arrival.own_starts, part.tiles[0])
    tiles = max(end - start for start, end in pairwise(starts)) * min(part.arrival.run_m, part.tiles[2])
    inputs = _input_bytes(graph, graph.ops[part.op], part.tiling, splits)
    tile = c.row_latency_us + inputs / c.sm_bytes_per_us + c.row_us.get(part.binary.kind, c.row_us[OTHER])
    return ceil(tiles / part.arrival.sharers) * tile


def splits_of(graph: OpGraph, plan: LaunchPlan) -> dict[str, int]:
    """Split count of every partial tensor of a plan."""
    return {
        tensor: part.splits
        for part in plan.parts()
        for tensor in graph.ops[part.op].writes.values()
        if graph.tensors[tensor].role is Role.PARTIAL
    }


def _input_bytes(graph: OpGraph, op: Op, tiling: Tiling, splits: Mapping[str, int]) -> float:
    """Bytes that the first tile reads of what others write; caches left out, whose old entries are streamed."""
    kind = KINDS[op.kind]
    tile = kind.domain(op, graph, tiling).tile(0)
    return float(
        sum(
            prod(high - low for low, high in region.box) * DTYPE_BYTES[graph.tensors[region.tensor].dtype]
            for region in kind.reads(op, graph, tiling, tile, splits)
            if graph.tensors[region.tensor].role is not Role.STATE
        )
    )


def _demand(part: KernelPart, loaders: bool, multiplies: bool, c: Calibration) -> Demand:
    """Room of one CTA: registers as the core needs them, at most what the launch bounds leave."""
    tiling, gpu = part.binary.tiling, c.gpu
    core = tiling.core if loaders and multiplies else "row"
    needed = c.registers[core] + (c.token_registers * max(tiling.block_m - 16, 0) if loaders else 0.0)
    most = gpu.registers_per_sm // (part.threads * max(tiling.ctas_per_sm, 1)) // 8 * 8
    registers = min(ceil(needed / 8) * 8, most, 255) * part.threads
    return Demand(part.threads, part.shared_bytes + gpu.reserved_shared, registers)


def _compute_rate(stream: float, flops: float, part: KernelPart, c: Calibration) -> float:
    """Streamed bytes per microsecond that one multiprocessor's math keeps up with."""
    if not flops or not stream:
        return float("inf")
    tiling = part.binary.tiling
    if tiling.core == "wgmma":
        return stream / flops * c.wgmma_flops
    rate = stream / flops * c.mma_flops
    if part.binary.kind.startswith("gemm_fp8"):
        # Weights are unpacked once, tokens once per 16 weight rows.
        rate = min(rate, c.unpack_bytes / (1.0 + tiling.block_m / 16))
    return rate

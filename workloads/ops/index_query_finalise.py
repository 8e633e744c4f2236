"""Finaliser of the indexer query projection: rotation, Hadamard, FP8, head weights; eight heads of a token a tile."""

from __future__ import annotations

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph
from workloads.ops.base import Domain, Operand, Pointer, Region, Splits, Tile, Tiling
from workloads.ops.row_op import MATH_WARPS, RowOp, float_bits

WIDTH = 128


def index_query_finalise(
    graph: OpGraph,
    name: str,
    *,
    partial: str,
    gate_partial: str,
    positions: str,
    cos_sin: str,
    hadamard: bool,
    neox: bool,
    quantised: str,
    head_weights: str,
) -> None:
    """Records the finaliser: `quantised` [M, heads, 128] e4m3 and `head_weights` [M, heads] fp32.

    `partial` is [split, M, heads * 128] and `gate_partial` [split, M, heads], both fp32.
    A head weight is (gate * scale of the head) * (heads * 128)^-0.5.

    Raises:
        WorkloadError: the columns of `partial` are not 128 a head.
    """
    heads, columns = graph.tensors[head_weights].shape[1], graph.tensors[partial].shape[1]
    if columns != heads * WIDTH:
        raise WorkloadError(f"op {name}: {columns} columns for {heads} heads: use {heads * WIDTH}")
    reads = {"partial": partial, "gate_partial": gate_partial, "positions": positions, "cos_sin": cos_sin}
    params = {"heads": heads, "hadamard": hadamard, "neox": neox}
    writes = {"quantised": quantised, "head_weights": head_weights}
    graph.record(Op(name, "index_query_finalise", reads, writes, params))


class IndexQueryFinalise(RowOp):
    """See `index_query_finalise`."""

    name = "index_query_finalise"
    constants = ("heads", "hadamard", "neox")
    slots = (
        "partial",
        "gate_partial",
        "positions",
        "cos_sin",
        "quantised",
        "head_weights",
        "splits",
        "gate_splits",
        "m",
        "factor",
    )

    def illegal(self, op: Op, graph: OpGraph, tiling: Tiling) -> str | None:
        reason = super().illegal(op, graph, tiling)
        if reason is None and int(op.params["heads"]) % MATH_WARPS:
            reason = f"{op.name}: {op.params['heads']} heads are not a multiple of {MATH_WARPS}"
        return reason

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        return Domain(graph.tensors[op.tensor("partial")].shape[0], int(op.params["heads"]) // MATH_WARPS)

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        partial, gate = op.tensor("partial"), op.tensor("gate_partial")
        heads, row = self._heads(tile), (tile.m, tile.m + 1)
        columns = (heads[0] * WIDTH, heads[1] * WIDTH)
        return (Region(partial, ((0, splits[partial]), row, columns)), Region(gate, ((0, splits[gate]), row, heads)))

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        row, heads = (tile.m, tile.m + 1), self._heads(tile)
        return (
            Region(op.tensor("quantised"), (row, heads, (0, WIDTH))),
            Region(op.tensor("head_weights"), (row, heads)),
        )

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        pointers = tuple(Pointer(op.tensor(role)) for role in self.slots[:6])
        partial, gate = op.tensor("partial"), op.tensor("gate_partial")
        factor = float_bits((int(op.params["heads"]) * WIDTH) ** -0.5)
        return (*pointers, splits[partial], splits[gate], graph.tensors[partial].shape[0], factor)

    @staticmethod
    def _heads(tile: Tile) -> tuple[int, int]:
        return tile.n * MATH_WARPS, (tile.n + 1) * MATH_WARPS

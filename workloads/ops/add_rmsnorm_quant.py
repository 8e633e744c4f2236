"""Residual add, RMSNorm, and FP8 of the norm per 128 values: 2048 values of a token a tile."""

from __future__ import annotations

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph, Role
from workloads.ops.base import K_BLOCK, MATH_THREADS, Domain, Operand, Pointer, Region, Splits, Tile, Tiling, rows_of
from workloads.ops.row_op import RowOp, float_bits

WIDTH = MATH_THREADS * 8  # values of a tile


def add_rmsnorm_quant(
    graph: OpGraph,
    name: str,
    *,
    hidden: str,
    residual: str,
    weight: str,
    eps: float,
    residual_out: str,
    norm_out: str,
    quantised: str,
    scale: str,
) -> None:
    """Records r = bf16(hidden + residual), n = bf16(RMSNorm(r)), FP8 of n.

    Where `hidden` is a partial, its sum over splits, in index order and rounded to bf16, stands for it.

    Shapes: hidden, residual, residual_out, norm_out, quantised [M, H]; weight [H]; scale [H/128, M padded to 4].

    Raises:
        WorkloadError: H is no whole number of scale groups.
    """
    size = graph.tensors[hidden].shape[1]
    if size % K_BLOCK:
        raise WorkloadError(f"op {name}: rows of {size} values: use a multiple of {K_BLOCK}")
    graph.record(
        Op(
            name,
            "add_rmsnorm_quant",
            {"hidden": hidden, "residual": residual, "weight": weight},
            {"residual_out": residual_out, "norm_out": norm_out, "quantised": quantised, "scale": scale},
            {"hidden_size": size, "partials": graph.tensors[hidden].role is Role.PARTIAL, "eps": eps},
        )
    )


class AddRmsnormQuant(RowOp):
    """See `add_rmsnorm_quant`. Every tile of a token reads the token's whole row, for the mean."""

    name = "add_rmsnorm_quant"
    constants = ("hidden_size", "partials")
    slots = (
        "hidden",
        "residual",
        "weight",
        "residual_out",
        "norm_out",
        "quantised",
        "scale",
        "scale_stride",
        "eps",
        "splits",
        "m",
    )

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        m, size = graph.tensors[op.tensor("hidden")].shape
        return Domain(m, -(-size // WIDTH))

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        row = rows_of(graph, op.tensor("residual"), tile.m, tile.m + 1)
        hidden = op.tensor("hidden")
        if not op.params["partials"]:
            return (Region(hidden, row.box), row)
        return (Region(hidden, ((0, splits[hidden]), *row.box)), row)

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        row, first = (tile.m, tile.m + 1), tile.n * WIDTH
        last = min(first + WIDTH, int(op.params["hidden_size"]))
        parts = [Region(op.tensor(r), (row, (first, last))) for r in ("residual_out", "norm_out", "quantised")]
        return (*parts, Region(op.tensor("scale"), ((first // K_BLOCK, last // K_BLOCK), row)))

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        pointers = tuple(Pointer(op.tensor(role)) for role in self.slots[:7])
        hidden = op.tensor("hidden")
        m = graph.tensors[hidden].shape[0]
        stride = graph.tensors[op.tensor("scale")].shape[1]
        return (*pointers, stride, float_bits(float(op.params["eps"])), splits.get(hidden, 1), m)

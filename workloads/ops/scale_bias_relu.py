"""One small dependent layer: out = max(x, 0) * w + b, elementwise."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph
from workloads.ops.base import Domain, Operand, Pointer, Region, Splits, Tile, Tiling
from workloads.ops.row_op import RowOp

ELEMENTS = (256, 1024)


def scale_bias_relu(graph: OpGraph, name: str, *, x: str, weight: str, bias: str, out: str) -> None:
    """Records out[i] = fma(max(x[i], 0), weight[i], bias[i]); all [n] fp32, n a multiple of 1024.

    Raises:
        WorkloadError: n is no whole number of tiles.
    """
    n = graph.tensors[out].shape[0]
    if n % max(ELEMENTS):
        raise WorkloadError(f"op {name}: n={n}: use a multiple of {max(ELEMENTS)}")
    graph.record(Op(name, "scale_bias_relu", {"x": x, "weight": weight, "bias": bias}, {"out": out}))


class ScaleBiasRelu(RowOp):
    """See `scale_bias_relu`. `Tiling.rows` is the number of elements of a tile."""

    name = "scale_bias_relu"
    slots = ("x", "weight", "bias", "out")
    tiled = True

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        return {"rows": ELEMENTS}

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        return Domain(1, graph.tensors[op.tensor("out")].shape[0] // tiling.rows)

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        return (Region(op.tensor("x"), (self._range(tiling, tile),)),)

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        return (Region(op.tensor("out"), (self._range(tiling, tile),)),)

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        return tuple(Pointer(op.tensor(role)) for role in self.slots)

    @staticmethod
    def _range(tiling: Tiling, tile: Tile) -> tuple[int, int]:
        return tile.n * tiling.rows, (tile.n + 1) * tiling.rows

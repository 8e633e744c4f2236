"""Finaliser of the indexer key projection: LayerNorm, rotation, Hadamard, FP8, cache write; one token a tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph
from workloads.ops.base import Domain, Operand, Pointer, Region, Splits, Tile, Tiling, whole
from workloads.ops.row_op import RowOp, float_bits

WIDTH = 128


def index_key_finalise(
    graph: OpGraph,
    name: str,
    *,
    partial: str,
    weight: str,
    bias: str,
    positions: str,
    slots: str,
    cos_sin: str,
    eps: float,
    hadamard: bool,
    neox: bool,
    cache: str,
) -> None:
    """Records the finaliser: 128 e4m3 values and a fp32 scale per token into the page-blocked `cache` [pages, 8448].

    `partial` is [split, M, 128] fp32; a negative slot skips the cache write.

    Raises:
        WorkloadError: the key has not 128 columns.
    """
    columns = graph.tensors[partial].shape[1]
    if columns != WIDTH:
        raise WorkloadError(f"op {name}: a key of {columns} columns: use {WIDTH} columns")
    reads = {"partial": partial, "weight": weight, "bias": bias, "positions": positions, "slots": slots}
    params = {"eps": eps, "hadamard": hadamard, "neox": neox}
    graph.record(Op(name, "index_key_finalise", reads | {"cos_sin": cos_sin}, {"cache": cache}, params))


class IndexKeyFinalise(RowOp):
    """See `index_key_finalise`. Which cache rows a tile writes is known at run time only."""

    name = "index_key_finalise"
    constants = ("hadamard", "neox")
    appends: ClassVar[Mapping[str, str]] = {"cache": "slots"}
    slots = ("partial", "weight", "bias", "positions", "slots", "cos_sin", "cache", "splits", "m", "eps")

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        return Domain(graph.tensors[op.tensor("partial")].shape[0], 1)

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        partial = op.tensor("partial")
        columns = graph.tensors[partial].shape[1]
        return (Region(partial, ((0, splits[partial]), (tile.m, tile.m + 1), (0, columns))),)

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        return (whole(graph, op.tensor("cache")),)

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        partial = op.tensor("partial")
        pointers = tuple(Pointer(op.tensor(role)) for role in self.slots[:7])
        return (*pointers, splits[partial], graph.tensors[partial].shape[0], float_bits(float(op.params["eps"])))

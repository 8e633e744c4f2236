"""Finaliser of the fused q_a | kv_a | k_pe projection: per token a tile for q, for latent and for rotary key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph
from workloads.ops.base import K_BLOCK, Domain, Operand, Pointer, Region, Splits, Tile, Tiling, rows_of, whole
from workloads.ops.row_op import RowOp, float_bits

LATENT = 512
KV_COLUMNS = LATENT + 64  # latent and rotary key
MAX_Q = 2048  # 8 values of q a thread


def qkv_finalise(
    graph: OpGraph,
    name: str,
    *,
    partial: str,
    q_weight: str,
    kv_weight: str,
    positions: str,
    slots: str,
    cos_sin: str,
    eps: float,
    q: str,
    q_scale: str,
    cache: str,
) -> None:
    """Records the finaliser: `q` [M, Q] e4m3 with `q_scale` [Q/128, M padded to 4], and the token's 656 cache bytes.

    `partial` is [split, M, Q + 512 + 64] fp32; `cache` [pages, 64, 656]; a negative slot skips the cache write.

    Raises:
        WorkloadError: no device code for that Q, or the columns of `partial` are not Q + 576.
    """
    q_size, columns = graph.tensors[q].shape[1], graph.tensors[partial].shape[1]
    if q_size % K_BLOCK or q_size > MAX_Q:
        raise WorkloadError(f"op {name}: Q={q_size}: use a multiple of {K_BLOCK} up to {MAX_Q}")
    if columns != q_size + KV_COLUMNS:
        raise WorkloadError(f"op {name}: {columns} projected columns: use {q_size + KV_COLUMNS}, Q and {KV_COLUMNS}")
    reads = {"partial": partial, "q_weight": q_weight, "kv_weight": kv_weight}
    graph.record(
        Op(
            name,
            "qkv_finalise",
            reads | {"positions": positions, "slots": slots, "cos_sin": cos_sin},
            {"q": q, "q_scale": q_scale, "cache": cache},
            {"q_size": q_size, "eps": eps},
        )
    )


class QkvFinalise(RowOp):
    """See `qkv_finalise`. Which cache rows a tile writes is known at run time only: its region is the whole cache."""

    name = "qkv_finalise"
    constants = ("q_size",)
    appends: ClassVar[Mapping[str, str]] = {"cache": "slots"}
    slots = (
        "partial",
        "q_weight",
        "kv_weight",
        "positions",
        "slots",
        "cos_sin",
        "q",
        "q_scale",
        "cache",
        "splits",
        "m",
        "scale_stride",
        "eps",
    )

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        return Domain(graph.tensors[op.tensor("partial")].shape[0], 3)

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        partial = op.tensor("partial")
        columns, q = graph.tensors[partial].shape[1], int(op.params["q_size"])
        cut = ((0, q), (q, q + LATENT), (q + LATENT, columns))[tile.n]
        return (Region(partial, ((0, splits[partial]), (tile.m, tile.m + 1), cut)),)

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        if tile.n > 0:
            return (whole(graph, op.tensor("cache")),)
        blocks = int(op.params["q_size"]) // K_BLOCK
        scale = Region(op.tensor("q_scale"), ((0, blocks), (tile.m, tile.m + 1)))
        return (rows_of(graph, op.tensor("q"), tile.m, tile.m + 1), scale)

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        partial = op.tensor("partial")
        pointers = tuple(Pointer(op.tensor(role)) for role in self.slots[:9])
        numbers = (splits[partial], graph.tensors[partial].shape[0], graph.tensors[op.tensor("q_scale")].shape[1])
        return (*pointers, *numbers, float_bits(float(op.params["eps"])))

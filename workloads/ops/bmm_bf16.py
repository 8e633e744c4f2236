"""Batched bf16 product per head: out[m, head, 0..511] = X[m, head, :] . W[head, :, 512], one rounding.

The other columns of `out` (the rotated part of the query) belong to another op.
"""

from __future__ import annotations

from collections.abc import Mapping

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph
from workloads.ops.base import (
    PAGE_BYTES,
    Domain,
    Operand,
    OpKind,
    Pointer,
    Region,
    Splits,
    TensorMapSpec,
    Tile,
    Tiling,
)

LATENT = 512  # columns of W, and of `out` that are written
OUT_COLUMNS = 576
CHUNK = 64  # K values of one TMA box: 128 bytes
BOX_ROWS = 64  # columns of W in one TMA box
BOX_BYTES = CHUNK * BOX_ROWS * 2


def bmm_bf16(graph: OpGraph, name: str, *, x: str, weight: str, out: str) -> None:
    """Records the product of x[M, heads, nope] with weight[heads, nope, 512] into columns 0..511 of out[M, heads, 576].

    Raises:
        WorkloadError: shapes that the device code does not know.
    """
    (_, heads, nope), w, o = graph.tensors[x].shape, graph.tensors[weight].shape, graph.tensors[out].shape
    if w != (heads, nope, LATENT) or o[1:] != (heads, OUT_COLUMNS) or nope % CHUNK:
        raise WorkloadError(
            f"op {name}: x [M, {heads}, {nope}] needs a weight [{heads}, {nope}, {LATENT}] and an output"
            f" [M, {heads}, {OUT_COLUMNS}], and K a multiple of {CHUNK}, but got {w} and {o}"
        )
    graph.record(Op(name, "bmm_bf16", {"x": x, "weight": weight}, {"out": out}, {"nope": nope}))


class BmmBf16(OpKind):
    """bf16 columns 0..511 of each head; K is neither split nor shared between warps."""

    name = "bmm_bf16"
    loaders = True
    slots = ("weight_map", "input_map", "m", "heads", "out")
    constants = ("nope",)

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        m = graph.tensors[op.tensor("x")].shape[0]
        block_m = (8, 16) if m <= 8 else (16,) if m <= 16 else (32, 16) if m <= 32 else (64, 32, 16)
        return {"block_m": block_m, "rows": (128, 256, 64), "ctas_per_sm": (2, 1, 3)}

    def illegal(self, op: Op, graph: OpGraph, tiling: Tiling) -> str | None:
        reason = super().illegal(op, graph, tiling)
        if reason is None and tiling.rows == 64 and tiling.block_m < 16:
            reason = (
                f"{op.name}: 64-row tiles share {tiling.block_m} tokens among two warpgroups, use 16 tokens or more"
            )
        # Outputs whose accumulators fit the registers that so many CTAs leave a thread.
        room = {1: 64 * 256, 2: 64 * 128, 3: 16 * 256}[tiling.ctas_per_sm] if reason is None else 0
        if reason is None and tiling.rows * tiling.block_m > room:
            reason = (
                f"{op.name}: {tiling.rows} x {tiling.block_m} outputs of a tile exceed the registers of"
                f" {tiling.ctas_per_sm} CTAs a multiprocessor"
            )
        return reason

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        m, heads, _ = graph.tensors[op.tensor("x")].shape
        return Domain(-(-m // tiling.block_m), heads * (LATENT // tiling.rows))

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        tokens, head, _ = self._place(op, graph, tiling, tile)
        return (Region(op.tensor("x"), (tokens, head, (0, int(op.params["nope"])))),)

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        return (Region(op.tensor("out"), self._place(op, graph, tiling, tile)),)

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        m, heads, nope = graph.tensors[op.tensor("x")].shape
        return (
            TensorMapSpec(
                op.tensor("weight"), (LATENT, heads * nope), (LATENT * 2,), (BOX_ROWS, CHUNK), element="bf16"
            ),
            TensorMapSpec(
                op.tensor("x"), (heads * nope, m), (heads * nope * 2,), (CHUNK, tiling.block_m), element="bf16"
            ),
            m,
            heads,
            Pointer(op.tensor("out")),
        )

    def pages(self, op: Op, tiling: Tiling) -> int:
        chunks = int(op.params["nope"]) // CHUNK
        boxes_per_page, x_per_page = PAGE_BYTES // BOX_BYTES, PAGE_BYTES // (tiling.block_m * CHUNK * 2)
        return -(-chunks * (tiling.rows // BOX_ROWS) // boxes_per_page) + -(-chunks // x_per_page)

    def weight_bytes(self, op: Op, graph: OpGraph) -> int:
        return graph.tensors[op.tensor("weight")].bytes

    def flops(self, op: Op, graph: OpGraph) -> int:
        m, heads, nope = graph.tensors[op.tensor("x")].shape
        return 2 * m * heads * nope * LATENT

    @staticmethod
    def _place(
        op: Op, graph: OpGraph, tiling: Tiling, tile: Tile
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Token, head and column ranges of a tile's outputs."""
        m = graph.tensors[op.tensor("x")].shape[0]
        head, part = divmod(tile.n, LATENT // tiling.rows)
        tokens = (tile.m * tiling.block_m, min((tile.m + 1) * tiling.block_m, m))
        return tokens, (head, head + 1), (part * tiling.rows, (part + 1) * tiling.rows)

"""Head gate: gate[M, heads] = X[M, K] . W[heads, K]^T in bf16 with fp32 accumulation, as fp32 split-K partials.

A small matrix against a long K: the weights of a tile go to registers before the inputs are ready, and many short K
ranges share the latency. Whoever needs the gate sums the splits in index order.
"""

from __future__ import annotations

from collections.abc import Mapping

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph, Role
from workloads.ops.base import (
    K_BLOCK,
    MATH_THREADS,
    PAGE_BYTES,
    Domain,
    Operand,
    OpKind,
    Pointer,
    Region,
    Splits,
    Tile,
    Tiling,
)

WARPS = MATH_THREADS // 32


def head_gate(graph: OpGraph, name: str, *, x: str, weight: str, out: str) -> str:
    """Records a head gate that leaves fp32 partials `out`[split, M, heads]; `out` is declared here.

    Raises:
        WorkloadError: no device code for that many heads, or K is no multiple of 128.
    """
    (m, k), heads = graph.tensors[x].shape, graph.tensors[weight].shape[0]
    if heads not in (32, 64) or k % K_BLOCK:
        raise WorkloadError(f"op {name}: {heads} heads and K={k}: use 32 or 64 heads and a multiple of {K_BLOCK}")
    graph.tensor(out, (m, heads), "f32", Role.PARTIAL)
    graph.record(Op(name, "head_gate", {"x": x, "weight": weight}, {"out": out}, {"heads": heads}))
    return out


class HeadGate(OpKind):
    """`out`[split, M, heads] fp32 partials."""

    name = "head_gate"
    loaders = False
    slots = ("weight", "x", "out", "m", "k")
    constants = ("heads",)

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        m, blocks = graph.tensors[op.tensor("x")].shape[0], self._k_blocks(op, graph)
        block_m = (8, 16) if m <= 8 else (16,) if m <= 16 else (16, 32)
        splits = tuple(s for s in (12, 24, 8, 6, 16, 48, 4) if s <= blocks) or (1,)
        return {"block_m": block_m, "split_k": splits, "ctas_per_sm": (2,)}

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        m = graph.tensors[op.tensor("x")].shape[0]
        return Domain(-(-m // tiling.block_m), 1, tiling.split_k, self._k_blocks(op, graph))

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        k_range = (tile.k_begin * K_BLOCK, tile.k_end * K_BLOCK)
        return (Region(op.tensor("x"), (self._tokens(op, graph, tiling, tile), k_range)),)

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        heads = graph.tensors[op.tensor("out")].shape[1]
        box = ((tile.split, tile.split + 1), self._tokens(op, graph, tiling, tile), (0, heads))
        return (Region(op.tensor("out"), box),)

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        m, k = graph.tensors[op.tensor("x")].shape
        return (Pointer(op.tensor("weight")), Pointer(op.tensor("x")), Pointer(op.tensor("out")), m, k)

    def pages(self, op: Op, tiling: Tiling) -> int:
        """Each warp leaves its sums in a page, to be added in warp order."""
        sums_per_page = PAGE_BYTES // (int(op.params["heads"]) * tiling.block_m * 4)
        return -(-WARPS // sums_per_page)

    def weight_bytes(self, op: Op, graph: OpGraph) -> int:
        return graph.tensors[op.tensor("weight")].bytes

    def flops(self, op: Op, graph: OpGraph) -> int:
        m, k = graph.tensors[op.tensor("x")].shape
        return 2 * m * k * int(op.params["heads"])

    def numerics(self, op: Op, tiling: Tiling) -> str:
        return f"split{tiling.split_k}"

    @staticmethod
    def _k_blocks(op: Op, graph: OpGraph) -> int:
        return graph.tensors[op.tensor("x")].shape[1] // K_BLOCK

    @staticmethod
    def _tokens(op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[int, int]:
        m = graph.tensors[op.tensor("x")].shape[0]
        return tile.m * tiling.block_m, min((tile.m + 1) * tiling.block_m, m)

"""FP8 GEMM with 1x128 activation and 128x128 weight scales: Y[M, N] = X[M, K] . W[N, K]^T.

Two epilogues: fp32 split-K partials (a finaliser sums them in index order), or the query projection's (bf16 rows of
`nope` values, then 64 rotated ones per head).
"""

from __future__ import annotations

from collections.abc import Mapping

from workloads.graph import Op, OpGraph, Role
from workloads.ops.base import (
    K_BLOCK,
    PAGE_BYTES,
    SCRATCH_BYTES,
    Domain,
    Operand,
    OpKind,
    Pointer,
    Region,
    Splits,
    TensorMapSpec,
    Tile,
    Tiling,
    rows_of,
)

ROPE = 64
MOST_BLOCKS = 64  # k-blocks of a split: a lane holds the scales of two
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# Tokens of a tile by the most tokens of a step, and for steps of more.
BLOCK_M = {8: (8, 16), 16: (16,), 32: (32, 16), 64: (64, 32)}
BLOCK_M_BEYOND = (64, 128, 32)
LATENT = 512


def gemm_fp8_partial(
    graph: OpGraph, name: str, *, x: str, x_scale: str, weight: str, weight_scale: str, out: str
) -> str:
    """Records a GEMM that leaves fp32 partials `out`[split, M, N]; `out` is declared here."""
    m, n = graph.tensors[x].shape[0], graph.tensors[weight].shape[0]
    graph.tensor(out, (m, n), "f32", Role.PARTIAL)
    reads = {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale}
    graph.record(Op(name, "gemm_fp8_partial", reads, {"out": out}, {"k": graph.tensors[x].shape[1]}))
    return out


def gemm_fp8_query(
    graph: OpGraph,
    name: str,
    *,
    x: str,
    x_scale: str,
    weight: str,
    weight_scale: str,
    positions: str,
    cos_sin: str,
    nope: int,
    q_nope: str,
    q_rope: str,
) -> None:
    """Records the query projection: `q_nope`[M, heads, nope] and the last 64 columns of `q_rope`[M, heads, 576]."""
    reads = {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale, "positions": positions}
    params = {"k": graph.tensors[x].shape[1], "nope": nope, "head_rows": nope + ROPE}
    graph.record(Op(name, "gemm_fp8_query", reads | {"cos_sin": cos_sin}, {"nope": q_nope, "rope": q_rope}, params))


class _GemmFp8(OpKind):
    loaders = True
    slots = (
        "weight_map",
        "input_map",
        "weight_scale",
        "input_scale",
        "m",
        "n",
        "scale_stride",
        "weight_blocks",
        "out0",
        "out1",
        "positions",
        "cos_sin",
        "head_rows",
        "nope",
        "heads",
    )

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        m = graph.tensors[op.tensor("x")].shape[0]
        block_m = next((choices for most, choices in BLOCK_M.items() if m <= most), BLOCK_M_BEYOND)
        return {
            "core": ("mma_sync", "wgmma"),
            "block_m": block_m,
            "rows": (64, 128, 32, 16),
            "stages": (6, 4, 5, 8),
            "ctas_per_sm": (2, 1, 3),
        }

    def illegal(self, op: Op, graph: OpGraph, tiling: Tiling) -> str | None:
        reason = super().illegal(op, graph, tiling)
        groups = 128 // tiling.rows
        if reason is None and tiling.stages % groups:
            reason = (
                f"{op.name}: stages={tiling.stages}, but {tiling.rows}-row tiles have {groups} math groups on one ring"
            )
        if reason is None and tiling.core == "wgmma" and tiling.rows < 64:
            reason = f"{op.name}: core wgmma takes tiles of 64 rows or more, not {tiling.rows}"
        if reason is None and tiling.core == "mma_sync" and tiling.block_m > 64:
            reason = f"{op.name}: core mma_sync has registers for at most 64 tokens, not {tiling.block_m}"
        if reason is None and tiling.ctas_per_sm > self._most_ctas(tiling):
            reason = f"{op.name}: the accumulators of {tiling.block_m} tokens leave registers for "
            reason += f"{self._most_ctas(tiling)} CTAs a multiprocessor, not {tiling.ctas_per_sm}"
        if reason is None and tiling.split_k > self._k_blocks(op):
            reason = f"{op.name}: split_k={tiling.split_k} exceeds {self._k_blocks(op)} k-blocks"
        if reason is None and -(-self._k_blocks(op) // tiling.split_k) > MOST_BLOCKS:
            reason = f"{op.name}: a split holds at most {MOST_BLOCKS} k-blocks"
        return reason

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        m, n = graph.tensors[op.tensor("x")].shape[0], graph.tensors[op.tensor("weight")].shape[0]
        return Domain(-(-m // tiling.block_m), -(-n // tiling.rows), tiling.split_k, self._k_blocks(op))

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        m = graph.tensors[op.tensor("x")].shape[0]
        low, high = tile.m * tiling.block_m, min((tile.m + 1) * tiling.block_m, m)
        return (
            Region(op.tensor("x"), ((low, high), (tile.k_begin * K_BLOCK, tile.k_end * K_BLOCK))),
            Region(op.tensor("x_scale"), ((tile.k_begin, tile.k_end), (low, high))),
        )

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        x, weight = graph.tensors[op.tensor("x")], graph.tensors[op.tensor("weight")]
        (m, k), n = x.shape, weight.shape[0]
        common: tuple[Operand, ...] = (
            TensorMapSpec(weight.name, (k, n), (k,), (K_BLOCK, tiling.rows)),
            TensorMapSpec(x.name, (k, m), (k,), (K_BLOCK, tiling.block_m)),
            Pointer(op.tensor("weight_scale")),
            Pointer(op.tensor("x_scale")),
            m,
            n,
            graph.tensors[op.tensor("x_scale")].shape[1],
            k // K_BLOCK,
        )
        return common + self._outputs(op, graph)

    def _outputs(self, op: Op, graph: OpGraph) -> tuple[Operand, ...]:
        raise AssertionError("each epilogue states its own operands")

    def pages(self, op: Op, tiling: Tiling) -> int:
        w_per_page, x_per_page = PAGE_BYTES // (tiling.rows * K_BLOCK), PAGE_BYTES // (tiling.block_m * K_BLOCK)
        # Scales have two slots a stage, in the scratch if they fit.
        scales = int(2 * tiling.stages * tiling.block_m * 4 > SCRATCH_BYTES)
        return -(-tiling.stages // w_per_page) + -(-tiling.stages // x_per_page) + scales

    def weight_bytes(self, op: Op, graph: OpGraph) -> int:
        return graph.tensors[op.tensor("weight")].bytes + graph.tensors[op.tensor("weight_scale")].bytes

    def flops(self, op: Op, graph: OpGraph) -> int:
        m, k = graph.tensors[op.tensor("x")].shape
        return 2 * m * k * graph.tensors[op.tensor("weight")].shape[0]

    def numerics(self, op: Op, tiling: Tiling) -> str:
        return f"{tiling.core}/split{tiling.split_k}/groups{128 // tiling.rows}"

    @staticmethod
    def _most_ctas(tiling: Tiling) -> int:
        """CTAs of 320 threads that the kernel fits without spills; seen on sm_90a and sm_103a with NVRTC 13.0."""
        if tiling.core == "wgmma":
            return 3 if tiling.block_m <= 32 else 2 if tiling.block_m <= 64 else 1
        return 3 if tiling.block_m <= 16 else 2 if tiling.block_m <= 32 else 1

    @staticmethod
    def _k_blocks(op: Op) -> int:
        return int(op.params["k"]) // K_BLOCK


class GemmFp8Partial(_GemmFp8):
    """`out`[split, M, N] fp32 partials."""

    name = "gemm_fp8_partial"

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        n, blocks = graph.tensors[op.tensor("weight")].shape[0], self._k_blocks(op)
        tiles = -(-n // 64)
        # Ranges from one to what puts four CTAs on each of 132 SMs; at least two k-blocks a split.
        fewest = -(-blocks // MOST_BLOCKS)
        splits = [s for s in SPLITS if fewest <= s <= blocks // 2 and tiles * s <= 4 * 132] or [fewest]
        return {**super().tunables(op, graph), "split_k": tuple(splits)}

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        m, n = graph.tensors[op.tensor("out")].shape
        return (
            Region(
                op.tensor("out"),
                (
                    (tile.split, tile.split + 1),
                    (tile.m * tiling.block_m, min((tile.m + 1) * tiling.block_m, m)),
                    (tile.n * tiling.rows, min((tile.n + 1) * tiling.rows, n)),
                ),
            ),
        )

    def ctas_with_finaliser(self, tiling: Tiling) -> int:
        """As compiled with each finaliser of the layer, for sm_90a and sm_103a with NVRTC 13.0."""
        if tiling.core == "wgmma":
            return 2 if tiling.block_m <= 16 else 1
        return 1 if tiling.block_m <= 32 else 0

    def _outputs(self, op: Op, graph: OpGraph) -> tuple[Operand, ...]:
        return (Pointer(op.tensor("out")), 0, 0, 0, 0, 0, 0)


class GemmFp8Query(_GemmFp8):
    """bf16 queries, rotated in the epilogue; K is not split."""

    name = "gemm_fp8_query"

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        return {**super().tunables(op, graph), "split_k": (1,)}

    def illegal(self, op: Op, graph: OpGraph, tiling: Tiling) -> str | None:
        reason = super().illegal(op, graph, tiling)
        head = int(op.params["head_rows"])
        if reason is None and tiling.core == "mma_sync" and tiling.ctas_per_sm > {16: 2, 32: 1}.get(tiling.block_m, 3):
            reason = f"{op.name}: the epilogue of {tiling.block_m} tokens leaves registers for fewer CTAs"
        if reason is None and head % tiling.rows:
            reason = f"{op.name}: a tile of {tiling.rows} rows does not divide a head of {head} rows"
        return reason

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        head_rows, nope = int(op.params["head_rows"]), int(op.params["nope"])
        head, first = divmod(tile.n * tiling.rows, head_rows)
        last = first + tiling.rows
        m = rows_of(graph, op.tensor("nope"), tile.m * tiling.block_m, (tile.m + 1) * tiling.block_m).box[0]
        regions = []
        if first < nope:
            regions.append(Region(op.tensor("nope"), (m, (head, head + 1), (first, min(last, nope)))))
        if last > nope:
            low = LATENT + max(first - nope, 0)
            regions.append(Region(op.tensor("rope"), (m, (head, head + 1), (low, LATENT + last - nope))))
        return tuple(regions)

    def _outputs(self, op: Op, graph: OpGraph) -> tuple[Operand, ...]:
        return (
            Pointer(op.tensor("nope")),
            Pointer(op.tensor("rope")),
            Pointer(op.tensor("positions")),
            Pointer(op.tensor("cos_sin")),
            int(op.params["head_rows"]),
            int(op.params["nope"]),
            graph.tensors[op.tensor("nope")].shape[1],
        )

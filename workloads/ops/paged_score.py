"""Paged indexer score: logits[t, s] = key_scale[s] * sum over heads of head_weight[t, h] * relu(<q[t, h], key[s]>).

Keys lie in pages of 64 tokens: 64 keys of 128 e4m3, then 64 fp32 scales. A request's block table names its pages, and
each token has a context length of its own; logits at or past it are left as they are.

What the device code reads before the wait rests on this contract with the caller:

- The block table and the context lengths are complete before the first op of a run starts, and constant in it.
- Tokens of one request are neighbours with ascending context lengths, each its position plus one.
- A run writes keys only at positions from its request's first token on, `context_lens[first] - 1`. So page p of a
  request is old, that is constant in the run, if (p + 1) * 64 < context_lens[first]. Requests share old pages only.

Between runs. The newest keys of one run are old in the next, and an early read waits for no kernel of its graph. It is
safe because a page grows old only by a change of `context_lens`, which the caller makes between two launches of a
graph: the stream orders these in full, so all writers of the earlier run are done. Layers that programmatic edges join
in one graph see the same `context_lens` in all of them, and each has a cache of its own; even one cache for two layers
would have its new rows at the same places in both, outside every old page. What would break this: to update
`context_lens` or `block_table` inside the graph, or to order two launches by less than the stream does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph
from workloads.ops.base import (
    PAGE_BYTES,
    SCRATCH_BYTES,
    Domain,
    EarlyRead,
    Operand,
    OpKind,
    Pointer,
    Region,
    Splits,
    TensorMapSpec,
    Tile,
    Tiling,
    whole,
)

PAGE_TOKENS = 64
KEY_BYTES = 128
CACHE_PAGE_BYTES = PAGE_TOKENS * (KEY_BYTES + 4)
BOX_QUERIES = 128  # (token, head) rows of one TMA box, at most


def paged_score(
    graph: OpGraph,
    name: str,
    *,
    q: str,
    head_weights: str,
    cache: str,
    block_table: str,
    context_lens: str,
    logits: str,
    tokens: int,
) -> None:
    """Records the score of q[M, heads, 128] against a paged cache; `tokens` neighbouring rows share one request.

    Raises:
        WorkloadError: shapes that the device code does not know.
    """
    m, heads, dim = graph.tensors[q].shape
    requests = graph.tensors[block_table].shape[0]
    if heads not in (32, 64) or dim != KEY_BYTES or graph.tensors[cache].shape[1] != CACHE_PAGE_BYTES:
        raise WorkloadError(
            f"op {name}: {heads} heads of {dim} and pages of {graph.tensors[cache].shape[1]} bytes:"
            f" use 32 or 64 heads of {KEY_BYTES} and pages of {CACHE_PAGE_BYTES}"
        )
    if requests * tokens != m:
        raise WorkloadError(f"op {name}: {m} query rows are not {requests} requests of {tokens} tokens")
    reads = {
        "q": q,
        "head_weights": head_weights,
        "cache": cache,
        "block_table": block_table,
        "context_lens": context_lens,
    }
    graph.record(Op(name, "paged_score", reads, {"logits": logits}, {"heads": heads, "tokens": tokens}))


class PagedScore(OpKind):
    """fp32 logits. A tile is one request x `block_m` of its tokens x `rows` cache positions.

    The stages that `w_ahead` counts are pages: so many old ones of a tile may be issued before the wait.
    """

    name = "paged_score"
    loaders = True
    slots = (
        "query_map",
        "key_map",
        "scale_map",
        "head_weights",
        "block_table",
        "context_lens",
        "logits",
        "tokens",
        "pages",
        "stride",
    )
    early_slots: ClassVar[Mapping[str, EarlyRead]] = {
        "key_map": EarlyRead.OLD_ROWS,
        "scale_map": EarlyRead.OLD_ROWS,
        "block_table": EarlyRead.TABLE,
        "context_lens": EarlyRead.TABLE,
    }
    constants = ("heads",)

    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        tokens = int(op.params["tokens"])
        return {
            "core": ("mma_sync", "wgmma"),
            # The largest covers a request at once; a block's rows past the request's tokens are computed, not stored.
            "block_m": tuple(b for b in (8, 4, 2, 1) if b < 2 * tokens),
            "rows": (128, 256, 512, 64),
            "ctas_per_sm": (2, 1),
        }

    def illegal(self, op: Op, graph: OpGraph, tiling: Tiling) -> str | None:
        reason = super().illegal(op, graph, tiling)
        scratch = (tiling.rows + tiling.block_m * int(op.params["heads"])) * 4
        if reason is None and scratch > SCRATCH_BYTES:
            reason = f"{op.name}: {scratch} bytes of key scales and head weights, at most {SCRATCH_BYTES}"
        return reason

    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        requests, pages = graph.tensors[op.tensor("block_table")].shape
        return Domain(requests * self._blocks(op, tiling), -(-pages * PAGE_TOKENS // tiling.rows))

    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        tokens, heads = self._tokens(op, tiling, tile), (0, int(op.params["heads"]))
        return (
            Region(op.tensor("q"), (tokens, heads, (0, KEY_BYTES))),
            Region(op.tensor("head_weights"), (tokens, heads)),
            whole(graph, op.tensor("cache")),  # which pages is known to the block table alone
        )

    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        """Columns up to the last page's end; what lies past a token's context is left alone at run time."""
        pages, stride = graph.tensors[op.tensor("block_table")].shape[1], graph.tensors[op.tensor("logits")].shape[1]
        low, high = tile.n * tiling.rows, min((tile.n + 1) * tiling.rows, pages * PAGE_TOKENS, stride)
        return (Region(op.tensor("logits"), (self._tokens(op, tiling, tile), (low, high))),)

    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        m, heads, _ = graph.tensors[op.tensor("q")].shape
        cache_pages, box = graph.tensors[op.tensor("cache")].shape[0], min(BOX_QUERIES, tiling.block_m * heads)
        return (
            TensorMapSpec(op.tensor("q"), (KEY_BYTES, m * heads), (KEY_BYTES,), (KEY_BYTES, box)),
            TensorMapSpec(
                op.tensor("cache"),
                (KEY_BYTES, PAGE_TOKENS, cache_pages),
                (KEY_BYTES, CACHE_PAGE_BYTES),
                (KEY_BYTES, PAGE_TOKENS, 1),
            ),
            TensorMapSpec(
                op.tensor("cache"),
                (PAGE_TOKENS, cache_pages),
                (CACHE_PAGE_BYTES,),
                (PAGE_TOKENS, 1),
                element="f32",
                swizzle=False,
                offset_bytes=PAGE_TOKENS * KEY_BYTES,
            ),
            Pointer(op.tensor("head_weights")),
            Pointer(op.tensor("block_table")),
            Pointer(op.tensor("context_lens")),
            Pointer(op.tensor("logits")),
            int(op.params["tokens"]),
            graph.tensors[op.tensor("block_table")].shape[1],
            graph.tensors[op.tensor("logits")].shape[1],
        )

    def pages(self, op: Op, tiling: Tiling) -> int:
        queries = tiling.block_m * int(op.params["heads"])
        return -(-tiling.rows * KEY_BYTES // PAGE_BYTES) + -(-queries * KEY_BYTES // PAGE_BYTES)

    def weight_bytes(self, op: Op, graph: OpGraph) -> int:
        """Bytes of the cache pages of all requests: old keys are streamed like weights."""
        requests, pages = graph.tensors[op.tensor("block_table")].shape
        return requests * pages * CACHE_PAGE_BYTES

    def flops(self, op: Op, graph: OpGraph) -> int:
        m, heads, dim = graph.tensors[op.tensor("q")].shape
        return 2 * m * heads * dim * graph.tensors[op.tensor("block_table")].shape[1] * PAGE_TOKENS

    def numerics(self, op: Op, tiling: Tiling) -> str:
        """The core, and the head sum's order: a thread's heads ascending, then the quad by pairs."""
        return f"{tiling.core}/quad"

    @staticmethod
    def _blocks(op: Op, tiling: Tiling) -> int:
        """Query blocks of one request."""
        return -(-int(op.params["tokens"]) // tiling.block_m)

    def _tokens(self, op: Op, tiling: Tiling, tile: Tile) -> tuple[int, int]:
        """Query rows of a tile."""
        tokens = int(op.params["tokens"])
        request, block = divmod(tile.m, self._blocks(op, tiling))
        first = request * tokens
        return first + block * tiling.block_m, first + min((block + 1) * tiling.block_m, tokens)

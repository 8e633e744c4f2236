"""Head gate, bf16 product per head, paged score: tiles cover their outputs exactly once, whatever shape and tiling."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph, Role
from workloads.ops.base import MAX_PAGES, OpKind, Pointer, Region, TensorMapSpec, Tiling
from workloads.ops.bmm_bf16 import BmmBf16, bmm_bf16
from workloads.ops.head_gate import HeadGate, head_gate
from workloads.ops.paged_score import PagedScore, paged_score


def gate_graph(m: int, k_blocks: int, heads: int) -> tuple[OpGraph, Op]:
    graph = OpGraph("gate")
    graph.tensor("x", (m, k_blocks * 128), "bf16", Role.INPUT)
    graph.tensor("w", (heads, k_blocks * 128), "bf16", Role.WEIGHT)
    head_gate(graph, "gate", x="x", weight="w", out="out")
    return graph, graph.ops["gate"]


def bmm_graph(m: int, heads: int, nope: int) -> tuple[OpGraph, Op]:
    graph = OpGraph("bmm")
    graph.tensor("x", (m, heads, nope), "bf16", Role.INPUT)
    graph.tensor("w", (heads, nope, 512), "bf16", Role.WEIGHT)
    graph.tensor("out", (m, heads, 576), "bf16", Role.OUTPUT)
    bmm_bf16(graph, "bmm", x="x", weight="w", out="out")
    return graph, graph.ops["bmm"]


def score_graph(requests: int, tokens: int, kv: int, heads: int) -> tuple[OpGraph, Op]:
    graph, m, pages = OpGraph("score"), requests * tokens, -(-kv // 64)
    graph.tensor("q", (m, heads, 128), "e4m3", Role.INPUT)
    graph.tensor("weights", (m, heads), "f32", Role.INPUT)
    graph.tensor("cache", (requests * pages + 1, 64 * 132), "u8", Role.STATE)
    graph.tensor("table", (requests, pages), "i32", Role.INPUT)
    graph.tensor("lens", (m,), "i32", Role.INPUT)
    graph.tensor("logits", (m, -(-kv // 256) * 256), "f32", Role.OUTPUT)
    paged_score(
        graph,
        "score",
        q="q",
        head_weights="weights",
        cache="cache",
        block_table="table",
        context_lens="lens",
        logits="logits",
        tokens=tokens,
    )
    return graph, graph.ops["score"]


def legal_tilings(kind: OpKind, op: Op, graph: OpGraph) -> Iterator[Tiling]:
    choices = kind.tunables(op, graph)
    for values in product(*choices.values()):
        tiling = Tiling(**dict(zip(choices, values, strict=True)))
        if kind.illegal(op, graph, tiling) is None:
            yield tiling


def default_tiling(kind: OpKind, op: Op, graph: OpGraph) -> Tiling:
    return Tiling(**{field: values[0] for field, values in kind.tunables(op, graph).items()})


def writes_per_element(kind: OpKind, op: Op, graph: OpGraph, tiling: Tiling, shape: tuple[int, ...]) -> np.ndarray:
    count = np.zeros(shape, np.int32)
    for tile in kind.domain(op, graph, tiling):
        for region in kind.writes(op, graph, tiling, tile):
            assert all(0 <= low < high <= extent for (low, high), extent in zip(region.box, shape, strict=True))
            count[tuple(slice(low, high) for low, high in region.box)] += 1
    return count


def check_inside(graph: OpGraph, regions: tuple[Region, ...]) -> None:
    for region in regions:
        shape = graph.tensors[region.tensor].shape
        assert all(0 <= low < high <= extent for (low, high), extent in zip(region.box, shape, strict=True)), region


def check_operands(kind: OpKind, op: Op, graph: OpGraph, tiling: Tiling) -> None:
    """One operand a slot; maps stay inside their tensors and pages inside the budget."""
    operands = kind.operands(op, graph, tiling, {})
    assert len(operands) == len(kind.slots)
    for operand in operands:
        if isinstance(operand, TensorMapSpec):
            size = {"u8": 1, "bf16": 2, "f32": 4}[operand.element]
            spans = [(extent - 1) * step for extent, step in zip(operand.dims, (size, *operand.strides), strict=True)]
            assert operand.offset_bytes + sum(spans) + size <= graph.tensors[operand.tensor].bytes
            assert not operand.swizzle or operand.box[0] * size == 128, "a swizzled row is 128 bytes"
            assert operand.offset_bytes % 16 == 0 and operand.box[0] * size % 16 == 0
            assert all(stride % 16 == 0 for stride in operand.strides)
            assert all(extent <= 256 for extent in operand.box)
        elif isinstance(operand, Pointer):
            assert operand.tensor in graph.tensors
    assert 0 < kind.pages(op, tiling) <= MAX_PAGES


@given(m=st.integers(1, 70), k_blocks=st.integers(1, 56), heads=st.sampled_from((32, 64)), data=st.data())
def test_gate_tiles_cover_every_partial_once(m: int, k_blocks: int, heads: int, data: st.DataObject) -> None:
    kind, (graph, op) = HeadGate(), gate_graph(m, k_blocks, heads)
    tiling = data.draw(st.sampled_from(list(legal_tilings(kind, op, graph))))
    assert (writes_per_element(kind, op, graph, tiling, (tiling.split_k, m, heads)) == 1).all()
    read = np.zeros((m, k_blocks * 128), np.int32)
    for tile in kind.domain(op, graph, tiling):
        (region,) = kind.reads(op, graph, tiling, tile, {})
        check_inside(graph, (region,))
        read[tuple(slice(low, high) for low, high in region.box)] += 1
    assert (read == 1).all()
    check_operands(kind, op, graph, tiling)


@given(m=st.integers(1, 70), heads=st.integers(1, 9), nope=st.sampled_from((128, 192)), data=st.data())
def test_bmm_tiles_cover_the_latent_columns_once(m: int, heads: int, nope: int, data: st.DataObject) -> None:
    kind, (graph, op) = BmmBf16(), bmm_graph(m, heads, nope)
    tiling = data.draw(st.sampled_from(list(legal_tilings(kind, op, graph))))
    count = writes_per_element(kind, op, graph, tiling, (m, heads, 576))
    assert (count[:, :, :512] == 1).all()
    assert (count[:, :, 512:] == 0).all()
    for tile in kind.domain(op, graph, tiling):
        (read,), (written,) = kind.reads(op, graph, tiling, tile, {}), kind.writes(op, graph, tiling, tile)
        check_inside(graph, (read,))
        assert read.box[:2] == written.box[:2]
    check_operands(kind, op, graph, tiling)


@given(
    requests=st.integers(1, 4),
    tokens=st.integers(1, 8),
    kv=st.integers(8, 2000),
    heads=st.sampled_from((32, 64)),
    data=st.data(),
)
def test_score_tiles_cover_all_pages_once(requests: int, tokens: int, kv: int, heads: int, data: st.DataObject) -> None:
    kind, (graph, op) = PagedScore(), score_graph(requests, tokens, kv, heads)
    tiling = data.draw(st.sampled_from(list(legal_tilings(kind, op, graph))))
    count = writes_per_element(kind, op, graph, tiling, graph.tensors["logits"].shape)
    pages = -(-kv // 64)
    assert (count[:, : pages * 64] == 1).all()
    assert (count[:, pages * 64 :] == 0).all()
    for tile in kind.domain(op, graph, tiling):
        query, weights, _ = kind.reads(op, graph, tiling, tile, {})
        check_inside(graph, (query, weights))
        low, high = query.box[0]
        assert low // tokens == (high - 1) // tokens, "a tile belongs to one request"
    check_operands(kind, op, graph, tiling)


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 256])
def test_first_choices_are_legal(m: int) -> None:
    for kind, (graph, op) in (
        (HeadGate(), gate_graph(m, 48, 32)),
        (HeadGate(), gate_graph(m, 56, 64)),
        (BmmBf16(), bmm_graph(m, 64, 192)),
        (BmmBf16(), bmm_graph(m, 8, 128)),
        (PagedScore(), score_graph(m, 1, 8192, 32)),
        (PagedScore(), score_graph(m, 8, 8192, 64)),
    ):
        assert kind.illegal(op, graph, default_tiling(kind, op, graph)) is None


def test_a_long_context_and_a_short_one_have_tiles() -> None:
    kind = PagedScore()
    for kv, tiles in ((1, 1), (128, 1), (129, 2), (131072, 1024)):
        graph, op = score_graph(2, 1, kv, 32)
        assert kind.domain(op, graph, default_tiling(kind, op, graph)).n_tiles == tiles


def test_tilings_without_room_are_refused_with_the_reason() -> None:
    graph, op = bmm_graph(64, 8, 192)
    kind = BmmBf16()
    assert kind.illegal(op, graph, Tiling(block_m=64, rows=256, ctas_per_sm=1)) is None
    assert "registers" in (kind.illegal(op, graph, Tiling(block_m=64, rows=256, ctas_per_sm=2)) or "")
    graph, op = bmm_graph(8, 8, 192)
    assert "warpgroups" in (kind.illegal(op, graph, Tiling(block_m=8, rows=64)) or "")


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(WorkloadError, match="use 32 or 64 heads"):
        gate_graph(4, 2, 48)
    with pytest.raises(WorkloadError, match="multiple of 64"):
        bmm_graph(4, 2, 100)
    with pytest.raises(WorkloadError, match="use 32 or 64 heads"):
        score_graph(1, 1, 64, 16)


def test_numerics_ignore_what_cannot_change_bits() -> None:
    graph, op = gate_graph(40, 48, 32)
    keys = {(t.split_k, HeadGate().numerics(op, t)) for t in legal_tilings(HeadGate(), op, graph)}
    assert len(keys) == len({key for _, key in keys}) == len({split for split, _ in keys})
    graph, op = bmm_graph(40, 2, 192)
    assert {BmmBf16().numerics(op, t) for t in legal_tilings(BmmBf16(), op, graph)} == {""}
    graph, op = score_graph(2, 8, 300, 32)
    assert len({PagedScore().numerics(op, t) for t in legal_tilings(PagedScore(), op, graph)}) == 2

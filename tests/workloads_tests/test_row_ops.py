"""Row ops: tiles cover their outputs and inputs exactly once, operands follow the slots, odd shapes are refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import WorkloadError
from workloads.graph import Op, OpGraph, Role
from workloads.ops.add_rmsnorm_quant import AddRmsnormQuant, add_rmsnorm_quant
from workloads.ops.base import OpKind, Pointer, Tiling
from workloads.ops.index_key_finalise import IndexKeyFinalise, index_key_finalise
from workloads.ops.index_query_finalise import IndexQueryFinalise, index_query_finalise
from workloads.ops.qkv_finalise import QkvFinalise, qkv_finalise
from workloads.ops.row_op import float_bits
from workloads.ops.scale_bias_relu import ScaleBiasRelu, scale_bias_relu

Shapes = Mapping[str, tuple[tuple[int, ...], str, Role]]
TOKENS = st.integers(1, 70)
SPLITS = st.integers(1, 24)


def declared(shapes: Shapes) -> OpGraph:
    """A graph with tensors. A partial is an inner tensor here: its producer is not what is tested."""
    graph = OpGraph("row")
    for name, (shape, dtype, role) in shapes.items():
        graph.tensor(name, shape, dtype, role)
    return graph


def table(m: int) -> Shapes:
    return {
        "positions": ((m,), "i32", Role.INPUT),
        "slots": ((m,), "i64", Role.INPUT),
        "cos_sin": ((64, 64), "f32", Role.WEIGHT),
    }


def norm_graph(m: int, hidden: int) -> tuple[OpGraph, Op]:
    row = {name: ((m, hidden), "bf16", Role.INPUT) for name in ("hidden", "residual")}
    out = {name: ((m, hidden), "bf16", Role.OUTPUT) for name in ("residual_out", "norm_out")}
    scale = {"scale": ((-(-hidden // 128), -(-m // 4) * 4), "f32", Role.OUTPUT)}
    weight = {"weight": ((hidden,), "bf16", Role.WEIGHT), "quantised": ((m, hidden), "e4m3", Role.OUTPUT)}
    graph = declared(row | out | scale | weight)
    add_rmsnorm_quant(
        graph,
        "op",
        hidden="hidden",
        residual="residual",
        weight="weight",
        eps=1e-5,
        residual_out="residual_out",
        norm_out="norm_out",
        quantised="quantised",
        scale="scale",
    )
    return graph, graph.ops["op"]


def qkv_graph(m: int, q: int, columns: int | None = None) -> tuple[OpGraph, Op]:
    shapes: Shapes = {
        "partial": ((m, columns or q + 576), "f32", Role.INPUT),
        "q_weight": ((q,), "bf16", Role.WEIGHT),
        "kv_weight": ((512,), "bf16", Role.WEIGHT),
        "q": ((m, q), "e4m3", Role.OUTPUT),
        "q_scale": ((-(-q // 128), -(-m // 4) * 4), "f32", Role.OUTPUT),
        "cache": ((3, 64, 656), "u8", Role.STATE),
    }
    graph = declared({**shapes, **table(m)})
    qkv_finalise(
        graph,
        "op",
        partial="partial",
        q_weight="q_weight",
        kv_weight="kv_weight",
        positions="positions",
        slots="slots",
        cos_sin="cos_sin",
        eps=1e-5,
        q="q",
        q_scale="q_scale",
        cache="cache",
    )
    return graph, graph.ops["op"]


def key_graph(m: int, columns: int = 128) -> tuple[OpGraph, Op]:
    shapes: Shapes = {
        "partial": ((m, columns), "f32", Role.INPUT),
        "weight": ((128,), "f32", Role.WEIGHT),
        "bias": ((128,), "f32", Role.WEIGHT),
        "cache": ((3, 64 * 132), "u8", Role.STATE),
    }
    graph = declared({**shapes, **table(m)})
    index_key_finalise(
        graph,
        "op",
        partial="partial",
        weight="weight",
        bias="bias",
        positions="positions",
        slots="slots",
        cos_sin="cos_sin",
        eps=1e-6,
        hadamard=True,
        neox=False,
        cache="cache",
    )
    return graph, graph.ops["op"]


def query_graph(m: int, heads: int, columns: int | None = None) -> tuple[OpGraph, Op]:
    shapes: Shapes = {
        "partial": ((m, columns or heads * 128), "f32", Role.INPUT),
        "gate": ((m, heads), "f32", Role.INPUT),
        "quantised": ((m, heads, 128), "e4m3", Role.OUTPUT),
        "head_weights": ((m, heads), "f32", Role.OUTPUT),
    }
    graph = declared({**shapes, **table(m)})
    index_query_finalise(
        graph,
        "op",
        partial="partial",
        gate_partial="gate",
        positions="positions",
        cos_sin="cos_sin",
        hadamard=True,
        neox=False,
        quantised="quantised",
        head_weights="head_weights",
    )
    return graph, graph.ops["op"]


def chain_graph(n: int) -> tuple[OpGraph, Op]:
    shapes = {name: ((n,), "f32", Role.WEIGHT) for name in ("weight", "bias")}
    graph = declared({"x": ((n,), "f32", Role.INPUT), **shapes, "out": ((n,), "f32", Role.OUTPUT)})
    scale_bias_relu(graph, "op", x="x", weight="weight", bias="bias", out="out")
    return graph, graph.ops["op"]


def touches(
    kind: OpKind, op: Op, graph: OpGraph, splits: Mapping[str, int], *, reads: bool, tiling: Tiling | None = None
) -> dict[str, np.ndarray]:
    """How many tiles read or write each element, by tensor; every region must lie inside its tensor."""
    chosen, counts = tiling or Tiling(), {}
    for tile in kind.domain(op, graph, chosen):
        found = kind.reads(op, graph, chosen, tile, splits) if reads else kind.writes(op, graph, chosen, tile)
        for region in found:
            shape = graph.tensors[region.tensor].shape
            if region.tensor in splits:
                shape = (splits[region.tensor], *shape)
            assert all(0 <= low < high <= extent for (low, high), extent in zip(region.box, shape, strict=True)), region
            count = counts.setdefault(region.tensor, np.zeros(shape, np.int32))
            count[tuple(slice(low, high) for low, high in region.box)] += 1
    return counts


def check_once(counts: Mapping[str, np.ndarray], tensors: set[str]) -> None:
    assert set(counts) == tensors
    for name, count in counts.items():
        assert (count == 1).all(), name


def check_scale(count: np.ndarray, m: int) -> None:
    """Scales are written for tokens; the padding of the row is left alone."""
    assert (count[:, :m] == 1).all()
    assert (count[:, m:] == 0).all()


def check_operands(kind: OpKind, op: Op, graph: OpGraph, splits: Mapping[str, int]) -> dict[str, int]:
    """One operand a slot and pointers to declared tensors under their slot's role; returns the numbers by slot."""
    operands = dict(zip(kind.slots, kind.operands(op, graph, Tiling(), splits), strict=True))
    for slot, operand in operands.items():
        if isinstance(operand, Pointer):
            assert operand.tensor == op.tensor(slot)
    assert kind.pages(op, Tiling()) == 0
    assert not kind.loaders
    return {slot: operand for slot, operand in operands.items() if isinstance(operand, int)}


def decoded(bits: int) -> float:
    assert 0 <= bits < 1 << 32
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@given(m=TOKENS, groups=st.integers(1, 64))
def test_norm_tiles_cover_every_row_once(m: int, groups: int) -> None:
    kind, (graph, op) = AddRmsnormQuant(), norm_graph(m, groups * 128)
    written = touches(kind, op, graph, {}, reads=False)
    check_scale(written.pop("scale"), m)
    check_once(written, {"residual_out", "norm_out", "quantised"})
    # Every tile of a token reads its whole row.
    tiles = kind.domain(op, graph, Tiling()).n_tiles
    read = touches(kind, op, graph, {}, reads=True)
    assert all((read[name] == tiles).all() for name in ("hidden", "residual"))
    numbers = check_operands(kind, op, graph, {})
    assert numbers["scale_stride"] == -(-m // 4) * 4
    assert decoded(numbers["eps"]) == np.float32(1e-5)


@given(m=TOKENS, groups=st.integers(1, 16), splits=SPLITS)
def test_qkv_tiles_cover_the_projection_once(m: int, groups: int, splits: int) -> None:
    kind, (graph, op), counts = QkvFinalise(), qkv_graph(m, groups * 128), {"partial": splits}
    written = touches(kind, op, graph, counts, reads=False)
    check_scale(written.pop("q_scale"), m)
    # Slots are known at run time only: the tiles of each token's latent and rotary key may write any row of the cache.
    assert (written.pop("cache") == 2 * m).all()
    check_once(written, {"q"})
    check_once(touches(kind, op, graph, counts, reads=True), {"partial"})
    numbers = check_operands(kind, op, graph, counts)
    assert (numbers["splits"], numbers["m"], numbers["scale_stride"]) == (splits, m, -(-m // 4) * 4)


@given(m=TOKENS, splits=SPLITS)
def test_index_key_tiles_cover_the_projection_once(m: int, splits: int) -> None:
    kind, (graph, op), counts = IndexKeyFinalise(), key_graph(m), {"partial": splits}
    check_once(touches(kind, op, graph, counts, reads=True), {"partial"})
    written = touches(kind, op, graph, counts, reads=False)
    assert set(written) == {"cache"}
    assert (written["cache"] == kind.domain(op, graph, Tiling()).num_tiles).all()
    numbers = check_operands(kind, op, graph, counts)
    assert (numbers["splits"], numbers["m"]) == (splits, m)
    assert decoded(numbers["eps"]) == np.float32(1e-6)


@given(m=TOKENS, heads=st.sampled_from((8, 32, 64)), splits=SPLITS, gate_splits=st.integers(1, 48))
def test_index_query_tiles_cover_every_head_once(m: int, heads: int, splits: int, gate_splits: int) -> None:
    kind, (graph, op) = IndexQueryFinalise(), query_graph(m, heads)
    counts = {"partial": splits, "gate": gate_splits}
    check_once(touches(kind, op, graph, counts, reads=True), {"partial", "gate"})
    check_once(touches(kind, op, graph, counts, reads=False), {"quantised", "head_weights"})
    numbers = check_operands(kind, op, graph, counts)
    assert (numbers["splits"], numbers["gate_splits"], numbers["m"]) == (splits, gate_splits, m)
    assert decoded(numbers["factor"]) == np.float32((heads * 128) ** -0.5)


@given(blocks=st.integers(1, 32), rows=st.sampled_from((256, 1024)))
def test_chain_tiles_cover_every_element_once(blocks: int, rows: int) -> None:
    kind, (graph, op) = ScaleBiasRelu(), chain_graph(blocks * 1024)
    assert kind.illegal(op, graph, Tiling(rows=rows)) is None
    assert kind.domain(op, graph, Tiling(rows=rows)).num_tiles == blocks * 1024 // rows
    for reads, tensor in ((True, "x"), (False, "out")):
        check_once(touches(kind, op, graph, {}, reads=reads, tiling=Tiling(rows=rows)), {tensor})
    assert check_operands(kind, op, graph, {}) == {}


def test_a_head_weight_of_32_heads_is_divided_by_64() -> None:
    graph, op = query_graph(1, 32)
    factor = check_operands(IndexQueryFinalise(), op, graph, {"partial": 1, "gate": 1})["factor"]
    assert decoded(factor) == 1 / 64


@pytest.mark.parametrize(
    ("value", "bits"), [(1.0, 0x3F800000), (1e-5, 0x3727C5AC), (1e-6, 0x358637BD), (-2.0, 0xC0000000)]
)
def test_numbers_travel_as_the_bits_of_fp32(value: float, bits: int) -> None:
    assert float_bits(value) == bits


def test_weights_that_are_streamed_are_counted_and_tables_are_not() -> None:
    graph, op = qkv_graph(4, 2048)
    assert QkvFinalise().weight_bytes(op, graph) == (2048 + 512) * 2
    graph, op = key_graph(4)
    assert IndexKeyFinalise().weight_bytes(op, graph) == 2 * 128 * 4
    graph, op = query_graph(4, 32)
    assert IndexQueryFinalise().weight_bytes(op, graph) == 0
    graph, op = norm_graph(4, 6144)
    assert AddRmsnormQuant().weight_bytes(op, graph) == 6144 * 2


def test_bits_and_binaries_do_not_depend_on_the_tiling() -> None:
    graph, op = norm_graph(4, 256)
    for kind in (AddRmsnormQuant(), QkvFinalise(), IndexKeyFinalise(), IndexQueryFinalise()):
        assert kind.tunables(op, graph) == {}
        assert not kind.tiled
        assert {kind.numerics(op, Tiling(block_m=m, rows=r)) for m, r in product((8, 16), (64, 128))} == {""}
    assert ScaleBiasRelu().numerics(op, Tiling(rows=1024)) == ScaleBiasRelu().numerics(op, Tiling(rows=256)) == ""


def test_shapes_without_device_code_are_refused() -> None:
    with pytest.raises(WorkloadError, match="multiple of 128"):
        norm_graph(2, 200)
    with pytest.raises(WorkloadError, match="multiple of 128 up to 2048"):
        qkv_graph(2, 2176)
    with pytest.raises(WorkloadError, match="2624"):
        qkv_graph(2, 2048, columns=2560)
    with pytest.raises(WorkloadError, match="128 columns"):
        key_graph(2, columns=64)
    with pytest.raises(WorkloadError, match="4096"):
        query_graph(2, 32, columns=2048)
    with pytest.raises(WorkloadError, match="multiple of 1024"):
        chain_graph(1280)
    graph, op = query_graph(2, 12)
    assert "not a multiple of 8" in (IndexQueryFinalise().illegal(op, graph, Tiling()) or "")

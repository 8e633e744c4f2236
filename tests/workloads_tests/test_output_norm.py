"""The output projection and its norm: the graph, the reference against torch's own operators, and planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.plan.launches import lower
from backends.plan.verify import verify
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.gpu import GpuRecord
from workloads import registry
from workloads.errors import WorkloadError
from workloads.ops import KINDS, compulsory_bytes
from workloads.ops.base import Tile, Tiling
from workloads.output_norm.graph import EPS, HIDDEN, OutputNormShape, build_graph
from workloads.output_norm.inputs import make_inputs, refresh
from workloads.output_norm.reference import compare, reference

H200 = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
SMALL = OutputNormShape(tokens=3, tp=8)


def test_the_graph_is_two_ops_and_one_edge() -> None:
    graph = build_graph(OutputNormShape())
    assert graph.op_edges() == (("O", "N"),)
    assert compulsory_bytes(graph) == HIDDEN * 16384 + 48 * 128 * 4 + HIDDEN * 2
    space = CmpSpace(graph, H200)
    for config in (serial(space), default(space)):
        space.check(config)
        assert config.ops["O"].tiling.split_k >= 2  # 128 k-blocks: one split would hold too many
        assert verify(graph, lower(graph, config, "sm_90a")).passed


def test_every_norm_tile_reads_all_splits_of_its_row() -> None:
    graph = build_graph(OutputNormShape(tokens=5))
    kind, op = KINDS["add_rmsnorm_quant"], graph.ops["N"]
    partial, residual = kind.reads(op, graph, Tiling(), Tile(3, 1, 0, 0, 0), {"o_partial": 4})
    assert (partial.tensor, partial.box) == ("o_partial", ((0, 4), (3, 4), (0, HIDDEN)))
    assert (residual.tensor, residual.box) == ("residual", ((3, 4), (0, HIDDEN)))
    row = dict(zip(kind.slots, kind.operands(op, graph, Tiling(), {"o_partial": 4}), strict=True))
    assert (row["splits"], row["m"]) == (4, 5)


def test_the_reference_agrees_with_torch_in_float64() -> None:
    tensors = make_inputs(SMALL, 1)
    got = reference(SMALL, tensors)
    k_blocks = SMALL.k // 128
    x = tensors["attn_fp8"].double() * tensors["attn_sf"][:, :3].T.double().repeat_interleave(128, 1)
    blocks = tensors["w_o_sf"].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    total = torch.nn.functional.linear(x, tensors["w_o"].double() * blocks) + tensors["residual"].double()
    norm = torch.nn.functional.rms_norm(total, (HIDDEN,), tensors["ln_w"].double(), EPS)
    assert tensors["attn_sf"].shape == (k_blocks, 4)
    torch.testing.assert_close(got["residual_out"].double(), total, atol=0.02, rtol=0.01)
    torch.testing.assert_close(got["norm_out"].double(), norm, atol=0.02, rtol=0.01)
    back = got["h_fp8"].double() * got["h_sf"][:, :3].T.double().repeat_interleave(128, 1)
    torch.testing.assert_close(back, got["norm_out"].double(), atol=0.02, rtol=0.0626)


def test_inputs_depend_on_the_seed_and_a_refresh_keeps_the_weights() -> None:
    first, again, other = make_inputs(SMALL, 1), make_inputs(SMALL, 1), make_inputs(SMALL, 2)
    assert all(torch.equal(first[n].view(torch.uint8), again[n].view(torch.uint8)) for n in first)
    assert not torch.equal(first["residual"], other["residual"])
    assert set(refresh(SMALL, first, 5)) == {"attn_fp8", "attn_sf", "residual"}


@pytest.mark.parametrize("name", ["residual_out", "norm_out", "h_fp8", "h_sf"])
def test_a_planted_fault_is_caught(name: str) -> None:
    want = reference(SMALL, make_inputs(SMALL, 1))
    assert compare(SMALL, want, want) == []
    broken = dict(want)
    values = want[name].clone()
    values.view(-1)[:200] = torch.zeros_like(values.view(-1)[:200])
    broken[name] = values
    assert any(mismatch.tensor == name for mismatch in compare(SMALL, broken, want))
    del broken[name]
    assert [m.rule for m in compare(SMALL, broken, want) if m.tensor == name] == ["is missing"]


def test_bad_shapes_are_refused() -> None:
    workload = registry.get("output_norm")
    with pytest.raises(WorkloadError, match="tokens=0 is out of range: use 1 to 256"):
        workload.shape({"tokens": 0})
    with pytest.raises(WorkloadError, match="tp=3 is out of range"):
        workload.shape({"tp": 3})
    assert replace(SMALL, tokens=16).key() == "m16tp8"

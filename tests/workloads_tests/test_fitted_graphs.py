"""Graphs over a caller's caches and tables: any number of pages, any length, the same schedule."""

from __future__ import annotations

from search_spaces.cmp import CmpSpace, default
from search_spaces.gpu import GpuRecord
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.ops import KINDS
from workloads.ops.base import TensorMapSpec

GRAPH = build_graph(AttentionPreShape())
GPU = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)


def test_larger_caches_reach_the_tensor_maps() -> None:
    fitted = GRAPH.fitted({"indexer_cache": (4096, 8448), "cos_sin": (202752, 64)})
    assert fitted.tensors["indexer_cache"].shape == (4096, 8448)
    assert fitted.tensors["cos_sin"].shape == (202752, 64)
    tiling = default(CmpSpace(GRAPH, GPU)).ops["E1"].tiling
    operands = KINDS["paged_score"].operands(fitted.ops["E1"], fitted, tiling, {})
    keys = next(o for o in operands if isinstance(o, TensorMapSpec) and o.tensor == "indexer_cache")
    assert 4096 in keys.dims


def test_what_does_not_fit_stays_as_declared() -> None:
    wrong = {"indexer_cache": (4096, 8447), "mla_cache": (255, 64, 656), "hidden": (32, 6144), "nothing": (1,)}
    fitted = GRAPH.fitted(wrong)
    assert fitted.tensors == GRAPH.tensors


def test_the_least_cache_holds_every_request_without_spares() -> None:
    assert GRAPH.fitted({"mla_cache": (256, 64, 656)}).tensors["mla_cache"].shape[0] == 256


def test_identity_and_original_are_untouched() -> None:
    before = GRAPH.digest()
    fitted = GRAPH.fitted({"indexer_cache": (4096, 8448)})
    assert GRAPH.tensors["indexer_cache"].shape != fitted.tensors["indexer_cache"].shape
    assert GRAPH.digest() == before

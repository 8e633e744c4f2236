"""A config in words: tunables only, long chains cut."""

from __future__ import annotations

from search_spaces.cmp import CmpSpace, default
from tests.tuner_tests.fakes import GPU
from tuner.describe import describe_config
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as build_chain


def test_a_row_op_shows_no_tiling_and_a_gemm_shows_what_it_is_tuned_by() -> None:
    graph = build_graph(AttentionPreShape())
    lines = describe_config(default(CmpSpace(graph, GPU)), graph)
    assert len(lines) == 12
    assert lines[0].startswith("A0   stream 0, trigger weights_issued")
    assert "core wgmma, block_m 16, rows 64, stages 6, ctas_per_sm 2, split_k 3" in lines[1]
    assert lines[-1].startswith("programmatic: A0>B0 A0>B1")


def test_a_long_chain_is_cut_and_says_so() -> None:
    graph = build_chain(PdlChainShape(layers=200))
    lines = describe_config(default(CmpSpace(graph, GPU)), graph)
    assert len(lines) == 18
    assert lines[16] == "... and 184 ops more, all of them in the stored config"
    assert lines[17].endswith("... and 167 more")

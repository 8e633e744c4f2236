"""Launch plans: lowering, canonical keys, and the verifier with planted faults."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.plan.encode import GRID_HEADER_BYTES, MAP_BYTES, OPERAND_SLOTS, grid_args, map_specs, table_row
from backends.plan.launches import (
    POINTS,
    EdgeKind,
    Prefetch,
    chained,
    delayed,
    lower,
    space_binaries,
    transitive_reduction,
)
from backends.plan.verify import ancestors, verify
from search_spaces.cmp import Choice, CmpSpace, default, serial
from search_spaces.config import NO_LIMIT_AHEAD, CmpConfig, from_json, numerics_key, run_key, to_json
from search_spaces.errors import ConfigError, IllegalConfig
from search_spaces.gpu import GpuRecord
from tuner.legal import Repair
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.graph import Role
from workloads.ops import KINDS
from workloads.ops.base import EarlyRead, TensorMapSpec
from workloads.ops.index_key_finalise import IndexKeyFinalise
from workloads.ops.paged_score import PagedScore
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as build_chain

H200 = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
GRAPH = build_graph(AttentionPreShape())
SPACE = CmpSpace(GRAPH, H200)


def test_the_headline_layer_is_eleven_kernels() -> None:
    plan = lower(GRAPH, default(SPACE), "sm_90a")
    assert [node.op for node in plan.nodes] == ["A0", "B0", "C0", "B1", "B0f", "B1f", "D0", "D1", "D2", "D1f", "E1"]
    assert plan.roots() == ("A0",)
    assert set(plan.sinks()) == {"D2", "E1"}


def test_the_graph_has_the_published_edges() -> None:
    edges = "A0>B0 A0>C0 A0>B1 B0>B0f B1>B1f B0f>D0 B0f>D1 D0>D2 D1>D1f C0>D1f D1f>E1 B1f>E1"
    assert {f"{p}>{c}" for p, c in GRAPH.op_edges()} == set(edges.split())


def test_serial_is_one_chain_of_ordinary_edges() -> None:
    plan = lower(GRAPH, serial(SPACE), "sm_90a")
    assert len(plan.edges) == 10
    assert {edge.kind for edge in plan.edges} == {EdgeKind.ORDINARY}
    assert all(edge.consumer == plan.nodes[i + 1].op for i, edge in enumerate(plan.edges))


@given(st.integers(0, 10_000))
def test_every_drawn_config_lowers_to_a_safe_plan(seed: int) -> None:
    config = SPACE.decode(SPACE.sample(random.Random(seed)))
    try:
        SPACE.check(config)
        plan = lower(GRAPH, config, "sm_90a")
    except IllegalConfig:
        return
    assert verify(GRAPH, plan, H200.sm_count).passed
    assert from_json(to_json(config)) == config
    assert run_key(from_json(to_json(config))) == run_key(config)


@given(st.integers(0, 1000), st.data())
def test_the_verifier_catches_a_removed_edge(seed: int, data: st.DataObject) -> None:
    config = replace(SPACE.decode(SPACE.sample(random.Random(seed))), ops=default(SPACE).ops)
    plan = lower(GRAPH, config, "sm_90a")
    gone = data.draw(st.sampled_from(plan.edges))
    cut = replace(plan, edges=tuple(edge for edge in plan.edges if edge != gone))
    verdict = verify(GRAPH, cut)
    before = ancestors(cut)
    assert before is not None
    needed = any(p not in before[c] for p, c in GRAPH.op_edges())
    assert verdict.passed is not needed
    assert verdict.passed or "no path orders" in verdict.message


def test_the_verifier_catches_a_cycle_a_stranger_and_a_missing_op() -> None:
    plan = lower(GRAPH, default(SPACE), "sm_90a")
    back = replace(plan.edges[0], producer="E1", consumer="A0")
    assert "cycle" in verify(GRAPH, replace(plan, edges=(*plan.edges, back))).message
    stranger = replace(plan.edges[0], producer="Z9")
    assert "Z9" in verify(GRAPH, replace(plan, edges=(*plan.edges, stranger))).message
    assert not verify(GRAPH, replace(plan, nodes=plan.nodes[:-1])).passed


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda p: p[0] < p[1])))
def test_transitive_reduction_keeps_reachability_and_nothing_else(pairs: set[tuple[int, int]]) -> None:
    named = {(str(a), str(b)) for a, b in pairs}
    kept = transitive_reduction(named, [str(i) for i in range(8)])
    assert kept <= named

    def reachable(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
        closed = set(edges)
        while True:
            more = {(a, d) for a, b in closed for c, d in closed if b == c} - closed
            if not more:
                return closed
            closed |= more

    assert reachable(kept) == reachable(named)
    assert all(reachable(kept - {edge}) != reachable(named) for edge in kept)


def test_stream_labels_are_canonical() -> None:
    base = default(SPACE)
    shuffled = SPACE.decode({f"{name}.stream": 3 for name in base.order})
    same = SPACE.decode({f"{name}.stream": 1 for name in base.order})
    assert lower(GRAPH, shuffled, "sm_90a").key() == lower(GRAPH, same, "sm_90a").key()


def test_the_numerics_key_ignores_the_schedule_but_not_the_splits() -> None:
    base = serial(SPACE)
    other = SPACE.decode({"B0.stages": 8, "A0>B0.edge": "ordinary"})
    assert numerics_key(GRAPH, base, "sm_90a") == numerics_key(GRAPH, other, "sm_90a")
    split = SPACE.decode({"B0.split_k": 6})
    assert numerics_key(GRAPH, base, "sm_90a") != numerics_key(GRAPH, split, "sm_90a")


def test_configs_that_do_not_fit_are_refused_with_the_reason() -> None:
    base = default(SPACE)
    with pytest.raises(ConfigError, match="orders B0 before A0"):
        lower(GRAPH, replace(base, order=tuple(reversed(base.order))), "sm_90a")
    tiling = replace(base.ops["D0"].tiling, rows=96)
    with pytest.raises(IllegalConfig, match="rows=96"):
        lower(GRAPH, replace(base, ops={**base.ops, "D0": replace(base.ops["D0"], tiling=tiling)}), "sm_90a")
    with pytest.raises(ConfigError, match="unknown field 'colour'"):
        document = to_json(base)
        document["ops"]["A0"]["colour"] = 1
        from_json(document)


def test_parameter_blocks_have_the_device_layout() -> None:
    plan = lower(GRAPH, default(SPACE), "sm_90a")
    addresses = {name: 0x1000 * (i + 1) for i, name in enumerate(GRAPH.tensors)}
    for part in plan.parts():
        maps = [bytes([i]) * MAP_BYTES for i, _ in enumerate(map_specs(part.operands))]
        body = grid_args(part, addresses, maps)
        assert len(body) == GRID_HEADER_BYTES + MAP_BYTES * max(len(maps), 1)
        assert body[GRID_HEADER_BYTES:].startswith(b"".join(maps))


def test_the_type_of_an_edge_is_part_of_a_plans_key() -> None:
    space = CmpSpace(
        build_chain(PdlChainShape(layers=3)), GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
    )
    config = replace(serial(space), programmatic=frozenset({("L0", "L1")}))
    edges = replace(lower(space.graph, config, "sm_90a"), edges=lower(space.graph, serial(space), "sm_90a").edges)
    assert edges.key() != lower(space.graph, config, "sm_90a").key()


def test_the_words_of_a_grid_kernel_stand_where_the_shell_reads_them() -> None:
    space = CmpSpace(
        build_chain(PdlChainShape(layers=1)), GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
    )
    part = replace(
        lower(space.graph, serial(space), "sm_90a").parts()[0],
        k_blocks=48,
        tiles=(11, 5, 1),
        ctas_x=6,
        trigger=3,
        wait=2,
        w_ahead=7,
        prefetch=Prefetch("w0", 64, 4),
    )
    addresses = dict.fromkeys(space.graph.tensors, 0) | {"w0": 77}
    body = grid_args(part, addresses, (), first_cta=8, delay_us=9, trace=99)
    words = struct.unpack_from("<2Q12i", body, OPERAND_SLOTS * 8)
    assert words == (77, 99, 9, 3, 3, 2, 7, 9, 11, 6, 5, 8, 64, 4)


def test_tensor_maps_are_numbered_in_operand_order() -> None:
    spec = TensorMapSpec("w", (128, 64), (128,), (128, 64))
    assert table_row((spec, 5, spec), {}, (11, 12))[:3] == [11, 5, 12]


def with_ops(**changes: dict[str, Any]) -> CmpConfig:
    """The default config with fields of some ops' schedules changed."""
    base = default(SPACE)
    return replace(base, ops={name: replace(s, **changes.get(name, {})) for name, s in base.ops.items()})


def test_ops_that_share_a_launch_are_one_node_with_the_edges_of_both() -> None:
    config = with_ops(C0={"host": "B0"}, B1={"host": "B0", "trigger": "stored"})
    SPACE.check(config)
    plan = lower(GRAPH, config, "sm_90a")
    node = plan.node("C0")
    assert node.op == "B0+C0+B1"
    assert node.grid == (sum(part.ctas for part in node.parts), 1, 1)
    assert node.threads == 320
    assert [part.trigger for part in node.parts] == [3, 3, 5]
    edges = {(edge.producer, edge.consumer) for edge in plan.edges}
    assert {("A0", node.op), (node.op, "B0f"), (node.op, "B1f")} <= edges
    assert (node.op, "D1f") not in edges  # implied by the path over B0f and D1
    assert verify(GRAPH, plan).passed


def test_the_strictest_kind_rules_an_edge_between_launches() -> None:
    config = replace(with_ops(C0={"host": "B0"}), programmatic=frozenset({("A0", "B0")}))
    assert lower(GRAPH, config, "sm_90a").edges[0].kind is EdgeKind.ORDINARY
    config = replace(config, programmatic=frozenset({("A0", "B0"), ("A0", "C0")}))
    assert lower(GRAPH, config, "sm_90a").edges[0].kind is EdgeKind.PROGRAMMATIC


@pytest.mark.parametrize(
    ("op", "host", "words"), [("D0", "B0", "D0: cannot share"), ("D1f", "B0", "D1f: cannot share"), ("C0", "Z9", "Z9")]
)
def test_ops_that_may_not_share_a_launch_are_refused(op: str, host: str, words: str) -> None:
    with pytest.raises((IllegalConfig, ConfigError), match=words):
        SPACE.check(with_ops(**{op: {"host": host}}))
    with pytest.raises((IllegalConfig, ConfigError)):
        lower(GRAPH, with_ops(**{op: {"host": host}, "D1": {"host": "D0"}}), "sm_90a")


def test_two_launches_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(IllegalConfig, match="wait for each other"):
        lower(GRAPH, with_ops(D1={"host": "B1f"}, E1={"host": "D0"}, D2={"host": "B0f"}), "sm_90a")


def test_a_host_that_hosts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="hosted by"):
        lower(GRAPH, with_ops(C0={"host": "B1"}, B1={"host": "C0"}), "sm_90a")


@given(st.integers(1, 400))
def test_a_grid_cap_holds_and_every_tile_has_a_cta(cap: int) -> None:
    part = lower(GRAPH, with_ops(D0={"grid_cap": cap}), "sm_90a").node("D0").parts[0]
    assert part.ctas <= max(cap, part.tiles[1] * part.tiles[2])
    assert 1 <= part.ctas_x <= part.tiles[0] == 256
    most, least = -(-256 // part.ctas_x), 256 // part.ctas_x
    assert most - least <= 1  # as even as whole tiles allow


def test_a_row_op_has_no_grid_cap() -> None:
    with pytest.raises(IllegalConfig, match="a row op has one CTA a tile"):
        lower(GRAPH, with_ops(B0f={"grid_cap": 4}), "sm_90a")


def test_a_prefetch_is_of_weights_and_stays_within_them() -> None:
    of_d0 = {"prefetch_of": "D0", "prefetch_kib": 1 << 20, "prefetch_at": "stored"}
    part = lower(GRAPH, with_ops(A0=of_d0), "sm_90a").node("A0").parts[0]
    assert part.prefetch is not None and part.prefetch.tensor == "w_d0"
    assert part.prefetch.bytes_per_cta * part.ctas <= GRAPH.tensors["w_d0"].bytes
    assert part.prefetch.bytes_per_cta % 16 == 0
    with pytest.raises(IllegalConfig, match="streams no weights"):
        lower(GRAPH, with_ops(A0={**of_d0, "prefetch_of": "E1"}), "sm_90a")
    with pytest.raises(ConfigError, match="no such op"):
        lower(GRAPH, with_ops(A0={**of_d0, "prefetch_of": "Z9"}), "sm_90a")
    plan = lower(GRAPH, with_ops(A0=of_d0), "sm_90a")
    stray = replace(part, prefetch=replace(part.prefetch, tensor="q_fp8"))
    nodes = tuple(replace(n, parts=(stray,)) if n.op == "A0" else n for n in plan.nodes)
    assert "no weight" in verify(GRAPH, replace(plan, nodes=nodes)).message


def key_writer_takes_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexKeyFinalise, "appends", {})


def rows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexKeyFinalise, "appends", {"cache": "partial"})


def cache_passes_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedScore, "early_slots", {"key_map": EarlyRead.TABLE})


def queries_are_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedScore, "early_slots", {"query_map": EarlyRead.OLD_ROWS})


def logits_are_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedScore, "early_slots", {"logits": EarlyRead.TABLE})


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (key_writer_takes_any_row, "E1 may read indexer_cache (key_map) before its wait .* but B1f may write any row"),
        (rows_are_computed, "E1 may read indexer_cache (key_map) before its wait .* but B1f may write any row"),
        (cache_passes_for_a_table, "E1 may read indexer_cache (key_map) before its wait .* but B1f writes it"),
        (queries_are_early, "E1 may read indexer_q_fp8 (query_map) before its wait .* its role is inner"),
        (logits_are_early, "E1 may read logits (logits) before its wait .* its role is output"),
    ],
)
def test_an_early_read_of_what_the_run_may_write_is_refused(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every plan: the strictest edges do not help a read that waits for none of them."""
    plans = [lower(GRAPH, config, "sm_90a") for config in (default(SPACE), serial(SPACE))]
    assert all(verify(GRAPH, plan).passed for plan in plans)
    plant(monkeypatch)
    for plan in plans:
        verdict = verify(GRAPH, plan)
        assert not verdict.passed
        assert re.search(words.replace("(", r"\(").replace(")", r"\)"), verdict.message), verdict.message


def test_early_slots_and_appended_tensors_are_operands_of_their_ops() -> None:
    for op in GRAPH.ops.values():
        kind = KINDS[op.kind]
        assert set(kind.early_slots) <= set(kind.slots)
        for written, rows in kind.appends.items():
            assert written in op.writes and rows in op.reads
            assert GRAPH.tensors[op.writes[written]].role is Role.STATE


def test_query_blocks_and_keys_ahead_of_the_wait_are_dimensions() -> None:
    choices = {d.name: d.values for d in SPACE.dimensions if isinstance(d, Choice)}
    assert set(choices["E1.block_m"]) == {1, 2, 4, 8}
    assert {0, NO_LIMIT_AHEAD} < set(choices["E1.w_ahead"])
    for block_m in choices["E1.block_m"]:
        tiling = replace(default(SPACE).ops["E1"].tiling, block_m=int(block_m))
        plan = lower(GRAPH, with_ops(E1={"tiling": tiling}), "sm_90a")
        assert plan.node("E1").parts[0].tiles[2] == 16 // block_m


def test_a_part_of_a_plan_keeps_its_edges() -> None:
    part = lower(GRAPH, default(SPACE), "sm_90a").only(["A0", "B0", "D0"])
    assert [node.op for node in part.nodes] == ["A0", "B0", "D0"]
    assert [(edge.producer, edge.consumer) for edge in part.edges] == [("A0", "B0")]


def test_a_schedule_names_no_binary_that_its_space_has_not() -> None:
    """Whatever is drawn, nothing is left to compile once the space's binaries are built, shared launches apart."""
    known = set(space_binaries(SPACE))
    for seed in range(60):
        config = SPACE.decode(Repair(SPACE, seed)(SPACE.sample(random.Random(seed))))
        parts = lower(GRAPH, config, "sm_90a").parts()
        assert {part.binary for part in parts if part.arrival is None} <= known


def test_only_what_a_schedule_asks_for_is_compiled_in() -> None:
    base = default(SPACE)
    plain = lower(GRAPH, base, "sm_90a")
    assert not any(part.binary.loops or part.binary.prefetches for part in plain.parts())
    capped = replace(base.ops["D0"], grid_cap=132)
    early = replace(base.ops["A0"], prefetch_of="D0", prefetch_kib=1024)
    plan = lower(GRAPH, replace(base, ops={**base.ops, "D0": capped, "A0": early}), "sm_90a")
    assert [part.op for part in plan.parts() if part.binary.loops] == ["D0"]
    assert [part.op for part in plan.parts() if part.binary.prefetches] == ["A0"]


def test_layers_in_a_row_wait_for_all_of_the_layer_before() -> None:
    plan = lower(GRAPH, default(SPACE), "sm_90a")
    row = chained(plan, 3)
    assert len(row.nodes) == 3 * len(plan.nodes)
    between = {(e.producer, e.consumer) for e in row.edges} - {
        (e.producer + suffix, e.consumer + suffix) for e in plan.edges for suffix in ("", "@1", "@2")
    }
    assert between == {("D2", "A0@1"), ("E1", "A0@1"), ("D2@1", "A0@2"), ("E1@1", "A0@2")}
    assert all(edge.kind is EdgeKind.PROGRAMMATIC for edge in row.edges)
    triggers = {node.op: node.parts[0].trigger for node in row.nodes}
    assert triggers["D2"] == triggers["E1@1"] == POINTS["inputs_read"]
    assert triggers["D2@2"] == POINTS["none"]
    assert row.roots() == ("A0",)


def test_a_delayed_plan_differs_in_its_binaries_alone() -> None:
    plan = lower(GRAPH, default(SPACE), "sm_90a")
    late = delayed(plan)
    assert all(part.binary.delays for part in late.parts())
    assert late.edges == plan.edges
    assert late.key() != plan.key()

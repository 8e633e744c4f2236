"""Building graphs from plans, on a stand-in for the driver's graph: every node, every edge, and nothing left behind."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from backends.cmp import build
from backends.cmp.build import Bracket, MapCache, build_graph, check_edges
from backends.errors import GraphMismatch
from backends.measure.trace import RECORD_BYTES
from backends.plan.encode import MAP_BYTES, OPERAND_SLOTS
from backends.plan.launches import EdgeKind, LaunchPlan, PlanEdge, chained, lower, traced
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord
from workloads.attention_pre.graph import build_graph as build_layer
from workloads.attention_pre.shapes import AttentionPreShape

GPU = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
LAYER = build_layer(AttentionPreShape())
SPACE = CmpSpace(LAYER, GPU)
ADDRESSES = {name: 0x10000 * (i + 1) for i, name in enumerate(LAYER.tensors)}
BRACKET = Bracket(((1, 2, 3),), 0x1000)


class FakeGraph:
    """Keeps what it is given, as the driver would."""

    made: list[FakeGraph] = []

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arguments: list[Any] = []
        self.held: set[tuple[int, int, str]] = set()
        self.state = "open"
        FakeGraph.made.append(self)

    def add_kernel(self, kernel: str, grid: Any, threads: int, shared: int, arguments: Any, priority: int = 0) -> int:
        self.nodes.append((kernel, grid, threads, shared, priority))
        self.arguments.append(arguments)
        return len(self.nodes) - 1

    def add_edge(self, producer: int, consumer: int, kind: str = "ordinary") -> None:
        self.held.add((producer, consumer, kind))

    def edges(self) -> set[tuple[int, int, str]]:
        return self.held

    def instantiate(self, stream: object) -> None:
        self.state = "ready"

    def close(self) -> None:
        self.state = "closed"


class ForgetsProgrammatic(FakeGraph):
    """A driver that makes every edge ordinary, as one call with a list of edge data can."""

    def add_edge(self, producer: int, consumer: int, kind: str = "ordinary") -> None:
        self.held.add((producer, consumer, "ordinary"))


class FakeKernels:
    def __init__(self, refused: str = "") -> None:
        self.refused = refused

    def grid(self, node: Any) -> str:
        if node.op == self.refused:
            raise IllegalConfig(f"{node.op}: 1 CTAs fit one multiprocessor, 2 promised")
        return str(node.op)

    def system(self, name: str) -> str:
        return name


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraph.made.clear()
    monkeypatch.setattr(build.driver, "Graph", FakeGraph)
    monkeypatch.setattr(build.driver, "encode_map", lambda spec, address: bytes(MAP_BYTES))


def made(plan: LaunchPlan | None, kernels: Any = None, bracket: Bracket | None = BRACKET) -> Any:
    return build_graph(plan, kernels or FakeKernels(), ADDRESSES, MapCache(), None, bracket=bracket)


@pytest.mark.parametrize("config", [serial(SPACE), default(SPACE)])
def test_a_graph_holds_the_plan_between_its_stamps(config: Any) -> None:
    plan = lower(LAYER, config, "sm_90a")
    graph = made(plan)
    names = [node[0] for node in graph.nodes]
    assert names == ["refresh", "stamp", *(node.op for node in plan.nodes), "stamp"]
    assert graph.state == "ready"
    typed = {(names[a], names[b], kind) for a, b, kind in graph.held}
    planned = {(e.producer, e.consumer, e.kind.value) for e in plan.edges}
    bounds = {("refresh", "stamp", "ordinary")} | {("stamp", root, "ordinary") for root in plan.roots()}
    assert typed == planned | bounds | {(sink, "stamp", "ordinary") for sink in plan.sinks()}


def test_the_empty_bracket_and_a_bare_plan() -> None:
    assert [node[0] for node in made(None).nodes] == ["refresh", "stamp", "stamp"]
    plan = lower(LAYER, default(SPACE), "sm_90a")
    assert [node[0] for node in made(plan, bracket=None).nodes] == [node.op for node in plan.nodes]


def test_edges_that_the_driver_changed_are_found_and_the_graph_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.driver, "Graph", ForgetsProgrammatic)
    with pytest.raises(GraphMismatch, match="24 of them unlike the plan's"):
        made(lower(LAYER, default(SPACE), "sm_90a"))
    assert [graph.state for graph in FakeGraph.made] == ["closed"]


def test_a_kernel_that_is_refused_half_way_leaves_no_graph() -> None:
    with pytest.raises(IllegalConfig, match="D2: 1 CTAs fit"):
        made(lower(LAYER, default(SPACE), "sm_90a"), FakeKernels(refused="D2"))
    assert [graph.state for graph in FakeGraph.made] == ["closed"]


def test_the_first_edge_that_differs_is_named() -> None:
    wanted = [PlanEdge("a", "b", EdgeKind.PROGRAMMATIC), PlanEdge("b", "c", EdgeKind.ORDINARY)]
    held = {(0, 1, "programmatic"), (1, 2, "ordinary")}
    check_edges(("a", "b", "c"), wanted, held)
    with pytest.raises(GraphMismatch, match="first, the programmatic edge a -> b is missing"):
        check_edges(("a", "b", "c"), wanted, {(0, 1, "ordinary"), (1, 2, "ordinary")})
    with pytest.raises(GraphMismatch, match="3 edges, 1 of them .* first, the ordinary edge a -> c is not the plan's"):
        check_edges(("a", "b", "c"), wanted, held | {(0, 2, "ordinary")})


def test_every_kernel_of_a_traced_plan_knows_where_its_records_go() -> None:
    plan = traced(lower(LAYER, default(SPACE), "sm_90a"))
    build_graph(plan, FakeKernels(), ADDRESSES, MapCache(), None, trace=0x10000)
    wanted = 0x10000
    for node, (block,) in zip(plan.nodes, FakeGraph.made[-1].arguments, strict=True):
        assert struct.unpack_from("<Q", block.raw, 8 * (OPERAND_SLOTS + 1)) == (wanted,), node.op
        wanted += RECORD_BYTES * node.ctas


def test_layers_in_a_row_get_addresses_of_their_own() -> None:
    plan = chained(lower(LAYER, default(SPACE), "sm_90a"), 2)
    later = {name: address + 0x1000000 for name, address in ADDRESSES.items()}
    build_graph(plan, FakeKernels(), ADDRESSES, MapCache(), None, later=[later])
    firsts = [struct.unpack_from("<Q", block.raw)[0] for (block,) in FakeGraph.made[-1].arguments]
    for node, address in zip(plan.nodes, firsts, strict=True):
        assert node.op.split("@")[0] != "A0" or address == (later if node.layer else ADDRESSES)["hidden"]

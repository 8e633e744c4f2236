"""Captured graphs on a stand-in for the driver: the same kernels as built directly, and the edges that are expected."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.cmp.build import Bracket, MapCache, build_graph
from backends.cmp.capture import StreamPool, capture_graph
from backends.cuda import driver
from backends.cuda.memory import counter_sizes
from backends.errors import CudaFailed, GraphMismatch
from backends.plan.encode import MAP_BYTES
from backends.plan.launches import EdgeKind, LaunchPlan, PlanEdge, lower
from backends.plan.streams import expected_edges, expressible
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord
from tests.backends_tests.capturing_driver import SYSTEM_KERNELS, CapturingDriver
from tuner.seeds import seeds
from workloads.attention_pre.graph import build_graph as build_layer
from workloads.attention_pre.shapes import AttentionPreShape

types = pytest.importorskip("cuda.bindings.driver")

GPU = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
LAYER = build_layer(AttentionPreShape())
SPACE = CmpSpace(LAYER, GPU)
ADDRESSES = {name: 0x10000 * (i + 1) for i, name in enumerate((*LAYER.tensors, *counter_sizes(LAYER)))}
BRACKET = Bracket(((1, 2, 3),), 0x1000)


class LoadsKernels:
    """Kernels by number; loading one during a capture is an error, as it is for the driver."""

    def __init__(self, stand_in: CapturingDriver, refused: str = "") -> None:
        self._driver, self._refused = stand_in, refused
        self._handles: dict[object, int] = {}

    def grid(self, node: Any) -> Any:
        assert not self._driver.capturing
        if node.op == self._refused:
            raise IllegalConfig(f"{node.op}: 1 CTAs fit one multiprocessor, 2 promised")
        return types.CUfunction(self._handles.setdefault(node.binary, 100 + len(self._handles)))

    def system(self, name: str) -> Any:
        assert not self._driver.capturing
        return types.CUfunction(SYSTEM_KERNELS[name])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> CapturingDriver:
    fake = CapturingDriver(types)
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    monkeypatch.setattr(driver, "encode_map", lambda spec, address: bytes(MAP_BYTES))
    return fake


@pytest.fixture
def pool(stand_in: CapturingDriver) -> Iterator[StreamPool]:
    made = StreamPool()
    yield made
    made.close()
    made.close()
    assert {kind for kind, _ in stand_in.live} <= {"graph", "exec"}


def both(
    plan: LaunchPlan | None, stand_in: CapturingDriver, pool: StreamPool, bracket: Bracket | None = BRACKET
) -> tuple[driver.Graph, driver.Graph]:
    kernels: Any = LoadsKernels(stand_in)
    inputs = (plan, kernels, ADDRESSES, MapCache(), types.CUstream(1))
    return build_graph(*inputs, bracket=bracket), capture_graph(*inputs, pool, bracket=bracket)


def drawn(seed: int) -> LaunchPlan | None:
    """An expressible plan of a random point, with its hosts, priorities and prefetches, or None."""
    config = SPACE.decode(SPACE.sample(random.Random(seed)))
    tilings = default(SPACE).ops
    ops = {name: replace(s, tiling=tilings[name].tiling, grid_cap=0) for name, s in config.ops.items()}
    try:
        plan = lower(LAYER, replace(config, ops=ops, launch_completion=frozenset()), "sm_90a")
    except IllegalConfig:
        return None
    return plan if expressible(plan) is None else None


@pytest.mark.parametrize("seed", seeds(SPACE), ids=lambda seed: seed.name)
@pytest.mark.parametrize("bracket", [BRACKET, None])
def test_both_constructions_of_a_seed_are_one_graph(
    seed: Any, bracket: Bracket | None, stand_in: CapturingDriver, pool: StreamPool
) -> None:
    direct, streams = both(lower(LAYER, seed.config, "sm_90a"), stand_in, pool, bracket)
    assert _plan_edges(streams, bracket) == _plan_edges(direct, bracket)
    assert _launched(stand_in, streams) == _launched(stand_in, direct)


def test_both_constructions_of_drawn_points_launch_the_same_kernels(
    stand_in: CapturingDriver, pool: StreamPool
) -> None:
    plans = [plan for plan in map(drawn, range(60)) if plan is not None]
    assert len(plans) > 10
    assert any(len(node.parts) > 1 for plan in plans for node in plan.nodes)
    assert any(node.priority for plan in plans for node in plan.nodes)
    assert any(part.prefetch for plan in plans for part in plan.parts())
    added = 0
    for plan in plans:
        direct, streams = both(plan, stand_in, pool)
        assert _launched(stand_in, streams) == _launched(stand_in, direct)
        place = {node.op: i + 2 for i, node in enumerate(plan.nodes)}
        wanted = {(place[e.producer], place[e.consumer], e.kind.value) for e in expected_edges(plan)}
        assert _plan_edges(streams, BRACKET) == wanted
        added += len(wanted - direct.edges())
    assert added


def _plan_edges(graph: driver.Graph, bracket: Bracket | None) -> set[tuple[int, int, str]]:
    """Edges between the plan's own nodes."""
    nodes = range(2, len(graph._ids) - 1) if bracket else range(len(graph._ids))
    return {edge for edge in graph.edges() if edge[0] in nodes and edge[1] in nodes}


def _launched(stand_in: CapturingDriver, graph: driver.Graph) -> list[dict[str, Any]]:
    return [stand_in.launched[node] for node in graph._ids]


def test_launch_completion_is_a_programmatic_event_at_block_start(stand_in: CapturingDriver, pool: StreamPool) -> None:
    """`griddepcontrol.wait` does not see a launch completion event."""
    config = default(SPACE)
    edge = ("A0", "B0")
    others = frozenset(e for e in config.programmatic if e[0] != "A0")
    begun = frozenset(e for e in config.programmatic if e[0] == "A0")
    plan = lower(LAYER, replace(config, programmatic=others, launch_completion=begun), "sm_90a")
    assert PlanEdge(*edge, EdgeKind.LAUNCH_COMPLETION) in plan.edges
    direct, streams = both(plan, stand_in, pool)
    assert direct.edges() == streams.edges()
    assert (2, 3, "launch_completion") in streams.edges()


def test_the_empty_bracket_can_be_captured(stand_in: CapturingDriver, pool: StreamPool) -> None:
    direct, streams = both(None, stand_in, pool)
    assert direct.edges() == streams.edges() == {(0, 1, "ordinary"), (1, 2, "ordinary")}


def test_captures_share_streams_and_pile_up_no_events(stand_in: CapturingDriver, pool: StreamPool) -> None:
    plan = lower(LAYER, default(SPACE), "sm_90a")

    def live(kind: str) -> set[tuple[str, int]]:
        return {item for item in stand_in.live if item[0] == kind}

    both(plan, stand_in, pool)
    streams, events = live("stream"), live("event")
    both(plan, stand_in, pool)
    assert streams and live("stream") == streams
    assert len(live("event")) == len(events) > 0
    assert not live("event") & events


# --- Faults ---


def _left(stand_in: CapturingDriver) -> set[str]:
    return {kind for kind, _ in stand_in.live} & {"graph", "exec"}


def _capture(plan: LaunchPlan, stand_in: CapturingDriver, pool: StreamPool, refused: str = "") -> driver.Graph:
    kernels: Any = LoadsKernels(stand_in, refused)
    return capture_graph(plan, kernels, ADDRESSES, MapCache(), types.CUstream(1), pool, bracket=BRACKET)


def test_a_serialization_that_is_lost_is_named(stand_in: CapturingDriver, pool: StreamPool) -> None:
    config = next(s.config for s in seeds(SPACE) if s.name == "one stream, programmatic edges")
    stand_in.forget = ["serialization"]
    with pytest.raises(GraphMismatch, match="2 of them unlike .* first, the programmatic edge A0 -> B0 is missing"):
        _capture(lower(LAYER, config, "sm_90a"), stand_in, pool)
    assert not _left(stand_in)


def test_a_wait_that_is_lost_is_named(stand_in: CapturingDriver, pool: StreamPool) -> None:
    """D1f waits for C0 and D1: the stream of C0 carries one, a wait the other."""
    chains = next(s.config for s in seeds(SPACE) if s.name == "chains, ordinary edges")
    plan = lower(LAYER, chains, "sm_90a")
    _capture(plan, stand_in, pool).close()
    waits = stand_in.calls.count("cuStreamWaitEvent")
    lost = []
    for number in range(waits):
        _forget_nth(stand_in, number)
        try:
            _capture(plan, stand_in, pool).close()
        except (GraphMismatch, CudaFailed) as error:
            lost.append(str(error))
        assert not _left(stand_in)
        assert not stand_in.capturing
    joins = len({node.stream for node in plan.nodes}) - 1  # one that another join implies leaves the graph as it was
    assert len(lost) >= waits - joins > 0
    assert any("ordinary edge D1 -> D1f is missing" in text for text in lost)
    assert any("ILLEGAL_STATE" in text or "UNJOINED" in text for text in lost)


def _forget_nth(stand_in: CapturingDriver, number: int) -> None:
    """Makes the stand-in forget the wait of this number."""
    seen = iter(range(1000))
    stand_in._forgets = lambda name: name == "cuStreamWaitEvent" and next(seen) == number  # type: ignore[method-assign]


def test_an_event_of_another_kind_is_named(
    stand_in: CapturingDriver, pool: StreamPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = driver._event_attribute
    monkeypatch.setattr(driver, "_event_attribute", lambda event, at_start: made(event, True))
    with pytest.raises(GraphMismatch, match="first, the programmatic edge A0 -> B0 is missing"):
        _capture(lower(LAYER, default(SPACE), "sm_90a"), stand_in, pool)
    assert not _left(stand_in)


def test_a_kernel_that_is_refused_begins_no_capture(stand_in: CapturingDriver, pool: StreamPool) -> None:
    with pytest.raises(IllegalConfig, match="D2: 1 CTAs fit"):
        _capture(lower(LAYER, serial(SPACE), "sm_90a"), stand_in, pool, refused="D2")
    assert not stand_in.capturing
    assert not _left(stand_in)

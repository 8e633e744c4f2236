"""Stream programs: what a capture of them gives, against the plan's edges and the declared stream-order edges."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backends.base import SessionSpec
from backends.plan.launches import EdgeKind, LaunchPlan, PlanEdge, lower, transitive_reduction
from backends.plan.streams import (
    CONSTRUCTIONS,
    Action,
    Event,
    Launch,
    Record,
    StreamProgram,
    Wait,
    constructed,
    expected_edges,
    expressible,
    stream_order_edges,
    stream_program,
)
from backends.plan.verify import verify
from backends.sessions import open_session
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.config import OpSchedule, relabel
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord
from tests.backends_tests.capture_model import CaptureError, CaptureModel
from tuner.seeds import seeds
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape

GPU = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
GRAPH = build_graph(AttentionPreShape())
SPACE = CmpSpace(GRAPH, GPU)
LAYER = lower(GRAPH, default(SPACE), "sm_90a")
Edges = set[tuple[object, object, str]]


def captured(actions: Iterable[Action], origin: int) -> Edges:
    """The edges that a capture of a program gives."""
    model = CaptureModel(origin)
    for action in actions:
        if isinstance(action, Launch):
            kind = action.signals.kind.value if action.signals else ""
            model.launch(action.stream, action.node, early=action.early, event=action.signals, kind=kind)
        elif isinstance(action, Record):
            model.record(action.stream, action.event)
        else:
            model.wait(action.stream, action.event)
    return model.end()


def typed(edges: Iterable[PlanEdge]) -> Edges:
    return {(edge.producer, edge.consumer, edge.kind.value) for edge in edges}


def drawn(seed: int) -> LaunchPlan:
    """A plan of a random point: order, streams, edges, hosts, triggers, priorities and prefetches; default tilings."""
    rng = random.Random(seed)
    config = SPACE.decode(SPACE.sample(rng))
    tilings = default(SPACE).ops
    ops = {name: replace(s, tiling=tilings[name].tiling, grid_cap=0) for name, s in config.ops.items()}
    config = replace(config, ops=ops)
    if rng.random() < 0.7:
        config = replace(config, launch_completion=frozenset())
    return lower(GRAPH, config, "sm_90a")


def made(streams: list[int], kinds: dict[tuple[int, int], EdgeKind]) -> LaunchPlan:
    """A plan of nodes `0`, `1`, ... on these streams with these edges."""
    first = LAYER.nodes[0]
    nodes = tuple(
        replace(first, parts=(replace(first.parts[0], op=str(i)),), stream=stream) for i, stream in enumerate(streams)
    )
    edges = tuple(PlanEdge(str(p), str(c), kind) for (p, c), kind in sorted(kinds.items()))
    return LaunchPlan("made", nodes, edges)


@st.composite
def plans(draw: st.DrawFn) -> LaunchPlan:
    """Any DAG of up to nine nodes on up to four streams, reduced with its stream-order edges as plans are."""
    streams = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    pairs = {(a, b) for b in range(len(streams)) for a in range(b) if draw(st.integers(0, 9)) < 3}
    last: dict[int, int] = {}
    for place, stream in enumerate(streams):
        if stream in last:
            pairs.add((last[stream], place))
        last[stream] = place
    names = [str(i) for i in range(len(streams))]
    kept = transitive_reduction([(str(a), str(b)) for a, b in pairs], names)
    usual = draw(st.sampled_from(list(EdgeKind)))
    kind = st.one_of(st.just(usual), st.sampled_from(list(EdgeKind)))
    return made(streams, {(int(a), int(b)): draw(kind) for a, b in sorted(kept)})


def check(plan: LaunchPlan) -> StreamProgram:
    """What every program owes: the expected edges and no others, bare and in the bracket."""
    program = stream_program(plan)
    got = captured(program.actions, program.origin)
    assert got == typed(expected_edges(plan)) == typed(program.edges)
    assert got >= typed(plan.edges)
    added = got - typed(plan.edges)
    assert added == typed(stream_order_edges(plan))
    stream = {node.op: node.stream for node in plan.nodes}
    assert all(stream[str(p)] == stream[str(c)] for p, c, _ in added)
    bracketed = stream_program(plan, bracketed=True)
    inside = captured(bracketed.actions, bracketed.origin)
    assert inside == typed(bracketed.edges)
    assert {edge for edge in inside if not {str(e) for e in edge[:2]} & {"<refresh>", "<start>", "<end>"}} == got
    assert {c for p, c, _ in inside if p == "<start>"} == set(plan.roots())
    assert {p for p, c, _ in inside if c == "<end>"} == set(plan.sinks())
    return program


@given(plans())
def test_a_captured_dag_has_the_expected_edges(plan: LaunchPlan) -> None:
    assume(expressible(plan) is None)
    program = check(plan)
    whole = constructed(plan, "streams")
    assert expressible(whole) is None
    assert stream_program(whole).actions == program.actions
    assert stream_order_edges(whole) == ()


@given(st.integers(0, 100_000))
def test_a_captured_point_of_the_space_has_the_expected_edges_and_stays_safe(seed: int) -> None:
    try:
        plan = drawn(seed)
    except IllegalConfig:
        assume(False)
        return
    if expressible(plan) is not None:
        with pytest.raises(IllegalConfig, match="construction streams: "):
            constructed(plan, "streams")
        return
    check(plan)
    assert verify(GRAPH, constructed(plan, "streams"), 132).passed


def test_a_good_part_of_the_space_is_expressible() -> None:
    """Else the property above would say little."""
    found = []
    for seed in range(200):
        try:
            found.append(expressible(drawn(seed)) is None)
        except IllegalConfig:
            continue
    assert sum(found) > 30


def test_every_seed_is_expressible_and_most_need_no_stream_order_edge() -> None:
    for seed in seeds(SPACE):
        plan = lower(GRAPH, seed.config, "sm_90a")
        check(plan)
        assert constructed(plan, "direct") is plan
        assert constructed(plan, "streams").key() == plan.key(), seed.name


# --- What cannot be said ---

ORDINARY, PROGRAMMATIC, BEGUN = EdgeKind.ORDINARY, EdgeKind.PROGRAMMATIC, EdgeKind.LAUNCH_COMPLETION


@pytest.mark.parametrize(
    ("streams", "kinds", "reason"),
    [
        ([0, 0], {(0, 1): BEGUN}, "1 follows 0 on a stream, which waits for its end or its trigger"),
        (
            [0, 1, 0],
            {(0, 2): PROGRAMMATIC, (1, 2): ORDINARY},
            "2 follows 0 on a stream by a programmatic edge, which would not leave its ordinary edge from 1",
        ),
        (
            [0, 1, 2],
            {(0, 1): PROGRAMMATIC, (0, 2): BEGUN},
            "0 would signal two events in one launch: programmatic for 1",
        ),
        ([0, 0], {}, "stream 0 would order 1 after 0, which the plan does not"),
        ([0, 1], {(1, 0): ORDINARY}, "0 is launched before 1, which it waits for"),
    ],
)
def test_what_streams_cannot_say_has_a_reason(
    streams: list[int], kinds: dict[tuple[int, int], EdgeKind], reason: str
) -> None:
    plan = made(streams, kinds)
    assert (expressible(plan) or "").startswith(reason)
    with pytest.raises(IllegalConfig, match="construction streams: "):
        stream_program(plan)


def test_a_stream_order_edge_delays_no_more_than_it_must() -> None:
    """Node 2 follows 0 on a stream; the plan orders it through 1."""
    for kind in EdgeKind:
        plan = made([0, 1, 0], {(0, 1): PROGRAMMATIC, (1, 2): kind})
        added = PlanEdge("0", "2", PROGRAMMATIC if kind is PROGRAMMATIC else ORDINARY)
        assert stream_order_edges(plan) == (added,)
        check(plan)


# --- Planted faults: a wrong program is caught by its edges ---


@given(plans(), st.data())
def test_a_program_without_one_wait_has_other_edges(plan: LaunchPlan, data: st.DataObject) -> None:
    assume(expressible(plan) is None)
    program = stream_program(plan)
    last = max(i for i, action in enumerate(program.actions) if isinstance(action, Launch))
    waits = [i for i, action in enumerate(program.actions[:last]) if isinstance(action, Wait) and action.event.node]
    assume(waits)
    gone = data.draw(st.sampled_from(waits))
    actions = program.actions[:gone] + program.actions[gone + 1 :]
    with contextlib.suppress(CaptureError):  # the stream never forked, or never joined
        assert captured(actions, program.origin) != typed(program.edges)


def test_faults_that_change_one_kind_are_seen() -> None:
    program = stream_program(LAYER)
    wanted = typed(program.edges)
    assert captured(program.actions, program.origin) == wanted
    for place, action in enumerate(program.actions):
        if not isinstance(action, Launch) or action.signals is None:
            continue
        # The event is recorded after the launch instead of being signalled by it.
        late = Record(action.stream, action.signals)
        actions = (*program.actions[:place], replace(action, signals=None), late, *program.actions[place + 1 :])
        changed = captured(actions, program.origin) ^ wanted
        assert changed
        assert all(producer == action.node for producer, _, _ in changed)


def test_a_side_stream_that_only_programmatic_edges_leave_must_still_join() -> None:
    program = stream_program(made([0, 1, 0], {(0, 1): ORDINARY, (1, 2): PROGRAMMATIC}))
    joins = [Record(1, Event("1", ORDINARY)), Wait(0, Event("1", ORDINARY))]
    assert list(program.actions[-2:]) == joins
    with pytest.raises(CaptureError, match="stream 1 has not joined"):
        captured(program.actions[:-2], program.origin)


# --- No bookkeeping ---


def test_a_new_op_moves_nothing_else() -> None:
    """An op put into the middle of the layer adds its own actions; every other action is the same as before."""
    old = stream_program(LAYER)
    new_part = replace(LAYER.nodes[2].parts[0], op="NEW")
    node = replace(LAYER.nodes[2], parts=(new_part,), stream=99)
    edges = (*LAYER.edges, PlanEdge("A0", "NEW", PROGRAMMATIC), PlanEdge("NEW", "D1f", PROGRAMMATIC))
    grown = replace(LAYER, nodes=(*LAYER.nodes[:2], node, *LAYER.nodes[2:]), edges=edges)
    new = stream_program(grown)
    check(grown)
    extra = [a for a in new.actions if a not in old.actions]
    assert [a for a in new.actions if a in old.actions] == list(old.actions)
    assert all(a.stream == 99 or (isinstance(a, Wait) and a.event.node == "NEW") for a in extra)


def test_serial_is_launches_alone() -> None:
    program = stream_program(lower(GRAPH, serial(SPACE), "sm_90a"))
    assert all(isinstance(action, Launch) and not action.early for action in program.actions)
    assert program.of(program.origin) == program.actions
    assert program.events() == ()


def test_one_stream_with_programmatic_edges_is_serialization_alone() -> None:
    config = next(s.config for s in seeds(SPACE) if s.name == "one stream, programmatic edges")
    program = stream_program(lower(GRAPH, config, "sm_90a"))
    assert [action.early for action in program.actions if isinstance(action, Launch)] == [False] + [True] * 10
    assert len(program.actions) == 11


def test_shared_launches_and_priorities_are_nodes_like_any_other() -> None:
    config = default(SPACE)
    ops: dict[str, OpSchedule] = dict(config.ops)
    ops["C0"] = replace(ops["C0"], host="B0")
    plan = lower(GRAPH, replace(config, ops=ops), "sm_90a")
    assert "B0+C0" in [a.node for a in check(plan).actions if isinstance(a, Launch)]


def test_a_session_runs_the_plan_that_its_construction_makes() -> None:
    """On a simulated device: the stream-order edge is in the plan and its key; what streams cannot say is illegal."""
    sessions = {
        name: open_session(SessionSpec("attention_pre", {}, "sim:h200", construction=name)) for name in CONSTRUCTIONS
    }
    space = sessions["direct"].space
    base = default(space)
    joined = replace(
        base, streams=relabel(tuple(0 if name in ("A0", "D1f") else i + 1 for i, name in enumerate(base.order)))
    )
    direct, streams = (session.prepare(joined) for session in sessions.values())
    assert set(streams.plan.edges) - set(direct.plan.edges) == {PlanEdge("A0", "D1f", PROGRAMMATIC)}
    assert streams.plan_key != direct.plan_key
    assert streams.numerics_key == direct.numerics_key
    assert sessions["streams"].verify(streams).passed
    begun = replace(
        joined, programmatic=base.programmatic - {("A0", "B0")}, launch_completion=frozenset({("A0", "B0")})
    )
    sessions["direct"].prepare(begun)
    with pytest.raises(IllegalConfig, match="construction streams: A0 would signal two events"):
        sessions["streams"].prepare(begun)
    assert [session.protocol["construction"] for session in sessions.values()] == list(CONSTRUCTIONS)
    with pytest.raises(ValueError, match="unknown construction 'rivers': use direct or streams"):
        constructed(LAYER, "rivers")

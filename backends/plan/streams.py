"""The stream construction of a launch plan: launches, events and waits that a capture turns into a graph. Pure data.

What a capture does, as the program relies on it:
  - a launch takes an edge from everything that its stream waits for: the launch before it, and awaited events;
  - an event carries its kind to the edge: `ordinary` when recorded after the launch, `programmatic` and
    `launch_completion` when the launch itself signals it (programmatic event, the latter triggered at block start);
  - a launch that allows programmatic stream serialization gets programmatic edges only: the ordinary ones of its
    stream and of its events turn programmatic with it.
So a stream adds an edge between neighbours that the plan may not have, since a longer path implies it. These
stream-order edges are declared; everything that a capture would silently change makes a plan inexpressible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.plan.launches import EdgeKind, LaunchPlan, PlanEdge
from backends.plan.outline import Outline, outline
from search_spaces.errors import IllegalConfig

CONSTRUCTIONS = ("direct", "streams")


@dataclass(frozen=True)
class Event:
    """What a wait is for: the end, the trigger or the begin of a node; of no node, the begin of the capture."""

    node: str
    kind: EdgeKind


FORK = Event("", EdgeKind.ORDINARY)


@dataclass(frozen=True)
class Launch:
    """Launches a node.

    Attributes:
        stream: label.
        node: name.
        early: allows programmatic stream serialization.
        signals: event that the launch itself signals, at its trigger or at its begin.
    """

    stream: int
    node: str
    early: bool = False
    signals: Event | None = None


@dataclass(frozen=True)
class Record:
    """Records an ordinary event after the last launch of a stream."""

    stream: int
    event: Event


@dataclass(frozen=True)
class Wait:
    """Makes the later launches of a stream wait for an event."""

    stream: int
    event: Event


Action = Launch | Record | Wait


@dataclass(frozen=True)
class StreamProgram:
    """What the host calls, in order, between the begin and the end of a capture.

    Attributes:
        origin: stream on which the capture begins and ends; the others fork from it and join it.
        actions: in the order of the calls. Nodes and events are named, so a new op moves no other.
        edges: that the captured graph must hold: the plan's and the stream-order edges.
    """

    origin: int
    actions: tuple[Action, ...]
    edges: tuple[PlanEdge, ...]

    def of(self, stream: int) -> tuple[Action, ...]:
        """The actions of one stream."""
        return tuple(action for action in self.actions if action.stream == stream)

    def streams(self) -> tuple[int, ...]:
        """Labels, in the order of first use."""
        return tuple(dict.fromkeys((self.origin, *(action.stream for action in self.actions))))

    def events(self) -> tuple[Event, ...]:
        """Events, in the order of first use."""
        signalled = [a.signals if isinstance(a, Launch) else a.event for a in self.actions]
        return tuple(dict.fromkeys(event for event in signalled if event is not None))


def expressible(plan: LaunchPlan) -> str | None:
    """Why streams and events cannot give a plan's edges, or None when they can."""
    return _refusal(outline(plan, False))


def stream_order_edges(plan: LaunchPlan) -> tuple[PlanEdge, ...]:
    """Edges that streams add to an expressible plan: between neighbours of a stream that a longer path joins."""
    return _added(outline(plan, False))


def expected_edges(plan: LaunchPlan) -> tuple[PlanEdge, ...]:
    """Edges of an expressible plan that is built with streams, in (producer, consumer) order of the nodes."""
    place = {node.op: i for i, node in enumerate(plan.nodes)}
    edges = (*plan.edges, *stream_order_edges(plan))
    return tuple(sorted(edges, key=lambda edge: (place[edge.producer], place[edge.consumer])))


def constructed(plan: LaunchPlan, construction: str) -> LaunchPlan:
    """The plan that a construction really runs: with `streams`, stream-order edges included.

    Raises:
        IllegalConfig: the plan cannot be said in streams; the text is the reason.
        ValueError: no such construction.
    """
    if construction not in CONSTRUCTIONS:
        raise ValueError(f"unknown construction {construction!r}: use {' or '.join(CONSTRUCTIONS)}")
    if construction == "direct":
        return plan
    reason = expressible(plan)
    if reason is not None:
        raise IllegalConfig(f"construction streams: {reason}")
    return replace(plan, edges=expected_edges(plan))


def stream_program(plan: LaunchPlan | None, *, bracketed: bool = False) -> StreamProgram:
    """The program that captures a plan's graph, with or without the bracket around it.

    Raises:
        IllegalConfig: the plan cannot be said in streams; the text is the reason.
    """
    made = outline(plan, bracketed)
    reason = _refusal(made)
    if reason is not None:
        raise IllegalConfig(f"construction streams: {reason}")
    return StreamProgram(made.origin, tuple(_actions(made)), (*made.edges, *_added(made)))


def _actions(made: Outline) -> Iterator[Action]:
    """A wait for each edge that stream order does not give, each launch in turn, and the joins."""
    before, entering = _previous(made), _entering(made)
    awaited = {Event(edge.producer, edge.kind) for edge in _crossing(made)}
    signals = {event.node: event for event in awaited if event.kind is not EdgeKind.ORDINARY}
    roots = {n for n, s in made.streams.items() if n not in before and not entering[n] and s != made.origin}
    if roots:
        yield Record(made.origin, FORK)
    for node, stream in made.streams.items():
        if node in roots:
            yield Wait(stream, FORK)
        for edge in entering[node]:
            if edge.producer != before.get(node):
                yield Wait(stream, Event(edge.producer, edge.kind))
        yield Launch(stream, node, _early(node, before, entering), signals.get(node))
        ended = Event(node, EdgeKind.ORDINARY)
        if ended in awaited:
            yield Record(stream, ended)
    # A capture ends only when every stream has joined the origin, for which a programmatic edge need not count. So the
    # end of each stream joins it; no launch follows there, so this adds no edge.
    for stream, node in {stream: node for node, stream in made.streams.items()}.items():
        if stream != made.origin:
            ended = Event(node, EdgeKind.ORDINARY)
            if ended not in awaited:
                yield Record(stream, ended)
            yield Wait(made.origin, ended)


def _previous(made: Outline) -> dict[str, str]:
    """The neighbour before each node on its stream, where there is one."""
    found, last = dict[str, str](), dict[int, str]()
    for node, stream in made.streams.items():
        if stream in last:
            found[node] = last[stream]
        last[stream] = node
    return found


def _entering(made: Outline) -> dict[str, list[PlanEdge]]:
    found: dict[str, list[PlanEdge]] = {node: [] for node in made.streams}
    for edge in made.edges:
        found[edge.consumer].append(edge)
    return found


def _crossing(made: Outline) -> list[PlanEdge]:
    """Edges that need an event: those between other nodes than neighbours of a stream."""
    before = _previous(made)
    return [edge for edge in made.edges if before.get(edge.consumer) != edge.producer]


def _early(node: str, before: dict[str, str], entering: dict[str, list[PlanEdge]]) -> bool:
    """Whether a launch allows programmatic stream serialization: where no edge of the plan changes by it."""
    kinds = {edge.kind for edge in entering[node]}
    return node in before and kinds == {EdgeKind.PROGRAMMATIC}


def _added(made: Outline) -> tuple[PlanEdge, ...]:
    before, entering = _previous(made), _entering(made)
    return tuple(
        PlanEdge(
            previous,
            node,
            EdgeKind.PROGRAMMATIC if _early(node, before, entering) else EdgeKind.ORDINARY,
        )
        for node, previous in before.items()
        if all(edge.producer != previous for edge in entering[node])
    )


def _refusal(made: Outline) -> str | None:
    place = {node: i for i, node in enumerate(made.streams)}
    for edge in made.edges:
        if place[edge.producer] >= place[edge.consumer]:
            return f"{edge.consumer} is launched before {edge.producer}, which it waits for"
    entering, ancestors = _entering(made), dict[str, set[str]]()
    for node, edges in entering.items():
        parents = {edge.producer for edge in edges}
        ancestors[node] = parents.union(*(ancestors[parent] for parent in parents))
    for node, previous in _previous(made).items():
        if previous not in ancestors[node]:
            return f"stream {made.streams[node]} would order {node} after {previous}, which the plan does not"
        reason = _neighbour_refusal(previous, entering[node])
        if reason is not None:
            return reason
    return _event_refusal(_crossing(made))


def _neighbour_refusal(previous: str, edges: list[PlanEdge]) -> str | None:
    """Why stream order cannot give the edge between neighbours its kind without changing another."""
    node = edges[0].consumer
    kind = next((edge.kind for edge in edges if edge.producer == previous), None)
    if kind is EdgeKind.LAUNCH_COMPLETION:
        return f"{node} follows {previous} on a stream, which waits for its end or its trigger but not for its begin"
    if kind is EdgeKind.PROGRAMMATIC:
        for edge in edges:
            if edge.kind is not kind:
                return (
                    f"{node} follows {previous} on a stream by a programmatic edge, "
                    f"which would not leave its {edge.kind.value} edge from {edge.producer} as it is"
                )
    return None


def _event_refusal(crossing: list[PlanEdge]) -> str | None:
    """Why a launch cannot signal what its consumers on other streams wait for: it signals one event."""
    signals: dict[str, PlanEdge] = {}
    for edge in crossing:
        if edge.kind is EdgeKind.ORDINARY:
            continue
        first = signals.setdefault(edge.producer, edge)
        if first.kind is not edge.kind:
            return (
                f"{edge.producer} would signal two events in one launch: "
                f"{first.kind.value} for {first.consumer} and {edge.kind.value} for {edge.consumer}"
            )
    return None

"""What a graph is made of, by name: both constructions of a plan's graph start from it."""

from __future__ import annotations

from dataclasses import dataclass

from backends.plan.launches import EdgeKind, LaunchPlan, PlanEdge

# Kernels of a measured graph around the plan: the writer that warms the inputs, and two time stamps.
REFRESH, START, END = "<refresh>", "<start>", "<end>"


@dataclass(frozen=True)
class Outline:
    """Nodes of a graph in a topological order, and its edges.

    Attributes:
        streams: stream label per node name, in the order of creation. The first node's stream is the origin.
        edges: typed, by node name.
    """

    streams: dict[str, int]
    edges: tuple[PlanEdge, ...]

    @property
    def origin(self) -> int:
        return next(iter(self.streams.values()))


def outline(plan: LaunchPlan | None, bracketed: bool) -> Outline:
    """The graph of a plan, with or without the bracket that spans are read from; without a plan, the empty bracket.

    Roots have an ordinary edge from the first stamp and sinks one to the second. The first stamp runs on the stream of
    the plan's first node, which is a root, and the second on that of its last node, which is a sink: so the order of
    these streams adds no edge to the bracket.
    """
    nodes = {node.op: node.stream for node in plan.nodes} if plan else {}
    edges = plan.edges if plan else ()
    if not bracketed:
        return Outline(nodes, edges)
    origin, last = (plan.nodes[0].stream, plan.nodes[-1].stream) if plan else (0, 0)
    before = [(REFRESH, START), *((START, root) for root in (plan.roots() if plan else (END,)))]
    after = [(sink, END) for sink in (plan.sinks() if plan else ())]
    return Outline(
        {REFRESH: origin, START: origin, **nodes, END: last},
        (*_ordinary(before), *edges, *_ordinary(after)),
    )


def _ordinary(pairs: list[tuple[str, str]]) -> list[PlanEdge]:
    return [PlanEdge(producer, consumer, EdgeKind.ORDINARY) for producer, consumer in pairs]

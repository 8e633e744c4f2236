"""The task graph: an op graph lowered to tiles and counter events.

A pairing policy says how finely a consumer's tiles wait for a producer's. `whole` is the fallback that is always
right: each consumer tile waits until every tile of the producer has signalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Tile, Tiling


@dataclass(frozen=True)
class Event:
    """A counter. It has happened when it has been signalled `threshold` times in the run.

    Attributes:
        number: index of the counter.
        producer: op whose tiles signal it.
        threshold: signals of one run.
    """

    number: int
    producer: str
    threshold: int


@dataclass(frozen=True)
class Task:
    """One tile of one op, with the events that it waits for and those that it signals (once each)."""

    op: str
    tile: Tile
    waits: tuple[int, ...]
    signals: tuple[int, ...]


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in op order, tiles of an op in domain order; `events[i].number == i`."""

    tasks: tuple[Task, ...]
    events: tuple[Event, ...]


def lower_tasks(graph: OpGraph, tilings: Mapping[str, Tiling], order: tuple[str, ...]) -> TaskGraph:
    """Expands ops to tiles with one `whole` event per producing op."""
    producers = dict.fromkeys(producer for producer, _ in graph.op_edges())
    events: dict[str, Event] = {}
    for producer in producers:
        domain = KINDS[graph.ops[producer].kind].domain(graph.ops[producer], graph, tilings[producer])
        events[producer] = Event(len(events), producer, domain.num_tiles)
    tasks = []
    for name in order:
        op = graph.ops[name]
        waits = tuple(events[p].number for p, c in graph.op_edges() if c == name)
        signals = (events[name].number,) if name in events else ()
        domain = KINDS[op.kind].domain(op, graph, tilings[name])
        tasks += [Task(name, tile, waits, signals) for tile in domain]
    return TaskGraph(tuple(tasks), tuple(events.values()))

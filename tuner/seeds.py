"""Heuristic schedules, tried before any sampler, and the way back from a config to a point of its space."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from backends.plan.launches import edge_kind
from search_spaces.cmp import Choice, CmpSpace, Priority, Value, default, serial
from search_spaces.config import CmpConfig, OpSchedule, relabel
from workloads.ops import KINDS

MAX_STREAMS = 4


@dataclass(frozen=True)
class Seed:
    """A named config that the study tries first."""

    name: str
    config: CmpConfig


def seeds(space: CmpSpace) -> list[Seed]:
    """Serial, default, and the schedules an expert would try, without repeats."""
    base = default(space)
    line, tree = _on_streams(base, lambda order: (0,) * len(order)), _on_streams(base, lambda o: chains(space, o))
    deep = _ordered(tree, critical_order(space))
    deep = replace(deep, streams=chains(space, deep.order))
    found = [
        Seed("serial", serial(space)),
        Seed("default", base),
        Seed("default, ordinary edges", replace(base, programmatic=frozenset())),
        Seed("one stream, programmatic edges", _every_edge(space, line)),
        Seed("chains", tree),
        Seed("chains, ordinary edges", replace(tree, programmatic=frozenset())),
        Seed("chains, critical path first", deep),
        Seed("chains, trigger at entry", _triggered(deep, "entry")),
        Seed("chains, trigger at inputs read", _triggered(deep, "inputs_read")),
        Seed("chains, trigger when stored", _triggered(deep, "stored")),
    ]
    unique: dict[CmpKey, Seed] = {}
    for seed in found:
        unique.setdefault(_key(seed.config), seed)
    return list(unique.values())


CmpKey = tuple[object, ...]


def _key(config: CmpConfig) -> CmpKey:
    return (tuple(sorted(config.ops.items())), config.order, config.streams, config.programmatic)


def _on_streams(config: CmpConfig, assign: Callable[[tuple[str, ...]], tuple[int, ...]]) -> CmpConfig:
    return replace(config, streams=assign(config.order))


def _every_edge(space: CmpSpace, config: CmpConfig) -> CmpConfig:
    pairs = zip(config.order, config.order[1:], strict=False)
    return replace(config, programmatic=frozenset((*space.graph.op_edges(), *pairs)))


def _ordered(config: CmpConfig, order: tuple[str, ...]) -> CmpConfig:
    return replace(config, order=order)


def _triggered(config: CmpConfig, point: str) -> CmpConfig:
    return replace(config, ops={name: replace(s, trigger=point) for name, s in config.ops.items()})


def chains(space: CmpSpace, order: Iterable[str]) -> tuple[int, ...]:
    """Streams by chains: an op goes on its latest producer's stream if no other consumer took it, else on a new one."""
    parents: dict[str, list[str]] = {name: [] for name in space.graph.ops}
    for producer, consumer in space.graph.op_edges():
        parents[consumer].append(producer)
    stream: dict[str, int] = {}
    tail: dict[int, str] = {}
    for name in order:
        free = [stream[p] for p in reversed(parents[name]) if tail.get(stream[p]) == p]
        label = free[0] if free else min(len(tail), MAX_STREAMS - 1)
        stream[name], tail[label] = label, name
    return relabel(tuple(stream[name] for name in order))


def critical_order(space: CmpSpace) -> tuple[str, ...]:
    """Topological order, the op with the most bytes still to stream on its way to a sink first."""
    graph = space.graph
    below: dict[str, float] = {}
    for name in reversed(graph.ops):
        op = graph.ops[name]
        after = [below[c] for p, c in graph.op_edges() if p == name]
        below[name] = 1.0 + KINDS[op.kind].weight_bytes(op, graph) + max(after, default=0.0)
    keys = {name: bytes_ / max(below.values()) for name, bytes_ in below.items()}
    return space.decode({f"{name}.order": key for name, key in keys.items()}).order


def encode(space: CmpSpace, config: CmpConfig) -> dict[str, Value]:
    """The point nearest to a config: `space.decode` of it is the config where the space can express that."""
    values: dict[str, Value] = {}
    count = len(config.order)
    for place, name in enumerate(config.order):
        values |= _op_values(name, config.ops[name])
        values[f"{name}.stream"] = config.streams[place]
        values[f"{name}.order"] = 1.0 - place / count
    data = set(space.graph.op_edges())
    for producer, consumer in data:
        values[f"{producer}>{consumer}.edge"] = edge_kind(config, producer, consumer).value
    values["stream_edges"] = "programmatic" if config.programmatic - data else "ordinary"
    if config.programmatic and not _has_stream_edges(config, data):
        values["stream_edges"] = "programmatic"
    values |= _prefetch_values(space, config)
    point: dict[str, Value] = {}
    for dimension in space.dimensions:
        value = values[dimension.name]
        if not isinstance(dimension, Priority) and value not in dimension.values:
            value = _nearest(value, dimension.values)
        point[dimension.name] = value
    return point


def _op_values(name: str, schedule: OpSchedule) -> dict[str, Value]:
    fields: dict[str, Value] = {f"{name}.{field}": value for field, value in schedule.tiling.__dict__.items()}
    for field in ("trigger", "wait", "w_ahead", "priority", "host", "sharers", "grid_cap"):
        fields[f"{name}.{field}"] = getattr(schedule, field)
    return fields


def _prefetch_values(space: CmpSpace, config: CmpConfig) -> dict[str, Value]:
    """The config's first prefetch; a space holds one."""
    values: dict[str, Value] = {d.name: d.values[0] for d in space.dimensions if isinstance(d, Choice)}
    for name, schedule in config.ops.items():
        if schedule.prefetch_of:
            values |= {"prefetch.of": schedule.prefetch_of, "prefetch.by": name}
            values |= {"prefetch.kib": schedule.prefetch_kib, "prefetch.at": schedule.prefetch_at}
            break
    return {name: value for name, value in values.items() if name.startswith("prefetch.")}


def _has_stream_edges(config: CmpConfig, data: set[tuple[str, str]]) -> bool:
    """Whether a pair of neighbours in a stream is no data edge: then the config says how such pairs are typed."""
    last: dict[int, str] = {}
    for name, stream in zip(config.order, config.streams, strict=True):
        if stream in last and (last[stream], name) not in data:
            return True
        last[stream] = name
    return False


def _nearest(value: Value, values: tuple[int | str, ...]) -> int | str:
    """Numbers wrap around the choices (a stream label beyond the last), everything else falls to the first."""
    return values[value % len(values)] if isinstance(value, int) else values[0]

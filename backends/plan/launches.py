"""The launch plan: what CMP runs, as nodes and typed edges, pure data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

from search_spaces.cmp import CmpSpace, default_tiling
from search_spaces.config import CmpConfig, splits_of
from search_spaces.errors import ConfigError, IllegalConfig
from workloads.graph import Op, OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Operand, Tiling

# Values of spantune::Point in backends/cuda/include/spantune/base.cuh.
POINTS = {"none": 0, "entry": 1, "set_up": 2, "weights_issued": 3, "inputs_read": 4, "stored": 5}
WAIT_POINTS = {"entry": POINTS["entry"], "after_setup": POINTS["set_up"], "a_loader_only": POINTS["none"]}


class EdgeKind(StrEnum):
    """Type of a graph edge."""

    ORDINARY = "ordinary"
    PROGRAMMATIC = "programmatic"


@dataclass(frozen=True)
class CompileKey:
    """Names one binary: everything that its source text depends on.

    Attributes:
        kind: op kind.
        shell: `grid` or `persistent`.
        arch: compile target.
        tiling: with `split_k` set to 1, since that is a run-time parameter.
        constants: op parameters that are template arguments, as (name, value) pairs.
    """

    kind: str
    shell: str
    arch: str
    tiling: Tiling
    constants: tuple[tuple[str, int | float | bool], ...] = ()

    def constant(self, name: str) -> str:
        """A constant as C++ spells it."""
        value = dict(self.constants)[name]
        return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class KernelNode:
    """One kernel of a launch plan.

    Attributes:
        op: op name.
        binary: which binary runs it.
        grid: CTAs in x (n tiles), y (splits), z (m tiles).
        threads: threads of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        operands: the operand row.
        k_blocks: k-blocks of the whole op.
        splits: split-K.
        trigger: value of `Point`.
        wait: value of `Point`.
        w_ahead: W stages before the wait.
        priority: node priority.
        stream: stream label.
    """

    op: str
    binary: CompileKey
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    operands: tuple[Operand, ...]
    k_blocks: int
    splits: int
    trigger: int
    wait: int
    w_ahead: int
    priority: int
    stream: int

    @property
    def ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class PlanEdge:
    """An edge between two kernels of a plan, by op name."""

    producer: str
    consumer: str
    kind: EdgeKind


@dataclass(frozen=True)
class LaunchPlan:
    """Nodes in creation order and edges in (producer, consumer) order of the nodes."""

    workload: str
    nodes: tuple[KernelNode, ...]
    edges: tuple[PlanEdge, ...]

    def node(self, op: str) -> KernelNode:
        return next(node for node in self.nodes if node.op == op)

    def roots(self) -> tuple[str, ...]:
        """Ops without an in-edge."""
        consumers = {edge.consumer for edge in self.edges}
        return tuple(node.op for node in self.nodes if node.op not in consumers)

    def sinks(self) -> tuple[str, ...]:
        """Ops without an out-edge."""
        producers = {edge.producer for edge in self.edges}
        return tuple(node.op for node in self.nodes if node.op not in producers)

    def binaries(self) -> tuple[CompileKey, ...]:
        return tuple(dict.fromkeys(node.binary for node in self.nodes))

    def key(self) -> str:
        """Canonical content hash: equal for plans that launch the same thing, whatever config they came from.

        Node order counts only through priorities and edges once a graph is instantiated, except that it breaks ties;
        it is part of the key. Stream labels are not: streams act only through the edges that they add.
        """
        text = repr((self.workload, [replace(node, stream=0) for node in self.nodes], self.edges))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def lower(graph: OpGraph, config: CmpConfig, arch: str) -> LaunchPlan:
    """Lowers a graph under a CMP config.

    Raises:
        ConfigError: the config names other ops than the graph, or its order is not topological.
        IllegalConfig: a tiling that the op cannot be built with.
    """
    _check_names(graph, config)
    splits = splits_of(graph, config)
    nodes = []
    for name, stream in zip(config.order, config.streams, strict=True):
        op, schedule = graph.ops[name], config.ops[name]
        kind, tiling = KINDS[op.kind], schedule.tiling
        reason = kind.illegal(op, graph, tiling)
        if reason is not None:
            raise IllegalConfig(reason)
        domain = kind.domain(op, graph, tiling)
        has_consumer = any(edge[0] == name for edge in config.programmatic)
        nodes.append(
            KernelNode(
                op=name,
                binary=compile_key(op, tiling, "grid", arch),
                grid=(domain.n_tiles, domain.splits, domain.m_tiles),
                threads=kind.threads,
                shared_bytes=kind.shared_bytes(op, tiling),
                operands=kind.operands(op, graph, tiling, splits),
                k_blocks=domain.k_blocks,
                splits=domain.splits,
                trigger=POINTS[schedule.trigger] if has_consumer else POINTS["none"],
                wait=WAIT_POINTS[schedule.wait],
                w_ahead=schedule.w_ahead if kind.loaders else 0,
                priority=schedule.priority,
                stream=stream,
            )
        )
    return LaunchPlan(graph.name, tuple(nodes), plan_edges(graph, config))


def compile_key(op: Op, tiling: Tiling, shell: str, arch: str) -> CompileKey:
    """The binary of an op: run-time fields dropped, template parameters kept."""
    kind = KINDS[op.kind]
    constants = tuple(sorted((name, op.params[name]) for name in kind.constants if name in op.params))
    return CompileKey(op.kind, shell, arch, replace(tiling, split_k=1) if kind.tiled else Tiling(), constants)


def space_binaries(space: CmpSpace) -> tuple[CompileKey, ...]:
    """Every binary that configs of a space can name, without repeats."""
    found: dict[CompileKey, None] = {}
    for name, op in space.graph.ops.items():
        choices = {f: v for f, v in KINDS[op.kind].tunables(op, space.graph).items() if f != "split_k"}
        base = default_tiling(space.graph, name, space.gpu)
        for values in product(*choices.values()):
            fields: dict[str, Any] = dict(zip(choices, values, strict=True))
            tiling = replace(base, **fields)
            if space.refusal(name, tiling) is None:
                found[compile_key(op, tiling, "grid", space.gpu.arch)] = None
    return tuple(found)


def plan_edges(graph: OpGraph, config: CmpConfig) -> tuple[PlanEdge, ...]:
    """Data edges and stream-order edges, typed, without those that a longer path implies.

    An implied edge may go because every kernel waits for its in-edges before its first access to mutable data, so
    completion is transitive along any path.
    """
    pairs = set(graph.op_edges())
    last: dict[int, str] = {}
    for name, stream in zip(config.order, config.streams, strict=True):
        if stream in last:
            pairs.add((last[stream], name))
        last[stream] = name
    place = {name: i for i, name in enumerate(config.order)}
    kept = sorted(transitive_reduction(pairs, config.order), key=lambda pair: (place[pair[0]], place[pair[1]]))
    return tuple(
        PlanEdge(p, c, EdgeKind.PROGRAMMATIC if (p, c) in config.programmatic else EdgeKind.ORDINARY) for p, c in kept
    )


def transitive_reduction(pairs: Iterable[tuple[str, str]], order: Iterable[str]) -> set[tuple[str, str]]:
    """Pairs of a DAG that no longer path implies; `order` is topological."""
    edges = set(pairs)
    reach: dict[str, set[str]] = {}
    for name in reversed(list(order)):
        children = [c for p, c in edges if p == name]
        below = set().union(*(reach[c] for c in children)) if children else set()
        edges -= {(name, c) for c in children if c in below}
        reach[name] = below | set(children)
    return edges


def _check_names(graph: OpGraph, config: CmpConfig) -> None:
    if set(config.order) != set(graph.ops) or len(config.order) != len(graph.ops):
        raise ConfigError(f"config orders {', '.join(config.order)}, but {graph.name} has {', '.join(graph.ops)}")
    if set(config.ops) != set(graph.ops):
        raise ConfigError(f"config schedules {', '.join(config.ops)}, but {graph.name} has {', '.join(graph.ops)}")
    if len(config.streams) != len(config.order):
        raise ConfigError(f"config gives {len(config.streams)} streams for {len(config.order)} ops")
    place = {name: i for i, name in enumerate(config.order)}
    for producer, consumer in graph.op_edges():
        if place[producer] > place[consumer]:
            raise ConfigError(f"config orders {consumer} before {producer}, whose output it reads")

"""The launch plan: what CMP runs, as nodes and typed edges, pure data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

from backends.plan.arrivals import Arrival, derive
from search_spaces.cmp import Choice, CmpSpace, arrival_hosts, default_tiling
from search_spaces.config import CmpConfig, OpSchedule, splits_of
from search_spaces.errors import ConfigError, IllegalConfig
from workloads.graph import Op, OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Domain, Operand, Splits, Tiling

# Values of spantune::Point in backends/cuda/include/spantune/base.cuh.
POINTS = {"none": 0, "entry": 1, "set_up": 2, "weights_issued": 3, "inputs_read": 4, "stored": 5}
WAIT_POINTS = {"entry": POINTS["entry"], "after_setup": POINTS["set_up"], "a_loader_only": POINTS["none"]}


class EdgeKind(StrEnum):
    """Type of a graph edge, the strictest first."""

    ORDINARY = "ordinary"  # the producer has ended
    PROGRAMMATIC = "programmatic"  # all CTAs of the producer have triggered or ended
    LAUNCH_COMPLETION = "launch_completion"  # all CTAs of the producer have begun


@dataclass(frozen=True)
class CompileKey:
    """Names one binary: everything that its source text depends on.

    Attributes:
        kind: op kind.
        shell: `grid`, `persistent`, or `arrival` for a finaliser inside its producer's grid kernel.
        arch: compile target.
        tiling: with `split_k` set to 1, since that is a run-time parameter.
        constants: op parameters that are template arguments, as (name, value) pairs.
        loops: whether a CTA takes several tiles in turn.
        prefetches: whether it brings weights of a later op into L2.
        delays: fault injection, whether a triggering thread sleeps before it goes on.
        waits: false only in binaries that are timed without their dependencies.
        traces: whether every CTA writes a trace record.
    """

    kind: str
    shell: str
    arch: str
    tiling: Tiling
    constants: tuple[tuple[str, int | float | bool], ...] = ()
    loops: bool = False
    prefetches: bool = False
    delays: bool = False
    waits: bool = True
    traces: bool = False

    def constant(self, name: str) -> str:
        """A constant as C++ spells it."""
        value = dict(self.constants)[name]
        return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Prefetch:
    """Weights that a launch brings into L2 for a later op, from the tensor's first byte on.

    Attributes:
        tensor: whose.
        bytes_per_cta: share of each CTA, a multiple of 16.
        at: value of `Point` at which a CTA issues it.
    """

    tensor: str
    bytes_per_cta: int
    at: int


@dataclass(frozen=True)
class KernelPart:
    """What one op contributes to a launch.

    Attributes:
        op: op name.
        binary: device code of the op.
        tiles: n tiles, splits, m tiles.
        ctas_x: CTAs along n; CTA i takes n tiles i, i + ctas_x, ...
        threads: that the op needs of a CTA.
        shared_bytes: dynamic shared memory that it needs.
        operands: the operand row.
        k_blocks: k-blocks of the whole op.
        trigger: value of `Point`.
        wait: value of `Point`.
        w_ahead: W stages before the wait.
        prefetch: of a later op's weights.
        arrival: how its tiles follow those of the part before it, for a finaliser without CTAs of its own.
    """

    op: str
    binary: CompileKey
    tiles: tuple[int, int, int]
    ctas_x: int
    threads: int
    shared_bytes: int
    operands: tuple[Operand, ...]
    k_blocks: int
    trigger: int
    wait: int
    w_ahead: int
    prefetch: Prefetch | None = None
    arrival: Arrival | None = None

    @property
    def splits(self) -> int:
        return self.tiles[1]

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs in x (n tiles), y (splits), z (m tiles)."""
        return (self.ctas_x, self.tiles[1], self.tiles[2])

    @property
    def ctas(self) -> int:
        """CTAs of its own."""
        return 0 if self.arrival else self.ctas_x * self.tiles[1] * self.tiles[2]

    @property
    def tiling(self) -> Tiling:
        """With its split count."""
        return replace(self.binary.tiling, split_k=self.splits)


@dataclass(frozen=True)
class KernelNode:
    """One kernel of a launch plan.

    Attributes:
        parts: the ops that run side by side in it, the host first, each with the finalisers behind it that run as its
            tiles arrive. CTAs are numbered through the parts in turn.
        priority: node priority.
        stream: stream label.
        layer: which of several layers in a row it belongs to.
    """

    parts: tuple[KernelPart, ...]
    priority: int
    stream: int
    layer: int = 0

    @property
    def op(self) -> str:
        """Name of the launch: its ops, the host first, then its layer if there are several."""
        return "+".join(part.op for part in self.parts) + (f"@{self.layer}" if self.layer else "")

    @property
    def binary(self) -> tuple[CompileKey, ...]:
        """Which binary runs it: the device code of its parts in order."""
        return tuple(part.binary for part in self.parts)

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs; several parts side by side are numbered along x."""
        return self.parts[0].grid if len(self.beside) == 1 else (self.ctas, 1, 1)

    @property
    def beside(self) -> tuple[KernelPart, ...]:
        """Parts with CTAs of their own."""
        return tuple(part for part in self.parts if part.arrival is None)

    @property
    def ctas(self) -> int:
        return sum(part.ctas for part in self.parts)

    @property
    def threads(self) -> int:
        return max(part.threads for part in self.parts)

    @property
    def shared_bytes(self) -> int:
        return max(part.shared_bytes for part in self.parts)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that must fit one multiprocessor: the fewest that a part asks for."""
        return min(part.binary.tiling.ctas_per_sm for part in self.beside)


@dataclass(frozen=True)
class PlanEdge:
    """An edge between two kernels of a plan, by the name of their nodes."""

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
        """The node that runs an op."""
        return next(node for node in self.nodes if any(part.op == op for part in node.parts))

    def parts(self) -> tuple[KernelPart, ...]:
        """Parts of all nodes, in node order."""
        return tuple(part for node in self.nodes for part in node.parts)

    def only(self, ops: Iterable[str]) -> LaunchPlan:
        """The nodes that run one of these ops, with the edges among them."""
        wanted = set(ops)
        nodes = tuple(node for node in self.nodes if wanted & {part.op for part in node.parts})
        names = {node.op for node in nodes}
        return replace(self, nodes=nodes, edges=tuple(e for e in self.edges if {e.producer, e.consumer} <= names))

    def waiting(self) -> int:
        """CTAs that may wait at once for CTAs of their own launch."""
        return sum(part.arrival.waiting for part in self.parts() if part.arrival is not None)

    def roots(self) -> tuple[str, ...]:
        """Names of nodes without an in-edge."""
        consumers = {edge.consumer for edge in self.edges}
        return tuple(node.op for node in self.nodes if node.op not in consumers)

    def sinks(self) -> tuple[str, ...]:
        """Names of nodes without an out-edge."""
        producers = {edge.producer for edge in self.edges}
        return tuple(node.op for node in self.nodes if node.op not in producers)

    def binaries(self) -> tuple[tuple[CompileKey, ...], ...]:
        return tuple(dict.fromkeys(node.binary for node in self.nodes))

    def key(self) -> str:
        """Canonical content hash: equal for plans that launch the same thing, whatever config they came from.

        Node order counts only through priorities and edges once a graph is instantiated, except that it breaks ties;
        it is part of the key. Stream labels are not: streams act only through the edges that they add.
        """
        text = repr((self.workload, [replace(node, stream=0) for node in self.nodes], self.edges))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def delayed(plan: LaunchPlan) -> LaunchPlan:
    """The same plan with kernels whose triggering threads sleep before they go on: a missing wait reads stale data."""
    return _with_binaries(plan, delays=True)


def unordered(plan: LaunchPlan) -> LaunchPlan:
    """The same plan with kernels that never wait. For timing only: what they write means nothing."""
    return _with_binaries(plan, waits=False)


def traced(plan: LaunchPlan) -> LaunchPlan:
    """The same plan with kernels that write trace records."""
    return _with_binaries(plan, traces=True)


def _with_binaries(plan: LaunchPlan, **changes: Any) -> LaunchPlan:
    def part(old: KernelPart) -> KernelPart:
        return replace(old, binary=replace(old.binary, **changes))

    return replace(plan, nodes=tuple(replace(n, parts=tuple(part(old) for old in n.parts)) for n in plan.nodes))


def chained(plan: LaunchPlan, layers: int, trigger: str = "inputs_read") -> LaunchPlan:
    """The same plan for several layers in a row, as a model runs it, with programmatic edges between the layers.

    Sinks trigger at a point of their own, so that the next layer's roots are there when they end. Each root waits for
    all sinks of the layer before, and with them for all of that layer: layers may share workspaces.
    """
    sinks, roots = plan.sinks(), plan.roots()
    nodes: list[KernelNode] = []
    edges: list[PlanEdge] = []
    before: dict[str, KernelNode] = {}
    for layer in range(layers):
        hands_on = sinks if layer < layers - 1 else ()
        here = {n.op: replace(_triggering(n, trigger) if n.op in hands_on else n, layer=layer) for n in plan.nodes}
        nodes += here.values()
        edges += [replace(e, producer=here[e.producer].op, consumer=here[e.consumer].op) for e in plan.edges]
        if before:
            pairs = [(before[sink].op, here[root].op) for sink in sinks for root in roots]
            edges += [PlanEdge(producer, consumer, EdgeKind.PROGRAMMATIC) for producer, consumer in pairs]
        before = here
    return replace(plan, nodes=tuple(nodes), edges=tuple(edges))


def _triggering(node: KernelNode, trigger: str) -> KernelNode:
    return replace(node, parts=tuple(replace(part, trigger=POINTS[trigger]) for part in node.parts))


def lower(graph: OpGraph, config: CmpConfig, arch: str) -> LaunchPlan:
    """Lowers a graph under a CMP config.

    Raises:
        ConfigError: the config names other ops than the graph, or its order is not topological.
        IllegalConfig: a tiling that the op cannot be built with.
    """
    _check_names(graph, config)
    splits = splits_of(graph, config)
    stream = dict(zip(config.order, config.streams, strict=True))
    nodes = {
        host: KernelNode(
            tuple(_part(graph, config, name, splits, arch) for name in _with_finalisers(graph, config, ops)),
            config.ops[host].priority,
            stream[host],
        )
        for host, ops in config.launches().items()
    }
    for host, node in nodes.items():
        _check_launch(graph, host, node)
    order = _launch_order(graph, config)
    named = [PlanEdge(nodes[p].op, nodes[c].op, kind) for (p, c), kind in _launch_edges(graph, config, order).items()]
    place = {nodes[host].op: i for i, host in enumerate(order)}
    named.sort(key=lambda edge: (place[edge.producer], place[edge.consumer]))
    return LaunchPlan(graph.name, tuple(nodes[host] for host in order), tuple(named))


def _arrives(graph: OpGraph, config: CmpConfig, name: str) -> bool:
    """Whether an op runs as the tiles of its host arrive, not beside them."""
    return config.ops[name].host in arrival_hosts(graph, name)


def _with_finalisers(graph: OpGraph, config: CmpConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Ops of a launch, each with those behind it that run as its tiles arrive."""
    behind = [name for name in names if _arrives(graph, config, name)]
    beside = [name for name in names if name not in behind]
    return tuple(n for name in beside for n in (name, *(f for f in behind if config.ops[f].host == name)))


def _part(graph: OpGraph, config: CmpConfig, name: str, splits: Splits, arch: str) -> KernelPart:
    """What an op contributes to its launch."""
    op, schedule = graph.ops[name], config.ops[name]
    kind, tiling = KINDS[op.kind], schedule.tiling
    reason = kind.illegal(op, graph, tiling)
    if reason is not None:
        raise IllegalConfig(reason)
    if schedule.grid_cap and not kind.loaders:
        raise IllegalConfig(f"{name}: grid_cap={schedule.grid_cap}, but a row op has one CTA a tile: use 0")
    domain = kind.domain(op, graph, tiling)
    host = config.host_of(name)
    has_consumer = any(config.host_of(p) == host != config.host_of(c) for p, c in config.programmatic)
    ctas_x = _capped(domain, schedule.grid_cap)
    prefetch = _prefetch(graph, name, schedule, ctas_x * domain.splits * domain.m_tiles)
    binary = compile_key(op, tiling, "grid", arch)
    part = KernelPart(
        op=name,
        binary=replace(binary, loops=ctas_x < domain.n_tiles, prefetches=prefetch is not None),
        tiles=(domain.n_tiles, domain.splits, domain.m_tiles),
        ctas_x=ctas_x,
        threads=kind.threads,
        shared_bytes=kind.shared_bytes(op, tiling),
        operands=kind.operands(op, graph, tiling, splits),
        k_blocks=domain.k_blocks,
        trigger=POINTS[schedule.trigger] if has_consumer else POINTS["none"],
        wait=WAIT_POINTS[schedule.wait],
        w_ahead=schedule.w_ahead if kind.loaders else 0,
        prefetch=prefetch,
    )
    return _behind(graph, config, part) if _arrives(graph, config, name) else part


def _behind(graph: OpGraph, config: CmpConfig, part: KernelPart) -> KernelPart:
    """A finaliser behind its producer: trigger, wait and prefetch are the producer's."""
    producer = config.ops[part.op].host
    tilings = {name: config.ops[name].tiling for name in (producer, part.op)}
    return replace(
        part,
        binary=replace(part.binary, shell="arrival", prefetches=False),
        trigger=POINTS["none"],
        wait=POINTS["none"],
        prefetch=None,
        arrival=derive(graph, producer, part.op, tilings, _sharers(graph, config, part.op)),
    )


def _sharers(graph: OpGraph, config: CmpConfig, name: str) -> int:
    """A CTA that takes several tiles in turn must not wait for one that it takes later: then nothing is shared."""
    producer = config.ops[name].host
    domain = KINDS[graph.ops[producer].kind].domain(graph.ops[producer], graph, config.ops[producer].tiling)
    one_tile_each = _capped(domain, config.ops[producer].grid_cap) == domain.n_tiles
    return config.ops[name].sharers if one_tile_each else 1


def _capped(domain: Domain, cap: int) -> int:
    """CTAs along n under a cap on all CTAs, as even as whole tiles allow."""
    others = domain.splits * domain.m_tiles
    if not cap or domain.n_tiles * others <= cap:
        return domain.n_tiles
    return -(-domain.n_tiles // -(-domain.n_tiles // max(1, cap // others)))


def _prefetch(graph: OpGraph, name: str, schedule: OpSchedule, ctas: int) -> Prefetch | None:
    if not schedule.prefetch_of or not schedule.prefetch_kib:
        return None
    if schedule.prefetch_of not in graph.ops:
        raise ConfigError(f"op {name} prefetches for {schedule.prefetch_of}, but {graph.name} has no such op")
    target = graph.ops[schedule.prefetch_of]
    if "weight" not in target.reads:
        raise IllegalConfig(f"{name}: {target.name} streams no weights that could be brought into L2")
    weight = graph.tensors[target.tensor("weight")]
    share = min(schedule.prefetch_kib * 1024, weight.bytes) // ctas // 16 * 16
    return Prefetch(weight.name, share, POINTS[schedule.prefetch_at]) if share else None


def _check_launch(graph: OpGraph, host: str, node: KernelNode) -> None:
    """Ops of one launch run side by side, so none may need another's output, except behind its tiles."""
    parts = {part.op: part for part in node.parts}
    for producer, consumer in graph.op_edges():
        if producer in parts and consumer in parts:
            arrival = parts[consumer].arrival
            if arrival is not None and arrival.producer == producer:
                continue
            raise IllegalConfig(f"{consumer}: cannot share the launch of {host}, since it reads what {producer} writes")


def _launch_order(graph: OpGraph, config: CmpConfig) -> tuple[str, ...]:
    """Hosts in a topological order, as near to the config's order of ops as their shared launches allow."""
    waiting: dict[str, set[str]] = {host: set() for host in config.launches()}
    for producer, consumer in graph.op_edges():
        pair = (config.host_of(producer), config.host_of(consumer))
        if pair[0] != pair[1]:
            waiting[pair[1]].add(pair[0])
    order: dict[str, None] = {}
    while waiting:
        ready = next((host for host, before in waiting.items() if before <= order.keys()), None)
        if ready is None:
            raise IllegalConfig(f"the launches of {', '.join(waiting)} wait for each other")
        order[ready] = None
        del waiting[ready]
    return tuple(order)


def compile_key(op: Op, tiling: Tiling, shell: str, arch: str) -> CompileKey:
    """The binary of an op: run-time fields dropped, template parameters kept."""
    kind = KINDS[op.kind]
    constants = tuple(sorted((name, op.params[name]) for name in kind.constants if name in op.params))
    return CompileKey(op.kind, shell, arch, replace(tiling, split_k=1) if kind.tiled else Tiling(), constants)


def space_binaries(space: CmpSpace) -> tuple[CompileKey, ...]:
    """Every binary that configs of a space can name, without repeats."""
    found: dict[CompileKey, None] = {}
    for name, op in space.graph.ops.items():
        choices = KINDS[op.kind].tunables(op, space.graph)
        base = default_tiling(space.graph, name, space.gpu)
        for values in product(*choices.values()):
            fields: dict[str, Any] = dict(zip(choices, values, strict=True))
            tiling = replace(base, **fields)
            if space.refusal(name, tiling) is None:
                key = compile_key(op, tiling, "grid", space.gpu.arch)
                found.update(dict.fromkeys(_variants(space, name, key, KINDS[op.kind].domain(op, space.graph, tiling))))
    return tuple(found)


def _variants(space: CmpSpace, name: str, key: CompileKey, domain: Domain) -> Iterator[CompileKey]:
    """The binaries of one tiling: as it is, and with what the space's grid caps and prefetches ask for."""
    yield key
    dimensions = {d.name: d.values for d in space.dimensions if isinstance(d, Choice)}
    caps = dimensions.get(f"{name}.grid_cap", (0,))
    if any(_capped(domain, int(cap)) < domain.n_tiles for cap in caps):
        yield replace(key, loops=True)
    if name in dimensions.get("prefetch.by", ()):
        yield replace(key, prefetches=True)


def _launch_edges(graph: OpGraph, config: CmpConfig, order: tuple[str, ...]) -> dict[tuple[str, str], EdgeKind]:
    """Data edges and stream-order edges between hosts, typed, without those that a longer path implies.

    An implied edge may go because every kernel waits for its in-edges before its first access to mutable data, so
    completion is transitive along any path. Where several data edges join two launches, the strictest kind rules.
    """
    found: dict[tuple[str, str], set[EdgeKind]] = {}
    for producer, consumer in graph.op_edges():
        pair = (config.host_of(producer), config.host_of(consumer))
        if pair[0] != pair[1]:
            found.setdefault(pair, set()).add(edge_kind(config, producer, consumer))
    stream = dict(zip(config.order, config.streams, strict=True))
    last: dict[int, str] = {}
    for host in order:
        if stream[host] in last:
            pair = (last[stream[host]], host)
            found.setdefault(pair, {edge_kind(config, *pair)})
        last[stream[host]] = host
    kept = transitive_reduction(found, order)
    return {pair: next(kind for kind in EdgeKind if kind in kinds) for pair, kinds in found.items() if pair in kept}


def edge_kind(config: CmpConfig, producer: str, consumer: str) -> EdgeKind:
    """Type of an edge between two ops under a config."""
    if (producer, consumer) in config.programmatic:
        return EdgeKind.PROGRAMMATIC
    if (producer, consumer) in config.launch_completion:
        return EdgeKind.LAUNCH_COMPLETION
    return EdgeKind.ORDINARY


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

"""The CMP search space of one graph: dimensions, decoding of a point, canonical form, heuristic seeds.

Orders and stream assignments are drawn through values that always decode to something legal: one priority per op
gives a topological order (list scheduling), one stream label per op is relabelled by first use. Dimensions that cannot
act are not made.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.config import (
    EDGES,
    NO_LIMIT_AHEAD,
    PREFETCH_POINTS,
    PRIORITIES,
    SHARERS,
    TRIGGERS,
    WAITS,
    CmpConfig,
    OpSchedule,
    relabel,
)
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord
from workloads.graph import OpGraph, Role
from workloads.ops import KINDS
from workloads.ops.base import Tiling

MAX_STREAMS = 4
W_AHEAD = (NO_LIMIT_AHEAD, 4, 2, 0)
PREFETCH_KIB = (256, 1024, 4096)
LEAST_PREFETCHED = 1 << 20  # bytes of weights below which nothing is worth bringing into L2
Value = int | float | str


@dataclass(frozen=True)
class Choice:
    """A categorical dimension; `values` in order of preference."""

    name: str
    values: tuple[int | str, ...]


@dataclass(frozen=True)
class Priority:
    """A random key in [0, 1]: higher goes earlier among ready ops."""

    name: str


Dimension = Choice | Priority


class CmpSpace:
    """The space of `CmpConfig`s of one graph on one GPU."""

    def __init__(self, graph: OpGraph, gpu: GpuRecord) -> None:
        self.graph = graph
        self.gpu = gpu
        self.dimensions: tuple[Dimension, ...] = tuple(self._dimensions())

    def _dimensions(self) -> Iterable[Dimension]:
        producers = {p for p, _ in self.graph.op_edges()}
        consumers = {c for _, c in self.graph.op_edges()}
        for op in self.graph.ops.values():
            kind = KINDS[op.kind]
            for field, values in kind.tunables(op, self.graph).items():
                allowed = tuple(v for v in values if field != "core" or v in self.gpu.cores())
                if len(allowed) > 1:
                    yield Choice(f"{op.name}.{field}", allowed)
            if op.name in producers:
                yield Choice(f"{op.name}.trigger", TRIGGERS)
            if op.name in consumers:
                yield Choice(f"{op.name}.wait", tuple(reversed(WAITS)))
                if kind.loaders and kind.tiled:
                    yield Choice(f"{op.name}.w_ahead", W_AHEAD)
            if kind.loaders and kind.tiled:
                yield Choice(f"{op.name}.grid_cap", (0, self.gpu.sm_count, self.gpu.sm_count // 2))
            hosts = hosts_of(self.graph, op.name)
            if hosts:
                yield Choice(f"{op.name}.host", ("", *hosts))
            if arrival_hosts(self.graph, op.name):
                yield Choice(f"{op.name}.sharers", SHARERS)
            yield Choice(f"{op.name}.stream", tuple(range(MAX_STREAMS)))
            yield Choice(f"{op.name}.priority", PRIORITIES)
            yield Priority(f"{op.name}.order")
        for producer, consumer in self.graph.op_edges():
            yield Choice(f"{producer}>{consumer}.edge", EDGES)
        yield Choice("stream_edges", EDGES[:2])
        yield from self._prefetches()

    def _prefetches(self) -> Iterable[Dimension]:
        """One op that brings a later op's weights into L2: a careless prefetch costs more than it wins."""
        by = tuple(name for name, op in self.graph.ops.items() if not KINDS[op.kind].loaders)
        of = tuple(name for name, op in self.graph.ops.items() if _streams(self.graph, op.name))
        if len(by) > 1 and of:
            yield Choice("prefetch.of", ("", *of))
            yield Choice("prefetch.by", by)
            yield Choice("prefetch.kib", PREFETCH_KIB)
            yield Choice("prefetch.at", PREFETCH_POINTS)

    def decode(self, point: Mapping[str, Value]) -> CmpConfig:
        """The config of a point; dimensions that a point lacks take their default."""
        order = self._order({n: float(point.get(f"{n}.order", 0.5)) for n in self.graph.ops})
        ops = {name: self._schedule(name, point) for name in self.graph.ops}
        streams = relabel(tuple(int(point.get(f"{name}.stream", i)) for i, name in enumerate(order)))
        data = set(self.graph.op_edges())
        kinds = {e: point.get(f"{e[0]}>{e[1]}.edge", "programmatic") for e in data}
        programmatic = {e for e, kind in kinds.items() if kind == "programmatic"}
        if point.get("stream_edges", "programmatic") == "programmatic":
            programmatic |= stream_edges(order, streams) - data
        begun = frozenset(e for e, kind in kinds.items() if kind == "launch_completion")
        return CmpConfig(ops, order, streams, frozenset(programmatic), begun)

    def _tiling(self, name: str, point: Mapping[str, Value]) -> Tiling:
        op = self.graph.ops[name]
        tiling = dict(default_tiling(self.graph, name, self.gpu).__dict__)
        for field in KINDS[op.kind].tunables(op, self.graph):
            if f"{name}.{field}" in point:
                tiling[field] = point[f"{name}.{field}"]
        return Tiling(**tiling)

    def _host(self, name: str, point: Mapping[str, Value]) -> str:
        """A finaliser whose producer leaves it no registers gets a launch of its own."""
        host = str(point.get(f"{name}.host", ""))
        if not self._is_behind(name, host):
            return host
        others = [op for op in self.graph.ops if op != name and point.get(f"{op}.host") == host]
        shares = bool(others or point.get(f"{host}.host"))
        tiling = self._tiling(host, point)
        return host if self._has_room_behind(host, tiling, shares, tiling.ctas_per_sm) else ""

    def _is_behind(self, name: str, host: str) -> bool:
        return host in arrival_hosts(self.graph, name)

    def _has_room_behind(self, producer: str, tiling: Tiling, shares: bool, ctas: int) -> bool:
        """Whether so many CTAs leave a finaliser registers; code of further ops in the kernel takes some as well."""
        most = KINDS[self.graph.ops[producer].kind].ctas_with_finaliser(tiling)
        return ctas <= (min(most, 1) if shares else most)

    def _schedule(self, name: str, point: Mapping[str, Value]) -> OpSchedule:
        fallback = OpSchedule()
        return OpSchedule(
            tiling=self._tiling(name, point),
            trigger=str(point.get(f"{name}.trigger", fallback.trigger)),
            wait=str(point.get(f"{name}.wait", fallback.wait)),
            w_ahead=int(point.get(f"{name}.w_ahead", fallback.w_ahead)),
            priority=int(point.get(f"{name}.priority", fallback.priority)),
            host=self._host(name, point),
            sharers=int(point.get(f"{name}.sharers", fallback.sharers)),
            grid_cap=int(point.get(f"{name}.grid_cap", 0)),
            **self._prefetch(name, point),
        )

    @staticmethod
    def _prefetch(name: str, point: Mapping[str, Value]) -> dict[str, Any]:
        of = str(point.get("prefetch.of", ""))
        if not of or point["prefetch.by"] != name:
            return {}
        return {"prefetch_of": of, "prefetch_kib": int(point["prefetch.kib"]), "prefetch_at": str(point["prefetch.at"])}

    def _order(self, keys: Mapping[str, float]) -> tuple[str, ...]:
        """List scheduling by key: the highest key among ready ops goes first, names break ties."""
        waiting = {name: {p for p, c in self.graph.op_edges() if c == name} for name in self.graph.ops}
        ready = [(-keys[name], name) for name, before in waiting.items() if not before]
        heapq.heapify(ready)
        order: list[str] = []
        while ready:
            _, name = heapq.heappop(ready)
            order.append(name)
            for other, before in waiting.items():
                if name in before:
                    before.remove(name)
                    if not before:
                        heapq.heappush(ready, (-keys[other], other))
        return tuple(order)

    def sample(self, rng: random.Random) -> dict[str, Value]:
        """A uniform point."""
        return {d.name: rng.random() if isinstance(d, Priority) else rng.choice(d.values) for d in self.dimensions}

    def check(self, config: CmpConfig) -> None:
        """Refuses what this GPU cannot hold.

        Raises:
            IllegalConfig: with the reason, naming the op.
        """
        for name, schedule in config.ops.items():
            reason = self.refusal(name, schedule.tiling)
            if reason is not None:
                raise IllegalConfig(reason)
        for host, names in config.launches().items():
            behind = [n for n in names if n in self.graph.ops and self._is_behind(n, config.ops[n].host)]
            beside = [n for n in names if n not in behind]
            for name in beside[1:]:
                if name not in self.graph.ops or host not in side_hosts(self.graph, name):
                    raise IllegalConfig(
                        f"{name}: cannot share the launch of {host}, use {_hosts_text(self.graph, name)}"
                    )
            shared = max(self._shared(name, config.ops[name].tiling) for name in names)
            ctas = min(config.ops[name].tiling.ctas_per_sm for name in beside)
            for name in behind:
                producer = config.ops[name].host
                if not self._has_room_behind(producer, config.ops[producer].tiling, len(beside) > 1, ctas):
                    raise IllegalConfig(f"{name}: {ctas} CTAs of {producer} a multiprocessor leave it no registers")
            if self.gpu.ctas_by_shared(shared) < ctas:
                raise IllegalConfig(self._no_room("+".join(names), ctas, shared))

    def refusal(self, name: str, tiling: Tiling) -> str | None:
        """Why this GPU cannot hold an op under a tiling, or None."""
        op = self.graph.ops[name]
        kind = KINDS[op.kind]
        reason = kind.illegal(op, self.graph, tiling)
        if reason is None and tiling.core not in self.gpu.cores():
            reason = f"{name}: core {tiling.core} does not run on {self.gpu.arch}"
        shared = self._shared(name, tiling)
        if reason is None and self.gpu.ctas_by_shared(shared) < tiling.ctas_per_sm:
            reason = self._no_room(name, tiling.ctas_per_sm, shared)
        return reason

    def _shared(self, name: str, tiling: Tiling) -> int:
        op = self.graph.ops[name]
        return KINDS[op.kind].shared_bytes(op, tiling)

    def _no_room(self, name: str, ctas: int, shared: int) -> str:
        return (
            f"{name}: {ctas} CTAs of {shared} bytes of shared memory do not fit "
            f"{self.gpu.shared_per_sm} bytes of one multiprocessor"
        )

    def digest_text(self) -> str:
        """What the space's hash is made from."""
        return repr((self.graph.digest(), self.gpu.arch, self.gpu.sm_count, self.dimensions))


def hosts_of(graph: OpGraph, name: str) -> tuple[str, ...]:
    """Ops whose launch an op may be part of, beside their tiles or behind them."""
    return (*side_hosts(graph, name), *arrival_hosts(graph, name))


def arrival_hosts(graph: OpGraph, name: str) -> tuple[str, ...]:
    """Ops behind whose tiles an op may run, as the last of those that it reads arrives.

    They have loaders, for the grid shell runs such tiles in the math group, and leave partials that the op sums.
    """
    if KINDS[graph.ops[name].kind].loaders:
        return ()
    partials = [tensor for tensor in graph.ops[name].reads.values() if graph.tensors[tensor].role is Role.PARTIAL]
    writers = [writer for tensor in partials for writer in graph.writers(tensor)]
    return tuple(writer for writer in writers if KINDS[graph.ops[writer].kind].loaders)


def side_hosts(graph: OpGraph, name: str) -> tuple[str, ...]:
    """Ops beside whose tiles an op may run: earlier ones with loaders that wait for the very same producers."""
    parents: dict[str, set[str]] = {op: set() for op in graph.ops}
    for producer, consumer in graph.op_edges():
        parents[consumer].add(producer)
    earlier = list(graph.ops)[: list(graph.ops).index(name)]
    return tuple(
        op for op in earlier if parents[name] and parents[op] == parents[name] and KINDS[graph.ops[op].kind].loaders
    )


def _hosts_text(graph: OpGraph, name: str) -> str:
    return " or ".join(hosts_of(graph, name)) or "a launch of its own"


def _streams(graph: OpGraph, name: str) -> bool:
    """Whether an op streams weights that are worth bringing into L2 ahead of it."""
    op = graph.ops[name]
    return "weight" in op.reads and graph.tensors[op.tensor("weight")].bytes >= LEAST_PREFETCHED


def stream_edges(order: tuple[str, ...], streams: tuple[int, ...]) -> set[tuple[str, str]]:
    """Consecutive pairs within each stream."""
    pairs, last = set(), dict[int, str]()
    for name, stream in zip(order, streams, strict=True):
        if stream in last:
            pairs.add((last[stream], name))
        last[stream] = name
    return pairs


def default_tiling(graph: OpGraph, name: str, gpu: GpuRecord) -> Tiling:
    """The untuned tiling: first choices, and the split that fills the GPU's first wave best.

    This is the rule an expert starts from: whole waves (most CTAs that one wave of 64-row tiles holds), no less than
    four k-blocks a split.
    """
    op = graph.ops[name]
    kind = KINDS[op.kind]
    choices = kind.tunables(op, graph)
    tiling = dict(Tiling().__dict__) | {field: values[0] for field, values in choices.items()}
    if "core" in choices and gpu.cores()[-1] in choices["core"]:
        tiling["core"] = gpu.cores()[-1]
    splits = sorted(int(s) for s in choices.get("split_k", (1,)))
    best = splits[0]
    for split in splits:
        domain = kind.domain(op, graph, Tiling(**{**tiling, "split_k": split}))
        if domain.num_tiles <= gpu.sm_count and domain.k_blocks >= 2 * split:
            best = split
    if "split_k" in choices:
        tiling["split_k"] = best
    return Tiling(**tiling)


def serial(space: CmpSpace) -> CmpConfig:
    """One stream, ordinary edges, default tilings."""
    order = tuple(space.graph.ops)
    ops = {name: OpSchedule(default_tiling(space.graph, name, space.gpu)) for name in order}
    return CmpConfig(ops, order, (0,) * len(order), frozenset())


def default(space: CmpSpace) -> CmpConfig:
    """What one writes down without tuning: a stream per op, every data edge programmatic, W ahead of the wait.

    Kernels trigger once their own weights are issued, so that a consumer's weights queue behind them.
    """
    order = tuple(space.graph.ops)
    ops = {name: OpSchedule(default_tiling(space.graph, name, space.gpu), trigger="weights_issued") for name in order}
    return CmpConfig(ops, order, tuple(range(len(order))), frozenset(space.graph.op_edges()))

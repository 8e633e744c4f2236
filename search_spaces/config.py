"""Configs: one point of a search space, frozen, printable and JSON.

A config has three keys. The compile key of an op names a binary. The run key names everything else. The numerics key
names the output bits: two configs with equal numerics keys that differ in one output bit are a bug.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from search_spaces.errors import ConfigError
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Tiling

T = TypeVar("T")

TRIGGERS = ("none", "entry", "set_up", "weights_issued", "inputs_read", "stored")
WAITS = ("entry", "after_setup", "a_loader_only")
NO_LIMIT_AHEAD = 64  # more than any ring: every stage may be issued before the wait
PRIORITIES = (0, 1, 2)  # node priority, higher runs first
SHARERS = (1, 4, 16)
EDGES = ("programmatic", "ordinary", "launch_completion")
PREFETCH_POINTS = ("entry", "weights_issued", "inputs_read", "stored")


@dataclass(frozen=True)
class OpSchedule:
    """How CMP runs one op.

    Attributes:
        tiling: tile shape, split-K, core, stages, residency.
        trigger: program point at which the kernel lets its programmatic consumers launch; `none` means at its end.
        wait: `entry`, `after_setup`, or `a_loader_only` (only the acquires that every kernel makes).
        w_ahead: W stages that may be issued before the wait.
        priority: node priority, 0 to 2.
        host: op whose launch this op shares, or empty for a launch of its own. Tiles of both run side by side; those of
            a finaliser hosted by its producer run as the producer's tiles arrive, and only its tiling then counts.
        sharers: tiles of the host, the last to arrive, that share the tiles of a finaliser behind it.
        grid_cap: CTAs at most; each then takes several tiles in turn. 0 means one CTA a tile.
        prefetch_of: op whose first weights this op brings into L2 on its way, or empty.
        prefetch_kib: KiB of them, over the whole launch.
        prefetch_at: program point at which each CTA issues its share.
    """

    tiling: Tiling = Tiling()
    trigger: str = "none"
    wait: str = "a_loader_only"
    w_ahead: int = NO_LIMIT_AHEAD
    priority: int = 0
    host: str = ""
    sharers: int = 1
    grid_cap: int = 0
    prefetch_of: str = ""
    prefetch_kib: int = 0
    prefetch_at: str = "entry"


@dataclass(frozen=True)
class CmpConfig:
    """A CUDA Graph + Multistream + PDL schedule of one graph.

    Attributes:
        ops: schedule per op name.
        order: a topological order of the ops: the order in which nodes are created.
        streams: stream of each op of `order`, labelled by first use. Ops of one stream run in `order`.
        programmatic: (producer, consumer) edges that are programmatic.
        launch_completion: those that let the consumer launch once all CTAs of the producer have begun. Edges in neither
            are ordinary.
    """

    ops: Mapping[str, OpSchedule]
    order: tuple[str, ...]
    streams: tuple[int, ...]
    programmatic: frozenset[tuple[str, str]] = frozenset()
    launch_completion: frozenset[tuple[str, str]] = frozenset()

    backend = "cmp"

    def host_of(self, name: str) -> str:
        """The op that gives its name, stream, place and priority to the launch that an op is part of."""
        seen = [name]
        while self.ops[seen[-1]].host:
            seen.append(self.ops[seen[-1]].host)
            if seen[-1] not in self.ops or seen.count(seen[-1]) > 1:
                raise ConfigError(f"op {name} is hosted by {seen[-1]}, which is no other op with a launch")
        return seen[-1]

    def launches(self) -> dict[str, tuple[str, ...]]:
        """Ops of each launch by its host, hosts in the order of their first op; the host comes first."""
        groups: dict[str, list[str]] = {}
        for name in self.order:
            groups.setdefault(self.host_of(name), []).append(name)
        return {host: (host, *(n for n in names if n != host)) for host, names in groups.items()}

    def restricted(self, ops: Iterable[str]) -> CmpConfig:
        """The schedule of some ops alone. What it says of others (a host, a prefetch, an edge) is dropped."""
        kept = set(ops)
        pairs = [(name, label) for name, label in zip(self.order, self.streams, strict=True) if name in kept]
        return CmpConfig(
            ops={name: _alone(s, kept) for name, s in self.ops.items() if name in kept},
            order=tuple(name for name, _ in pairs),
            streams=relabel(tuple(label for _, label in pairs)),
            programmatic=frozenset(e for e in self.programmatic if kept.issuperset(e)),
            launch_completion=frozenset(e for e in self.launch_completion if kept.issuperset(e)),
        )


def _alone(schedule: OpSchedule, kept: set[str]) -> OpSchedule:
    if schedule.host and schedule.host not in kept:
        schedule = replace(schedule, host="")
    if schedule.prefetch_of and schedule.prefetch_of not in kept:
        schedule = replace(schedule, prefetch_of="", prefetch_kib=0)
    return schedule


@dataclass(frozen=True)
class MegakernelConfig:
    """A persistent-kernel schedule of one graph.

    Attributes:
        ops: tiling per op name.
        order: topological order in which ops' tiles are dealt to the queues.
        policy: queue policy; `round_robin` deals tile i to worker i mod workers.
        workers: resident CTAs, at most one per multiprocessor; 0 means one per multiprocessor.
    """

    ops: Mapping[str, Tiling]
    order: tuple[str, ...]
    policy: str = "round_robin"
    workers: int = 0

    backend = "megakernel"


Config = CmpConfig | MegakernelConfig


def relabel(streams: tuple[int, ...]) -> tuple[int, ...]:
    """Stream labels in order of first use, so that equal partitions are equal tuples."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(stream, len(seen)) for stream in streams)


def tiling_of(config: Config, op: str) -> Tiling:
    schedule = config.ops[op]
    return schedule.tiling if isinstance(schedule, OpSchedule) else schedule


def splits_of(graph: OpGraph, config: Config) -> dict[str, int]:
    """Split count of every partial tensor of a graph under a config."""
    return {
        tensor: tiling_of(config, op.name).split_k
        for op in graph.ops.values()
        for tensor in op.writes.values()
        if graph.tensors[tensor].role == "partial"
    }


def to_json(config: Config) -> dict[str, Any]:
    """A JSON object from which `from_json` rebuilds an equal config."""
    document: dict[str, Any] = {
        "backend": config.backend,
        "ops": {n: asdict(config.ops[n]) for n in sorted(config.ops)},
    }
    document["order"] = list(config.order)
    if isinstance(config, CmpConfig):
        document["streams"] = list(config.streams)
        document["programmatic"] = sorted(f"{p}>{c}" for p, c in config.programmatic)
        document["launch_completion"] = sorted(f"{p}>{c}" for p, c in config.launch_completion)
    else:
        document["policy"], document["workers"] = config.policy, config.workers
    return document


def from_json(document: Mapping[str, Any]) -> Config:
    """Rebuilds a config.

    Raises:
        ConfigError: a field is missing, unknown, or of the wrong form.
    """
    try:
        backend, order = document["backend"], tuple(document["order"])
        if backend == "cmp":
            return CmpConfig(
                ops={name: _schedule(value) for name, value in document["ops"].items()},
                order=order,
                streams=tuple(document["streams"]),
                programmatic=_pairs(document["programmatic"]),
                launch_completion=_pairs(document.get("launch_completion", ())),
            )
        if backend == "megakernel":
            tilings = {name: _known(Tiling, value) for name, value in document["ops"].items()}
            return MegakernelConfig(tilings, order, document["policy"], document["workers"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"malformed config: {type(error).__name__} {error}") from error
    raise ConfigError(f"unknown backend {backend!r} in a config: use cmp or megakernel")


def _pairs(edges: Iterable[str]) -> frozenset[tuple[str, str]]:
    split = [edge.split(">", 1) for edge in edges]
    return frozenset((producer, consumer) for producer, consumer in split)


def _known(kind: type[T], value: Mapping[str, Any]) -> T:
    unknown = set(value) - {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ConfigError(f"malformed config: unknown field {sorted(unknown)[0]!r}")
    return kind(**value)


def _schedule(value: Mapping[str, Any]) -> OpSchedule:
    return replace(_known(OpSchedule, value), tiling=_known(Tiling, value["tiling"]))


def run_key(config: Config) -> str:
    """Content hash of the whole config, 16 hex digits."""
    return hashlib.sha256(json.dumps(to_json(config), sort_keys=True).encode()).hexdigest()[:16]


def numerics_key(graph: OpGraph, config: Config, arch: str) -> str:
    """What names the output bits, readable: `sm_90a|B0:wgmma/split3/groups2|...`."""
    parts = [arch]
    for op in graph.ops.values():
        text = KINDS[op.kind].numerics(op, tiling_of(config, op.name))
        if text:
            parts.append(f"{op.name}:{text}")
    return "|".join(parts)

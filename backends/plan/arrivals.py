"""Finalisers inside the launch of their producer: which tiles run when which tiles of the producer have arrived.

A producer's tiles are put into groups, one counter each. A tile that has stored its partials arrives at its group's
counter; the tile that arrives last runs all tiles of the finaliser that read this group. The groups are read off the
declared regions of both ops, never stated by an op.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

from search_spaces.errors import IllegalConfig
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Domain, Region, Tile, Tiling

MOST_GROUPS = 31  # along n: what the parameters have room for
MOST_SHARERS = 31  # a share's number travels as a count of one warp's lanes
Place = tuple[int, int, int]  # n, split, m of a tile


@dataclass(frozen=True)
class Arrival:
    """How the tiles of a finaliser follow those of its producer. Group (i, j) is the i-th along n, the j-th along m.

    Attributes:
        producer: op of the same launch whose tiles arrive.
        n_starts: first tile of the producer along n of each group, which ends where the next one starts.
        own_starts: the same of the finaliser's tiles.
        gathered_m: tiles of the producer along m that a group spans, with all their splits; the last may have fewer.
        run_m: tiles of the finaliser along m that a group starts.
        groups_m: groups along m.
        sharers: tiles of the producer that share a group's work, the last to arrive; of a smaller group all. Those
            before the last of them wait.
    """

    producer: str
    n_starts: tuple[int, ...]
    own_starts: tuple[int, ...]
    gathered_m: int
    run_m: int
    groups_m: int
    sharers: int = 1

    @property
    def waiting(self) -> int:
        """CTAs that may wait at once for others of their launch to arrive, or more."""
        return (self.sharers - 1) * self.num_groups

    @property
    def num_groups(self) -> int:
        """Each has a counter of its own."""
        return len(self.n_starts) * self.groups_m

    def arrivals(self, tile: Tile, domain: Domain) -> frozenset[Place]:
        """Tiles of the producer, of this domain, that arrive before a tile of the finaliser runs."""
        group = bisect_right(self.own_starts, tile.n) - 1
        columns = range(self.n_starts[group], (*self.n_starts, domain.n_tiles)[group + 1])
        first = tile.m // self.run_m * self.gathered_m
        rows = range(first, min(first + self.gathered_m, domain.m_tiles))
        return frozenset(product(columns, range(domain.splits), rows))


def counters_of(op: str) -> str:
    """Name of a finaliser's counters among the addresses of a graph. No tensor has a dot in its name."""
    return f"{op}.arrivals"


def derive(graph: OpGraph, producer: str, name: str, tilings: Mapping[str, Tiling], sharers: int = 1) -> Arrival:
    """The groups of a finaliser; there are no more sharers than tiles to share.

    Raises:
        IllegalConfig: the tiles that it reads form no groups of equal shape.
    """
    needs = needed(graph, producer, name, tilings[producer], tilings[name])
    own = _domain(graph, name, tilings[name])
    if not all(needs.values()):
        raise IllegalConfig(f"{name}: reads nothing that {producer} writes")
    own_starts = [n for n in range(own.n_tiles) if n == 0 or needs[n, 0, 0] != needs[n - 1, 0, 0]]
    n_starts = [min(n for n, _, _ in needs[start, 0, 0]) for start in own_starts]
    gathered_m = len({m for _, _, m in needs[0, 0, 0]})
    run_m = sum(needs[0, 0, m] == needs[0, 0, 0] for m in range(own.m_tiles))
    most = max(end - start for start, end in pairwise((*own_starts, own.n_tiles))) * run_m
    arrival = Arrival(
        producer,
        tuple(n_starts),
        tuple(own_starts),
        gathered_m,
        run_m,
        -(-own.m_tiles // run_m),
        min(sharers, most),
    )
    fault = fault_of(graph, name, arrival, tilings[producer], tilings[name])
    if fault is not None:
        raise IllegalConfig(f"{name}: cannot run as tiles of {producer} arrive: {fault}")
    return arrival


def fault_of(graph: OpGraph, name: str, arrival: Arrival, producer: Tiling, own: Tiling) -> str | None:
    """Why groups are not exactly what each tile of the finaliser reads, with a tile as witness; None when they are."""
    domain, own_domain = _domain(graph, arrival.producer, producer), _domain(graph, name, own)
    for op, starts, tiles in (
        (arrival.producer, arrival.n_starts, domain.n_tiles),
        (name, arrival.own_starts, own_domain.n_tiles),
    ):
        if starts[:1] != (0,) or any(low >= high for low, high in pairwise((*starts, tiles))):
            return f"groups that start at tiles {starts} of {op} do not cover its {tiles} tiles"
    if len(arrival.n_starts) != len(arrival.own_starts) or len(arrival.n_starts) > MOST_GROUPS:
        return f"{len(arrival.n_starts)} groups along n start {len(arrival.own_starts)}, at most {MOST_GROUPS}"
    spans, runs = -(-domain.m_tiles // arrival.gathered_m), -(-own_domain.m_tiles // arrival.run_m)
    if not spans == runs == arrival.groups_m:
        return f"{spans} groups along m start {runs}, planned are {arrival.groups_m}"
    needs = needed(graph, arrival.producer, name, producer, own)
    if not 1 <= arrival.sharers <= MOST_SHARERS:
        return f"{arrival.sharers} share a group, at most {MOST_SHARERS}"
    for tile in own_domain:
        wrong = needs[tile.n, tile.split, tile.m] ^ arrival.arrivals(tile, domain)
        if wrong:
            n, split, m = min(wrong)
            reads = (n, split, m) in needs[tile.n, tile.split, tile.m]
            which = f"tile m={m} n={n} split={split} of {arrival.producer}"
            text = (
                f"reads {which}, which is not of its group" if reads else f"waits for {which}, which it does not read"
            )
            return f"tile m={tile.m} n={tile.n} of {name} {text}"
    return None


@lru_cache(maxsize=256)
def needed(graph: OpGraph, producer: str, name: str, tiling: Tiling, own: Tiling) -> dict[Place, frozenset[Place]]:
    """Tiles of the producer that write what a tile of the finaliser reads, per tile of the finaliser."""
    op, source = graph.ops[name], graph.ops[producer]
    kind, splits = KINDS[op.kind], _splits(graph, name, {producer: tiling.split_k})
    written = _Written(graph, producer, tiling)
    return {
        (tile.n, tile.split, tile.m): frozenset().union(
            *(
                written.over(region)
                for region in kind.reads(op, graph, own, tile, splits)
                if region.tensor in source.writes.values()
            )
        )
        for tile in _domain(graph, name, own)
    }


class _Written:
    """Tiles of an op by what they write: intervals of each axis first, so that few boxes are compared."""

    def __init__(self, graph: OpGraph, name: str, tiling: Tiling) -> None:
        op = graph.ops[name]
        self._tiles: dict[str, dict[tuple[tuple[int, int], ...], set[Place]]] = {}
        for tile in _domain(graph, name, tiling):
            for region in KINDS[op.kind].writes(op, graph, tiling, tile):
                boxes = self._tiles.setdefault(region.tensor, {})
                boxes.setdefault(region.box, set()).add((tile.n, tile.split, tile.m))
        self._axes = {
            tensor: [sorted(set(axis)) for axis in zip(*boxes, strict=True)] for tensor, boxes in self._tiles.items()
        }

    def over(self, region: Region) -> frozenset[Place]:
        """Tiles that write a part of a region."""
        boxes = self._tiles.get(region.tensor, {})
        touched = [
            [(low, high) for low, high in axis if low < to and start < high]
            for axis, (start, to) in zip(self._axes.get(region.tensor, []), region.box, strict=True)
        ]
        return frozenset().union(*(boxes.get(box, ()) for box in product(*touched))) if boxes else frozenset()


def _splits(graph: OpGraph, name: str, known: Mapping[str, int]) -> dict[str, int]:
    """Split counts of the partials that an op reads; other producers' do not matter here."""
    return {
        tensor: known.get(writer, 1)
        for tensor in graph.ops[name].reads.values()
        for writer in graph.writers(tensor)
        if graph.tensors[tensor].role == "partial"
    }


def _domain(graph: OpGraph, name: str, tiling: Tiling) -> Domain:
    op = graph.ops[name]
    return KINDS[op.kind].domain(op, graph, tiling)

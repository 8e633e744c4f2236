"""Finalisers inside the launch of their producer: which tiles run when which tiles of the producer have arrived.

A producer's tiles are put into groups, one counter each. A tile that has stored its partials arrives at its group's
counter; the tile that arrives last runs all tiles of the finaliser that read this group. The groups are read off the
declared regions of both ops, never stated by an op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from search_spaces.errors import IllegalConfig
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Domain, Region, Tile, Tiling

MOST_SHARERS = 31  # a share's number travels as a count of one warp's lanes
Place = tuple[int, int, int]  # n, split, m of a tile


@dataclass(frozen=True)
class Arrival:
    """How the tiles of a finaliser follow those of its producer. Pairs are tiles along n and along m.

    Attributes:
        producer: op of the same launch whose tiles arrive.
        gathered: tiles of the producer that a group spans; it holds all their splits. The last group may be smaller.
        run: tiles of the finaliser that a group starts.
        groups: groups, each with a counter of its own.
        sharers: tiles of the producer that share a group's work, the last to arrive. All but the last of them wait.
    """

    producer: str
    gathered: tuple[int, int]
    run: tuple[int, int]
    groups: tuple[int, int]
    sharers: int = 1

    @property
    def waiting(self) -> int:
        """CTAs that may wait at once for others of their launch to arrive."""
        return (self.sharers - 1) * self.num_groups

    @property
    def num_groups(self) -> int:
        return self.groups[0] * self.groups[1]

    def arrivals(self, tile: Tile, domain: Domain) -> frozenset[Place]:
        """Tiles of the producer, of this domain, that arrive before a tile of the finaliser runs."""
        n, m = (at // run * span for at, run, span in zip((tile.n, tile.m), self.run, self.gathered, strict=True))
        columns = range(n, min(n + self.gathered[0], domain.n_tiles))
        rows = range(m, min(m + self.gathered[1], domain.m_tiles))
        return frozenset(product(columns, range(domain.splits), rows))


def counters_of(op: str) -> str:
    """Name of a finaliser's counters among the addresses of a graph. No tensor has a dot in its name."""
    return f"{op}.arrivals"


def derive(graph: OpGraph, producer: str, name: str, tilings: Mapping[str, Tiling], sharers: int = 1) -> Arrival:
    """The groups of a finaliser; there are no more sharers than tiles to share or tiles that arrive.

    Raises:
        IllegalConfig: the tiles that it reads form no groups of equal shape.
    """
    needs = needed(graph, producer, name, tilings[producer], tilings[name])
    own = _domain(graph, name, tilings[name])
    first = needs[0, 0, 0]
    gathered = (len({n for n, _, _ in first}), len({m for _, _, m in first}))
    run = (
        sum(needs[n, 0, 0] == first for n in range(own.n_tiles)),
        sum(needs[0, 0, m] == first for m in range(own.m_tiles)),
    )
    if not first:
        raise IllegalConfig(f"{name}: reads nothing that {producer} writes")
    groups = (-(-own.n_tiles // run[0]), -(-own.m_tiles // run[1]))
    fewest = min(len(needs[n, 0, m]) for n, m in product(range(own.n_tiles), range(own.m_tiles)))
    arrival = Arrival(producer, gathered, run, groups, min(sharers, run[0] * run[1], fewest))
    fault = fault_of(graph, name, arrival, tilings[producer], tilings[name])
    if fault is not None:
        raise IllegalConfig(f"{name}: cannot run as tiles of {producer} arrive: {fault}")
    return arrival


def fault_of(graph: OpGraph, name: str, arrival: Arrival, producer: Tiling, own: Tiling) -> str | None:
    """Why groups are not exactly what each tile of the finaliser reads, with a tile as witness; None when they are."""
    domain, own_domain = _domain(graph, arrival.producer, producer), _domain(graph, name, own)
    spans = tuple(-(-tiles // span) for tiles, span in zip(_extents(domain), arrival.gathered, strict=True))
    runs = tuple(-(-tiles // run) for tiles, run in zip(_extents(own_domain), arrival.run, strict=True))
    if spans != arrival.groups or runs != arrival.groups:
        return f"{spans} groups of arriving tiles start {runs} groups of tiles, planned are {arrival.groups}"
    needs = needed(graph, arrival.producer, name, producer, own)
    fewest = min(map(len, needs.values()))
    if not 1 <= arrival.sharers <= min(fewest, MOST_SHARERS):
        return f"{arrival.sharers} share a group of which {fewest} tiles arrive"
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


def _extents(domain: Domain) -> tuple[int, int]:
    return domain.n_tiles, domain.m_tiles

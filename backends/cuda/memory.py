"""Device memory of a graph: one arena per rotation set, one for everything that a run shares.

A set holds what the workload streams (weights, then caches), contiguous, so that the floor kernel can stream the same
bytes. The shared arena holds inputs, then everything that ops write, contiguous, so that one fill poisons it all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from backends.cuda import driver
from backends.plan.arrivals import counters_of
from search_spaces.cmp import arrival_hosts
from workloads.graph import OpGraph, Role
from workloads.ops import KINDS
from workloads.ops.base import Tiling

ALIGNMENT = 1024
PADDING = 1024  # behind every tensor: bulk copies of whole token tiles may read past the last row


@dataclass(frozen=True)
class Slice:
    """A tensor's place in an arena, in bytes."""

    offset: int
    bytes: int


@dataclass
class Arena:
    """A block of device memory that holds several tensors."""

    base: int
    bytes: int
    slices: dict[str, Slice] = field(default_factory=dict)

    def addresses(self) -> dict[str, int]:
        return {name: self.base + piece.offset for name, piece in self.slices.items()}

    def close(self) -> None:
        """Frees the block. Safe to call twice."""
        if self.base:
            driver.free(self.base)
            self.base = 0


def plan_slices(sizes: dict[str, int]) -> tuple[dict[str, Slice], int]:
    """Places tensors one behind the other; returns their slices and the total size."""
    slices, offset = {}, 0
    for name, size in sizes.items():
        slices[name] = Slice(offset, size)
        offset += -(-(size + PADDING) // ALIGNMENT) * ALIGNMENT
    return slices, offset


def allocate(sizes: dict[str, int]) -> Arena:
    slices, total = plan_slices(sizes)
    return Arena(driver.allocate(max(total, ALIGNMENT)), total, slices)


def set_sizes(graph: OpGraph) -> dict[str, int]:
    """Bytes of the tensors of one rotation set: weights by size, largest first, then caches."""
    weights = [t for t in graph.tensors.values() if t.role is Role.WEIGHT]
    states = [t for t in graph.tensors.values() if t.role is Role.STATE]
    return {t.name: t.bytes for t in (*sorted(weights, key=lambda t: -t.bytes), *states)}


def input_sizes(graph: OpGraph) -> dict[str, int]:
    return {t.name: t.bytes for t in graph.tensors.values() if t.role is Role.INPUT}


def written_sizes(graph: OpGraph, max_splits: dict[str, int]) -> dict[str, int]:
    """Bytes of everything that ops write outside of the caches; partials at their largest split count."""
    written = (Role.INNER, Role.PARTIAL, Role.OUTPUT)
    return {t.name: t.bytes * max_splits.get(t.name, 1) for t in graph.tensors.values() if t.role in written}


def largest_splits(graph: OpGraph) -> dict[str, int]:
    """The largest split count that the space may draw, per partial tensor."""
    largest = {}
    for op in graph.ops.values():
        choices = KINDS[op.kind].tunables(op, graph).get("split_k", (1,))
        for tensor in op.writes.values():
            if graph.tensors[tensor].role is Role.PARTIAL:
                largest[tensor] = max(int(choice) for choice in choices)
    return largest


def counter_sizes(graph: OpGraph) -> dict[str, int]:
    """Bytes of the arrival counters of all finalisers: one uint32 a group, and no group is without a tile."""
    sizes = {}
    for name, op in graph.ops.items():
        if arrival_hosts(graph, name):
            choices = KINDS[op.kind].tunables(op, graph)
            tilings = [dict[str, Any](zip(choices, values, strict=True)) for values in product(*choices.values())]
            tiles = (KINDS[op.kind].domain(op, graph, Tiling(**tiling)).num_tiles for tiling in tilings)
            sizes[counters_of(name)] = 4 * max(tiles)
    return sizes


def allocate_counters(graph: OpGraph) -> Arena:
    """Arrival counters at zero. Every launch leaves them at zero, so nothing resets them between replays."""
    arena = allocate(counter_sizes(graph))
    driver.copy_from_host(arena.base, bytes(max(arena.bytes, 4)))
    return arena

"""Which ops can sit beside which on one multiprocessor: what a prefetching consumer can gain from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from search_spaces.cmp import CmpSpace, default_tiling
from workloads.ops import KINDS
from workloads.ops.base import Tiling


@dataclass(frozen=True)
class Residency:
    """One data edge.

    Attributes:
        producer: op name.
        consumer: op name.
        default_fits: whether a CTA of the consumer fits beside a full complement of the producer's, both untuned.
        fitting: pairs of tilings for which it fits.
        pairs: all pairs of tilings that differ in shared memory or residency.
    """

    producer: str
    consumer: str
    default_fits: bool
    fitting: int
    pairs: int


@dataclass(frozen=True)
class _Footprint:
    shared: int
    threads: int
    ctas: int


def residencies(space: CmpSpace) -> list[Residency]:
    """Every data edge of the graph."""
    found = []
    for producer, consumer in space.graph.op_edges():
        first = _footprint(space, producer, default_tiling(space.graph, producer, space.gpu))
        second = _footprint(space, consumer, default_tiling(space.graph, consumer, space.gpu))
        pairs = list(product(_footprints(space, producer), _footprints(space, consumer)))
        fitting = sum(_fits(space, a, b) for a, b in pairs)
        found.append(Residency(producer, consumer, _fits(space, first, second), fitting, len(pairs)))
    return found


def _footprints(space: CmpSpace, name: str) -> set[_Footprint]:
    op = space.graph.ops[name]
    kind = KINDS[op.kind]
    return {
        _footprint(space, name, tiling)
        for tiling in _tilings(space, name)
        if kind.illegal(op, space.graph, tiling) is None
    }


def _tilings(space: CmpSpace, name: str) -> Iterator[Tiling]:
    op = space.graph.ops[name]
    choices = KINDS[op.kind].tunables(op, space.graph)
    base = default_tiling(space.graph, name, space.gpu).__dict__
    for values in product(*choices.values()):
        yield Tiling(**{**base, **dict(zip(choices, values, strict=True))})


def _footprint(space: CmpSpace, name: str, tiling: Tiling) -> _Footprint:
    op = space.graph.ops[name]
    kind = KINDS[op.kind]
    shared = kind.shared_bytes(op, tiling) + space.gpu.reserved_shared
    return _Footprint(shared, kind.threads, tiling.ctas_per_sm)


def _fits(space: CmpSpace, producer: _Footprint, consumer: _Footprint) -> bool:
    """By shared memory and threads; registers follow from the launch bounds that residency sets."""
    shared = producer.shared * producer.ctas + consumer.shared
    threads = producer.threads * producer.ctas + consumer.threads
    return shared <= space.gpu.shared_per_sm and threads <= space.gpu.threads_per_sm

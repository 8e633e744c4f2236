"""Repairs points whose tilings this GPU cannot hold, so that proposals are not spent on them."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from search_spaces.cmp import Choice, CmpSpace, Value, default_tiling
from search_spaces.config import CmpConfig
from search_spaces.errors import IllegalConfig
from tuner.errors import OptionError
from tuner.seeds import encode
from workloads.ops import KINDS
from workloads.ops.base import Tiling

TILING_FIELDS = tuple(Tiling.__dataclass_fields__)


@dataclass(frozen=True)
class _OpTilings:
    """The tiling dimensions of one op and the combinations of their values that are legal."""

    dimensions: tuple[str, ...]
    legal: frozenset[tuple[Value, ...]]

    @cached_property
    def ordered(self) -> list[tuple[Value, ...]]:
        return sorted(self.legal, key=str)


class Repair:
    """Moves the tiling of each op to a nearest legal one; everything else of a point stays."""

    def __init__(self, space: CmpSpace, seed: int) -> None:
        self._rng = random.Random(seed)
        self._ops = [found for name in space.graph.ops if (found := _tilings_of(space, name)).dimensions]

    def __call__(self, point: dict[str, Value]) -> dict[str, Value]:
        """The point itself when it is legal or cannot be helped, else a changed copy."""
        changed = point
        for op in self._ops:
            values = tuple(point[name] for name in op.dimensions)
            if values in op.legal or not op.legal:
                continue
            near = self._nearest(op, values)
            changed = {**changed, **dict(zip(op.dimensions, near, strict=True))}
        return changed

    def _nearest(self, op: _OpTilings, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """A legal combination that differs in the fewest fields, drawn among equals."""
        distances = [sum(a != b for a, b in zip(legal, values, strict=True)) for legal in op.ordered]
        least = min(distances)
        return self._rng.choice([v for v, d in zip(op.ordered, distances, strict=True) if d == least])


def nearest(space: CmpSpace, config: CmpConfig) -> CmpConfig:
    """A config of another space of the same ops, in this one: itself if it is legal here, else a near legal config.

    Raises:
        OptionError: it schedules other ops.
    """
    if set(config.ops) != set(space.graph.ops):
        known = ", ".join(space.graph.ops)
        raise OptionError(f"a start schedules {', '.join(sorted(config.ops))}, but {space.graph.name} has {known}")
    if all(_offered(space, name, schedule.tiling) for name, schedule in config.ops.items()):
        with contextlib.suppress(IllegalConfig):
            space.check(config)
            return config
    return space.decode(Repair(space, seed=0)(encode(space, config)))


def _offered(space: CmpSpace, name: str, tiling: Tiling) -> bool:
    """Whether a tiling is made of values that the space offers for an op."""
    op = space.graph.ops[name]
    return all(getattr(tiling, field) in values for field, values in KINDS[op.kind].tunables(op, space.graph).items())


def _tilings_of(space: CmpSpace, name: str) -> _OpTilings:
    choices = {
        d.name: d.values
        for d in space.dimensions
        if isinstance(d, Choice) and d.name.rpartition(".")[0] == name and d.name.rpartition(".")[2] in TILING_FIELDS
    }
    fields = [dimension.rpartition(".")[2] for dimension in choices]
    base = default_tiling(space.graph, name, space.gpu).__dict__
    legal = frozenset(
        values
        for values in product(*choices.values())
        if space.refusal(name, Tiling(**{**base, **dict(zip(fields, values, strict=True))})) is None
    )
    return _OpTilings(tuple(choices), legal)

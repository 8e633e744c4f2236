"""What a simulation answers: times per op, where each op lost time, and the chain of ops that made the span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OpTimes:
    """One kernel on the timeline, microseconds after the first stamp.

    Attributes:
        start_us: the first CTA starts.
        input_us: the first CTA may read what its producers wrote.
        end_us: the last CTA has ended and its stores are visible.
        stalls: microseconds lost, by reason: `slot` (launched, no room for all CTAs), `wait` (resident and set up,
            producers not done), `memory` (bytes that came slower than the CTA alone would get them).
    """

    start_us: float
    input_us: float
    end_us: float
    stalls: Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """CTAs of one op that started together."""

    op: str
    ctas: int
    most_per_sm: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """A predicted run.

    Attributes:
        span_us: between the stamps, the empty bracket subtracted.
        ops: times by op name.
        critical: ops of the chain that made the span, first to last: of each op, the one that it started or read
            last for want of (a producer, or the op that held its slots).
        placements: which CTAs started together, in order of start.
    """

    span_us: float
    ops: Mapping[str, OpTimes]
    critical: tuple[str, ...]
    placements: tuple[Placement, ...]

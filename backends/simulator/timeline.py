"""What a simulation answers: times per op, where each op lost time, and the chain of ops that made the span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.measure.trace import CtaRecord


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


def records(timeline: Timeline, launches: Mapping[str, str], sm_count: int) -> tuple[CtaRecord, ...]:
    """Trace records of a predicted run, by the launch of each op. A CTA is put where the fewest others are."""
    free_at = [[0.0] for _ in range(sm_count)]  # ends of the CTAs that each multiprocessor held
    found = []
    for place in timeline.placements:
        ready = max(place.start_us, timeline.ops[place.op].input_us)
        load = [sum(end > place.start_us for end in ends) for ends in free_at]
        for _ in range(place.ctas):
            sm = load.index(min(load))
            load[sm] += 1
            free_at[sm].append(place.end_us)
            found.append(CtaRecord(launches[place.op], place.start_us, min(ready, place.end_us), place.end_us, sm))
    return tuple(found)

"""Paired readings of many rounds, taken in calls that stay short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.base import Executable, Session
from backends.errors import MeasurementVoid

VOID_RETRIES = 3
CHUNK_ROUNDS = 20  # rounds of one measuring call, so that whoever watches hears of it often


def paired_readings(
    session: Session, executables: Sequence[Executable], rounds: int, alive: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """`rounds` spans in microseconds of every executable, paired by round; a void call is repeated.

    Raises:
        MeasurementVoid: it stays disturbed, or a span is not longer than the bracket that is subtracted from it.
    """
    readings: list[list[float]] = [[] for _ in executables]
    left, voids = rounds, 0
    while left:
        count = min(left, CHUNK_ROUNDS)
        try:
            found = session.measure(executables, count)
        except MeasurementVoid:
            voids += 1
            if voids > VOID_RETRIES:
                raise
            continue
        if any(us <= 0 for new in found for us in new):
            raise MeasurementVoid("a span is not longer than the empty bracket that is subtracted from it")
        for mine, new in zip(readings, found, strict=True):
            mine += new
        left -= count
        alive()
    return readings

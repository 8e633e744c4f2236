"""Confirmation: the contenders, the default and the serial schedule once more, interleaved, with intervals.

The search picks contenders by noisy readings, so its own ratios flatter them. These readings are fresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backends.measure.stats import ratio_interval
from results.record import Outcome, TrialRecord
from tuner.errors import StudyFailed

MAX_CONTENDERS = 5
ROUNDS = 60
LEVEL = 0.99  # 95 % after Bonferroni's division by five contenders
DEFAULT, SERIAL, CONTENDER = "default", "serial", "contender"


@dataclass(frozen=True)
class Finalist:
    """One row of the confirmation table.

    Attributes:
        role: `default`, `serial` or `contender`.
        record: fresh readings, paired with the default's.
        low: lower end of the interval of the ratio to the default; None where the config failed this time.
        high: upper end.
    """

    role: str
    record: TrialRecord
    low: float | None = None
    high: float | None = None

    @property
    def beats_default(self) -> bool:
        """Whether the interval of the ratio lies below 1."""
        return self.high is not None and self.high < 1.0


def line_up(
    contenders: Sequence[dict[str, Any]], default: dict[str, Any], serial: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Roles and config documents of a confirmation; the default and the serial config come first, never twice."""
    rest = [c for c in contenders if c not in (default, serial)]
    return [(DEFAULT, default), (SERIAL, serial), *((CONTENDER, c) for c in rest)]


def judge(roles: Sequence[str], records: Sequence[TrialRecord]) -> tuple[Finalist, ...]:
    """The confirmation table of a confirm job's records."""
    table = []
    for role, record in zip(roles, records, strict=True):
        if record.outcome is not Outcome.SCORED:
            table.append(Finalist(role, record))
            continue
        low, high = ratio_interval(record.samples_us, record.reference_us, level=LEVEL)
        table.append(Finalist(role, record, low, high))
    return tuple(table)


def winner(table: Sequence[Finalist]) -> tuple[Finalist, bool]:
    """The finalist to publish, and whether it beats the default.

    The default wins unless another one's interval excludes 1; then the lowest ratio among those does.

    Raises:
        StudyFailed: the default could not be measured.
    """
    default = next(f for f in table if f.role == DEFAULT)
    if default.record.outcome is not Outcome.SCORED:
        raise StudyFailed(f"the default config could not be confirmed: {default.record.message}")
    better = [f for f in table if f.role != DEFAULT and f.beats_default]
    if not better:
        return default, False
    return min(better, key=lambda f: f.record.ratio or 0.0), True

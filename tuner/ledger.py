"""What a study knows so far: records, known plans, counts by outcome, the best."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from results.record import Outcome, TrialRecord

CHEAP = (Outcome.DUPLICATE, Outcome.ILLEGAL, Outcome.LOST)  # cost no device time that the budget should pay for


class Ledger:
    """The finished trials of one study, old and new.

    Attributes:
        records: in the order of finishing.
        counts: trials by outcome.
    """

    def __init__(self) -> None:
        self.records: list[TrialRecord] = []
        self.counts: Counter[Outcome] = Counter()
        self._plans: dict[str, TrialRecord] = {}
        self._best: TrialRecord | None = None

    def add(self, record: TrialRecord) -> None:
        """Enters one finished trial. A plan counts once, also when two programs measured it for one study."""
        if record.outcome.measured and record.plan_key in self._plans:
            record = replace(record, outcome=Outcome.DUPLICATE)
        self.records.append(record)
        self.counts[record.outcome] += 1
        if record.outcome in CHEAP:
            return
        if record.plan_key:
            self._plans.setdefault(record.plan_key, record)
        if record.outcome is Outcome.SCORED and (self._best is None or _ratio(record) < _ratio(self._best)):
            self._best = record

    @property
    def done(self) -> int:
        """Trials that count against the budget."""
        return len(self.records) - sum(self.counts[outcome] for outcome in CHEAP)

    @property
    def scored(self) -> int:
        """Distinct plans with a passed verdict and their full share of paired rounds."""
        return self.counts[Outcome.SCORED] + self.counts[Outcome.DROPPED]

    @property
    def best(self) -> TrialRecord | None:
        """The fully measured record with the lowest ratio."""
        return self._best

    def known(self, plan_key: str) -> TrialRecord | None:
        """The record of a plan that was tried before."""
        return self._plans.get(plan_key)

    def contenders(self, count: int) -> list[TrialRecord]:
        """The best distinct plans, fully measured, best first."""
        scored = [r for r in self._plans.values() if r.outcome is Outcome.SCORED]
        return sorted(scored, key=_ratio)[:count]


def _ratio(record: TrialRecord) -> float:
    return record.ratio if record.ratio is not None else float("inf")

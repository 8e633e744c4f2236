"""The executor seam: who runs trials, and what an executor owes the study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from results.record import TrialRecord


@dataclass(frozen=True)
class Job:
    """A batch of configs to try. Plain data, so that it crosses a process or a host boundary.

    Attributes:
        number: identifies the job in its result; the study numbers jobs from 0.
        configs: config documents (`search_spaces.config.to_json`).
        best_ratio: the study's best ratio so far; a race drops a config whose first rounds lie clearly above it.
    """

    number: int
    configs: tuple[dict[str, Any], ...]
    best_ratio: float | None = None


@dataclass(frozen=True)
class JobResult:
    """Records of a job in the order of its configs."""

    number: int
    records: tuple[TrialRecord, ...]


class Executor(Protocol):
    """Runs jobs on devices, each job on one.

    Duties: `submit` never blocks for long; `next_result` returns results in the order of completion; a child that
    hangs or dies is killed and replaced, its job comes back with `HANG`, `CRASH` or `LOST` records, and a config is
    blamed only after it failed once more in a fresh process. `close` leaves no process behind.
    """

    def submit(self, job: Job) -> None:
        """Queues a job."""

    def pending(self) -> int:
        """Jobs submitted and not yet returned."""

    def next_result(self, timeout_s: float) -> JobResult | None:
        """The next finished job, or None when none finished in time."""

    def describe(self) -> dict[str, Any]:
        """Provenance of the devices: see `results.record.Provenance`."""

    def close(self) -> None:
        """Ends every child. Safe to call twice."""

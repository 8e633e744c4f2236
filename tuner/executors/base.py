"""The executor seam: who runs trials, and what an executor owes the study."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from results.record import TrialRecord


class JobKind(StrEnum):
    """What a job asks for."""

    SCORE = "score"  # verify, race, measure: one record per config
    CONFIRM = "confirm"  # all configs interleaved for `rounds` rounds: one record per config
    FLOOR = "floor"  # `facts["floor_us"]`, no records


@dataclass(frozen=True)
class Job:
    """A batch of configs to try. Plain data, so that it crosses a process or a host boundary.

    Attributes:
        number: identifies the job in its result; the study numbers jobs from 0.
        configs: config documents (`search_spaces.config.to_json`).
        best_ratio: the study's best ratio so far; a race drops a config whose first rounds lie clearly above it.
        kind: what is asked for.
        reference: document of the config that every span is paired with.
        rounds: paired rounds of a confirmation.
    """

    number: int
    configs: tuple[dict[str, Any], ...]
    best_ratio: float | None = None
    kind: JobKind = JobKind.SCORE
    reference: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0


@dataclass(frozen=True)
class Failed:
    """Why a whole job has no records.

    Attributes:
        stage: `open`, `reference`, `measure` or `child`.
        message: one line.
    """

    stage: str
    message: str


@dataclass(frozen=True)
class JobResult:
    """Records of a job in the order of its configs.

    Attributes:
        number: of the job.
        records: one per config; empty when the job failed as a whole.
        facts: what else was read: `floor_us`, `clocks`.
        failure: set when the job failed for a reason that is no config's fault.
    """

    number: int
    records: tuple[TrialRecord, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    failure: Failed | None = None


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
        """The device and the protocol; waits until a session is open.

        Keys: `gpu` (fields of `GpuRecord`), `simulated`, `uuid`, `versions`, `protocol`, `clocks`.

        Raises:
            SessionRefused: the session cannot be opened as asked.
            StudyFailed: it dies or hangs while it opens.
        """

    def close(self) -> None:
        """Ends every child. Safe to call twice."""

"""What a measuring process does with one job: prepare, verify, race, measure, one record per config.

A batch shares its readings of the reference. Expected failures are data; what leaves here as an exception ends the
process, and the parent decides whom to blame.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends.base import Executable, Session
from backends.errors import BuildFailed, CudaFailed, GraphMismatch, MeasurementVoid, UnsafePlan
from backends.measure.readings import paired_readings
from backends.measure.stats import hodges_lehmann, paired_ratio
from results.record import Outcome, TrialRecord
from search_spaces.config import from_json
from search_spaces.errors import ConfigError, IllegalConfig
from tuner import race
from tuner.executors.base import Job, JobKind

TOGETHER = -1  # reported instead of a config's index while several are replayed in turn
REFERENCE = -2  # reported while the reference is built and checked
OUT_OF_MEMORY = 2

Report = Callable[..., None]


class ReferenceFailed(Exception):
    """The reference config has no passing verdict; the text says why."""


@dataclass(frozen=True)
class _Ready:
    index: int
    executable: Executable
    verdict: str


class Scorer:
    """Runs jobs on one session. `report` sends `("at", index)` and `("record", index, record)` messages."""

    def __init__(self, session: Session, report: Report) -> None:
        self._session = session
        self._report = report
        self._reference: tuple[str, Executable, str] | None = None

    def run(self, job: Job) -> dict[str, Any]:
        """Runs one job, reporting records as they come, and returns its facts.

        Raises:
            ReferenceFailed: no ratio can exist.
            CudaFailed: the device context is lost.
        """
        if job.kind is JobKind.FLOOR:
            self._report("at", TOGETHER)
            return {"floor_us": self._session.floor_us()}
        started = time.monotonic()
        reference = self._prepare_reference(job.reference)
        ready = [found for i, doc in enumerate(job.configs) if (found := self._prepare(job, i, doc, started))]
        try:
            self._measure_all(job, reference, ready, started)
        finally:
            for entry in ready:
                if entry.executable is not reference:
                    entry.executable.close()
        return {"clocks": clocks_of(self._session)} if job.kind is JobKind.CONFIRM else {}

    def _prepare_reference(self, document: dict[str, Any]) -> Executable:
        key = json.dumps(document, sort_keys=True)
        if self._reference is not None:
            if self._reference[0] == key:
                return self._reference[1]
            self._reference[1].close()
            self._reference = None
        self._report("at", REFERENCE)
        try:
            executable = self._session.prepare(from_json(document))
        except (IllegalConfig, ConfigError, UnsafePlan, BuildFailed, GraphMismatch) as error:
            raise ReferenceFailed(f"the default config does not run: {error}") from error
        verdict = self._session.verify(executable)
        if not verdict.passed:
            executable.close()
            raise ReferenceFailed(f"the default config is wrong ({verdict.stage} check): {verdict.message}")
        self._reference = (key, executable, verdict.stage)
        return executable

    def _prepare(self, job: Job, index: int, document: dict[str, Any], started: float) -> _Ready | None:
        """Builds and checks one config; reports its record when that already fails."""
        self._report("at", index)
        reference = self._reference
        if reference is not None and json.dumps(document, sort_keys=True) == reference[0]:
            return _Ready(index, reference[1], reference[2])
        try:
            executable = self._session.prepare(from_json(document))
        except (IllegalConfig, ConfigError, UnsafePlan, GraphMismatch, BuildFailed, CudaFailed) as error:
            self._report("record", index, _failure(document, error, started))
            return None
        try:
            verdict = self._session.verify(executable)
        except CudaFailed as error:
            executable.close()
            self._report("record", index, _failure(document, error, started))
            return None
        if verdict.passed:
            return _Ready(index, executable, verdict.stage)
        executable.close()
        outcome = Outcome.UNSAFE if verdict.stage == "plan" else Outcome.WRONG
        record = TrialRecord(
            outcome,
            document,
            f"{verdict.stage} check: {one_line(verdict.message)}",
            executable.plan_key,
            executable.numerics_key,
            seconds=time.monotonic() - started,
        )
        self._report("record", index, record)
        return None

    def _measure_all(self, job: Job, reference: Executable, ready: list[_Ready], started: float) -> None:
        if not ready:
            return
        self._report("at", ready[0].index if len(ready) == 1 else TOGETHER)
        rounds = job.rounds if job.kind is JobKind.CONFIRM else race.FIRST_ROUNDS
        try:
            readings = self._read([reference, *(entry.executable for entry in ready)], rounds)
            kept = list(range(len(ready)))
            more: list[list[float]] = [[]]
            if job.kind is JobKind.SCORE:
                kept = [i for i in kept if not race.drops(readings[1 + i], readings[0], job.best_ratio)]
                more = self._more([reference, *(ready[i].executable for i in kept)]) if kept else more
            seconds = (time.monotonic() - started) / len(job.configs)
        except MeasurementVoid as error:
            for entry in ready:
                lost = TrialRecord(Outcome.LOST, job.configs[entry.index], one_line(str(error)))
                self._report("record", entry.index, lost)
            return
        for i, entry in enumerate(ready):
            samples, base = readings[1 + i], readings[0]
            if job.kind is JobKind.SCORE and i in kept:
                samples, base = samples + more[1 + kept.index(i)], base + more[0]
            outcome = Outcome.SCORED if i in kept else Outcome.DROPPED
            self._report("record", entry.index, self._record(job, entry, outcome, samples, base, seconds))

    def _more(self, executables: list[Executable]) -> list[list[float]]:
        return self._read(executables, race.FULL_ROUNDS - race.FIRST_ROUNDS)

    def _read(self, executables: list[Executable], rounds: int) -> list[list[float]]:
        return paired_readings(self._session, executables, rounds, lambda: self._report("alive"))

    def _record(
        self, job: Job, entry: _Ready, outcome: Outcome, samples: list[float], base: list[float], seconds: float
    ) -> TrialRecord:
        return TrialRecord(
            outcome,
            job.configs[entry.index],
            plan_key=entry.executable.plan_key,
            numerics_key=entry.executable.numerics_key,
            verdict=entry.verdict,
            span_us=hodges_lehmann(samples),
            ratio=paired_ratio(samples, base),
            samples_us=tuple(samples),
            reference_us=tuple(base),
            simulated=self._session.info.simulated,
            seconds=seconds,
        )


def clocks_of(session: Session) -> dict[str, Any]:
    """Clocks and throttle reasons, where the session can tell."""
    read = getattr(session, "clocks", None)
    return dict(read()) if read is not None else {}


def one_line(text: str) -> str:
    """A message without line breaks, cut to a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _failure(document: dict[str, Any], error: Exception, started: float) -> TrialRecord:
    """The record of a config that cannot be built or run.

    Raises:
        CudaFailed: the error itself, when the context is lost or full: then the process, not the config, comes first.
    """
    if isinstance(error, CudaFailed):
        if error.sticky or error.code == OUT_OF_MEMORY:
            raise error
        outcome = Outcome.CRASH
    elif isinstance(error, BuildFailed):
        outcome = Outcome.BUILD_FAILED
    elif isinstance(error, UnsafePlan | GraphMismatch):
        outcome = Outcome.UNSAFE
    else:
        outcome = Outcome.ILLEGAL
    return TrialRecord(outcome, document, one_line(str(error)), seconds=time.monotonic() - started)

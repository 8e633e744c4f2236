"""The executor of one device: one killable child process that holds the device, supervised by deadlines.

A child that hangs or dies is replaced. The config that it was busy with runs once more, alone, in a fresh process; only
if that fails too is it blamed. When a batch fails while its configs are replayed in turn, the culprit is unknown, so
each config of the batch runs alone.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from backends.base import SessionSpec
from results.record import Outcome, TrialRecord
from tuner.devices import DeviceLock
from tuner.errors import SessionRefused, StudyFailed
from tuner.executors.base import Failed, Job, JobKind, JobResult
from tuner.executors.child import Child, Died
from tuner.executors.scoring import REFERENCE, TOGETHER

SESSION_FACTORY = "tuner.executors.opening:open_session"
STEP_TIMEOUT_S = 60.0  # compiling a config's binaries is the longest step
OPEN_TIMEOUT_S = 600.0  # loading the weights of every rotation set and the reference answer
STRIKES = 2


@dataclass
class _Work:
    """A job under way: configs still to run, in groups of indices, and what went wrong so far."""

    job: Job
    groups: deque[list[int]]
    records: dict[int, TrialRecord] = field(default_factory=dict)
    strikes: Counter[int] = field(default_factory=Counter)
    sent: list[int] = field(default_factory=list)
    at: int = REFERENCE
    facts: dict[str, Any] = field(default_factory=dict)


class InlineExecutor:
    """Runs jobs one after the other in one child process. See `tuner.executors.base.Executor` for its duties.

    Args:
        spec: what the child opens.
        factory: `module:function` that makes a session of a spec.
        step_timeout_s: longest silence of a child at work.
        open_timeout_s: longest time until its session is open.

    Raises:
        DeviceBusy: another process measures on the same GPU.
    """

    def __init__(
        self,
        spec: SessionSpec,
        *,
        factory: str = SESSION_FACTORY,
        step_timeout_s: float = STEP_TIMEOUT_S,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        self._spec = spec
        self._factory = factory
        self._step_timeout_s = step_timeout_s
        self._open_timeout_s = open_timeout_s
        self._queue: deque[Job] = deque()
        self._done: deque[JobResult] = deque()
        self._work: _Work | None = None
        self._child: Child | None = None
        self._description: dict[str, Any] | None = None
        self._refusal: tuple[str, str] | None = None
        self._open_strikes = 0
        self._lock = DeviceLock(spec.device)

    # --- The executor's verbs ---

    def submit(self, job: Job) -> None:
        """See `Executor.submit`."""
        self._queue.append(job)
        self._start_next()

    def pending(self) -> int:
        """See `Executor.pending`."""
        return len(self._queue) + len(self._done) + (self._work is not None)

    def next_result(self, timeout_s: float) -> JobResult | None:
        """See `Executor.next_result`."""
        until = time.monotonic() + timeout_s
        while not self._done:
            self._start_next()
            if self._done or self._work is None or not self._pump(until):
                break
        return self._done.popleft() if self._done else None

    def describe(self) -> dict[str, Any]:
        """See `Executor.describe`."""
        while self._description is None and self._refusal is None:
            if self._child is None:
                self._spawn()
            self._pump(time.monotonic() + 1.0)
        if self._refusal is not None:
            stage, message = self._refusal
            raise SessionRefused(message) if stage == "input" else StudyFailed(message)
        assert self._description is not None
        return dict(self._description)

    def close(self) -> None:
        """See `Executor.close`."""
        child, self._child = self._child, None
        if child is not None:
            if child.opened and self._work is None:
                child.stop()
            else:
                child.kill()
        self._lock.release()

    # --- Jobs to the child ---

    def _spawn(self) -> Child:
        self._child = Child(self._spec, self._factory, self._open_timeout_s, self._lock.descriptors())
        return self._child

    def _start_next(self) -> None:
        """Begins the next job when none is under way and it can be served."""
        if self._work is not None or not self._queue:
            return
        if self._refusal is not None:
            self._done.append(JobResult(self._queue.popleft().number, (), failure=Failed("open", self._refusal[1])))
            return
        job = self._queue.popleft()
        indices = list(range(len(job.configs)))
        self._work = _Work(job, deque([indices] if indices or job.kind is JobKind.FLOOR else []))
        self._advance()

    def _advance(self) -> None:
        """Sends the next group of the job under way, or finishes the job."""
        work = self._work
        assert work is not None
        while work.groups:
            group = [i for i in work.groups.popleft() if i not in work.records]
            if not group and work.job.kind is not JobKind.FLOOR:
                continue
            work.sent, work.at = group, REFERENCE
            child = self._child or self._spawn()
            if child.opened:
                child.deadline = time.monotonic() + self._step_timeout_s
            try:
                child.send(replace(work.job, configs=tuple(work.job.configs[i] for i in group)))
            except Died as error:
                self._on_loss(str(error), Outcome.CRASH)
            return
        records = tuple(work.records[i] for i in range(len(work.job.configs)))
        self._finish(JobResult(work.job.number, records, work.facts))

    def _finish(self, result: JobResult) -> None:
        self._work = None
        self._done.append(result)

    def _fail(self, stage: str, message: str) -> None:
        assert self._work is not None
        self._finish(JobResult(self._work.job.number, (), failure=Failed(stage, message)))

    # --- Messages from the child ---

    def _pump(self, until: float) -> bool:
        """Handles one message or one missed deadline; False when `until` passed first."""
        child = self._child
        if child is None:
            return False
        try:
            message = child.receive(min(until, child.deadline) - time.monotonic())
        except Died as error:
            self._on_loss(str(error), Outcome.CRASH)
            return True
        now = time.monotonic()
        if message is not None:
            child.deadline = now + self._step_timeout_s
            handler: Callable[..., None] = getattr(self, f"_on_{message[0]}")
            handler(*message[1:])
            return True
        if now >= child.deadline and (self._work is not None or not child.opened):
            limit = self._step_timeout_s if child.opened else self._open_timeout_s
            self._on_loss(f"no sign of life for {limit:g} s", Outcome.HANG)
            return True
        return now < until

    def _on_opened(self, description: dict[str, Any]) -> None:
        assert self._child is not None
        self._child.opened = True
        self._open_strikes = 0
        self._description = self._description or description

    def _on_refused(self, stage: str, message: str) -> None:
        self._drop_child()
        self._refusal = (stage, message)
        if self._work is not None:
            self._fail("open", message)

    def _on_at(self, index: int) -> None:
        if self._work is not None:
            self._work.at = self._work.sent[index] if index >= 0 else index

    def _on_alive(self) -> None:
        """Only re-arms the deadline."""

    def _on_record(self, index: int, record: TrialRecord) -> None:
        if self._work is not None:
            self._work.records[self._work.sent[index]] = record

    def _on_done(self, facts: dict[str, Any]) -> None:
        if self._work is not None:
            self._work.facts |= facts
            self._advance()

    def _on_failed(self, stage: str, message: str) -> None:
        if self._work is not None:
            self._fail(stage, message)

    def _on_lost(self, message: str) -> None:
        self._on_loss(message, Outcome.CRASH)

    # --- Losing the child ---

    def _drop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _on_loss(self, message: str, outcome: Outcome) -> None:
        """Replaces a child that hung or died, and decides what of its job runs again."""
        opened = self._child is not None and self._child.opened
        self._drop_child()
        if not opened:
            self._open_strikes += 1
            if self._open_strikes >= STRIKES:
                self._on_refused("child", f"the device cannot be opened: {message}")
            elif self._work is not None:
                self._resend()
            return
        work = self._work
        if work is None:
            return
        work.strikes[work.at] += 1
        if work.at >= 0:
            if work.strikes[work.at] >= STRIKES:
                work.records[work.at] = TrialRecord(outcome, work.job.configs[work.at], message)
            elif work.job.kind is JobKind.SCORE:
                work.groups.appendleft([i for i in work.sent if i != work.at])
                work.groups.appendleft([work.at])
                self._advance()
                return
        elif work.strikes[work.at] >= STRIKES:
            self._fail("reference" if work.at == REFERENCE else "measure", message)
            return
        elif work.at == TOGETHER and work.job.kind is JobKind.SCORE:
            work.groups.extendleft([i] for i in reversed(work.sent))
            # NOTE: alone, each config reports its own index, so the joint strike is settled here.
            work.strikes[TOGETHER] = 0
            self._advance()
            return
        self._resend()

    def _resend(self) -> None:
        assert self._work is not None
        self._work.groups.appendleft(self._work.sent)
        self._advance()

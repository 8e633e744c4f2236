"""The search loop: seeds first, then a sampler, in batches; every finished trial is stored before anything else."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from results.record import Outcome, TrialRecord
from search_spaces.cmp import CmpSpace
from search_spaces.config import CmpConfig, run_key, to_json
from tuner.errors import StudyFailed
from tuner.executors.base import Executor, Job, JobResult
from tuner.interrupt import StopFlag
from tuner.ledger import Ledger
from tuner.legal import Repair
from tuner.progress import Progress
from tuner.sampling import BAD_VALUE, Point, Proposal, Sampler, distributions
from tuner.screen import screen
from tuner.seeds import encode
from tuner.storage import TrialStore

BATCH = 8  # configs of one job: they share the readings of the reference
JOBS_AHEAD = 2  # the device measures one job while the next is proposed
MAX_RETRIES = 2  # of a config that infrastructure lost
MAX_LOST = 24  # trials lost in a row: the device, not a passing disturbance
STALE_PROPOSALS = 200  # in a row without a new plan: the space is exhausted
POLL_S = 0.1


@dataclass
class Candidate:
    """A proposal on its way: its point, the config, and whether the point says this very plan."""

    proposal: Proposal
    config: CmpConfig
    exact: bool = True
    plan_key: str = ""
    twins: list[Candidate] = field(default_factory=list)


@dataclass(frozen=True)
class Budget:
    """When a search ends: after `trials` trials that cost device time, or `seconds` after it began."""

    trials: int
    seconds: float | None = None


class Search:
    """One run of the search. `resume` first, then `run`."""

    def __init__(
        self,
        *,
        space: CmpSpace,
        sampler: Sampler,
        store: TrialStore,
        executor: Executor,
        reference: CmpConfig,
        budget: Budget,
        stop: StopFlag,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.resumed = 0
        self._space = space
        self._sampler = sampler
        self._store = store
        self._executor = executor
        self._reference = to_json(reference)
        self._budget = budget
        self._stop = stop
        self._on_progress = on_progress
        self._distributions = distributions(space)
        self._repair = Repair(space, seed=0)
        self._queue: deque[Candidate] = deque()
        self._tried: set[str] = set()
        self._flying: dict[str, Candidate] = {}
        self._jobs: dict[int, list[Candidate]] = {}
        self._numbers = 0
        self._retries: Counter[str] = Counter()
        self._lost = 0
        self._stale = 0
        self._scored_before = 0
        self._started = time.monotonic()

    # --- Before the loop ---

    def resume(self, finished: Iterable[tuple[Point, TrialRecord]]) -> None:
        """Takes over the finished trials of the store and teaches them to the sampler."""
        for point, record in finished:
            self.ledger.add(record)
            if record.outcome is not Outcome.LOST and point.keys() == self._distributions.keys():
                self._teach(Proposal(point), record)
        self.resumed, self._scored_before = self.ledger.done, self.ledger.scored
        self._tried = {_text(r.config) for r in self.ledger.records if r.outcome is not Outcome.LOST}

    def enqueue(self, configs: Iterable[CmpConfig]) -> None:
        """Puts configs in front of the sampler, those left out that an earlier run has tried."""
        for config in configs:
            if _text(to_json(config)) not in self._tried:
                point = encode(self._space, config)
                same = screen(self._space, self._space.decode(point)) == screen(self._space, config)
                self._queue.append(Candidate(Proposal(point), config, exact=same))

    # --- The loop ---

    def run(self) -> None:
        """Searches until the budget is spent, the space is exhausted, or Ctrl-C.

        Raises:
            StudyFailed: no config can be measured.
            KeyboardInterrupt: after Ctrl-C, with every finished trial stored.
        """
        self._started = time.monotonic()
        while True:
            self._feed()
            if not self._executor.pending():
                break
            result = self._executor.next_result(POLL_S)
            if result is not None:
                self._absorb(result)
            self._show()
            if self._stop:
                self._drain()
                raise KeyboardInterrupt
        self._show()

    def _feed(self) -> None:
        while self._executor.pending() < JOBS_AHEAD and not self._stop:
            batch = self._next_batch()
            if not batch:
                return
            number, self._numbers = self._numbers, self._numbers + 1
            self._jobs[number] = batch
            best = self.ledger.best
            self._executor.submit(
                Job(
                    number,
                    tuple(to_json(c.config) for c in batch),
                    best.ratio if best is not None else None,
                    reference=self._reference,
                )
            )

    def _next_batch(self) -> list[Candidate]:
        """New plans to measure; what needs no device is settled on the way."""
        batch: list[Candidate] = []
        while len(batch) < BATCH and not self._stop and self._room() > len(batch):
            if not self._queue and (self._stale >= STALE_PROPOSALS or self._overdue()):
                break
            candidate = self._queue.popleft() if self._queue else self._propose()
            if self._settle(candidate):
                self._stale += 1
            else:
                self._stale = 0
                batch.append(candidate)
        return batch

    def _room(self) -> int:
        return self._budget.trials - self.ledger.done - sum(len(batch) for batch in self._jobs.values())

    def _overdue(self) -> bool:
        return self._budget.seconds is not None and time.monotonic() - self._started > self._budget.seconds

    def _propose(self) -> Candidate:
        proposal = self._sampler.propose()
        proposal = replace(proposal, point=self._repair(proposal.point))
        return Candidate(proposal, self._space.decode(proposal.point))

    def _settle(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no device: it is illegal, its plan is known, or its plan is being measured."""
        screened = screen(self._space, candidate.config)
        if screened.reason:
            self._finish(candidate, TrialRecord(Outcome.ILLEGAL, to_json(candidate.config), screened.reason))
            return True
        candidate.plan_key = screened.plan_key
        known = self.ledger.known(screened.plan_key)
        if known is not None:
            self._finish_twin(candidate, known)
            return True
        if screened.plan_key in self._flying:
            self._flying[screened.plan_key].twins.append(candidate)
            return True
        self._flying[screened.plan_key] = candidate
        return False

    # --- Results ---

    def _absorb(self, result: JobResult) -> None:
        batch = self._jobs.pop(result.number)
        if result.failure is not None:
            raise StudyFailed(result.failure.message)
        for candidate, record in zip(batch, result.records, strict=True):
            self._flying.pop(candidate.plan_key, None)
            if not record.plan_key:
                record = replace(record, plan_key=candidate.plan_key)
            self._finish(candidate, record)
            for twin in candidate.twins:
                if record.outcome is Outcome.LOST:
                    self._sampler.forget(twin.proposal)
                else:
                    self._finish_twin(twin, record)
            candidate.twins = []

    def _finish(self, candidate: Candidate, record: TrialRecord) -> None:
        # A seed that no point says exactly is stored without one: a resumed study must not learn it from its neighbour.
        self._store.append(candidate.proposal.point if candidate.exact else {}, record, self._distributions)
        self.ledger.add(record)
        if record.outcome is not Outcome.LOST:
            self._lost = 0
            if candidate.exact:
                self._teach(candidate.proposal, record)
            return
        self._lost += 1
        if self._lost >= MAX_LOST:
            raise StudyFailed(f"{self._lost} trials in a row were lost, the last one because {record.message}")
        self._sampler.forget(candidate.proposal)
        key = run_key(candidate.config)
        self._retries[key] += 1
        if self._retries[key] <= MAX_RETRIES:
            again = Proposal(candidate.proposal.point)
            self._queue.appendleft(Candidate(again, candidate.config, candidate.exact))

    def _finish_twin(self, candidate: Candidate, known: TrialRecord) -> None:
        twin = replace(
            known,
            outcome=Outcome.DUPLICATE,
            config=to_json(candidate.config),
            message="" if known.outcome.measured else f"{known.outcome.value}: {known.message}",
            samples_us=(),
            reference_us=(),
            seconds=0.0,
        )
        self._finish(candidate, twin)

    def _teach(self, proposal: Proposal, record: TrialRecord) -> None:
        feasible = record.ratio is not None
        self._sampler.tell(proposal, record.ratio if record.ratio is not None else BAD_VALUE, feasible)

    def _drain(self) -> None:
        """Stores what is finished, and gives the job under way a moment to finish."""
        for _ in range(JOBS_AHEAD):
            result = self._executor.next_result(2.0)
            if result is None:
                return
            if result.failure is None:
                self._absorb(result)

    # --- Progress ---

    def progress(self, phase: str) -> Progress:
        """The state of the study as a value."""
        seconds = time.monotonic() - self._started
        fresh = self.ledger.done - self.resumed
        left = max(0, self._budget.trials - self.ledger.done)
        eta = left * seconds / fresh if fresh and phase == "searching" else None
        if eta is not None and self._budget.seconds is not None:
            eta = max(0.0, min(eta, self._budget.seconds - seconds))
        best = self.ledger.best
        return Progress(
            phase,
            self.ledger.done,
            self._budget.trials,
            self.resumed,
            best.span_us if best else None,
            best.ratio if best else None,
            (self.ledger.scored - self._scored_before) / seconds if seconds > 0 else 0.0,
            eta,
            dict(self.ledger.counts),
            seconds,
        )

    def _show(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress("searching"))


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True)

"""A study: opens the device, searches, confirms, and says what won.

`run_study` is the whole of it; `publish` hands its winner to the stored best configs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.base import SessionSpec
from results import best as best_files
from results.record import Outcome, Provenance, TrialRecord
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.config import CmpConfig, Config, from_json, run_key, to_json
from search_spaces.errors import ConfigError
from search_spaces.gpu import GpuRecord
from tuner import confirm
from tuner.errors import StudyFailed
from tuner.executors.base import Executor, Job, JobKind, JobResult
from tuner.executors.inline import InlineExecutor
from tuner.identity import provenance_of, shape_key, study_name
from tuner.interrupt import StopFlag
from tuner.legal import nearest
from tuner.options import Options, graph_of
from tuner.progress import Progress
from tuner.sampling import make_sampler
from tuner.search import POLL_S, Budget, Search
from tuner.seeds import seeds
from tuner.storage import TrialStore, older_winners, parse_location
from workloads.graph import OpGraph

VOID_RETRIES = 3
FIRST_OTHER_JOB = 1_000_000  # numbers of jobs that are not the search's
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class StudyResult:
    """What a study found.

    Attributes:
        study: its name.
        storage: where its trials lie, as the storage option spells it.
        spec: what was tuned.
        backend: of its configs.
        shape_key: short name of the shape.
        graph_digest: content hash of the op graph.
        gpu: limits of the GPU, or of the one that is modelled.
        best: confirmation row of the winner; the default's when nothing beats it.
        gain: whether the winner's interval of the ratio to the default excludes 1.
        table: the confirmation, default and serial first.
        records: every finished trial of the study.
        counts: trials by outcome.
        resumed: trials that an earlier run had finished.
        search_s: wall time of this run's search.
        scored_per_s: scored trials per second of this run's search.
        seed_keys: run keys of the heuristic seeds.
        winner_is_seed: whether the winner was among them.
        floor_us: time to stream the workload's compulsory bytes once.
        provenance: where the numbers come from.
    """

    study: str
    storage: str
    spec: SessionSpec
    backend: str
    shape_key: str
    graph_digest: str
    gpu: GpuRecord
    best: confirm.Finalist
    gain: bool
    table: tuple[confirm.Finalist, ...]
    records: tuple[TrialRecord, ...]
    counts: dict[Outcome, int]
    resumed: int
    search_s: float
    scored_per_s: float
    seed_keys: dict[str, str]
    winner_is_seed: bool
    floor_us: float
    provenance: Provenance

    @property
    def config(self) -> Config:
        """The winner."""
        return from_json(self.best.record.config)

    @property
    def scored(self) -> int:
        """Distinct plans that were verified and measured."""
        return self.counts.get(Outcome.SCORED, 0) + self.counts.get(Outcome.DROPPED, 0)

    def span_us(self, role: str) -> float | None:
        """Confirmed span of the `default` or the `serial` config."""
        return next((f.record.span_us for f in self.table if f.role == role), None)


def run_study(
    spec: SessionSpec,
    *,
    trials: int,
    timeout_s: float | None = None,
    storage: str | None = None,
    sampler: str = "tpe",
    seed: int = 0,
    backend: str = "cmp",
    starts: Sequence[CmpConfig] = (),
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
) -> StudyResult:
    """Tunes one workload at one shape on one device.

    A study that was interrupted, killed or finished before is taken up where it was left: `trials` counts its old
    trials too.

    Args:
        spec: workload, shape, device.
        trials: trials that cost device time; duplicates and illegal configs are counted apart.
        timeout_s: most seconds of searching; the confirmation comes on top.
        storage: where trials are kept, see `tuner.storage`; None is a journal below `.spantune/studies`.
        sampler: `tpe` or `random`.
        seed: of the sampler.
        backend: of the configs.
        starts: configs to try right after the heuristic seeds, such as winners of another shape: where this space
            cannot express one, its nearest legal neighbour.
        executor: runs the jobs and stays the caller's to close; None measures in a child process of its own.
        on_progress: called often, with a value that is cheap to drop.

    Raises:
        InputError: what is asked for is not possible.
        StudyFailed: the default config or the measuring process fails.
        DeviceBusy: another process measures on the GPU.
        KeyboardInterrupt: after Ctrl-C; every finished trial is stored.
    """
    options = Options(trials, timeout_s, storage, sampler, seed, backend)
    graph = graph_of(spec)
    options.check()
    if on_progress is not None:
        on_progress(Progress("opening", 0, trials))
    if executor is not None:
        return _Study(spec, graph, options, starts, executor, on_progress).run()
    owned = InlineExecutor(spec)
    try:
        return _Study(spec, graph, options, starts, owned, on_progress).run()
    finally:
        owned.close()


class _Study:
    """One run of a study on an executor."""

    def __init__(
        self,
        spec: SessionSpec,
        graph: OpGraph,
        options: Options,
        starts: Sequence[CmpConfig],
        executor: Executor,
        on_progress: OnProgress | None,
    ) -> None:
        self._spec = spec
        self._graph = graph
        self._options = options
        self._executor = executor
        self._on_progress = on_progress
        self._jobs = FIRST_OTHER_JOB
        described = executor.describe()
        self._provenance = provenance_of(spec, described)
        self._space = CmpSpace(graph, GpuRecord(**described["gpu"]))
        self._reference = default(self._space)
        self._seeds = seeds(self._space)
        self._starts = [nearest(self._space, config) for config in starts]
        self._name = study_name(spec, self._space, self._provenance, options.backend, options.sampler)
        self._location = parse_location(options.storage, self._name)
        self._store = TrialStore(self._location, self._name)

    def run(self) -> StudyResult:
        """Reads the floor, searches, confirms."""
        with self._store.claimed(), StopFlag() as stop:
            floor_us = self._floor(stop)
            self._store.describe(self._facts(floor_us))
            search = self._search(stop)
            search.run()
            found = search.progress("confirming")
            self._show(found)
            table, clocks = self._confirm(search, stop)
        self._store.describe({"confirmation": [_row(f) for f in table]})
        self._show(replace(found, phase="done"))
        return self._result(search, found, floor_us, table, clocks)

    def _search(self, stop: StopFlag) -> Search:
        options = self._options
        finished = self._store.load()
        search = Search(
            space=self._space,
            # A resumed study goes on with other draws than those that it has behind it.
            sampler=make_sampler(options.sampler, self._space, options.seed + len(finished)),
            store=self._store,
            executor=self._executor,
            reference=self._reference,
            budget=Budget(options.trials, options.timeout_s),
            stop=stop,
            on_progress=self._on_progress,
        )
        search.resume(finished)
        search.enqueue(s.config for s in self._seeds)
        search.enqueue(self._starts)
        search.enqueue(self._inherited())
        return search

    def _inherited(self) -> list[CmpConfig]:
        """Winners of the same workload, shape and device under another space or other sources."""
        found = []
        for document in older_winners(self._location, self._name):
            with contextlib.suppress(ConfigError):
                config = from_json(document)
                if isinstance(config, CmpConfig) and config.ops.keys() == self._graph.ops.keys():
                    found.append(config)
        return found

    def _show(self, progress: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    def _result(
        self,
        search: Search,
        found: Progress,
        floor_us: float,
        table: tuple[confirm.Finalist, ...],
        clocks: dict[str, Any],
    ) -> StudyResult:
        best, gain = confirm.winner(table)
        keys = {s.name: run_key(s.config) for s in self._seeds}
        return StudyResult(
            study=self._name,
            storage=str(self._location),
            spec=self._spec,
            backend=self._options.backend,
            shape_key=shape_key(self._spec),
            graph_digest=self._graph.digest(),
            gpu=self._space.gpu,
            best=best,
            gain=gain,
            table=table,
            records=tuple(search.ledger.records),
            counts=dict(search.ledger.counts),
            resumed=search.resumed,
            search_s=found.seconds,
            scored_per_s=found.rate,
            seed_keys=keys,
            winner_is_seed=run_key(from_json(best.record.config)) in keys.values(),
            floor_us=floor_us,
            provenance=replace(self._provenance, clocks={**self._provenance.clocks, "after": clocks}),
        )

    def _facts(self, floor_us: float) -> dict[str, Any]:
        """Attributes of the stored study, for whoever reads it without this package."""
        return {
            "workload": self._spec.workload,
            "shape": shape_key(self._spec),
            "params": dict(self._spec.params),
            "backend": self._options.backend,
            "device": self._provenance.device,
            "simulated": self._provenance.simulated,
            "versions": self._provenance.versions,
            "protocol": self._provenance.protocol,
            "reference": to_json(self._reference),
            "floor_us": floor_us,
            "graph_digest": self._graph.digest(),
            "seeds": {s.name: run_key(s.config) for s in self._seeds},
        }

    # --- Jobs outside the search ---

    def _await(self, job: Job, stop: StopFlag) -> JobResult:
        self._executor.submit(job)
        while True:
            result = self._executor.next_result(POLL_S)
            if stop:
                raise KeyboardInterrupt
            if result is None:
                continue
            if result.failure is not None:
                raise StudyFailed(result.failure.message)
            return result

    def _number(self) -> int:
        self._jobs += 1
        return self._jobs

    def _floor(self, stop: StopFlag) -> float:
        return float(self._await(Job(self._number(), (), kind=JobKind.FLOOR), stop).facts["floor_us"])

    def _confirm(self, search: Search, stop: StopFlag) -> tuple[tuple[confirm.Finalist, ...], dict[str, Any]]:
        reference = to_json(self._reference)
        contenders = [r.config for r in search.ledger.contenders(confirm.MAX_CONTENDERS)]
        entries = confirm.line_up(contenders, reference, to_json(serial(self._space)))
        for _ in range(VOID_RETRIES):
            job = Job(
                self._number(),
                tuple(document for _, document in entries),
                kind=JobKind.CONFIRM,
                reference=reference,
                rounds=confirm.ROUNDS,
            )
            result = self._await(job, stop)
            if all(r.outcome is not Outcome.LOST for r in result.records):
                table = confirm.judge([role for role, _ in entries], result.records)
                return table, dict(result.facts.get("clocks", {}))
        raise StudyFailed(f"the confirmation was disturbed {VOID_RETRIES} times: {result.records[0].message}")


def _row(finalist: confirm.Finalist) -> dict[str, Any]:
    return {"role": finalist.role, "low": finalist.low, "high": finalist.high, "record": finalist.record.to_json()}


def publish(result: StudyResult, directory: Path) -> Path:
    """Stores a study's winner among the best configs of its device and returns the file.

    A stored entry that is faster beyond doubt stays, with a `results.best.BestKeptWarning`.

    Raises:
        StudyFailed: the winner has no span.
        BestFileError: the stored file is corrupted or newer, or the folder is not writable.
    """
    record = result.best.record
    default_us, serial_us = result.span_us(confirm.DEFAULT), result.span_us(confirm.SERIAL)
    if record.span_us is None or default_us is None:
        raise StudyFailed(f"the winner of {result.study} has no confirmed span")
    low, high = result.best.low or 1.0, result.best.high or 1.0
    return best_files.publish(
        directory,
        best_files.BestEntry(
            workload=result.spec.workload,
            shape_params=dict(result.spec.params),
            shape_key=result.shape_key,
            graph_digest=result.graph_digest,
            backend=result.backend,
            device=result.provenance.device,
            gpu=best_files.GpuIdentity.of(result.gpu),
            config=record.config,
            span_us=record.span_us,
            interval_us=(default_us * low, default_us * high),
            serial_us=serial_us,
            default_us=default_us,
            floor_us=result.floor_us,
            numerics_key=record.numerics_key,
            provenance=result.provenance,
            study=result.study,
            trials={outcome.value: count for outcome, count in result.counts.items()},
        ),
    )

"""Durable storage of finished trials: an Optuna study that only ever receives complete records.

A trial is written in one piece when it ends, so a kill loses no finished trial and leaves none half-written. Schemes:

    journal:PATH                 a file (the default, below `.spantune/studies`)
    sqlite:///PATH               one file, slower to write
    postgresql://USER@HOST/NAME  for several machines
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from results.record import Outcome, TrialRecord
from tuner.errors import OptionError, StorageBusy
from tuner.sampling import BAD_VALUE, Point

DEFAULT_FOLDER = Path(".spantune") / "studies"
DATABASES = ("sqlite", "postgresql", "postgresql+psycopg", "postgresql+psycopg2")
SCHEMES = "journal:PATH, sqlite:///PATH or postgresql://USER@HOST/NAME"


@dataclass(frozen=True)
class Location:
    """Where trials are kept: `scheme` is `journal` or a database's, `target` a path or a whole URL."""

    scheme: str
    target: str

    def __str__(self) -> str:
        if self.scheme != "journal":
            return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", self.target)
        return f"journal:{self.target}"


def parse_location(text: str | None, study: str = "study") -> Location:
    """A location from an option's text; None is the default journal of a study.

    Raises:
        OptionError: unknown scheme, or nothing behind it.
    """
    if text is None:
        return Location("journal", str(DEFAULT_FOLDER / f"{file_name(study)}.journal"))
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "journal" and rest:
        return Location("journal", rest)
    if colon and scheme in DATABASES and re.match(r"//.*[^/]", rest):
        return Location(scheme, text)
    raise OptionError(f"unknown storage {text!r}: use {SCHEMES}")


def file_name(study: str) -> str:
    """A study's name as one file name."""
    return re.sub(r"[^\w.+-]+", "_", study)


class TrialStore:
    """The finished trials of one study.

    Raises:
        OptionError: the storage cannot be opened.
    """

    def __init__(self, location: Location, study: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.location = location
        try:
            self._study = optuna.create_study(
                storage=_open(location), study_name=study, direction="minimize", load_if_exists=True
            )
        except Exception as error:  # the database drivers share no base class
            detail = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise OptionError(f"storage {location} cannot be opened: {detail}") from error
        self._fail_stale()

    def _fail_stale(self) -> None:
        """Ends trials that another program left running: they would repel the sampler for ever."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keeps other processes from running studies on the same journal. The kernel drops the claim of a dead one.

        Databases are not claimed: they are for many writers.

        Raises:
            StorageBusy: another process holds the journal.
        """
        if self.location.scheme != "journal":
            yield
            return
        descriptor = os.open(f"{self.location.target}.run", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            where = self.location.target
            raise StorageBusy(
                f"another process runs a study on {where}: wait for it, or name another --storage"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def load(self) -> list[tuple[Point, TrialRecord]]:
        """Every finished trial with its point, oldest first; trials without a record are left out."""
        finished = (TrialState.COMPLETE, TrialState.FAIL)
        trials = self._study.get_trials(deepcopy=False, states=finished)
        return [(dict(t.params), read_record(t.user_attrs)) for t in trials if "outcome" in t.user_attrs]

    def append(self, point: Point, record: TrialRecord, distributions: Mapping[str, Any]) -> None:
        """Writes one finished trial, whole."""
        self._study.add_trial(as_trial(point, record, distributions))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Sets study attributes, where they changed."""
        known = self._study.user_attrs
        for name, value in facts.items():
            if known.get(name) != value:
                self._study.set_user_attr(name, value)


def as_trial(point: Point, record: TrialRecord, distributions: Mapping[str, Any]) -> FrozenTrial:
    """A record as a finished Optuna trial: `lost` failed, a config's failure is infeasible at a bad value."""
    used = {name: distributions[name] for name in point}
    if record.outcome is Outcome.LOST:
        return create_trial(state=TrialState.FAIL, params=point, distributions=used, user_attrs=record.to_json())
    scored = record.ratio is not None
    return create_trial(
        value=record.ratio if record.ratio is not None else BAD_VALUE,
        params=point,
        distributions=used,
        user_attrs=record.to_json(),
        constraints={"config": -1.0 if scored else 1.0},
    )


def read_record(attributes: Mapping[str, Any]) -> TrialRecord:
    """A record from a trial's attributes; fields of later schemas are left out."""
    names = {f.name for f in fields(TrialRecord)}
    known = {name: value for name, value in attributes.items() if name in names}
    known["outcome"] = Outcome(known["outcome"])
    for name in ("samples_us", "reference_us"):
        known[name] = tuple(known.get(name, ()))
    return TrialRecord(**known)


def _open(location: Location) -> BaseStorage:
    if location.scheme != "journal":
        return RDBStorage(location.target)
    path = Path(location.target)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _KernelLock(path)
    _cut_torn_line(path, lock)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


class _KernelLock(JournalFileOpenLock):
    """A lock that the kernel drops when its holder dies; Optuna's own lock files outlive a kill by 30 s."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = f"{path}.lock"
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _cut_torn_line(path: Path, lock: _KernelLock) -> None:
    """Cuts a line that a killed writer left unfinished, on which every later read would fail."""
    if not path.exists():
        return
    lock.acquire()
    try:
        with path.open("r+b") as file:
            if b'"op_code"' not in file.readline(4096):
                return  # not a journal: Optuna will say so, and nothing of it is lost
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()


def older_winners(location: Location, study: str, most: int = 2) -> list[dict[str, Any]]:
    """Best configs of studies that differ from one only by space or sources, the latest files first.

    Looks into the same storage, and for the default journals into their neighbours.
    """
    family = "/".join(study.split("/")[:4]) + "/"
    places = [location]
    if location.scheme == "journal" and Path(location.target).parent == DEFAULT_FOLDER:
        files = sorted(DEFAULT_FOLDER.glob(f"{file_name(family)}*.journal"), key=lambda p: -p.stat().st_mtime)
        places += [Location("journal", str(path)) for path in files if str(path) != location.target]
    found: list[dict[str, Any]] = []
    for place in places[: most + 1]:
        storage = _open(place)
        for name in optuna.study.get_all_study_names(storage):
            if name == study or not name.startswith(family):
                continue
            trials = optuna.load_study(study_name=name, storage=storage).get_trials(
                deepcopy=False, states=(TrialState.COMPLETE,)
            )
            scored = [t for t in trials if t.user_attrs.get("outcome") == Outcome.SCORED.value]
            if scored:
                found.append(dict(min(scored, key=lambda t: t.value or BAD_VALUE).user_attrs["config"]))
    return found[:most]

"""Best files: the published winners of one workload on one device, `<directory>/<device>/<workload>.json`.

A file is sorted and indented, so that a diff shows what a study changed. It carries a schema number; a file that is
corrupted, or newer than this spantune, is refused and never overwritten. Predictions of a simulated device and
measurements of a real one never share a folder.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from results import fields
from results.errors import BestFileError
from results.fields import FieldError
from results.files import locked, write_whole
from results.record import Provenance
from search_spaces.gpu import GpuRecord

SCHEMA = 1
SIMULATED_PREFIX = "sim-"
COLD = "cold"
Identity = tuple[str, str, str, str]


class BestKeptWarning(UserWarning):
    """A published winner is slower than the stored one, measured under the same conditions, which was kept."""


def device_slug(name: str) -> str:
    """Folder name of a device: `NVIDIA H200` gives `nvidia-h200`, `sim:b300` gives `sim-b300`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True)
class GpuIdentity:
    """What must be equal for a config to be at home on a GPU.

    Attributes:
        name: as the driver prints it.
        sm_count: multiprocessors; differs between variants and partitions of one model.
        arch: compile target, such as `sm_90a`.
    """

    name: str
    sm_count: int
    arch: str

    @staticmethod
    def of(record: GpuRecord) -> GpuIdentity:
        return GpuIdentity(record.name, record.sm_count, record.arch)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch}, {self.sm_count} multiprocessors)"


@dataclass(frozen=True)
class BestEntry:
    """The winner of one study: its config, what it costs, and where that number comes from.

    Attributes:
        workload: registered name.
        shape_params: parameters that rebuild the shape.
        shape_key: short name of the shape.
        graph_digest: content hash of the op graph that was tuned.
        backend: `cmp` or `megakernel`.
        device: name of the device's folder; any device name is turned into one.
        gpu: the GPU, or the one that a simulated device models.
        config: the winner as JSON.
        span_us: span of the winner.
        interval_us: confidence interval of the span, (low, high).
        serial_us: span of the serial config in the same confirmation, or None when it could not be measured.
        default_us: span of the untuned config in the same confirmation.
        floor_us: time to stream the workload's compulsory bytes once.
        numerics_key: names the output bits.
        provenance: device, software, protocol and sources behind the numbers.
        study: name of the study.
        trials: number of its trials by outcome, such as `scored`.
    """

    workload: str
    shape_params: Mapping[str, int | str]
    shape_key: str
    graph_digest: str
    backend: str
    device: str
    gpu: GpuIdentity
    config: Mapping[str, Any]
    span_us: float
    interval_us: tuple[float, float]
    serial_us: float | None
    default_us: float
    floor_us: float
    numerics_key: str
    provenance: Provenance
    study: str
    trials: Mapping[str, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_slug(self.device))

    @property
    def simulated(self) -> bool:
        """Whether its numbers are predictions."""
        return self.provenance.simulated

    @property
    def l2(self) -> str:
        """Whether weights started in L2: `cold` or `warm`."""
        return str(self.provenance.protocol.get("l2", COLD))

    @property
    def identity(self) -> Identity:
        """What a file holds one entry of. Cold and warm spans are different questions, so both may stand."""
        return self.shape_key, self.backend, self.graph_digest, self.l2

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `entry_from_json` rebuilds an equal entry."""
        return {**asdict(self), "interval_us": list(self.interval_us)}


_PARSERS: dict[str, fields.Parser] = {
    "workload": fields.file_name,
    "shape_params": fields.params,
    "shape_key": fields.name,
    "graph_digest": fields.name,
    "backend": fields.name,
    "device": fields.file_name,
    "gpu": fields.record_of(GpuIdentity),
    "config": fields.document,
    "span_us": fields.microseconds,
    "interval_us": fields.interval,
    "serial_us": fields.optional(fields.microseconds),
    "default_us": fields.microseconds,
    "floor_us": fields.microseconds,
    "numerics_key": fields.text,
    "provenance": fields.record_of(Provenance),
    "study": fields.text,
    "trials": fields.counts,
}


def entry_from_json(document: object) -> BestEntry:
    """Rebuilds an entry.

    Raises:
        FieldError: a field is missing, unknown or of the wrong form; names it.
    """
    entry = BestEntry(**fields.parse(document, _PARSERS))
    if document["device"] != entry.device:  # type: ignore[index]
        raise FieldError(f"device is not a folder name: {entry.device!r} would be")
    if entry.simulated != entry.device.startswith(SIMULATED_PREFIX):
        kind, folder = ("simulated", "real") if entry.simulated else ("measured", "simulated")
        raise FieldError(f"device {entry.device} is a {folder} one, but the numbers are {kind}")
    if entry.config.get("backend") != entry.backend:
        raise FieldError(f"backend is {entry.backend}, but the config's is {entry.config.get('backend')!r}")
    return entry


def best_path(directory: Path, device: str, workload: str) -> Path:
    """Where the best file of a workload lies; `device` by any of its names."""
    return directory / device_slug(device) / f"{workload}.json"


def load(path: Path) -> list[BestEntry]:
    """Reads a best file.

    Raises:
        BestFileError: it is missing, corrupted, incomplete, newer than this spantune, or lies in another device's
            folder; one line with the file and what is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise BestFileError(f"{path}: no such file") from None
    except OSError as error:
        raise BestFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BestFileError(f"{path}: corrupted, not a JSON document: {error}") from None
    try:
        return _entries(path, document)
    except FieldError as error:
        raise BestFileError(f"{path}: {error}") from None


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a number")


def _entries(path: Path, document: object) -> list[BestEntry]:
    if not isinstance(document, dict):
        raise FieldError("corrupted, the document is not an object")
    schema = document.get("schema")
    if type(schema) is not int or schema < 1:
        raise FieldError("corrupted, schema is missing or not a positive number")
    if schema > SCHEMA:
        raise FieldError(f"written by a newer spantune (schema {schema}, this one reads up to {SCHEMA}): upgrade")
    if not isinstance(document.get("entries"), list):
        raise FieldError("corrupted, entries is missing or not a list")
    found: dict[Identity, BestEntry] = {}
    for place, item in enumerate(document["entries"]):
        try:
            entry = entry_from_json(item)
        except FieldError as error:
            raise FieldError(f"entry {place}: {error}") from None
        if (entry.device, f"{entry.workload}.json") != (path.parent.name, path.name):
            raise FieldError(f"entry {place}: belongs into {best_path(Path(), entry.device, entry.workload)}")
        if entry.identity in found:
            raise FieldError(f"entry {place}: repeats {' '.join(entry.identity)}")
        found[entry.identity] = entry
    return list(found.values())


def dump(entries: Iterable[BestEntry]) -> str:
    """The text of a best file: entries by identity, keys by name."""
    ordered = [entry.to_json() for entry in sorted(entries, key=lambda entry: entry.identity)]
    return json.dumps({"schema": SCHEMA, "entries": ordered}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def publish(directory: Path, entry: BestEntry) -> Path:
    """Stores an entry among those of its device and workload and returns the file.

    An entry with the same identity is replaced, unless it is faster beyond the intervals of both and was taken under
    the same conditions (`keeps`); then it stays and `BestKeptWarning` says so.

    Args:
        directory: of best files; made when missing.
        entry: a winner; simulated entries go to simulated devices' folders only.

    Raises:
        BestFileError: the entry is malformed, the stored file is corrupted or newer, or the folder is not writable.
            Nothing was changed.
    """
    path = best_path(directory, entry.device, entry.workload)
    try:
        entry = entry_from_json(json.loads(json.dumps(entry.to_json(), allow_nan=False)))
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            stored = {e.identity: e for e in load(path)} if path.exists() else {}
            old = stored.get(entry.identity)
            if old is not None and keeps(old, entry):
                text = f"{path}: kept the config of {old.study}, {old.span_us:.3f} us, over {entry.span_us:.3f} us"
                warnings.warn(text, BestKeptWarning, stacklevel=2)
                return path
            write_whole(path, dump({**stored, entry.identity: entry}.values()))
    except (FieldError, TypeError, ValueError) as error:
        raise BestFileError(f"{path}: not written, {error}") from error
    except OSError as error:
        raise BestFileError(f"{path}: not written, {error.strerror or error}") from error
    return path


def keeps(old: BestEntry, new: BestEntry) -> bool:
    """Whether a stored entry outlives a new one: same conditions, and faster beyond both intervals.

    Compared relative to each study's own default config, so that a change of clocks between two studies cancels.
    """
    same = all(
        getattr(old.provenance, name) == getattr(new.provenance, name) for name in ("source_hash", "versions", "uuid")
    )
    return same and old.gpu == new.gpu and old.interval_us[1] / old.default_us < new.interval_us[0] / new.default_us

"""Finds the config for a workload at a shape on a GPU: stored for exactly that, the nearest stored, or the default.

how      reason.code      what is loaded
exact    same             stored for this graph, GPU and device sources
exact    other_driver     the same, but measured under another driver
nearest  stale_sources    stored for this graph and GPU, but the device sources have changed since
nearest  other_shape      stored for another shape of the same model on this GPU; `block_m` follows the token rows (it
                          names no output bits), the rest stays and is legal for this shape
default  no_entry         nothing is stored for this workload and device
default  other_gpu        entries are of a GPU with this name but other limits
default  no_legal_entry   entries are of other models or graphs, or their tilings are illegal for this shape

All but `exact same` come with a `MatchWarning`, which Python prints once per text.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from results.best import COLD, BestEntry, GpuIdentity, load
from results.errors import NoConfigError
from results.paths import Place, best_files, search_path
from search_spaces.cmp import CmpSpace, default
from search_spaces.config import CmpConfig, Config, from_json, numerics_key, tiling_of
from search_spaces.errors import ConfigError, IllegalConfig
from search_spaces.gpu import GpuRecord
from workloads import registry
from workloads.errors import WorkloadError
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Tiling

SAME_PARAMS = ("tp",)  # besides texts, what must be equal for one shape to speak for another


class How(StrEnum):
    """How well a config fits what was asked for."""

    EXACT = "exact"
    NEAREST = "nearest"
    DEFAULT = "default"


class MatchWarning(UserWarning):
    """A config was not stored for exactly what it is used for."""


@dataclass(frozen=True)
class Reason:
    """Why a config was chosen: a code of the module's table, and one line for people."""

    code: str
    text: str


@dataclass(frozen=True)
class Target:
    """The device that a config is for.

    Attributes:
        device: the GPU's name, or a simulated device's.
        gpu: its limits, or None when only the name is known.
        driver: version of the CUDA driver, such as `13.0`; empty when it is not known or does not matter.
    """

    device: str
    gpu: GpuRecord | None = None
    driver: str = ""


@dataclass(frozen=True)
class Match:
    """A config and how it was found.

    Attributes:
        config: to run.
        how: exact, nearest or default.
        reason: which rule chose it.
        entry: the stored entry behind it; None for the default.
        path: the best file of the entry; None for the default.
        place: the folder of the search path that the file lies in; None for the default.
        numerics_key: names the output bits of this config at this shape.
    """

    config: Config
    how: How
    reason: Reason
    entry: BestEntry | None
    path: Path | None
    place: Place | None
    numerics_key: str


@dataclass(frozen=True)
class _Stored:
    entry: BestEntry
    path: Path
    place: Place


@dataclass(frozen=True)
class _Query:
    workload: registry.Workload
    shape: registry.Shape
    graph: OpGraph
    target: Target
    source_hash: str

    def __str__(self) -> str:
        return f"{self.workload.name} {self.shape.key()} on {self.target.device}"


def find(
    workload: str,
    shape_params: Mapping[str, int | str],
    *,
    device: Target | GpuRecord | str,
    backend: str | None = None,
    results: str | Path | None = None,
    source_hash: str | None = None,
) -> Match:
    """Finds the config to run.

    Args:
        workload: registered name.
        shape_params: shape parameters; those left out take their default.
        device: `cuda:N`, a GPU's record, or the name of a GPU or of a simulated device.
        backend: only configs of this backend; the fastest of all when None.
        results: first folder of the search path, as `--results`.
        source_hash: of the device sources that will run; those of this installation when None.

    Raises:
        WorkloadError: unknown workload, or a shape out of range.
        DeviceError: no such GPU.
        BestFileError: a best file on the search path is corrupted or newer.
        ResultsPathError: the named folder does not exist.
        NoConfigError: nothing matches, and the default needs a GPU record or another backend.
    """
    known = registry.get(workload)
    shape = known.shape(shape_params)
    target = target_of(device)
    query = _Query(known, shape, known.graph(shape), target, source_hash or _own_source_hash())
    stored = [
        _Stored(entry, path, place)
        for path, place in best_files(search_path(results), target.device, workload)
        for entry in load(path)
        if backend in (None, entry.backend) and entry.l2 == COLD
    ]
    match = _exact(query, stored) or _nearest(query, stored) or _default(query, stored, backend)
    if match.reason.code != "same":
        warnings.warn(f"{query}: {match.reason.text}", MatchWarning, stacklevel=1)
    return match


def target_of(device: Target | GpuRecord | str) -> Target:
    """The target that a device argument names.

    Raises:
        DeviceError: `cuda:N` names no GPU.
    """
    if isinstance(device, Target):
        return device
    if isinstance(device, GpuRecord):
        return Target(device.name, device)
    cuda = re.fullmatch(r"cuda:(\d+)", device)
    if cuda is None:
        return Target(device)
    from backends.cuda import driver

    record = driver.read_record(int(cuda.group(1)))
    version = int(driver.call("cuDriverGetVersion"))
    return Target(record.name, record, f"{version // 1000}.{version % 1000 // 10}")


def _own_source_hash() -> str:
    from backends.cuda.jit import source_hash

    return source_hash()


# --- The three rules ---


def _exact(query: _Query, stored: list[_Stored]) -> Match | None:
    """Same graph and GPU; same sources before stale ones, then the fastest, then the first of the search path."""
    digest = query.graph.digest()
    fitting = [s for s in stored if s.entry.graph_digest == digest and _same_gpu(query.target, s.entry)]
    for item in sorted(fitting, key=lambda s: (_stale(query, s.entry), s.entry.span_us)):
        config = _legal(query, item.entry)
        if config is None:
            continue
        if _stale(query, item.entry):
            text = f"{item.path} was measured on other device sources: tune again"
            return _match(query, config, How.NEAREST, Reason("stale_sources", text), item)
        measured = item.entry.provenance.versions.get("driver_cuda", "")
        if query.target.driver and measured and query.target.driver != measured:
            text = f"{item.path} was measured under driver {measured}, this is {query.target.driver}"
            return _match(query, config, How.EXACT, Reason("other_driver", text), item)
        return _match(query, config, How.EXACT, Reason("same", f"{item.path} was stored for this"), item)
    return None


def _nearest(query: _Query, stored: list[_Stored]) -> Match | None:
    """Nearest token rows, then cached positions, then the other sizes, by ratio."""
    ranked = []
    for item in stored:
        far = _distance(query, item.entry) if _same_gpu(query.target, item.entry) else None
        if far is not None:
            ranked.append(((*far, _stale(query, item.entry), item.entry.span_us), item))
    for _, item in sorted(ranked, key=lambda pair: pair[0]):
        config = _legal(query, item.entry, refit=True)
        if config is not None:
            stale = ", measured on other device sources," if _stale(query, item.entry) else ""
            text = f"nothing is stored for this shape, {item.entry.shape_key} of {item.path}{stale} is nearest"
            return _match(query, config, How.NEAREST, Reason("other_shape", text), item)
    return None


def _default(query: _Query, stored: list[_Stored], backend: str | None) -> Match:
    """The untuned config, with the reason why nothing stored fits."""
    gpu, name = query.target.gpu, query.target.device
    if not stored:
        reason = Reason("no_entry", f"nothing is stored for {name}, so the untuned config is used: tune it")
    elif not any(_same_gpu(query.target, s.entry) for s in stored):
        text = f"{stored[0].path} is of {stored[0].entry.gpu}, so the untuned config is used: tune it"
        reason = Reason("other_gpu", text)
    else:
        text = f"no entry of {stored[0].path} is legal for this shape, so the untuned config is used: tune it"
        reason = Reason("no_legal_entry", text)
    if gpu is None:
        raise NoConfigError(f"{query}: no stored config fits, and a default needs the GPU's record")
    if backend not in (None, CmpConfig.backend):
        raise NoConfigError(f"{query}: no stored {backend} config fits, and the default is a {CmpConfig.backend} one")
    return _match(query, default(CmpSpace(query.graph, gpu)), How.DEFAULT, reason, None)


def _match(query: _Query, config: Config, how: How, reason: Reason, item: _Stored | None) -> Match:
    gpu = query.target.gpu
    arch = gpu.arch if gpu is not None else item.entry.gpu.arch if item is not None else ""
    key = numerics_key(query.graph, config, arch)
    if item is None:
        return Match(config, how, reason, None, None, None, key)
    return Match(config, how, reason, item.entry, item.path, item.place, key)


# --- What counts as fitting ---


def _same_gpu(target: Target, entry: BestEntry) -> bool:
    """A name alone matches its folder; a record must match the entry's GPU in full."""
    return target.gpu is None or GpuIdentity.of(target.gpu) == entry.gpu


def _stale(query: _Query, entry: BestEntry) -> bool:
    """Predictions do not depend on device sources."""
    return not entry.simulated and entry.provenance.source_hash != query.source_hash


def _distance(query: _Query, entry: BestEntry) -> tuple[float, float, float] | None:
    """How far another shape is, as logarithms of ratios: token rows, cached positions, all other sizes.

    None when the entry is of another model, of a part of the graph, or of a graph that has changed since.
    """
    try:
        shape = query.workload.shape(entry.shape_params)
    except (WorkloadError, TypeError):  # a shape that this version does not know
        return None
    mine, other = query.shape.params(), shape.params()
    for name, value in mine.items():
        if (isinstance(value, str) or name in SAME_PARAMS) and other[name] != value:
            return None
    if query.workload.graph(shape).digest() != entry.graph_digest:
        return None
    sizes = {n: abs(math.log(int(other[n]) / int(v))) for n, v in mine.items() if not isinstance(v, str)}
    rows = abs(math.log(getattr(shape, "m", 1) / getattr(query.shape, "m", 1)))
    return rows, sizes.pop("kv", 0.0), sum(sizes.values())


def _legal(query: _Query, entry: BestEntry, *, refit: bool = False) -> Config | None:
    """The entry's config if this graph and GPU can run it; `refit` lets `block_m` follow the graph's token rows."""
    from backends.plan.launches import lower
    from backends.plan.queues import lower_queues

    gpu, graph = query.target.gpu, query.graph
    try:
        config = from_json(entry.config)
        if refit:
            config = _refitted(query.graph, config)
        if isinstance(config, CmpConfig):
            lower(graph, config, entry.gpu.arch)
            if gpu is not None:
                CmpSpace(graph, gpu).check(config)
        else:
            lower_queues(graph, config, entry.gpu.arch, entry.gpu.sm_count)
    except (ConfigError, IllegalConfig, KeyError):  # a key: a program point or core that this version does not know
        return None
    return config


def _refitted(graph: OpGraph, config: Config) -> Config:
    """The config with `block_m` of each op set to the nearest legal choice, where its own is illegal on a graph."""
    tilings = {name: _refitted_tiling(graph, name, tiling_of(config, name)) for name in config.ops if name in graph.ops}
    if isinstance(config, CmpConfig):
        schedules = {name: replace(config.ops[name], tiling=tiling) for name, tiling in tilings.items()}
        return replace(config, ops={**config.ops, **schedules})
    return replace(config, ops={**config.ops, **tilings})


def _refitted_tiling(graph: OpGraph, name: str, tiling: Tiling) -> Tiling:
    op = graph.ops[name]
    kind = KINDS[op.kind]
    if not isinstance(tiling.block_m, int) or tiling.block_m < 1:
        return tiling
    choices = [int(choice) for choice in kind.tunables(op, graph).get("block_m", ())]
    choices.sort(key=lambda choice: abs(math.log(choice / tiling.block_m)))
    for candidate in (tiling, *(replace(tiling, block_m=choice) for choice in choices)):
        if kind.illegal(op, graph, candidate) is None:
            return candidate
    return tiling

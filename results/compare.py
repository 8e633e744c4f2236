"""What each way of running a workload is worth, side by side: table data first, text second.

Ratios are taken within one study, where both sides were measured in turn in one run. Spans of two studies share only
the device, so between backends the table says which is faster and whether their intervals overlap, no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from results.best import BestEntry, GpuIdentity
from results.record import Outcome
from results.table import aligned

SCHEMA = 1


@dataclass(frozen=True)
class Way:
    """The best config of one backend, beside what its study measured with it. Ratios are best / other: less is better.

    Attributes:
        backend: `cmp` or `megakernel`.
        span_us: span of the best config.
        interval_us: its confidence interval, (low, high).
        serial_us: span of the serial config, or None when it could not be measured.
        default_us: span of the untuned config.
        floor_us: time to stream the compulsory bytes once.
        over_serial: best / serial, or None.
        over_default: best / default.
        over_default_interval: its confidence interval, (low, high).
        over_floor: best / floor.
        gain: whether the interval of best / default lies below 1.
        numerics_key: names the output bits.
        num_trials: verified, measured trials of the study.
        study: name of the study.
        source_hash: of the device sources that were measured.
    """

    backend: str
    span_us: float
    interval_us: tuple[float, float]
    serial_us: float | None
    default_us: float
    floor_us: float
    over_serial: float | None
    over_default: float
    over_default_interval: tuple[float, float]
    over_floor: float
    gain: bool
    numerics_key: str
    num_trials: int
    study: str
    source_hash: str


@dataclass(frozen=True)
class Group:
    """One workload at one shape on one device.

    Attributes:
        workload: registered name.
        shape_key: short name of the shape.
        graph_digest: content hash of the op graph.
        device: folder name of the device.
        gpu: the GPU, or the one that a simulated device models.
        l2: whether weights started in L2, `cold` or `warm`.
        simulated: whether spans are predictions.
        ways: one per backend, the fastest first.
        decided: whether the interval of the fastest lies below all others; True when it is alone.
        same_bits: whether all ways have one numerics key, so that they give the same output bits.
    """

    workload: str
    shape_key: str
    graph_digest: str
    device: str
    gpu: GpuIdentity
    l2: str
    simulated: bool
    ways: tuple[Way, ...]
    decided: bool
    same_bits: bool


@dataclass(frozen=True)
class Comparison:
    """Groups by workload, shape and device."""

    groups: tuple[Group, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every number of the table."""
        return {"schema": SCHEMA, **asdict(self)}


def compare(entries: Iterable[BestEntry]) -> Comparison:
    """Table data of any number of entries; of two with one identity the first stands, as on a search path."""
    groups: dict[tuple[str, ...], dict[str, BestEntry]] = {}
    for entry in entries:
        key = (entry.workload, entry.shape_key, entry.device, str(entry.gpu), entry.graph_digest, entry.l2)
        groups.setdefault(key, {}).setdefault(entry.backend, entry)
    return Comparison(tuple(_group(list(groups[key].values())) for key in sorted(groups)))


def _group(entries: list[BestEntry]) -> Group:
    ways = tuple(sorted(map(_way, entries), key=lambda way: (way.span_us, way.backend)))
    first = entries[0]
    return Group(
        workload=first.workload,
        shape_key=first.shape_key,
        graph_digest=first.graph_digest,
        device=first.device,
        gpu=first.gpu,
        l2=first.l2,
        simulated=first.simulated,
        ways=ways,
        decided=all(ways[0].interval_us[1] < other.interval_us[0] for other in ways[1:]),
        same_bits=len({way.numerics_key for way in ways}) == 1,
    )


def _way(entry: BestEntry) -> Way:
    low, high = (bound / entry.default_us for bound in entry.interval_us)
    return Way(
        backend=entry.backend,
        span_us=entry.span_us,
        interval_us=entry.interval_us,
        serial_us=entry.serial_us,
        default_us=entry.default_us,
        floor_us=entry.floor_us,
        over_serial=None if entry.serial_us is None else entry.span_us / entry.serial_us,
        over_default=entry.span_us / entry.default_us,
        over_default_interval=(low, high),
        over_floor=entry.span_us / entry.floor_us,
        gain=high < 1,
        numerics_key=entry.numerics_key,
        num_trials=sum(count for name, count in entry.trials.items() if name in _MEASURED),
        study=entry.study,
        source_hash=entry.provenance.source_hash,
    )


_MEASURED = frozenset(outcome.value for outcome in Outcome if outcome.measured)

# --- Text ---

_HEADINGS = ("", "serial", "default", "best us", "interval", "floor", "/serial", "/default", "interval", "/floor", "n")


def render(table: Comparison) -> str:
    """The table as text for a terminal, without a final newline."""
    if not table.groups:
        return "nothing is published yet"
    return "\n\n".join("\n".join(_lines(group)) for group in table.groups)


def _lines(group: Group) -> list[str]:
    title = f"{group.workload} {group.shape_key} on {group.device}, {group.gpu}, L2 {group.l2}"
    if group.simulated:
        title += ", simulated: spans are predicted"
    lines = [title, *aligned([_HEADINGS, *(_cells(way) for way in group.ways)])]
    return lines + [f"  {remark}" for remark in _remarks(group)]


def _cells(way: Way) -> tuple[str, ...]:
    return (
        way.backend,
        _us(way.serial_us),
        _us(way.default_us),
        _us(way.span_us),
        f"{_us(way.interval_us[0])} to {_us(way.interval_us[1])}",
        _us(way.floor_us),
        _ratio(way.over_serial),
        _ratio(way.over_default),
        f"{_ratio(way.over_default_interval[0])} to {_ratio(way.over_default_interval[1])}",
        _ratio(way.over_floor),
        str(way.num_trials),
    )


def _remarks(group: Group) -> list[str]:
    """What a reader must know besides the numbers."""
    remarks = [f"{way.backend}: no gain over the default beyond the interval" for way in group.ways if not way.gain]
    if len(group.ways) > 1:
        fastest, others = group.ways[0].backend, ", ".join(way.backend for way in group.ways[1:])
        remarks.append(
            f"{fastest} is faster than {others}" if group.decided else f"{fastest} and {others}: intervals overlap"
        )
        if len({way.source_hash for way in group.ways}) > 1:
            remarks.append("the studies measured different device sources")
    if group.same_bits:
        remarks.append(f"numerics {group.ways[0].numerics_key}")
    else:
        remarks += [f"numerics of {way.backend} {way.numerics_key}" for way in group.ways]
    return remarks


def _us(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"

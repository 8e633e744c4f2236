"""What trace records say: windows of kernels, multiprocessors at work, and how much of the span is overlap.

A record is made by one thread of a CTA (grid shell) or of a task (persistent shell): when it entered, when its main
input was ready (its wait had returned), when it was done, and on which multiprocessor. Times are `%globaltimer`'s,
whose step on the H200 is 32 ns; records are made in builds of their own, which run a few percent slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECORD_WORDS = 4  # of 64 bits; values of spantune::TraceWord in backends/cuda/include/spantune/base.cuh
RECORD_BYTES = 8 * RECORD_WORDS


@dataclass(frozen=True)
class CtaRecord:
    """One CTA, microseconds after the first stamp.

    Attributes:
        kernel: name of its launch.
        entry_us: its first instruction.
        ready_us: its main input may be read.
        done_us: its last store is issued.
        sm: multiprocessor.
    """

    kernel: str
    entry_us: float
    ready_us: float
    done_us: float
    sm: int


@dataclass(frozen=True)
class Trace:
    """One replay.

    Attributes:
        records: of every CTA.
        span_us: between the stamps, bracket included: records lie within.
        sm_count: multiprocessors of the GPU.
    """

    records: tuple[CtaRecord, ...]
    span_us: float
    sm_count: int


@dataclass(frozen=True)
class KernelWindow:
    """One kernel of a replay.

    Attributes:
        kernel: name of its launch.
        ctas: their number.
        sms: multiprocessors that held one.
        entry_us: the first CTA enters.
        ready_us: the first CTA has its main input.
        all_ready_us: the last one has.
        done_us: the last CTA is done.
    """

    kernel: str
    ctas: int
    sms: int
    entry_us: float
    ready_us: float
    all_ready_us: float
    done_us: float

    @property
    def waiting_us(self) -> float:
        """Launched, but no CTA has its main input yet: set-up, weights on their way, and waiting."""
        return self.ready_us - self.entry_us

    @property
    def working_us(self) -> float:
        return self.done_us - self.ready_us


@dataclass(frozen=True)
class Utilisation:
    """How full a replay is.

    Attributes:
        kernel_sum_us: sum of all kernels' times from first entry to last done, waits included.
        busy_us: from the first entry to the last done.
        mean_active: multiprocessors that hold a CTA, averaged over `busy_us`.
        mean_working: those that hold one with its main input ready.
        coverage: `mean_active` over all multiprocessors.
    """

    kernel_sum_us: float
    busy_us: float
    mean_active: float
    mean_working: float
    coverage: float


def parse(words: Sequence[int], kernels: Iterable[tuple[str, int]], start_ns: int) -> tuple[CtaRecord, ...]:
    """Records from a device's buffer.

    Args:
        words: `RECORD_WORDS` a CTA, kernel after kernel.
        kernels: name and number of CTAs of each, in the order of the buffer.
        start_ns: the first stamp.
    """
    found, at = [], 0
    for name, ctas in kernels:
        for _ in range(ctas):
            entry, ready, done, sm = words[at : at + RECORD_WORDS]
            times = [(time - start_ns) / 1000 for time in (entry, ready, done)]
            found.append(CtaRecord(name, times[0], times[1], times[2], sm))
            at += RECORD_WORDS
    return tuple(found)


def windows(trace: Trace) -> tuple[KernelWindow, ...]:
    """One window a kernel, in order of entry."""
    by_kernel: dict[str, list[CtaRecord]] = {}
    for record in trace.records:
        by_kernel.setdefault(record.kernel, []).append(record)
    found = [
        KernelWindow(
            name,
            len(records),
            len({r.sm for r in records}),
            min(r.entry_us for r in records),
            min(r.ready_us for r in records),
            max(r.ready_us for r in records),
            max(r.done_us for r in records),
        )
        for name, records in by_kernel.items()
    ]
    return tuple(sorted(found, key=lambda window: window.entry_us))


def active_curve(trace: Trace, *, working: bool = False) -> tuple[tuple[float, int], ...]:
    """(microseconds, multiprocessors that hold a CTA from there on), at every change.

    With `working`, a CTA counts from when its main input is ready.
    """
    changes: list[tuple[float, int, int]] = []
    for record in trace.records:
        begin = record.ready_us if working else record.entry_us
        changes += [(begin, 1, record.sm), (max(begin, record.done_us), -1, record.sm)]
    held: dict[int, int] = {}
    curve: list[tuple[float, int]] = []
    for time, step, sm in sorted(changes):
        held[sm] = held.get(sm, 0) + step
        if not held[sm]:
            del held[sm]
        if curve and curve[-1][0] == time:
            curve.pop()
        if not curve or curve[-1][1] != len(held):
            curve.append((time, len(held)))
    return tuple(curve)


def utilisation(trace: Trace) -> Utilisation:
    """Averages over the time from the first entry to the last done."""
    found = windows(trace)
    begin, end = min(w.entry_us for w in found), max(w.done_us for w in found)
    busy = max(end - begin, 1e-9)
    active, working = (_area(active_curve(trace, working=w)) / busy for w in (False, True))
    kernel_sum = sum(w.done_us - w.entry_us for w in found)
    return Utilisation(kernel_sum, busy, active, working, active / trace.sm_count)


def _area(curve: Sequence[tuple[float, int]]) -> float:
    """Multiprocessor microseconds under a curve that ends at zero."""
    return sum(n * (after - time) for (time, n), (after, _) in zip(curve, curve[1:], strict=False))


def typical(traces: Sequence[Trace]) -> Trace:
    """The replay of median span."""
    return sorted(traces, key=lambda trace: trace.span_us)[(len(traces) - 1) // 2]


def median_windows(traces: Sequence[Trace]) -> tuple[KernelWindow, ...]:
    """Windows whose times are medians over replays of one plan, in order of entry."""
    by_kernel: dict[str, list[KernelWindow]] = {}
    for trace in traces:
        for window in windows(trace):
            by_kernel.setdefault(window.kernel, []).append(window)
    times = ("entry_us", "ready_us", "all_ready_us", "done_us")
    found = [
        KernelWindow(
            name,
            seen[0].ctas,
            round(statistics.median(w.sms for w in seen)),
            *(statistics.median(getattr(w, time) for w in seen) for time in times),
        )
        for name, seen in by_kernel.items()
    ]
    return tuple(sorted(found, key=lambda window: window.entry_us))


def chrome_trace(trace: Trace, streams: Mapping[str, int]) -> dict[str, Any]:
    """The trace-event JSON that Perfetto loads: kernels by stream, CTAs by multiprocessor, and how many are active.

    Args:
        trace: one replay.
        streams: stream of each kernel.
    """
    events: list[dict[str, Any]] = [_name(1, "kernels by stream"), _name(2, "CTAs by multiprocessor")]
    for window in windows(trace):
        lane = {"pid": 1, "tid": streams.get(window.kernel, 0)}
        size = {"ctas": window.ctas, "multiprocessors": window.sms}
        events.append(_slice(f"{window.kernel} waiting", window.entry_us, window.ready_us, lane, size))
        events.append(_slice(window.kernel, window.ready_us, window.done_us, lane, size))
    for record in trace.records:
        lane = {"pid": 2, "tid": record.sm}
        events.append(_slice(f"{record.kernel} waiting", record.entry_us, record.ready_us, lane, {}))
        events.append(_slice(record.kernel, record.ready_us, record.done_us, lane, {}))
    for time, count in active_curve(trace):
        events.append({"ph": "C", "name": "active multiprocessors", "pid": 1, "ts": time, "args": {"active": count}})
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _slice(name: str, begin: float, end: float, lane: Mapping[str, int], args: Mapping[str, int]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": max(end - begin, 0.0), **lane, "args": dict(args)}


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}

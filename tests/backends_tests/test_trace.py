"""Traces: records from words, conservation under the curves, the JSON that Perfetto loads, and traced plans."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.measure.trace import (
    RECORD_BYTES,
    RECORD_WORDS,
    CtaRecord,
    Trace,
    active_curve,
    chrome_trace,
    median_windows,
    parse,
    typical,
    utilisation,
    windows,
)
from backends.plan.encode import OPERAND_SLOTS, grid_args
from backends.plan.launches import lower, traced
from search_spaces.cmp import CmpSpace, default
from search_spaces.gpu import GpuRecord
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape

TWO = Trace((CtaRecord("A", 1.0, 2.0, 4.0, 0), CtaRecord("B", 3.0, 5.0, 6.0, 1)), 7.0, 4)
RECORDS = st.lists(
    st.tuples(
        st.sampled_from("ABC"), st.integers(0, 50), st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)
    ).map(lambda r: CtaRecord(r[0], float(r[1]), float(r[1] + r[2]), float(r[1] + r[2] + r[3]), r[4])),
    min_size=1,
    max_size=30,
)


def test_records_are_read_in_the_order_of_the_plan() -> None:
    words = [1100, 1200, 1300, 7, 1400, 1500, 1600, 8, 1050, 1060, 1070, 9]
    found = parse(words, [("A0", 2), ("B0", 1)], 1000)
    assert [r.kernel for r in found] == ["A0", "A0", "B0"]
    assert found[1] == CtaRecord("A0", 0.4, 0.5, 0.6, 8)
    assert found[2].sm == 9


def test_a_worked_example() -> None:
    first, second = windows(TWO)
    assert (first.kernel, first.waiting_us, first.working_us) == ("A", 1.0, 2.0)
    assert (second.waiting_us, second.working_us) == (2.0, 1.0)
    assert active_curve(TWO) == ((1.0, 1), (3.0, 2), (4.0, 1), (6.0, 0))
    assert active_curve(TWO, working=True) == ((2.0, 1), (4.0, 0), (5.0, 1), (6.0, 0))
    use = utilisation(TWO)
    assert use.kernel_sum_us == 6.0
    assert use.busy_us == 5.0
    assert use.mean_active == pytest.approx(6 / 5)
    assert use.mean_working == pytest.approx(3 / 5)
    assert use.coverage == pytest.approx(6 / 5 / 4)


def _held(records: list[CtaRecord], sm: int) -> float:
    """Microseconds in which a multiprocessor holds a CTA, by a sweep over its intervals."""
    total, end = 0.0, float("-inf")
    for begin, done in sorted((r.entry_us, r.done_us) for r in records if r.sm == sm):
        total += max(0.0, done - max(begin, end))
        end = max(end, done)
    return total


@given(RECORDS)
def test_the_area_under_the_curve_is_the_time_that_multiprocessors_are_held(records: list[CtaRecord]) -> None:
    trace = Trace(tuple(records), 100.0, 4)
    curve = active_curve(trace)
    area = sum(n * (after - time) for (time, n), (after, _) in zip(curve, curve[1:], strict=False))
    assert area == pytest.approx(sum(_held(records, sm) for sm in range(4)))
    assert curve[-1][1] == 0
    assert all(0 <= count <= 4 for _, count in curve)
    use = utilisation(trace)
    assert use.mean_working <= use.mean_active + 1e-9
    assert use.coverage <= 1.0 + 1e-9


@given(RECORDS)
def test_windows_hold_all_records_of_their_kernel(records: list[CtaRecord]) -> None:
    found = {w.kernel: w for w in windows(Trace(tuple(records), 100.0, 4))}
    assert sum(w.ctas for w in found.values()) == len(records)
    for record in records:
        window = found[record.kernel]
        assert window.entry_us <= record.entry_us and record.done_us <= window.done_us
        assert window.ready_us <= record.ready_us <= window.all_ready_us


def test_the_typical_replay_has_the_median_span() -> None:
    traces = [Trace(TWO.records, span, 4) for span in (9.0, 7.0, 8.0)]
    assert typical(traces).span_us == 8.0
    assert median_windows(traces) == windows(TWO)


def test_perfetto_gets_kernels_ctas_and_the_curve() -> None:
    document = chrome_trace(TWO, {"A": 0, "B": 3})
    events = document["traceEvents"]
    kernels = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in kernels] == [
        ("A waiting", 0, 1.0, 1.0),
        ("A", 0, 2.0, 2.0),
        ("B waiting", 3, 3.0, 2.0),
        ("B", 3, 5.0, 1.0),
    ]
    assert {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 2} == {0, 1}
    assert [e["args"]["active"] for e in events if e["ph"] == "C"] == [1, 2, 1, 0]


def test_traced_kernels_are_other_binaries_of_the_same_plan() -> None:
    graph = build_graph(AttentionPreShape())
    plan = lower(
        graph, default(CmpSpace(graph, GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448))), "sm_90a"
    )
    with_records = traced(plan)
    assert not any(part.binary.traces for part in plan.parts())
    assert all(part.binary.traces for part in with_records.parts())
    assert with_records.edges == plan.edges
    assert RECORD_BYTES == 8 * RECORD_WORDS == 32
    addresses = {name: 64 * i for i, name in enumerate(graph.tensors)}
    body = grid_args(plan.node("A0").parts[0], addresses, (), trace=0xABCD00)
    assert struct.unpack_from("<Q", body, 8 * (OPERAND_SLOTS + 1)) == (0xABCD00,)

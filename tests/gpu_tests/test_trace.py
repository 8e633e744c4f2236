"""On a GPU: traced runs keep the bits, and their records agree with the plan and with each other."""

from __future__ import annotations

from typing import Any

import pytest

from backends.base import SessionSpec
from backends.measure.trace import windows
from backends.sessions import open_session
from search_spaces.cmp import default, serial

pytestmark = pytest.mark.gpu


def test_records_follow_the_plan() -> None:
    session: Any = open_session(SessionSpec("attention_pre", {"kv": 512}, "cuda:0", seed=3))
    try:
        for config in (serial(session.space), default(session.space)):
            run = session.prepare(config)
            assert session.verify(run).passed
            traced = session.traced(run)
            verdict = session.verify(traced)
            assert verdict.passed and verdict.stage == "bits", verdict.message
            for trace in session.trace(traced, 5):
                assert len(trace.records) == sum(node.ctas for node in run.plan.nodes)
                for record in trace.records:
                    assert 0 <= record.entry_us <= record.ready_us <= record.done_us <= trace.span_us, record
                    assert 0 <= record.sm < trace.sm_count
                window = {w.kernel: w for w in windows(trace)}
                for edge in run.plan.edges:
                    # Every wait returns after all CTAs of a producer are done; 0.032 us is the timer's step.
                    assert window[edge.consumer].ready_us >= window[edge.producer].done_us - 0.032, edge
            traced.close()
            run.close()
    finally:
        session.close()

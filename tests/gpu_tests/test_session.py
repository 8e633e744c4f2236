"""On a GPU: verdicts, planted races, delayed producers, both shells, spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.base import SessionSpec
from backends.errors import DeviceError
from backends.plan.launches import delayed, unordered
from backends.sessions import open_session
from benchmarks.verdicts import check_both_shells
from search_spaces.cmp import default, serial

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    opened = open_session(SessionSpec("attention_pre", {"kv": 512}, "cuda:0", seed=3))
    yield opened
    opened.close()


def test_serial_and_default_pass_and_agree_with_their_own_bits(session: Any) -> None:
    for config in (serial(session.space), default(session.space)):
        run = session.prepare(config)
        assert session.verify(run).passed
        assert session.verify(run).stage == "bits"
        run.close()


def test_a_missing_edge_is_seen_as_wrong_bits(session: Any) -> None:
    """The reader starts with its producer, which sleeps after its trigger: poison must reach the outputs."""
    run = session.prepare(default(session.space))
    assert session.verify(run).passed
    kept = tuple(e for e in run.plan.edges if (e.producer, e.consumer) != ("B0f", "D0"))
    plan = delayed(replace(run.plan, edges=kept))
    raced = replace(run, plan=plan, graphs=[session._graph(plan, 0, 100)])
    verdict = session.verify(raced)
    raced.close()
    run.close()
    assert not verdict.passed
    assert verdict.stage == "bits"


def test_kernels_that_never_wait_are_seen_as_wrong_bits(session: Any) -> None:
    """The check that a wait is needed at all: without one, sleeping producers leave poison to their readers."""
    run = session.prepare(default(session.space))
    assert session.verify(run).passed
    plan = unordered(delayed(run.plan))
    session.kernels.build(plan.binaries())
    raced = replace(run, plan=plan, graphs=[session._graph(plan, 0, 100)])
    verdict = session.verify(raced)
    raced.close()
    run.close()
    assert not verdict.passed
    assert verdict.stage == "bits"


def test_delayed_producers_change_no_bit(session: Any) -> None:
    run = session.prepare(default(session.space))
    assert session.verify(run).passed
    session.kernels.build(delayed(run.plan).binaries())
    for trigger in ("entry", "set_up", "weights_issued", "inputs_read", "stored"):
        config = default(session.space)
        ops = {name: replace(schedule, trigger=trigger) for name, schedule in config.ops.items()}
        late = session.prepare(replace(config, ops=ops), delay_us=100)
        verdict = session.verify(late)
        late.close()
        assert verdict.passed, (trigger, verdict.message)
        assert verdict.stage == "bits"
    run.close()


def test_both_shells_write_the_same_bits() -> None:
    results = check_both_shells("cuda:0")
    assert all(result["passed"] for result in results.values()), results


def test_spans_exceed_the_floor_and_serial_exceeds_default(session: Any) -> None:
    runs = [session.prepare(serial(session.space)), session.prepare(default(session.space))]
    assert all(session.verify(run).passed for run in runs)
    slow, fast = session.measure(runs, 10)
    for run in runs:
        run.close()
    assert len(slow) == len(fast) == 10
    assert min(fast) > session.floor_us() * 0.9
    assert sum(slow) > sum(fast)
    assert 0.2 < session.bracket_us < 2.0


def test_the_chain_is_bit_exact_in_both_backends() -> None:
    from search_spaces.config import MegakernelConfig, tiling_of

    opened = open_session(SessionSpec("pdl_chain", {"layers": 12}, "cuda:0"))
    config = default(opened.space)
    resident = MegakernelConfig({n: tiling_of(config, n) for n in config.order}, config.order)
    for candidate in (config, serial(opened.space), resident):
        run = opened.prepare(candidate)
        verdict = opened.verify(run)
        run.close()
        assert verdict.passed, verdict.message
    opened.close()


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="no device cuda:99"):
        open_session(SessionSpec("attention_pre", {}, "cuda:99"))


def test_planted_numbers_fail_the_reference_check(session: Any) -> None:
    """The verifier can fail: a reference that is off by a scale must not pass."""
    run = session.prepare(serial(session.space))
    variants = session._verifier._variants
    want = dict(variants[1].want)
    want["head_weights"] = want["head_weights"] * 1.5
    session._verifier._golden.clear()
    kept = list(variants)
    variants[1] = replace(variants[1], want=want)
    try:
        verdict = session.verify(run)
    finally:
        variants[:] = kept
        session._verifier._golden.clear()
        run.close()
    assert not verdict.passed
    assert verdict.stage == "reference"
    assert "head_weights" in verdict.message

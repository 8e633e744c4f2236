"""On a GPU: finalisers that run as the tiles of their producer arrive write the bits of their own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.base import SessionSpec
from backends.cuda import binding
from backends.sessions import open_session
from search_spaces.cmp import default
from search_spaces.config import CmpConfig
from workloads.ops import KINDS

pytestmark = pytest.mark.gpu

PAIRS = {"B0f": "B0", "B1f": "B1", "D1f": "D1"}
Changes = dict[str, dict[str, Any]]  # fields of ops' schedules, by op


def behind(*names: str, **fields: Any) -> Changes:
    """Finalisers behind their producers."""
    return {name: {"host": PAIRS[name], **fields} for name in names}


ALL = behind(*PAIRS)
VARIANTS: dict[str, Changes] = {
    **{f"{name} behind {host}": behind(name) for name, host in PAIRS.items()},
    "all": ALL,
    "all in shared launches": {**ALL, "C0": {"host": "B0"}, "B1": {"host": "B0"}, "D1": {"host": "D0"}},
    "all, shared by 4": behind(*PAIRS, sharers=4),
    "all, shared by 16": behind(*PAIRS, sharers=16),
    "all, few CTAs": {**ALL, **{host: {"grid_cap": 66} for host in PAIRS.values()}},
    "all, late triggers": {**ALL, **{host: {"trigger": "stored"} for host in PAIRS.values()}},
}
REPLAYS = 200


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    opened = open_session(SessionSpec("attention_pre", {"kv": 512}, "cuda:0", seed=5))
    yield opened
    opened.close()


def config(session: Any, changes: Changes) -> CmpConfig:
    """The default config with some schedules changed, and room for finalisers behind their producers."""
    base = default(session.space)
    ops = {name: replace(schedule, **changes.get(name, {})) for name, schedule in base.ops.items()}
    shares = any(ops[host].host for host in PAIRS.values())
    for host in PAIRS.values():
        tiling = ops[host].tiling
        room = 1 if shares else KINDS[session.graph.ops[host].kind].ctas_with_finaliser(tiling)
        ops[host] = replace(ops[host], tiling=replace(tiling, ctas_per_sm=min(tiling.ctas_per_sm, room)))
    return replace(base, ops=ops)


def counters(session: Any) -> Any:
    return binding.bytes_at(session._counters.base, max(session._counters.bytes, 4))


@pytest.mark.parametrize("variant", VARIANTS)
def test_behind_their_producer_finalisers_write_the_same_bits(session: Any, variant: str) -> None:
    own = session.prepare(default(session.space))
    assert session.verify(own).passed  # the golden bits of this numerics key
    own.close()
    run = session.prepare(config(session, VARIANTS[variant]))
    assert run.numerics_key == own.numerics_key
    for _ in range(REPLAYS // 2):  # a check replays two variants of inputs, on poisoned workspaces
        verdict = session.verify(run)
        assert verdict.passed and verdict.stage == "bits", verdict.message
        assert not counters(session).any()
    run.close()


def test_spans_are_read_with_finalisers_behind_their_producers(session: Any) -> None:
    """Replays queued back to back over all sets, which share the counters."""
    run = session.prepare(config(session, ALL))
    assert session.verify(run).passed
    (spans,) = session.measure([run], 20)
    assert min(spans) > 0
    assert not counters(session).any()
    assert session.verify(run).passed
    run.close()


def test_delayed_triggers_change_no_bit(session: Any) -> None:
    own = session.prepare(default(session.space))
    assert session.verify(own).passed
    own.close()
    for point in ("entry", "set_up", "weights_issued", "inputs_read", "stored"):
        changes = {name: {"trigger": point, **ALL.get(name, {})} for name in session.graph.ops}
        late = session.prepare(config(session, changes), delay_us=100)
        verdict = session.verify(late)
        late.close()
        assert verdict.passed and verdict.stage == "bits", (point, verdict.message)

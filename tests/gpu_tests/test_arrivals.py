"""On a GPU: finalisers that run as the tiles of their producer arrive write the bits of their own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from backends.base import SessionSpec
from backends.cuda import binding
from backends.sessions import open_session
from search_spaces.cmp import default
from search_spaces.config import CmpConfig
from tuner.seeds import encode

pytestmark = pytest.mark.gpu

PAIRS = {"B0f": "B0", "B1f": "B1", "D1f": "D1"}
ALL = {f"{name}.host": host for name, host in PAIRS.items()}
VARIANTS: dict[str, dict[str, int | str]] = {
    **{f"{name} behind {host}": {f"{name}.host": host} for name, host in PAIRS.items()},
    "all": ALL,
    "all in shared launches": {**ALL, "C0.host": "B0", "B1.host": "B0", "D1.host": "D0"},
    "all, shared by 4": {**ALL, **{f"{name}.sharers": 4 for name in PAIRS}},
    "all, shared by 16": {**ALL, **{f"{name}.sharers": 16 for name in PAIRS}},
    "all, few CTAs": {**ALL, "B0.grid_cap": 66, "B1.grid_cap": 66, "D1.grid_cap": 66},
    "all, late triggers": {**ALL, **{f"{host}.trigger": "stored" for host in PAIRS.values()}},
}
REPLAYS = 200


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    opened = open_session(SessionSpec("attention_pre", {"kv": 512}, "cuda:0", seed=5))
    yield opened
    opened.close()


def config(session: Any, changes: dict[str, int | str]) -> CmpConfig:
    found: CmpConfig = session.space.decode({**encode(session.space, default(session.space)), **changes})
    for key, value in changes.items():
        if key.endswith(".host"):
            assert found.ops[key.removesuffix(".host")].host == value
    return found


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
        triggers = {f"{name}.trigger": point for name in session.graph.ops}
        triggers = {key: value for key, value in triggers.items() if key in {d.name for d in session.space.dimensions}}
        late = session.prepare(config(session, {**triggers, **ALL}), delay_us=100)
        verdict = session.verify(late)
        late.close()
        assert verdict.passed and verdict.stage == "bits", (point, verdict.message)

"""On a GPU: the paged score with every query block and every number of keys ahead of the wait writes the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.base import SessionSpec
from backends.sessions import open_session
from search_spaces.cmp import default
from search_spaces.config import NO_LIMIT_AHEAD, CmpConfig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[509, 512, 513])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Contexts that end inside a page, at its end, and with one new key in the next page."""
    opened = open_session(SessionSpec("attention_pre", {"kv": request.param}, "cuda:0", seed=3))
    yield opened
    opened.close()


def with_score(session: Any, block_m: int, rows: int, w_ahead: int) -> CmpConfig:
    """The default config with another tiling of the score. It must fit the device."""
    config = default(session.space)
    score = config.ops["E1"]
    changed = replace(score, tiling=replace(score.tiling, block_m=block_m, rows=rows), w_ahead=w_ahead)
    config = replace(config, ops={**config.ops, "E1": changed})
    session.space.check(config)
    return config


@pytest.mark.parametrize("w_ahead", [NO_LIMIT_AHEAD, 2, 0])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("block_m", [1, 2, 4, 8])
def test_every_query_block_and_prefetch_writes_the_same_bits(
    session: Any, block_m: int, rows: int, w_ahead: int
) -> None:
    run = session.prepare(default(session.space))
    assert session.verify(run).passed
    run.close()
    run = session.prepare(with_score(session, block_m, rows, w_ahead))
    verdict = session.verify(run)
    run.close()
    assert verdict.passed, verdict.message
    assert verdict.stage == "bits"


@pytest.mark.parametrize("block_m", [1, 2, 4, 8])
def test_keys_read_early_are_never_those_of_this_run(session: Any, block_m: int) -> None:
    """The key's writer sleeps while the score is resident: a page taken too early would hold poison."""
    run = session.prepare(default(session.space))
    assert session.verify(run).passed
    run.close()
    config = with_score(session, block_m, 64, NO_LIMIT_AHEAD)
    ops = {name: replace(schedule, trigger="entry") for name, schedule in config.ops.items()}
    run = session.prepare(replace(config, ops=ops), delay_us=100)
    verdict = session.verify(run)
    run.close()
    assert verdict.passed, verdict.message
    assert verdict.stage == "bits"

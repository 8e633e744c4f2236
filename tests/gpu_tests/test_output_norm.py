"""On a GPU: the output projection and its norm are right in every schedule seed, and their edge can be studied."""

from __future__ import annotations

from typing import Any

import pytest

from backends.base import SessionSpec
from backends.sessions import open_session
from search_spaces.cmp import CmpSpace, default
from tuner.edge_study import study_edge
from tuner.seeds import seeds

pytestmark = pytest.mark.gpu


def test_seeds_are_right_and_the_ceiling_is_no_slower_than_the_pair() -> None:
    session: Any = open_session(SessionSpec("output_norm", {"tokens": 16}, "cuda:0", seed=1))
    try:
        space = CmpSpace(session.graph, session.info.record)
        for seed in seeds(space):
            run = session.prepare(seed.config)
            verdict = session.verify(run)
            run.close()
            assert verdict.passed, (seed.name, verdict.message)
        study = study_edge(session, session.graph, default(space), ("O", "N"), rounds=10)
        assert study.ceiling.span_us < 1.05 * min(case.off.span_us for case in study.cases)
    finally:
        session.close()

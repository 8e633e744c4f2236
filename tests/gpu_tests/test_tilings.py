"""On a GPU: every core, token block and weight-tile height of the FP8 GEMMs gives right outputs."""

from __future__ import annotations

from typing import Any

import pytest

from backends.base import SessionSpec
from backends.plan.launches import lower
from backends.sessions import open_session
from search_spaces.cmp import serial
from search_spaces.config import CmpConfig
from tuner.alone import tilings, with_tilings

pytestmark = pytest.mark.gpu
GEMMS = ("B0", "B1", "D0", "D1")


def configs(session: Any) -> dict[str, CmpConfig]:
    """One config per (op, core, block_m, rows), with the first legal stages, residency and split."""
    found: dict[str, CmpConfig] = {}
    for name in GEMMS:
        for candidate in tilings(session.space, (name,)):
            t = candidate[name]
            found.setdefault(f"{name} {t.core} {t.block_m}x{t.rows}", with_tilings(serial(session.space), candidate))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("requests", [2, 8, 13, 32])  # 104 tokens leave a part of the last tile empty
def test_every_tile_shape_is_right(requests: int) -> None:
    session: Any = open_session(SessionSpec("attention_pre", {"requests": requests, "kv": 512}, "cuda:0", seed=5))
    try:
        drawn = configs(session)
        plans = [lower(session.graph, config, session.info.record.arch) for config in drawn.values()]
        session.kernels.build({binary for plan in plans for binary in plan.binaries()})
        for name, config in drawn.items():
            run = session.prepare(config)
            verdict = session.verify(run)
            run.close()
            assert verdict.passed, (name, verdict.message)
    finally:
        session.close()

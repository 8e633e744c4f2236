"""What a study is called."""

from __future__ import annotations

from dataclasses import replace

from backends.base import SessionSpec
from search_spaces.cmp import CmpSpace
from tests.tuner_tests.fakes import GPU
from tuner.identity import provenance_of, study_name
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape


def test_another_construction_is_another_study() -> None:
    """The same config runs another plan there, so its readings must not be taken over."""
    spec = SessionSpec("attention_pre", {}, "sim:h200")
    described = {"simulated": True, "uuid": "", "versions": {}, "protocol": {"source_hash": "abc"}, "clocks": {}}
    space, provenance = CmpSpace(build_graph(AttentionPreShape()), GPU), provenance_of(spec, described)
    names = {
        study_name(replace(spec, construction=name), space, provenance, "cmp", "tpe") for name in ("direct", "streams")
    }
    assert len(names) == 2

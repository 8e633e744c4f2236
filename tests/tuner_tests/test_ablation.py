"""Ablations: variants that differ in one thing, stages and chains of the graph, and tables on the simulated device."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import SessionSpec
from backends.measure.stats import hodges_lehmann, location_interval
from backends.plan.launches import EdgeKind, lower
from backends.sessions import open_session
from backends.simulator import calibration
from search_spaces.cmp import CmpSpace, default
from search_spaces.config import CmpConfig
from tuner.ablation import (
    DAG_PDL,
    LINEAR_ORDINARY,
    LINEAR_PDL,
    Reading,
    ablate,
    early,
    linear,
    modes,
    ordinary,
    paths,
    stages_of,
)
from tuner.alone import tilings, tune_alone
from tuner.cli import main
from tuner.edge_study import closure, parse_edge, study_edge
from tuner.errors import OptionError, StudyFailed
from tuner.legal import Repair, nearest
from workloads import registry
from workloads.attention_pre.graph import STAGES

WORKLOAD = registry.get("attention_pre")
GRAPH = WORKLOAD.graph(WORKLOAD.shape({}))
SPACE = CmpSpace(GRAPH, calibration.load("h200").gpu)


@pytest.fixture
def session() -> Any:
    return open_session(SessionSpec("attention_pre", {}, "sim:h200", seed=1))


def _random(seed: int) -> CmpConfig:
    return SPACE.decode(Repair(SPACE, seed)(SPACE.sample(random.Random(seed))))


@pytest.mark.parametrize("seed", range(8))
def test_the_four_modes_run_the_same_kernels(seed: int) -> None:
    """Only edges, and the triggers that nobody waits for, may differ."""

    def kernels(config: CmpConfig) -> set[object]:
        plan = lower(GRAPH, config, "sm_90a")
        return {replace(part, trigger=0) for part in plan.parts()}

    config = _random(seed)
    found = modes(config)
    assert found[DAG_PDL] == config
    assert len({frozenset(kernels(variant)) for variant in found.values()}) == 1


@pytest.mark.parametrize("seed", range(8))
def test_linear_is_one_chain_of_one_kind_of_edge(seed: int) -> None:
    for programmatic, kind in ((True, EdgeKind.PROGRAMMATIC), (False, EdgeKind.ORDINARY)):
        plan = lower(GRAPH, linear(_random(seed), programmatic=programmatic), "sm_90a")
        names = [node.op for node in plan.nodes]
        assert [(e.producer, e.consumer) for e in plan.edges] == list(zip(names, names[1:], strict=False))
        assert {edge.kind for edge in plan.edges} == {kind}


@pytest.mark.parametrize("seed", range(8))
def test_ordinary_keeps_the_edges_and_changes_their_kind(seed: int) -> None:
    config = _random(seed)
    before, after = (lower(GRAPH, c, "sm_90a").edges for c in (config, ordinary(config)))
    assert [(e.producer, e.consumer) for e in before] == [(e.producer, e.consumer) for e in after]
    assert {edge.kind for edge in after} == {EdgeKind.ORDINARY}


def test_early_makes_every_edge_programmatic() -> None:
    plan = lower(GRAPH, early(GRAPH, _random(3), "entry"), "sm_90a")
    assert {edge.kind for edge in plan.edges} == {EdgeKind.PROGRAMMATIC}


def test_stages_follow_the_published_order_and_keep_finalisers_with_their_producers() -> None:
    config = default(SPACE)
    assert stages_of(GRAPH, config, STAGES) == STAGES
    assert ("B0", "B0f") in stages_of(GRAPH, config)
    with pytest.raises(ValueError, match="E1"):
        stages_of(GRAPH, config, STAGES[:-1])


def test_stages_that_share_a_launch_become_one() -> None:
    ops = {**default(SPACE).ops}
    ops["C0"] = replace(ops["C0"], host="B0")
    found = stages_of(GRAPH, replace(default(SPACE), ops=ops), STAGES)
    assert [sorted(stage) for stage in found[:3]] == [["A0"], ["B0", "B0f", "C0"], ["B1", "B1f"]]
    assert sorted(name for stage in found for name in stage) == sorted(GRAPH.ops)


def test_paths_are_the_maximal_chains_of_the_graph() -> None:
    assert set(paths(GRAPH)) == {
        ("A0", "B0", "B0f", "D0", "D2"),
        ("A0", "B0", "B0f", "D1", "D1f", "E1"),
        ("A0", "C0", "D1f", "E1"),
        ("A0", "B1", "B1f", "E1"),
    }


def test_an_ablation_adds_up(session: Any) -> None:
    """Growing ends at the whole graph, the added spans sum to it, and nothing beats its bound."""
    found = ablate(session, GRAPH, default(SPACE), order=STAGES, rounds=10)
    whole = found.modes[DAG_PDL].span_us
    assert found.stages[-1].cumulative.span_us == pytest.approx(whole, rel=0.02)
    assert sum(stage.added.span_us for stage in found.stages) == pytest.approx(whole, rel=0.02)
    assert found.modes[LINEAR_ORDINARY].span_us > found.modes[LINEAR_PDL].span_us > whole
    assert found.floor.span_us < found.bound_us < whole
    assert found.simulated
    assert {"span_us", "interval_us", "samples_us"} == set(found.to_json()["stages"][0]["alone"])


def test_an_ablation_takes_shared_launches_whole(session: Any) -> None:
    ops = {**default(SPACE).ops}
    for name in ("C0", "B1"):
        ops[name] = replace(ops[name], host="B0")
    found = ablate(session, GRAPH, replace(default(SPACE), ops=ops), order=STAGES, rounds=3)
    assert found.stages[1].name == "B0+C0+B1+B0f+B1f" or set(found.stages[1].ops) == {"C0", "B1", "B1f", "B0", "B0f"}


def test_a_wrong_config_is_not_taken_apart(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.base import Verdict

    monkeypatch.setattr(session, "verify", lambda run: Verdict(False, "bits", "q_nope: 3 bytes differ"))
    with pytest.raises(StudyFailed, match="q_nope: 3 bytes differ"):
        ablate(session, GRAPH, default(SPACE), order=STAGES, rounds=3)


def test_an_edge_study_orders_the_wait_points_and_its_ceiling_is_lowest() -> None:
    ops = closure(GRAPH, ("A0", "B0"))
    assert ops == ("A0", "B0")
    part = GRAPH.subgraph(ops)
    session: Any = open_session(SessionSpec("attention_pre", {}, "sim:h200", ops=ops))
    found = study_edge(session, part, default(CmpSpace(part, session.info.record)), ("A0", "B0"), rounds=10)
    spans = [found.case(wait).on["entry"].span_us for wait in ("entry", "after_setup", "a_loader_only")]
    assert spans == sorted(spans, reverse=True)
    assert all(found.ceiling.span_us < 1.01 * case.on[case.best_trigger].span_us for case in found.cases)
    assert found.ceiling.span_us < 0.9 * found.case("entry").on["entry"].span_us
    assert all(case.saved.interval_us[0] > 0 for case in found.cases)


def test_closure_holds_everything_that_an_edge_needs() -> None:
    assert closure(GRAPH, ("D0", "D2")) == ("A0", "B0", "B0f", "D0", "D2")
    GRAPH.subgraph(closure(GRAPH, ("D1f", "E1")))


def test_an_edge_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match=r"'A0>E1' is no edge of attention_pre: use one of A0>B0"):
        parse_edge("A0>E1", GRAPH)
    assert parse_edge("D0>D2", GRAPH) == ("D0", "D2")


def test_the_commands_print_their_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "attention_pre", "--device", "sim:h200", "--rounds", "5"]) == 0
    text = capsys.readouterr().out
    assert "predicted by a model" in text
    assert "DAG, PDL" in text
    assert "A0+B0+B0f+D0+D2" in text
    assert main(["edge", "attention_pre", "--device", "sim:h200", "--edge", "B0f>D0", "--rounds", "5"]) == 0
    assert "a_loader_only" in capsys.readouterr().out
    assert main(["edge", "attention_pre", "--device", "sim:h200", "--edge", "A0>E1"]) == 2
    assert main(["ablate", "attention_pre", "--device", "sim:h200", "--rounds", "1"]) == 2
    assert "rounds=1 is out of range" in capsys.readouterr().err


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=40))
def test_a_location_interval_holds_its_centre(samples: list[float]) -> None:
    low, high = location_interval(samples)
    assert low <= hodges_lehmann(samples) <= high


def test_a_location_interval_covers_as_often_as_it_says() -> None:
    rng = random.Random(5)
    inside = 0
    for _ in range(200):
        low, high = location_interval([30.0 + rng.gauss(0.0, 0.3) for _ in range(30)], level=0.9)
        inside += low <= 30.0 <= high
    assert 168 <= inside <= 192


def test_a_location_interval_of_a_worked_example() -> None:
    """Ten readings 1 to 10: the signed-rank interval near 95 % runs from the 9th pairwise mean to the 9th last."""
    means = sorted((a + b) / 2 for a in range(1, 11) for b in range(a, 11))
    assert location_interval([float(x) for x in range(1, 11)]) == (means[8], means[-9])


def test_the_difference_of_readings_is_taken_round_by_round() -> None:
    assert Reading((3.0, 5.0)).less(Reading((1.0, 2.0))).samples_us == (2.0, 3.0)


# --- Kernel by kernel ---


def test_every_legal_tiling_of_a_stage_is_raced_once() -> None:
    found = [t["D0"] for t in tilings(SPACE, ("D0",))]
    assert len(set(found)) == len(found)
    assert found[0] == default(SPACE).ops["D0"].tiling
    assert all(SPACE.refusal("D0", tiling) is None for tiling in found)
    assert {t.rows for t in found} >= {64, 128}


def test_kernels_are_tuned_alone_and_none_is_slower_than_untuned(session: Any) -> None:
    config, races = tune_alone(session, SPACE, order=STAGES, heats=((3, 8), (5, 1)))
    assert [race.stage[0] for race in races] == ["C0", "B1", "B0", "D0", "D1", "D2", "E1"]
    assert set(config.streams) == {0}
    assert not config.programmatic
    for race in races:
        assert race.reading.span_us <= race.untuned.span_us * 1.01
        assert {n: config.ops[n].tiling for n in race.stage} == race.winner


def test_a_wrong_tiling_cannot_win(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.base import Verdict

    right = session.verify

    def verify(run: Any) -> Verdict:
        rows = next(p.binary.tiling.rows for p in run.plan.parts() if p.op == "D0")
        return Verdict(False, "bits", "q_nope: 1 byte differs") if rows == 128 else right(run)

    monkeypatch.setattr(session, "verify", verify)
    _, races = tune_alone(session, SPACE, order=STAGES, heats=((3, 8), (5, 1)))
    race = next(race for race in races if race.stage == ("D0",))
    assert race.winner["D0"].rows == 64
    assert race.refused > 0
    assert race.reason == "bits check: q_nope: 1 byte differs"


def test_a_start_of_another_shape_becomes_a_legal_neighbour() -> None:
    graph = WORKLOAD.graph(WORKLOAD.shape({"requests": 8}))
    wide = CmpSpace(graph, SPACE.gpu)
    config = _random(4)
    near = nearest(wide, config)
    wide.check(near)
    assert near.order == config.order
    assert near.streams == config.streams
    assert near.ops["B0"].tiling.rows == config.ops["B0"].tiling.rows
    assert nearest(SPACE, config) == config
    with pytest.raises(OptionError, match="a start schedules A0, but attention_pre has"):
        nearest(SPACE, config.restricted(("A0",)))


def test_the_winners_start_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    device = ["--device", "sim:h200"]
    assert main(["kernels", "attention_pre", *device, "--out", str(out)]) == 0
    assert "D0: core wgmma" in capsys.readouterr().out
    start = ["--start", str(out), "--storage", f"journal:{tmp_path}/j", "--results", str(tmp_path / "best")]
    assert main(["tune", "attention_pre", *device, "--trials", "20", *start]) in (0, 3)
    assert main(["kernels", "attention_pre", *device, "--out", str(tmp_path / "none" / "x.json")]) == 2
    assert "is no folder" in capsys.readouterr().err

"""The modelled GPU: determinism, launch semantics on hand-computed examples, sane orderings, sourced constants."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import SessionSpec
from backends.errors import DeviceError
from backends.plan.launches import POINTS, EdgeKind, LaunchPlan, PlanEdge, lower
from backends.sessions import open_session
from backends.simulator.calibration import FOLDER, Calibration, load, names
from backends.simulator.model import predict
from backends.simulator.session import SimulatedSession
from search_spaces.cmp import CmpSpace, default, serial
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as build_chain

H200 = load("h200")
CHAIN = build_chain(PdlChainShape(layers=3, n=1024))
LAYER = build_graph(AttentionPreShape())


def chain_plan(kind: EdgeKind, trigger: str = "none") -> LaunchPlan:
    """Three layers in a chain with edges of one kind."""
    plan = lower(CHAIN, serial(CmpSpace(CHAIN, H200.gpu)), "sm_90a")
    nodes = tuple(replace(node, trigger=POINTS[trigger]) for node in plan.nodes)
    return replace(plan, nodes=nodes, edges=tuple(PlanEdge(e.producer, e.consumer, kind) for e in plan.edges))


def test_an_ordinary_consumer_starts_one_hand_off_after_its_producer_ends() -> None:
    ops = predict(CHAIN, chain_plan(EdgeKind.ORDINARY), H200).ops
    for before, after in (("L0", "L1"), ("L1", "L2")):
        assert ops[after].start_us == pytest.approx(ops[before].end_us + H200.ordinary_us)


def test_a_programmatic_consumer_starts_after_the_trigger_and_reads_after_the_end() -> None:
    ops = predict(CHAIN, chain_plan(EdgeKind.PROGRAMMATIC, "entry"), H200).ops
    assert ops["L1"].start_us == pytest.approx(ops["L0"].start_us + H200.early_us)
    assert ops["L1"].input_us >= ops["L0"].end_us + H200.wait_us - 1e-6


def test_without_a_trigger_a_programmatic_edge_fires_at_the_end() -> None:
    ops = predict(CHAIN, chain_plan(EdgeKind.PROGRAMMATIC), H200).ops
    assert ops["L1"].start_us == pytest.approx(ops["L0"].end_us + min(H200.early_us, H200.ordinary_us))


def test_early_launch_never_slows_a_chain() -> None:
    ordinary = predict(CHAIN, chain_plan(EdgeKind.ORDINARY), H200).span_us
    assert all(
        predict(CHAIN, chain_plan(EdgeKind.PROGRAMMATIC, trigger), H200).span_us <= ordinary for trigger in POINTS
    )


@given(st.floats(1.05, 4.0))
def test_more_bandwidth_never_slows_a_chain(factor: float) -> None:
    plan = lower(LAYER, serial(CmpSpace(LAYER, H200.gpu)), "sm_90a")
    faster: Calibration = replace(H200, hbm_rate=H200.hbm_rate * factor)
    assert predict(LAYER, plan, faster).span_us <= predict(LAYER, plan, H200).span_us + 1e-6


@pytest.mark.parametrize("name", ["h200", "b300"])
def test_the_headline_orders_as_measured(name: str) -> None:
    session = SimulatedSession(SessionSpec("attention_pre", {}, f"sim:{name}"))
    base = default(session.space)
    spans = [
        session.prepare(config).timeline.span_us
        for config in (serial(session.space), replace(base, programmatic=frozenset()), base)
    ]
    assert spans[0] > spans[1] > spans[2] > session.floor_us()


def test_readings_repeat_for_a_fresh_session_and_are_marked() -> None:
    runs = []
    for _ in range(2):
        session = SimulatedSession(SessionSpec("attention_pre", {}, "sim:b300"))
        run = session.prepare(default(session.space))
        assert session.verify(run).stage == "plan"
        runs.append(session.measure([run], 5))
        assert session.info.simulated
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 1


def test_each_constant_names_its_source() -> None:
    for name in names():
        document = json.loads((FOLDER / f"{name}.json").read_text())
        assert document["gpu_source"]
        assert all(entry["unit"] and entry["source"] for entry in document["constants"].values())


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="sim:b300, sim:h200"):
        open_session(SessionSpec("attention_pre", {}, "sim:h900"))

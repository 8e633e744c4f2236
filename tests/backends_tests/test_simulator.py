"""The modelled GPU: determinism, launch semantics on hand-computed examples, sane orderings, sourced constants."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import SessionSpec
from backends.errors import DeviceError
from backends.plan.launches import POINTS, EdgeKind, LaunchPlan, PlanEdge, lower
from backends.sessions import open_session
from backends.simulator.calibration import FOLDER, Calibration, load, names
from backends.simulator.cost import kernel_cost, splits_of
from backends.simulator.model import Model, predict
from backends.simulator.session import TIMER_US, SimulatedSession
from backends.simulator.slots import Demand, Slots
from search_spaces.cmp import CmpSpace, default, default_tiling, serial
from search_spaces.config import MegakernelConfig
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.ops import compulsory_bytes
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as build_chain

H200 = load("h200")
CHAIN = build_chain(PdlChainShape(layers=3, n=1024))
LAYER = build_graph(AttentionPreShape())
SPACE = CmpSpace(LAYER, H200.gpu)
SERIAL = lower(LAYER, serial(SPACE), "sm_90a")
PLAIN = lower(LAYER, replace(default(SPACE), programmatic=frozenset()), "sm_90a")
TRIGGERS = tuple(POINTS)
SLOW_US = 5.0  # so long that what may go ahead has gone ahead
ONE_CTA: dict[str, Any] = {"tiles": (1, 1, 1), "ctas_x": 1}
SLOW = replace(H200, row_us={**H200.row_us, "scale_bias_relu": SLOW_US})


def chain_plan(kind: EdgeKind, trigger: str = "none", wait: str = "none") -> LaunchPlan:
    """Three layers of one CTA each in a chain with edges of one kind."""
    plan = lower(CHAIN, serial(CmpSpace(CHAIN, H200.gpu)), "sm_90a")
    nodes = tuple(
        replace(
            node, parts=(replace(node.parts[0], **ONE_CTA, trigger=POINTS[trigger], wait=POINTS[wait] if i else 0),)
        )
        for i, node in enumerate(plan.nodes)
    )
    return replace(plan, nodes=nodes, edges=tuple(PlanEdge(e.producer, e.consumer, kind) for e in plan.edges))


def edges_of(plan: LaunchPlan, *edges: tuple[str, str, EdgeKind]) -> LaunchPlan:
    return replace(plan, edges=tuple(PlanEdge(*edge) for edge in edges))


def row_time(plan: LaunchPlan) -> tuple[float, float]:
    """Of one CTA of the chain: from start to the end of its issue of loads, and from its inputs' issue to its end."""
    cost = kernel_cost(CHAIN, plan.node("L1").parts[0], splits_of(CHAIN, plan), H200)
    copies = cost.input_latency_us + cost.input_bytes / H200.sm_bytes_per_us
    return H200.start_us + cost.set_up_us, copies + cost.body_us + H200.flush_us


# Launch semantics, on one-CTA kernels.


def test_a_lone_kernel_takes_its_own_time_and_one_hand_off() -> None:
    graph = build_chain(PdlChainShape(layers=1, n=1024))
    plan = lower(graph, serial(CmpSpace(graph, H200.gpu)), "sm_90a")
    line = predict(graph, plan, H200)
    (times,) = line.ops.values()
    assert times.start_us == pytest.approx(H200.ordinary_us)
    assert line.span_us == pytest.approx(times.end_us + H200.ordinary_us - H200.bracket_us)


def test_an_ordinary_consumer_starts_one_hand_off_after_its_producer_ends() -> None:
    ops = predict(CHAIN, chain_plan(EdgeKind.ORDINARY), H200).ops
    for before, after in (("L0", "L1"), ("L1", "L2")):
        assert ops[after].start_us == pytest.approx(ops[before].end_us + H200.ordinary_us)


def test_a_programmatic_consumer_starts_after_the_trigger_and_reads_after_the_end() -> None:
    plan = chain_plan(EdgeKind.PROGRAMMATIC, "entry")
    ops = predict(CHAIN, plan, SLOW).ops
    entry = ops["L0"].start_us + H200.start_us
    assert ops["L1"].start_us == pytest.approx(entry + H200.early_us)
    assert ops["L1"].input_us == pytest.approx(ops["L0"].end_us + H200.wait_us)
    # The third starts on the second's trigger, long before the first has ended, and still reads after the second.
    assert ops["L2"].start_us == pytest.approx(ops["L1"].start_us + H200.start_us + H200.early_us)
    assert ops["L2"].start_us < ops["L0"].end_us
    assert ops["L2"].input_us == pytest.approx(ops["L1"].end_us + H200.wait_us)


def test_a_resident_consumer_has_only_its_inputs_left_after_the_wait() -> None:
    plan = chain_plan(EdgeKind.PROGRAMMATIC, "entry")
    ops = predict(CHAIN, plan, SLOW).ops
    _, after = row_time(plan)
    own = after - H200.row_us["scale_bias_relu"] + SLOW_US
    assert ops["L1"].end_us == pytest.approx(ops["L1"].input_us + own)
    assert ops["L1"].stalls["wait"] == pytest.approx(ops["L1"].input_us - ops["L1"].start_us - row_time(plan)[0])


def test_a_wait_at_entry_leaves_set_up_and_weights_for_afterwards() -> None:
    early, late = (
        predict(CHAIN, plan, SLOW).ops["L1"]
        for plan in (chain_plan(EdgeKind.PROGRAMMATIC, "entry", wait) for wait in ("none", "entry"))
    )
    assert late.input_us == pytest.approx(early.input_us)
    assert late.end_us >= early.end_us + H200.row_set_up_us


def test_without_a_trigger_a_programmatic_edge_fires_at_the_end() -> None:
    ops = predict(CHAIN, chain_plan(EdgeKind.PROGRAMMATIC), H200).ops
    assert ops["L1"].start_us == pytest.approx(ops["L0"].end_us + H200.early_us)


@pytest.mark.parametrize("soft", [True, False])
def test_a_join_starts_at_the_later_of_its_edges_and_reads_after_both(soft: bool) -> None:
    kinds = EdgeKind.PROGRAMMATIC, EdgeKind.PROGRAMMATIC if soft else EdgeKind.ORDINARY
    plan = edges_of(chain_plan(EdgeKind.PROGRAMMATIC, "entry"), ("L0", "L2", kinds[0]), ("L1", "L2", kinds[1]))
    ops = predict(CHAIN, plan, SLOW).ops
    if soft:
        assert ops["L2"].start_us == pytest.approx(ops["L1"].start_us + H200.start_us + H200.early_us)
    else:
        assert ops["L2"].start_us == pytest.approx(ops["L1"].end_us + H200.ordinary_us)
    assert ops["L2"].input_us >= max(ops["L0"].end_us, ops["L1"].end_us)


def test_each_further_consumer_of_a_producer_starts_later() -> None:
    plan = chain_plan(EdgeKind.ORDINARY)
    ops = predict(CHAIN, edges_of(plan, *((("L0", c, EdgeKind.ORDINARY)) for c in ("L1", "L2"))), H200).ops
    assert ops["L2"].start_us == pytest.approx(ops["L1"].start_us + H200.fan_out_us)


def test_a_cycle_is_refused() -> None:
    plan = edges_of(chain_plan(EdgeKind.ORDINARY), ("L1", "L2", EdgeKind.ORDINARY), ("L2", "L1", EdgeKind.ORDINARY))
    with pytest.raises(ValueError, match="L1, L2 never end"):
        predict(CHAIN, plan, H200)


# Residency.


def test_residents_keep_their_slots_and_others_wait_for_room() -> None:
    plan = chain_plan(EdgeKind.PROGRAMMATIC, "entry")
    small = replace(H200, gpu=replace(H200.gpu, sm_count=1, threads_per_sm=plan.nodes[0].threads))
    ops = predict(CHAIN, plan, small).ops
    assert ops["L1"].start_us == pytest.approx(ops["L0"].end_us)
    assert ops["L1"].stalls["slot"] > 0


def test_ctas_spread_before_they_stack_and_free_their_room() -> None:
    gpu = GpuRecord("test", "sm_90a", 4, 1 << 20, 100_000, 99_000)
    slots, demand = Slots(gpu), Demand(256, 40_000, 10_000)
    assert slots.capacity(demand) == 8
    assert slots.place(0, demand, 3) == (3, 1)
    assert slots.place(1, demand, 9) == (5, 2)
    assert slots.place(2, demand, 1) == (0, 0)
    slots.release(0, demand)
    assert slots.capacity(demand) == 3
    slots.release(1, demand)
    assert slots.capacity(demand) == 8


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3)), max_size=12))
def test_room_is_never_lost_or_made(steps: list[tuple[int, int]]) -> None:
    slots, demands = Slots(H200.gpu), [Demand(320, 70_000 * k // 2, 320 * 48) for k in (1, 2, 3)]
    before = [slots.capacity(d) for d in demands]
    placed = []
    for number, (wanted, kind) in enumerate(steps):
        room = slots.capacity(demands[kind - 1])
        count, _ = slots.place(number, demands[kind - 1], wanted)
        assert count == min(wanted, room)
        placed.append((number, demands[kind - 1]))
    for number, demand in placed:
        slots.release(number, demand)
    assert [slots.capacity(d) for d in demands] == before


# Orderings.


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_early_launch_never_slows_a_chain(trigger: str) -> None:
    ordinary = predict(CHAIN, chain_plan(EdgeKind.ORDINARY), H200).span_us
    assert predict(CHAIN, chain_plan(EdgeKind.PROGRAMMATIC, trigger), H200).span_us <= ordinary


@settings(max_examples=25)
@given(st.floats(1.05, 4.0), st.sampled_from(["hbm_bytes_per_us", "l2_bytes_per_us"]))
def test_more_bandwidth_never_slows_a_chain(factor: float, rate: str) -> None:
    faster = replace(H200, **{rate: getattr(H200, rate) * factor})
    assert predict(LAYER, SERIAL, faster).span_us <= predict(LAYER, SERIAL, H200).span_us + 1e-6


@settings(max_examples=25)
@given(
    st.floats(0.0, 2.0),
    st.sampled_from(["ordinary_us", "start_us", "set_up_us", "tail_us", "load_latency_us", "input_latency_us"]),
)
def test_longer_latencies_never_shorten_a_chain(extra: float, name: str) -> None:
    slower = replace(H200, **{name: getattr(H200, name) + extra})
    assert predict(LAYER, SERIAL, slower).span_us >= predict(LAYER, SERIAL, H200).span_us - 1e-6


def test_branches_pay_off_and_bytes_bound_from_below() -> None:
    floor = Model(LAYER, H200).floor_us(compulsory_bytes(LAYER))
    assert predict(LAYER, SERIAL, H200).span_us > predict(LAYER, PLAIN, H200).span_us > floor


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_any_legal_plan_ends_and_keeps_to_its_edges(seed: int) -> None:
    rng = random.Random(seed)
    base = default(SPACE)
    names_of = list(LAYER.ops)
    schedules = {
        n: replace(s, trigger=rng.choice(TRIGGERS), priority=rng.randrange(3), w_ahead=rng.choice((0, 2, 64)))
        for n, s in base.ops.items()
    }
    streams = tuple(rng.randrange(4) for _ in names_of)
    programmatic = frozenset(e for e in LAYER.op_edges() if rng.random() < 0.7)
    config = replace(base, ops=schedules, streams=streams, programmatic=programmatic)
    plan = lower(LAYER, config, "sm_90a")
    line = predict(LAYER, plan, H200)
    for edge in plan.edges:
        producer, consumer = line.ops[edge.producer], line.ops[edge.consumer]
        assert consumer.input_us >= producer.end_us
        assert edge.kind is EdgeKind.PROGRAMMATIC or consumer.start_us >= producer.end_us
    assert sum(p.ctas for p in line.placements) == sum(node.ctas for node in plan.nodes)
    assert set(line.critical) <= set(line.ops) and min(min(t.stalls.values()) for t in line.ops.values()) >= -1e-6
    assert line == predict(LAYER, plan, H200)


def test_kept_costs_change_nothing() -> None:
    model = Model(LAYER, H200)
    assert [model.predict(p) for p in (SERIAL, PLAIN, SERIAL)] == [
        predict(LAYER, p, H200) for p in (SERIAL, PLAIN, SERIAL)
    ]


# Sessions and calibrations.


@pytest.mark.parametrize("name", ["h200", "b300"])
def test_the_headline_orders_as_measured(name: str) -> None:
    session = SimulatedSession(SessionSpec("attention_pre", {}, f"sim:{name}"))
    base = default(session.space)
    spans = [
        session.prepare(config).span_us
        for config in (serial(session.space), replace(base, programmatic=frozenset()), base)
    ]
    assert spans[0] > spans[1] > spans[2] > session.floor_us()


def test_readings_repeat_for_a_fresh_session_and_are_marked() -> None:
    runs = []
    for _ in range(2):
        session = SimulatedSession(SessionSpec("attention_pre", {}, "sim:b300"))
        run = session.prepare(default(session.space))
        verdict = session.verify(run)
        assert (verdict.passed, verdict.stage, verdict.message) == (True, "plan", "")
        runs.append(session.measure([run], 9))
        assert session.info.simulated and session.info.uuid == "sim-b300"
    assert runs[0] == runs[1]
    readings = runs[0][0]
    assert len(set(readings)) > 1
    assert all(r == pytest.approx(round(r / TIMER_US) * TIMER_US) for r in readings)
    assert sum(readings) / 9 == pytest.approx(run.span_us, rel=0.02)


def test_weights_that_fit_l2_come_from_it_when_warm() -> None:
    warm, cold = (
        SimulatedSession(SessionSpec("attention_pre", {}, "sim:b300", ops=("A0", "B0", "B0f"), l2=l2))
        for l2 in ("warm", "cold")
    )
    assert warm.prepare(serial(warm.space)).span_us < cold.prepare(serial(cold.space)).timeline.span_us


def test_what_has_no_model_or_another_owner_is_refused() -> None:
    session = SimulatedSession(SessionSpec("attention_pre", {}, "sim:h200"))
    tilings = {name: default_tiling(session.graph, name, session.space.gpu) for name in session.graph.ops}
    with pytest.raises(IllegalConfig, match="megakernel"):
        session.prepare(MegakernelConfig(tilings, tuple(session.graph.ops)))
    with pytest.raises(TypeError, match="another session"):
        session.verify(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_each_constant_has_a_unit_and_a_source(name: str) -> None:
    document = json.loads((FOLDER / f"{name}.json").read_text())
    entries = {**document["gpu"], **document["constants"]}
    assert all(set(e) == {"value", "unit", "source"} and e["unit"] and e["source"] for e in entries.values())
    assert set(document["constants"]) == {f.name for f in fields(Calibration)} - {"name", "digest", "gpu"}
    assert load(name).gpu.sm_count == document["gpu"]["sm_count"]["value"]


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="sim:b300, sim:h200"):
        open_session(SessionSpec("attention_pre", {}, "sim:h900"))

"""On a GPU: what a capture does, and that both constructions give the expected edges and the same bits."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from backends.base import SessionSpec
from backends.cmp import capture
from backends.cmp.capture import StreamPool
from backends.cuda import driver
from backends.errors import CudaFailed, GraphMismatch
from backends.plan.launches import EdgeKind, lower
from backends.plan.outline import END, REFRESH, START
from backends.plan.streams import Event, Launch, StreamProgram, Wait, expected_edges, expressible, stream_program
from backends.sessions import open_session
from search_spaces.cmp import default
from search_spaces.errors import IllegalConfig
from tuner.seeds import seeds

pytestmark = pytest.mark.gpu
DRAWN = 12  # random points; about one in three can be said in streams


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    opened = open_session(SessionSpec("attention_pre", {"kv": 512}, "cuda:0", seed=3))
    yield opened
    opened.close()


def drawn(session: Any) -> list[Any]:
    """Expressible configs of random points with default tilings, stream-order edges among them."""
    found: list[Any] = []
    tilings = default(session.space).ops
    for seed in range(1000):
        config = session.space.decode(session.space.sample(random.Random(seed)))
        ops = {name: replace(s, tiling=tilings[name].tiling, grid_cap=0) for name, s in config.ops.items()}
        config = replace(config, ops=ops)
        if seed % 3:
            config = replace(config, launch_completion=frozenset())
        try:
            session.space.check(config)
            plan = lower(session.graph, config, session.info.record.arch)
        except IllegalConfig:
            continue
        if expressible(plan) is None:
            found.append(config)
        if len(found) == DRAWN:
            break
    return found


def named(plan: Any, graph: driver.Graph) -> set[tuple[str, str, str]]:
    """The edges that the driver holds between the plan's nodes."""
    names = (REFRESH, START, *(node.op for node in plan.nodes), END)
    found = {(names[p], names[c], kind) for p, c, kind in graph.edges()}
    return {edge for edge in found if not {*edge[:2]} & {REFRESH, START, END}}


def check_both(session: Any, config: Any, **options: Any) -> int:
    """Verdicts, edges and bits of both constructions; the number of stream-order edges."""
    import torch

    direct = session.prepare(config, **options)
    streams = session.prepare(config, construction="streams", **options)
    plan = lower(session.graph, config, session.info.record.arch)
    try:
        wanted = {(e.producer, e.consumer, e.kind.value) for e in expected_edges(plan)}
        assert {tuple(sorted(named(plan, graph))) for graph in streams.graphs} == {tuple(sorted(wanted))}
        assert named(plan, direct.graphs[0]) == {(e.producer, e.consumer, e.kind.value) for e in plan.edges}
        assert session.verify(direct).passed
        verdict = session.verify(streams)
        assert verdict.passed and verdict.stage == "bits", verdict.message
        for variant in (0, 1):
            got, same = session.outputs(streams, variant), session.outputs(direct, variant)
            for name, tensor in same.items():
                bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got[name], tensor)]
                assert torch.equal(*bits), name
    finally:
        direct.close()
        streams.close()
    return len(wanted) - len(plan.edges)


def test_both_constructions_of_every_seed_agree(session: Any) -> None:
    for seed in seeds(session.space):
        assert check_both(session, seed.config) == 0, seed.name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_both_constructions_of_random_points_agree(session: Any) -> None:
    configs = drawn(session)
    added = [check_both(session, config) for config in configs]
    assert any(added), "no point has a stream-order edge"


def test_delayed_producers_change_no_bit_in_streams(session: Any) -> None:
    check_both(session, default(session.space), delay_us=100)


def test_launch_completion_and_shared_launches_agree(session: Any) -> None:
    config = default(session.space)
    begun = frozenset(edge for edge in config.programmatic if edge[0] == "A0")
    check_both(session, replace(config, programmatic=config.programmatic - begun, launch_completion=begun))
    ops = {**config.ops, "C0": replace(config.ops["C0"], host="B0"), "D1": replace(config.ops["D1"], priority=2)}
    check_both(session, replace(config, ops=ops))


# --- What the programs rely on ---


class Rules:
    """Captures of one-thread kernels on two streams and an origin."""

    def __init__(self, session: Any) -> None:
        self.pool = StreamPool()
        self.streams = self.pool.streams(range(3))
        self.tokens = [driver.create_event() for _ in range(4)]
        self._kernel = session.kernels.system("stamp")
        self._arguments = [ctypes.c_void_p(session._stamps)]
        self.capture = driver.Capture(self.streams[0])
        self.nodes: list[Any] = []

    def launch(self, stream: int, **attributes: Any) -> None:
        node = self.capture.launch(self.streams[stream], self._kernel, (1, 1, 1), 1, 0, self._arguments, **attributes)
        self.nodes.append(node)

    def pass_on(self, token: int, source: int, target: int) -> None:
        self.capture.record(self.streams[source], self.tokens[token])
        self.capture.wait(self.streams[target], self.tokens[token])

    def edges(self) -> set[tuple[int, int, str]]:
        try:
            graph = self.capture.end(self.nodes)
            found = graph.edges()
            graph.close()
            return found
        finally:
            for token in self.tokens:
                driver.destroy_event(token)
            self.pool.close()


def test_stream_order_and_serialization(session: Any) -> None:
    rules = Rules(session)
    rules.launch(0)
    rules.launch(0, early=True)
    rules.launch(0)
    assert rules.edges() == {(0, 1, "programmatic"), (1, 2, "ordinary")}


@pytest.mark.parametrize(("at_start", "kind"), [(False, "programmatic"), (True, "launch_completion")])
def test_an_event_that_the_launch_signals_types_the_edge(session: Any, at_start: bool, kind: str) -> None:
    rules = Rules(session)
    rules.launch(0, event=rules.tokens[0], at_start=at_start)
    rules.capture.wait(rules.streams[1], rules.tokens[0])
    rules.launch(1)
    rules.pass_on(1, 1, 0)
    assert rules.edges() == {(0, 1, kind)}


def test_serialization_turns_an_ordinary_event_programmatic(session: Any) -> None:
    rules = Rules(session)
    rules.launch(0)
    rules.pass_on(0, 0, 1)
    rules.launch(1)
    rules.pass_on(1, 1, 0)
    rules.launch(0, early=True)
    rules.pass_on(2, 1, 0)
    assert rules.edges() == {(0, 1, "ordinary"), (0, 2, "programmatic"), (1, 2, "programmatic")}


def test_a_plain_launch_keeps_both_kinds_and_the_implied_stream_order_edge(session: Any) -> None:
    rules = Rules(session)
    rules.launch(0, event=rules.tokens[0])
    rules.capture.wait(rules.streams[1], rules.tokens[0])
    rules.launch(1, event=rules.tokens[1])
    rules.capture.wait(rules.streams[0], rules.tokens[1])
    rules.launch(0)
    rules.pass_on(2, 1, 0)
    assert rules.edges() == {(0, 1, "programmatic"), (0, 2, "ordinary"), (1, 2, "programmatic")}


# --- Planted faults ---


def test_a_program_with_a_fault_is_refused_and_the_session_goes_on(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lower(session.graph, default(session.space), session.info.record.arch)
    program = stream_program(plan, bracketed=True)

    def planted(actions: Any) -> Any:
        wrong = StreamProgram(program.origin, tuple(actions), program.edges)
        return lambda *_, **__: wrong

    # D1f waits for D1 and C0 on a stream of its own: without one of the waits it is still captured.
    wait = next(a for a in program.actions if isinstance(a, Wait) and a.event == Event("C0", EdgeKind.PROGRAMMATIC))
    with monkeypatch.context() as patched:
        patched.setattr(capture, "stream_program", planted(a for a in program.actions if a != wait))
        with pytest.raises(GraphMismatch, match="programmatic edge C0 -> D1f is missing"):
            session.prepare(default(session.space), construction="streams")
    unjoined = program.actions[: max(i for i, a in enumerate(program.actions) if isinstance(a, Launch)) + 1]
    with monkeypatch.context() as patched:
        patched.setattr(capture, "stream_program", planted(unjoined))
        with pytest.raises(CudaFailed, match="UNJOINED"):
            session.prepare(default(session.space), construction="streams")
    run = session.prepare(default(session.space), construction="streams")
    assert session.verify(run).passed
    run.close()

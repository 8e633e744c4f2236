"""What PDL is worth on one edge: a producer, a consumer, and where the consumer waits.

The consumer's math, tiles and epilogue stay the same; only its wait moves. `entry` waits before anything else,
`after_setup` once barriers and descriptors stand, `a_loader_only` lets every weight stage be issued before the wait.
Each is read with an ordinary and with a programmatic edge, beside a ceiling: the same launches with kernels that never
wait, so that nothing is left of the edge but the consumer's early start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from backends.base import Executable, Session
from backends.plan.launches import EdgeKind, PlanEdge, unordered
from search_spaces.config import NO_LIMIT_AHEAD, WAITS, CmpConfig
from tuner.ablation import ROUNDS, Bench, Reading
from tuner.errors import OptionError
from workloads.graph import OpGraph

MOST_EDGES = 16  # that a refusal lists
TRIGGERS = ("entry", "inputs_read", "stored")


@dataclass(frozen=True)
class WaitCase:
    """One wait point.

    Attributes:
        wait: where the consumer waits.
        off: spans of the pair with an ordinary edge.
        on: spans with a programmatic edge, by the producer's trigger point.
    """

    wait: str
    off: Reading
    on: dict[str, Reading]

    @property
    def best_trigger(self) -> str:
        return min(self.on, key=lambda trigger: self.on[trigger].span_us)

    @property
    def saved(self) -> Reading:
        """What PDL takes off the span at the best trigger; negative where it costs."""
        return self.off.less(self.on[self.best_trigger])


@dataclass(frozen=True)
class EdgeStudy:
    """The cases of one edge.

    Attributes:
        producer: op name.
        consumer: op name.
        cases: by wait point.
        ceiling: the two kernels without the dependency. For timing only: what they write means nothing.
        simulated: whether a model made the numbers.
    """

    producer: str
    consumer: str
    cases: tuple[WaitCase, ...]
    ceiling: Reading
    simulated: bool

    def case(self, wait: str) -> WaitCase:
        return next(case for case in self.cases if case.wait == wait)

    def to_json(self) -> dict[str, Any]:
        return {
            "edge": f"{self.producer}>{self.consumer}",
            "cases": [
                {
                    "wait": case.wait,
                    "off": case.off.to_json(),
                    "on": {trigger: reading.to_json() for trigger, reading in case.on.items()},
                    "best_trigger": case.best_trigger,
                    "saved": case.saved.to_json(),
                }
                for case in self.cases
            ],
            "ceiling": self.ceiling.to_json(),
            "simulated": self.simulated,
        }


def parse_edge(text: str, graph: OpGraph) -> tuple[str, str]:
    """An edge of a graph as `PRODUCER>CONSUMER`.

    Raises:
        OptionError: it is none; the text lists those there are.
    """
    producer, _, consumer = text.partition(">")
    edges = graph.op_edges()
    if (producer, consumer) not in edges:
        known = " ".join(f"{p}>{c}" for p, c in edges[:MOST_EDGES]) + (" ..." if len(edges) > MOST_EDGES else "")
        raise OptionError(f"{text!r} is no edge of {graph.name}: use one of {known}")
    return producer, consumer


def closure(graph: OpGraph, ops: tuple[str, ...]) -> tuple[str, ...]:
    """Ops and everything that they depend on, in graph order: the smallest sub-graph that can be checked."""
    needed = set(ops)
    for name in reversed(list(graph.ops)):
        if name in needed:
            needed |= {p for p, c in graph.op_edges() if c == name}
    return tuple(name for name in graph.ops if name in needed)


def study_edge(
    session: Session,
    graph: OpGraph,
    config: CmpConfig,
    edge: tuple[str, str],
    *,
    rounds: int = ROUNDS,
    alive: Callable[[], None] = lambda: None,
) -> EdgeStudy:
    """Reads every case of an edge in one interleaved run.

    Args:
        session: of `graph`, which must hold the edge and what it depends on.
        graph: the session's op graph.
        config: the kernels.
        edge: producer and consumer.
        rounds: paired rounds of each case.
        alive: called between measuring calls.

    Raises:
        StudyFailed: a case's outputs are wrong.
        MeasurementVoid: the machine stays disturbed.
    """
    cases: list[tuple[str, str]] = [(wait, trigger) for wait in WAITS for trigger in ("", *TRIGGERS)]
    with Bench(session, graph, session.info.record.arch) as bench:
        runs = []
        for wait, trigger in cases:
            variant = _variant(graph, config, edge, wait, trigger)
            runs.append(_pair(bench, variant, edge, EdgeKind.PROGRAMMATIC if trigger else EdgeKind.ORDINARY))
        free = _variant(graph, config, edge, "a_loader_only", "entry")
        runs.append(_pair(bench, free, edge, EdgeKind.PROGRAMMATIC, ordered=False))
        runs.append(bench.part(bench.verified(free), free, edge[:1]))
        *found, loose, producer = bench.read(runs, rounds, alive)
    # A consumer that does not wait may end first, but the pair has not ended before its producer has.
    ceiling = Reading(tuple(map(max, loose.samples_us, producer.samples_us)))
    by_case = dict(zip(cases, found, strict=True))
    return EdgeStudy(
        *edge,
        tuple(WaitCase(wait, by_case[wait, ""], {t: by_case[wait, t] for t in TRIGGERS}) for wait in WAITS),
        ceiling,
        session.info.simulated,
    )


def _pair(
    bench: Bench, config: CmpConfig, edge: tuple[str, str], kind: EdgeKind, *, ordered: bool = True
) -> Executable:
    """The two kernels of a verified config with this edge between them, even where the whole plan implies it."""
    plan = bench.lower(config).only(edge)
    plan = replace(plan, edges=(PlanEdge(*edge, kind),))
    return bench.kept(bench.session.probe(bench.verified(config), plan if ordered else unordered(plan)))


def _variant(graph: OpGraph, config: CmpConfig, edge: tuple[str, str], wait: str, trigger: str) -> CmpConfig:
    """The config with launches of their own for both ops and this wait and trigger on the edge."""
    producer, consumer = edge
    ops = {name: replace(s, host="") if s.host in edge or name in edge else s for name, s in config.ops.items()}
    ops[producer] = replace(ops[producer], trigger=trigger or "none")
    ahead = NO_LIMIT_AHEAD if wait == "a_loader_only" else 0
    ops[consumer] = replace(ops[consumer], wait=wait, w_ahead=ahead)
    edges = (config.programmatic | {edge}) if trigger else (config.programmatic - {edge})
    return replace(config, ops=ops, programmatic=edges, launch_completion=config.launch_completion - {edge})

"""Where a schedule's time comes from: one fixed set of kernels, taken apart and put together again.

Three tables, each read in one interleaved run: branches against hand-offs (the 2 x 2), the graph as it grows stage by
stage, and every stage alone against the time that its bytes need. A fourth number bounds the schedule from below: the
longest chain of dependent kernels with nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from backends.base import Executable, Session
from backends.measure.readings import paired_readings
from backends.measure.stats import hodges_lehmann, location_interval, paired_ratio, ratio_interval
from backends.plan.launches import EdgeKind, LaunchPlan, PlanEdge, lower
from search_spaces.cmp import stream_edges
from search_spaces.config import NO_LIMIT_AHEAD, CmpConfig
from tuner.errors import StudyFailed
from workloads.graph import OpGraph
from workloads.ops import KINDS, compulsory_bytes

ROUNDS = 60
LINEAR_ORDINARY, LINEAR_PDL = "linear, ordinary", "linear, PDL"
DAG_ORDINARY, DAG_PDL = "DAG, ordinary", "DAG, PDL"
CHAIN_TRIGGERS = ("entry", "weights_issued", "inputs_read")


@dataclass(frozen=True)
class Reading:
    """Spans of one case, microseconds, with the 95 % interval of their Hodges-Lehmann centre."""

    samples_us: tuple[float, ...]

    @property
    def span_us(self) -> float:
        return hodges_lehmann(self.samples_us)

    @property
    def interval_us(self) -> tuple[float, float]:
        return location_interval(self.samples_us)

    def less(self, other: Reading) -> Reading:
        """What this one takes more than another, round by round."""
        return Reading(tuple(a - b for a, b in zip(self.samples_us, other.samples_us, strict=True)))

    def over(self, other: Reading) -> tuple[float, float, float]:
        """Ratio to another that was read in the same rounds, and its 95 % interval."""
        low, high = ratio_interval(self.samples_us, other.samples_us)
        return paired_ratio(self.samples_us, other.samples_us), low, high

    def to_json(self) -> dict[str, Any]:
        return {"span_us": self.span_us, "interval_us": self.interval_us, "samples_us": self.samples_us}


@dataclass(frozen=True)
class Stage:
    """Ops that are timed together: those of one launch, and a finaliser with its producer.

    Attributes:
        name: its ops.
        ops: their names in launch order.
        cumulative: span of the graph up to this stage.
        added: what this stage adds to the span.
        alone: span of this stage with nothing before or beside it, weights cold.
        floor: time that only streaming its weights takes; None where it has none.
    """

    name: str
    ops: tuple[str, ...]
    cumulative: Reading
    added: Reading
    alone: Reading
    floor: Reading | None


@dataclass(frozen=True)
class Ablation:
    """The tables of one config.

    Attributes:
        modes: the four corners of {linear, DAG} x {ordinary, PDL} over fixed kernels, by name.
        stages: the graph as it grows, in the workload's order.
        chains: longest chains of dependent kernels by their ops, each at its fastest trigger.
        floor: streaming of all compulsory bytes.
        beside: other configs that were read in the same rounds.
        simulated: whether a model made the numbers.
    """

    modes: Mapping[str, Reading]
    stages: tuple[Stage, ...]
    chains: Mapping[str, Reading]
    floor: Reading
    beside: Mapping[str, Reading]
    simulated: bool

    @property
    def bound_us(self) -> float:
        """No schedule of these kernels can be faster: the slowest chain alone, or the floor."""
        return max([self.floor.span_us, *(chain.span_us for chain in self.chains.values())])

    def to_json(self) -> dict[str, Any]:
        stages = [
            {
                "name": stage.name,
                "ops": stage.ops,
                **{n: getattr(stage, n).to_json() for n in ("cumulative", "added", "alone")},
                "floor": stage.floor.to_json() if stage.floor else None,
            }
            for stage in self.stages
        ]
        return {
            "modes": {name: reading.to_json() for name, reading in self.modes.items()},
            "stages": stages,
            "chains": {name: reading.to_json() for name, reading in self.chains.items()},
            "floor": self.floor.to_json(),
            "beside": {name: reading.to_json() for name, reading in self.beside.items()},
            "bound_us": self.bound_us,
            "simulated": self.simulated,
        }


# --- Configs that differ in one thing ---


def linear(config: CmpConfig, *, programmatic: bool) -> CmpConfig:
    """The same kernels in the same order on one stream; every edge programmatic, or every edge ordinary."""
    edges: Iterable[tuple[str, str]] = ()
    if programmatic:
        # Both ways: a launch of several ops may stand behind ops that come after its host.
        edges = {(p, c) for p in config.order[:-1] for c in config.order if p != c}
    return replace(
        config, streams=(0,) * len(config.order), programmatic=frozenset(edges), launch_completion=frozenset()
    )


def ordinary(config: CmpConfig) -> CmpConfig:
    """The same kernels on the same streams, every edge ordinary."""
    return replace(config, programmatic=frozenset(), launch_completion=frozenset())


def modes(config: CmpConfig) -> dict[str, CmpConfig]:
    """The 2 x 2 over one set of kernels. The corner "DAG, PDL" is the config as it is."""
    return {
        LINEAR_ORDINARY: linear(config, programmatic=False),
        LINEAR_PDL: linear(config, programmatic=True),
        DAG_ORDINARY: ordinary(config),
        DAG_PDL: config,
    }


def early(graph: OpGraph, config: CmpConfig, trigger: str) -> CmpConfig:
    """The same kernels, all edges programmatic, triggers at one point, every weight stage before the wait."""
    ops = {
        name: replace(s, trigger=trigger, wait="a_loader_only", w_ahead=NO_LIMIT_AHEAD)
        for name, s in config.ops.items()
    }
    edges = frozenset(graph.op_edges()) | stream_edges(config.order, config.streams)
    return replace(config, ops=ops, programmatic=edges, launch_completion=frozenset())


def stages_of(graph: OpGraph, config: CmpConfig, order: Sequence[Sequence[str]] = ()) -> tuple[tuple[str, ...], ...]:
    """Ops that are timed together, in order: by default one op each, finalisers with the producer of their partials.

    Stages whose ops share a launch are merged into the first of them.
    """
    groups = [tuple(n for n in names if n in graph.ops) for names in order] or _default_stages(graph)
    groups = [group for group in groups if group]
    missing = set(graph.ops) - {name for group in groups for name in group}
    if missing:
        raise ValueError(f"no stage holds {', '.join(sorted(missing))}")
    merged: list[tuple[str, ...]] = []
    for group in groups:
        hosts = {config.host_of(name) for name in group}
        shared = [i for i, other in enumerate(merged) if hosts & {config.host_of(name) for name in other}]
        if not shared:
            merged.append(group)
            continue
        merged[shared[0]] += tuple(n for i in shared[1:] for n in merged[i]) + group
        merged = [m for i, m in enumerate(merged) if i not in shared[1:]]
    return tuple(tuple(n for n in config.order if n in group) for group in merged)


def _default_stages(graph: OpGraph) -> list[tuple[str, ...]]:
    groups: list[list[str]] = []
    for op in graph.ops.values():
        partials = [t for t in op.reads.values() if graph.tensors[t].role == "partial"]
        home = next((g for g in groups if partials and graph.writers(partials[0])[0] in g), None)
        if home is not None:
            home.append(op.name)
        else:
            groups.append([op.name])
    return [tuple(group) for group in groups]


def paths(graph: OpGraph) -> tuple[tuple[str, ...], ...]:
    """Every path of data edges from a source to a sink that no other path contains."""
    children: dict[str, list[str]] = {name: [] for name in graph.ops}
    for producer, consumer in graph.op_edges():
        children[producer].append(consumer)
    consumers = {consumer for _, consumer in graph.op_edges()}

    def below(name: str) -> list[tuple[str, ...]]:
        return [(name, *rest) for child in children[name] for rest in below(child)] or [(name,)]

    found = [path for name in graph.ops if name not in consumers for path in below(name)]
    return tuple(p for p in found if not any(set(p) < set(q) for q in found))


# --- Measuring ---


@dataclass
class Bench:
    """Executables of one session that are read together and closed together."""

    session: Session
    graph: OpGraph
    arch: str
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def verified(self, config: CmpConfig) -> Executable:
        """Builds a config and checks its outputs.

        Raises:
            StudyFailed: the outputs are wrong.
        """
        run = self.kept(self.session.prepare(config))
        verdict = self.session.verify(run)
        if not verdict.passed:
            raise StudyFailed(f"the config is wrong ({verdict.stage} check): {verdict.message}")
        return run

    def part(self, verified: Executable, config: CmpConfig, ops: Iterable[str]) -> Executable:
        """Some kernels of a verified config, for timing only."""
        return self.kept(self.session.probe(verified, self.lower(config).only(ops)))

    def prefix(self, verified: Executable, config: CmpConfig, ops: Sequence[str]) -> Executable:
        """A leading part of the graph on its own: edges are those of the part, not what is left of the whole's."""
        plan = lower(self.graph.subgraph(ops), config.restricted(ops), self.arch)
        return self.kept(self.session.probe(verified, plan))

    def lower(self, config: CmpConfig) -> LaunchPlan:
        return lower(self.graph, config, self.arch)

    def streams(self, size: int) -> list[Executable]:
        return [self.kept(run) for run in self.session.streams(size)]

    def kept(self, run: Executable) -> Executable:
        self._stack.callback(run.close)
        return run

    def read(self, runs: Sequence[Executable], rounds: int, alive: Callable[[], None]) -> list[Reading]:
        return [Reading(tuple(samples)) for samples in paired_readings(self.session, runs, rounds, alive)]


def fastest(readings: Sequence[Reading]) -> Reading:
    """The one with the shortest span."""
    return min(readings, key=lambda reading: reading.span_us)


def ablate(
    session: Session,
    graph: OpGraph,
    config: CmpConfig,
    *,
    order: Sequence[Sequence[str]] = (),
    beside: Mapping[str, CmpConfig] = MappingProxyType({}),
    rounds: int = ROUNDS,
    alive: Callable[[], None] = lambda: None,
) -> Ablation:
    """Takes a config apart on an open session.

    Args:
        session: of `graph`.
        graph: the session's op graph.
        config: its kernels (tilings, hosts, grid caps) are used in every row.
        order: stages of the cumulative table; by default an op each, finalisers with their producers.
        beside: other configs to read in the same rounds.
        rounds: paired rounds of each row.
        alive: called between measuring calls.

    Raises:
        StudyFailed: the config's outputs are wrong.
        MeasurementVoid: the machine stays disturbed.
    """
    arch = session.info.record.arch
    groups = stages_of(graph, config, order)
    with Bench(session, graph, arch) as bench:
        corners = {name: bench.verified(variant) for name, variant in modes(config).items()}
        whole = corners[DAG_PDL]
        others = [bench.verified(other) for other in beside.values()]
        grown = [bench.prefix(whole, config, sum(groups[: i + 1], ())) for i in range(len(groups))]
        alone = [bench.part(whole, config, group) for group in groups]
        sizes = [_streamed(graph, group) for group in groups]
        floors = {size: bench.streams(size) for size in {*sizes, compulsory_bytes(graph)} if size}
        chains = {path: _chain_runs(bench, graph, config, path) for path in paths(graph)}
        runs = [*corners.values(), *others, *grown, *alone]
        runs += [run for group in floors.values() for run in group]
        runs += [run for group in chains.values() for run in group]
        taken = iter(bench.read(runs, rounds, alive))
        read_modes = {name: next(taken) for name in corners}
        read_beside = {name: next(taken) for name in beside}
        read_grown = [next(taken) for _ in grown]
        read_alone = [next(taken) for _ in alone]
        read_floors = {size: fastest([next(taken) for _ in group]) for size, group in floors.items()}
        read_chains = {"+".join(path): fastest([next(taken) for _ in group]) for path, group in chains.items()}
    found = tuple(
        Stage(
            "+".join(group),
            group,
            read_grown[i],
            read_grown[i].less(read_grown[i - 1]) if i else read_grown[0],
            read_alone[i],
            read_floors.get(sizes[i]),
        )
        for i, group in enumerate(groups)
    )
    floor = read_floors[compulsory_bytes(graph)]
    return Ablation(read_modes, found, read_chains, floor, read_beside, session.info.simulated)


def _streamed(graph: OpGraph, ops: Iterable[str]) -> int:
    """Bytes of weights and old cache entries that ops must stream."""
    return sum(KINDS[graph.ops[name].kind].weight_bytes(graph.ops[name], graph) for name in ops)


@dataclass(frozen=True)
class StandAlone:
    """One op with nothing before or beside it, and the time that only streaming its bytes takes, if it has any."""

    alone: Reading
    floor: Reading | None

    def to_json(self) -> dict[str, Any]:
        return {"alone": self.alone.to_json(), "floor": self.floor.to_json() if self.floor else None}


def stand_alone(
    session: Session,
    graph: OpGraph,
    config: CmpConfig,
    *,
    rounds: int = ROUNDS,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, StandAlone]:
    """Every op of a config alone, its weights cold, and its floor in the same rounds; by the name of its launch.

    Raises:
        StudyFailed: the config's outputs are wrong.
        MeasurementVoid: the machine stays disturbed.
    """
    with Bench(session, graph, session.info.record.arch) as bench:
        whole = bench.verified(config)
        launches = {node.op: [part.op for part in node.parts] for node in bench.lower(config).nodes}
        alone = [bench.part(whole, config, ops) for ops in launches.values()]
        floors = {name: bench.streams(size) for name, ops in launches.items() if (size := _streamed(graph, ops))}
        taken = iter(bench.read([*alone, *(run for group in floors.values() for run in group)], rounds, alive))
        read_alone = {name: next(taken) for name in launches}
        read_floors = {name: fastest([next(taken) for _ in group]) for name, group in floors.items()}
    return {name: StandAlone(read_alone[name], read_floors.get(name)) for name in launches}


def _chain_runs(bench: Bench, graph: OpGraph, config: CmpConfig, path: tuple[str, ...]) -> list[Executable]:
    """One chain alone, weights before every wait, at several trigger points: the fastest of them is its bound."""
    found = []
    for trigger in CHAIN_TRIGGERS:
        variant = early(graph, config, trigger)
        plan = bench.lower(variant)
        nodes = tuple(dict.fromkeys(plan.node(op) for op in path))
        edges = tuple(PlanEdge(a.op, b.op, EdgeKind.PROGRAMMATIC) for a, b in zip(nodes, nodes[1:], strict=False))
        found.append(bench.kept(bench.session.probe(bench.verified(variant), replace(plan, nodes=nodes, edges=edges))))
    return found

"""What `spantune ablate`, `edge` and `kernels` do: measure on one device, and say the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.base import Session, SessionSpec
from backends.sessions import open_session
from results.table import aligned
from search_spaces.cmp import CmpSpace, default
from search_spaces.config import CmpConfig, to_json
from tuner.ablation import LINEAR_ORDINARY, Ablation, Reading, StandAlone, ablate, stand_alone
from tuner.alone import StageRace, tune_alone, with_tilings
from tuner.config_file import read_config
from tuner.describe import tiling_words
from tuner.devices import DeviceLock
from tuner.edge_study import EdgeStudy, closure, parse_edge, study_edge
from tuner.errors import OptionError
from tuner.options import graph_of
from workloads import registry
from workloads.graph import OpGraph

MOST_ROUNDS = 1000


@dataclass(frozen=True)
class TunedKernels:
    """What tuning kernel by kernel found.

    Attributes:
        config: the winners under the default schedule.
        races: one per stage that has a choice.
        alone: every winner alone, against its floor.
        simulated: whether a model made the numbers.
    """

    config: CmpConfig
    races: list[StageRace]
    alone: dict[str, StandAlone]
    simulated: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "config": to_json(self.config),
            "races": [race.to_json() for race in self.races],
            "alone": {name: found.to_json() for name, found in self.alone.items()},
            "simulated": self.simulated,
        }


def ablate_config(
    spec: SessionSpec, config: Path | None, *, rounds: int, alive: Callable[[], None] = lambda: None
) -> Ablation:
    """Takes a config apart on a device.

    Args:
        spec: workload, shape and device.
        config: file with a config or with best configs; None stands for the untuned config.
        rounds: paired rounds of every row.
        alive: called between measuring calls.

    Raises:
        InputError: what is asked for is not possible.
        StudyFailed: the config's outputs are wrong.
        DeviceBusy: another process measures on the GPU.
    """
    _check_rounds(rounds)
    graph = graph_of(spec)
    chosen = None if config is None else read_config(config, spec, graph)
    with measuring(spec) as session:
        order = registry.get(spec.workload).stages
        return ablate(session, graph, chosen_config(session, graph, chosen), order=order, rounds=rounds, alive=alive)


def tune_kernels(spec: SessionSpec, out: Path | None, *, alive: Callable[[], None] = lambda: None) -> TunedKernels:
    """Tunes every kernel alone and writes the winners' config to `out`.

    Raises:
        InputError: what is asked for is not possible.
        DeviceBusy: another process measures on the GPU.
    """
    graph = graph_of(spec)
    if out is not None and not out.parent.is_dir():
        raise OptionError(f"{out} cannot be written: {out.parent} is no folder")
    with measuring(spec) as session:
        space = CmpSpace(graph, session.info.record)
        kernels, races = tune_alone(session, space, order=registry.get(spec.workload).stages, alive=alive)
        config = with_tilings(default(space), {name: s.tiling for name, s in kernels.ops.items()})
        alone = stand_alone(session, graph, kernels, alive=alive)
    if out is not None:
        out.write_text(json.dumps(to_json(config), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return TunedKernels(config, races, alone, spec.device.startswith("sim:"))


def study_one_edge(
    spec: SessionSpec, edge: str, config: Path | None, *, rounds: int, alive: Callable[[], None] = lambda: None
) -> EdgeStudy:
    """Reads what PDL is worth on one edge, given as `PRODUCER>CONSUMER`.

    Raises:
        InputError: there is no such edge, or what is asked for is not possible.
        StudyFailed: a case's outputs are wrong.
        DeviceBusy: another process measures on the GPU.
    """
    _check_rounds(rounds)
    graph = graph_of(spec)
    pair = parse_edge(edge, graph)
    chosen = None if config is None else read_config(config, spec, graph)
    ops = closure(graph, pair)
    with measuring(replace(spec, ops=ops)) as session:
        part = graph.subgraph(ops)
        own = chosen_config(session, part, None if chosen is None else chosen.restricted(ops))
        return study_edge(session, part, own, pair, rounds=rounds, alive=alive)


def _check_rounds(rounds: int) -> None:
    if not 2 <= rounds <= MOST_ROUNDS:
        raise OptionError(f"rounds={rounds} is out of range: use 2 to {MOST_ROUNDS}")


@contextmanager
def measuring(spec: SessionSpec) -> Iterator[Session]:
    """A session on a device that no other process measures on meanwhile."""
    lock = DeviceLock(spec.device)
    try:
        session = open_session(spec)
        try:
            yield session
        finally:
            session.close()
    finally:
        lock.release()


def chosen_config(session: Session, graph: OpGraph, chosen: CmpConfig | None) -> CmpConfig:
    """A config that fits the session's device: the chosen one, or the untuned one."""
    space = CmpSpace(graph, session.info.record)
    config = chosen or default(space)
    space.check(config)
    return config


# --- Text ---


def render_ablation(found: Ablation) -> str:
    """The tables of an ablation for a terminal, without a final newline."""
    base = found.modes[LINEAR_ORDINARY]
    modes = [("kernels fixed", "span", "95 %", "of the first")]
    modes += [(name, *_span(r), _ratio(r.over(base))) for name, r in found.modes.items()]
    stages = [("stage", "up to here", "added", "95 %", "alone", "95 %", "floor", "alone / floor")]
    for stage in found.stages:
        floor = ("none", "none") if stage.floor is None else (_us(stage.floor), _ratio(stage.alone.over(stage.floor)))
        stages.append((stage.name, _us(stage.cumulative), *_span(stage.added), *_span(stage.alone), *floor))
    chains = [("chain alone", "span", "95 %"), *((name, *_span(reading)) for name, reading in found.chains.items())]
    lines = [f"microseconds{', predicted by a model' if found.simulated else ''}", *aligned(modes), ""]
    lines += [*aligned(stages), "", *aligned(chains), ""]
    return "\n".join([*lines, f"  floor {_us(found.floor)}, bound {found.bound_us:.3f}"])


def render_kernels(graph: OpGraph, found: TunedKernels) -> str:
    """What every kernel's race found, for a terminal, without a final newline."""
    rows = [("stage", "tilings", "untuned", "tuned", "95 %", "ratio")]
    remarks = []
    for race in found.races:
        name = "+".join(race.stage)
        rows.append(
            (name, str(race.entrants), _us(race.untuned), *_span(race.reading), _ratio(race.reading.over(race.untuned)))
        )
        words = {op: tiling_words(graph, op, tiling) for op, tiling in race.winner.items()}
        remarks += [f"{op}: {', '.join(tiling)}" for op, tiling in words.items() if tiling]
        if race.refused:
            remarks.append(f"{name}: {race.refused} tilings refused, the first: {race.reason}")
    ops = [("op", "alone", "95 %", "floor", "alone / floor")]
    for name, op in found.alone.items():
        floor = ("none", "none") if op.floor is None else (_us(op.floor), _ratio(op.alone.over(op.floor)))
        ops.append((name, *_span(op.alone), *floor))
    title = f"alone, weights cold, microseconds{', predicted by a model' if found.simulated else ''}"
    return "\n".join([title, *aligned(rows), *(f"  {remark}" for remark in remarks), "", *aligned(ops)])


def render_edge(found: EdgeStudy) -> str:
    """The table of an edge study for a terminal, without a final newline."""
    rows = [("wait", "ordinary", "PDL", "trigger", "saved", "95 %", "above the ceiling")]
    for case in found.cases:
        on = case.on[case.best_trigger]
        rows.append(
            (case.wait, _us(case.off), _us(on), case.best_trigger, *_span(case.saved), _us(on.less(found.ceiling)))
        )
    what = ", predicted by a model" if found.simulated else ""
    lines = [f"{found.producer} > {found.consumer}, microseconds{what}", *aligned(rows)]
    lines.append(f"  ceiling, no dependency: {_us(found.ceiling)} (time only: what it writes means nothing)")
    slower = [case.wait for case in found.cases if case.saved.interval_us[1] < 0]
    return "\n".join(lines + [f"  PDL costs time with the wait at {wait}" for wait in slower])


def _us(reading: Reading) -> str:
    return f"{reading.span_us:.3f}"


def _span(reading: Reading) -> tuple[str, str]:
    low, high = reading.interval_us
    return _us(reading), f"{low:.3f} to {high:.3f}"


def _ratio(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"

"""Tuning kernel by kernel: every tiling of every stage, raced alone, as one does without a graph search.

This is the serial baseline that a schedule has to beat: not the untuned kernels one after another, but each kernel at
its own best, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from backends.base import Executable, Session
from backends.errors import BackendError, CudaFailed
from search_spaces.cmp import CmpSpace, serial
from search_spaces.config import CmpConfig
from search_spaces.errors import IllegalConfig
from tuner.ablation import Bench, Reading, stages_of
from tuner.errors import StudyFailed
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Tiling

# Rounds of each heat and how many go on to the next one; the first heat is open to all.
HEATS = ((5, 24), (15, 6), (60, 1))


@dataclass(frozen=True)
class StageRace:
    """One stage's race.

    Attributes:
        stage: its ops.
        entrants: tilings that ran and were right.
        refused: tilings that failed to build, to prove or to pass their check, with the reason of the first.
        winner: tilings by op.
        reading: of the winner, alone, in the last heat.
        untuned: of the default tilings in the same heat.
    """

    stage: tuple[str, ...]
    entrants: int
    refused: int
    reason: str
    winner: dict[str, Tiling]
    reading: Reading
    untuned: Reading

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "entrants": self.entrants,
            "refused": self.refused,
            "reason": self.reason,
            "winner": {name: dict(vars(tiling)) for name, tiling in self.winner.items()},
            "alone": self.reading.to_json(),
            "untuned": self.untuned.to_json(),
        }


def tune_alone(
    session: Session,
    space: CmpSpace,
    *,
    order: Sequence[Sequence[str]] = (),
    only: Sequence[str] = (),
    heats: Sequence[tuple[int, int]] = HEATS,
    alive: Callable[[], None] = lambda: None,
) -> tuple[CmpConfig, list[StageRace]]:
    """The serial config whose kernels are each at their best alone, and how each was found.

    Args:
        session: of the space's graph.
        space: gives the tilings.
        order: stages, see `tuner.ablation.stages_of`; a finaliser runs behind its producer.
        only: ops whose stages are raced; all of them if empty.
        heats: (rounds, survivors) of each heat.
        alive: called between measuring calls.

    Raises:
        MeasurementVoid: the machine stays disturbed.
        CudaFailed: the device context is lost.
    """
    config = serial(space)
    races = []
    for stage in stages_of(space.graph, config, order):
        wanted = not only or set(stage) & set(only)
        if wanted and len(list(tilings(space, stage))) > 1:
            race = _race(session, space, config, stage, heats, alive)
            races.append(race)
            config = with_tilings(config, race.winner)
    return config, races


def tilings(space: CmpSpace, stage: Sequence[str]) -> Iterator[dict[str, Tiling]]:
    """Every legal combination of tilings of a stage's ops."""
    base = serial(space)
    choices = [_tilings_of(space, name, base.ops[name].tiling) for name in stage]
    for combination in product(*choices):
        yield dict(zip(stage, combination, strict=True))


def _tilings_of(space: CmpSpace, name: str, base: Tiling) -> list[Tiling]:
    graph: OpGraph = space.graph
    choices = KINDS[graph.ops[name].kind].tunables(graph.ops[name], graph)
    found = [base]
    for values in product(*choices.values()):
        fields: dict[str, Any] = dict(zip(choices, values, strict=True))
        tiling = replace(base, **fields)
        if tiling != base and space.refusal(name, tiling) is None:
            found.append(tiling)
    return found


def with_tilings(config: CmpConfig, found: dict[str, Tiling]) -> CmpConfig:
    """A config with other tilings of some ops."""
    return replace(config, ops={**config.ops, **{n: replace(config.ops[n], tiling=t) for n, t in found.items()}})


def _race(
    session: Session,
    space: CmpSpace,
    config: CmpConfig,
    stage: tuple[str, ...],
    heats: Sequence[tuple[int, int]],
    alive: Callable[[], None],
) -> StageRace:
    refused, reason = 0, ""
    with Bench(session, space.graph, session.info.record.arch) as bench:
        field: list[tuple[dict[str, Tiling], Executable]] = []
        for candidate in tilings(space, stage):
            try:
                field.append((candidate, _entrant(bench, with_tilings(config, candidate), stage)))
            except (BackendError, IllegalConfig, StudyFailed) as error:
                if isinstance(error, CudaFailed) and error.sticky:
                    raise
                refused, reason = refused + 1, reason or str(error)
            alive()
        entrants, untuned = len(field), field[0]
        for rounds, survivors in heats:
            runs = [untuned, *(entry for entry in field if entry is not untuned)]
            readings = bench.read([run for _, run in runs], rounds, alive)
            ranked = sorted(zip(readings, runs, strict=True), key=lambda pair: pair[0].span_us)
            field = [run for _, run in ranked[:survivors]]
        best, base = ranked[0], readings[0]
    return StageRace(stage, entrants, refused, reason, best[1][0], best[0], base)


def _entrant(bench: Bench, config: CmpConfig, stage: tuple[str, ...]) -> Executable:
    """The stage's kernels of a config whose outputs were checked."""
    whole = bench.session.prepare(config)
    try:
        verdict = bench.session.verify(whole)
        if not verdict.passed:
            raise StudyFailed(f"{verdict.stage} check: {verdict.message}")
        return bench.part(whole, config, stage)
    finally:
        whole.close()

"""Proposing points: Optuna's TPE with neighbours of the best mixed in, or uniform sampling.

Samplers work on an in-memory study of a bounded size and never touch a disk. TPE's cost per proposal grows with the
number of dimensions and of trials that it sees, so both the view and its share of the proposals shrink in large spaces.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from search_spaces.cmp import CmpSpace, Priority, Value
from tuner.errors import OptionError

SAMPLERS = ("tpe", "random")
BAD_VALUE = 10.0  # told for a config that fails: finite, far above any ratio of a config that runs
MAX_VIEW = 300
VIEW_VALUES = 30_000  # dimensions x trials that one TPE proposal may look at
MIN_VIEW = 60
ELITE = 8
STARTUP = 16
MANY_DIMENSIONS = 64  # beyond which TPE makes one proposal in RARELY, and neighbours of the best the others
RARELY = 16

Point = dict[str, Value]


@dataclass(frozen=True)
class Proposal:
    """A point and the handle under which its sampler remembers it; -1 when it does not."""

    point: Point
    handle: int = -1


class Sampler(Protocol):
    """Proposes points and learns from their values. Lower is better."""

    def propose(self) -> Proposal:
        """The next point. It is pending until it is told or forgotten."""

    def tell(self, proposal: Proposal, value: float, feasible: bool) -> None:
        """Reports a value; also of a point that came from elsewhere, such as a seed or a resumed study."""

    def forget(self, proposal: Proposal) -> None:
        """Drops a pending proposal that has no value."""


def make_sampler(name: str, space: CmpSpace, seed: int) -> Sampler:
    """A sampler by name.

    Raises:
        OptionError: no such sampler.
    """
    if name == "tpe":
        return TpeSampler(space, seed)
    if name == "random":
        return RandomSampler(space, seed)
    raise OptionError(f"unknown sampler {name!r}: use {' or '.join(SAMPLERS)}")


def distributions(space: CmpSpace) -> dict[str, BaseDistribution]:
    """The dimensions in Optuna's words."""
    return {
        d.name: FloatDistribution(0.0, 1.0) if isinstance(d, Priority) else CategoricalDistribution(d.values)
        for d in space.dimensions
    }


class RandomSampler:
    """Uniform points, for comparison."""

    def __init__(self, space: CmpSpace, seed: int) -> None:
        self._space = space
        self._rng = random.Random(seed)

    def propose(self) -> Proposal:
        """See `Sampler.propose`."""
        return Proposal(self._space.sample(self._rng))

    def tell(self, proposal: Proposal, value: float, feasible: bool) -> None:
        """Learns nothing."""

    def forget(self, proposal: Proposal) -> None:
        """Keeps nothing."""


class TpeSampler:
    """Multivariate TPE; some proposals are neighbours of the best points, which hill-climbs from good seeds."""

    def __init__(self, space: CmpSpace, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._rng = random.Random(seed)
        self._distributions = distributions(space)
        size = max(1, len(self._distributions))
        self._view = min(MAX_VIEW, max(MIN_VIEW, VIEW_VALUES // size))
        self._rare = RARELY if size > MANY_DIMENSIONS else 0
        self._sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP
        )
        self._told: list[tuple[float, bool, Point]] = []
        self._pending: dict[int, tuple[int, Point]] = {}
        self._handles = 0
        self._study = self._new_study([])

    def propose(self) -> Proposal:
        """See `Sampler.propose`."""
        turn, self._handles = self._handles, self._handles + 1
        by_tpe = turn % self._rare == 0 if self._rare else turn % 4 != 3
        elite = self._elite()
        if by_tpe or not elite:
            trial = self._study.ask(self._distributions)
            self._pending[turn] = (trial.number, dict(trial.params))
        else:
            point = self._neighbour(self._rng.choice(elite))
            self._pending[turn] = (self._begin(point), point)
        return Proposal(dict(self._pending[turn][1]), turn)

    def tell(self, proposal: Proposal, value: float, feasible: bool) -> None:
        """See `Sampler.tell`."""
        self.forget(proposal)
        self._told.append((value, feasible, proposal.point))
        self._study.add_trial(self._finished(value, feasible, proposal.point))
        if len(self._study.get_trials(deepcopy=False)) > 2 * self._view + len(self._pending):
            self._shrink()

    def forget(self, proposal: Proposal) -> None:
        """See `Sampler.forget`. A failed trial teaches TPE nothing, a running one repels it."""
        if proposal.handle in self._pending:
            self._study.tell(self._pending.pop(proposal.handle)[0], state=TrialState.FAIL)

    def _begin(self, point: Point) -> int:
        """Adds a running trial, which repels TPE from its place, and returns its number."""
        running = create_trial(state=TrialState.RUNNING, params=point, distributions=self._distributions)
        self._study.add_trial(running)
        return len(self._study.get_trials(deepcopy=False)) - 1

    def _elite(self) -> list[Point]:
        good = sorted((entry for entry in self._told if entry[1]), key=lambda entry: entry[0])
        return [point for _, _, point in good[:ELITE]]

    def _neighbour(self, point: Point) -> Point:
        """A point that differs in one to four dimensions."""
        changed = dict(point)
        count = 1
        while count < 4 and self._rng.random() < 0.5:
            count += 1
        for dimension in self._rng.sample(self._space.dimensions, min(count, len(self._space.dimensions))):
            if isinstance(dimension, Priority):
                changed[dimension.name] = self._rng.random()
            else:
                others = [value for value in dimension.values if value != point[dimension.name]]
                changed[dimension.name] = self._rng.choice(others)
        return changed

    def _finished(self, value: float, feasible: bool, point: Point) -> optuna.trial.FrozenTrial:
        return create_trial(
            value=value,
            params=point,
            distributions=self._distributions,
            constraints={} if feasible else {"config": 1.0},
        )

    def _new_study(self, trials: list[optuna.trial.FrozenTrial]) -> optuna.Study:
        study = optuna.create_study(sampler=self._sampler)
        study.add_trials(trials)
        return study

    def _shrink(self) -> None:
        """Rebuilds the study from the best and the latest; what is pending stays pending."""
        latest = self._told[-self._view // 2 :]
        best = sorted(self._told[: -len(latest)], key=lambda entry: entry[0])[: self._view - len(latest)]
        self._told = best + latest
        self._study = self._new_study([self._finished(*entry) for entry in self._told])
        for handle, (_, point) in list(self._pending.items()):
            self._pending[handle] = (self._begin(point), point)

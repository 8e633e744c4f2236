"""The race and the confirmation on synthetic readings."""

from __future__ import annotations

import io
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.record import Outcome, TrialRecord
from tuner import confirm, race
from tuner.errors import StudyFailed
from tuner.ledger import Ledger
from tuner.progress import Progress, ProgressPrinter


def readings(ratio: float, rounds: int = 10, noise: float = 0.005, seed: int = 0) -> tuple[list[float], list[float]]:
    """Candidate and reference readings that share a drift, as real ones do."""
    rng = random.Random(seed)
    drift = [40 * (1 + 0.05 * math.sin(i)) for i in range(rounds)]
    samples = [us * ratio * math.exp(rng.gauss(0, noise)) for us in drift]
    return samples, [us * math.exp(rng.gauss(0, noise)) for us in drift]


def test_nothing_is_dropped_without_a_best() -> None:
    assert not race.drops(*readings(9.0), None)


@pytest.mark.parametrize(("ratio", "dropped"), [(0.90, False), (0.95, False), (0.98, False), (1.02, True), (1.5, True)])
def test_clearly_slower_configs_stop_after_the_first_rounds(ratio: float, dropped: bool) -> None:
    for seed in range(20):
        samples, reference = readings(ratio, seed=seed)
        assert race.drops(samples, reference, 0.96) is dropped


def test_noise_earns_more_rounds() -> None:
    samples, reference = readings(1.02, noise=0.2)
    assert not race.drops(samples, reference, 0.96)


@given(st.floats(0.5, 2.0), st.integers(0, 1000))
def test_a_contender_within_the_margin_stays(best: float, seed: int) -> None:
    samples, reference = readings(best * 1.01, seed=seed)
    assert not race.drops(samples, reference, best)


def test_identical_readings_have_no_spread() -> None:
    assert race.lower_limit([44.0] * 10, [40.0] * 10) == pytest.approx(1.1)
    assert race.drops([44.0] * 10, [40.0] * 10, 1.0)


# --- Confirmation ---


def record(ratio: float, outcome: Outcome = Outcome.SCORED, seed: int = 0, name: str = "c") -> TrialRecord:
    samples, reference = readings(ratio, 60, seed=seed)
    return TrialRecord(outcome, {"name": name}, ratio=ratio, samples_us=tuple(samples), reference_us=tuple(reference))


def test_the_winner_needs_an_interval_below_one() -> None:
    table = confirm.judge(["default", "serial", "contender"], [record(1.0), record(1.4), record(0.93)])
    best, gain = confirm.winner(table)
    assert gain and best.role == "contender"
    assert best.low is not None and best.high is not None and best.low < 0.93 < best.high < 1


def test_a_gain_inside_the_noise_publishes_the_default() -> None:
    table = confirm.judge(["default", "serial", "contender"], [record(1.0), record(1.4), record(0.9995, seed=3)])
    best, gain = confirm.winner(table)
    assert not gain and best.role == "default"


def test_a_contender_that_fails_this_time_is_passed_over() -> None:
    rows = [record(1.0), record(1.4), record(0.5, Outcome.WRONG), record(0.9)]
    best, gain = confirm.winner(confirm.judge(["default", "serial", "contender", "contender"], rows))
    assert gain and best.record.ratio == 0.9


def test_without_a_default_there_is_no_winner() -> None:
    with pytest.raises(StudyFailed, match="could not be confirmed"):
        confirm.winner(confirm.judge(["default"], [record(1.0, Outcome.HANG)]))


def test_nobody_stands_in_the_line_twice() -> None:
    default, serial, other = {"n": 0}, {"n": 1}, {"n": 2}
    line = confirm.line_up([default, other, serial], default, serial)
    assert line == [("default", default), ("serial", serial), ("contender", other)]


# --- The ledger ---


def test_cheap_trials_do_not_count_and_never_win() -> None:
    ledger = Ledger()
    for outcome, ratio in ((Outcome.SCORED, 0.9), (Outcome.DUPLICATE, 0.5), (Outcome.DROPPED, 0.4)):
        ledger.add(TrialRecord(outcome, {}, plan_key=outcome.value, ratio=ratio))
    for outcome in (Outcome.ILLEGAL, Outcome.LOST, Outcome.HANG):
        ledger.add(TrialRecord(outcome, {}))
    assert ledger.done == 3 and ledger.scored == 2
    assert ledger.best is not None and ledger.best.ratio == 0.9
    assert [r.ratio for r in ledger.contenders(5)] == [0.9]
    assert ledger.known("scored") is not None and ledger.known("duplicate") is None


# --- Progress ---


class Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize("tty", [True, False])
def test_progress_never_floods(tty: bool) -> None:
    stream = Stream(tty)
    printer = ProgressPrinter(stream)
    for done in range(1000):
        printer(Progress("searching", done, 1000, counts={Outcome.HANG: 2, Outcome.SCORED: done}))
    printer(Progress("confirming", 1000, 1000))
    printer.finish()
    text = stream.getvalue()
    assert ("\n" not in text) if tty else (len(text.splitlines()) == 2)
    assert "2 hang" in text and "searching 0/1000" in text


def test_progress_says_what_matters() -> None:
    line = Progress("searching", 50, 200, 0, 36.9, 0.912, 7.5, 130.0, {Outcome.DUPLICATE: 3}).line()
    assert line == "searching 50/200, best 36.900 us (0.9120 of the default), 7.5 scored/s, 2m10s left, 3 duplicates"


def test_a_plan_that_two_programs_measured_counts_once() -> None:
    ledger = Ledger()
    for ratio in (0.9, 0.8):
        ledger.add(TrialRecord(Outcome.SCORED, {}, plan_key="same", ratio=ratio))
    assert ledger.done == 1 and ledger.scored == 1 and ledger.counts[Outcome.DUPLICATE] == 1


def test_the_lowest_ratio_wins_a_confirmation() -> None:
    def finalist(role: str, ratio: float) -> confirm.Finalist:
        return confirm.Finalist(role, TrialRecord(Outcome.SCORED, {}, ratio=ratio), ratio - 0.01, ratio + 0.01)

    table = [finalist(confirm.DEFAULT, 1.0), *(finalist(confirm.CONTENDER, ratio) for ratio in (0.9, 0.8, 0.95))]
    best, gain = confirm.winner(table)
    assert gain and best.record.ratio == 0.8

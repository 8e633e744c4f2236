"""Statistics against definitions, the protocol's rotation rule, and a verifier that can fail."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.measure.protocol import Protocol
from backends.measure.stats import hodges_lehmann, paired_ratio, ratio_interval, trimmed_mean
from backends.measure.verify import Variant, Verifier

SPANS = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=25)


def test_hodges_lehmann_of_a_worked_example() -> None:
    """Walsh averages of 1, 5, 12: 1, 3, 6.5, 5, 8.5, 12; their median is 5.75."""
    assert hodges_lehmann([12.0, 1.0, 5.0]) == pytest.approx(5.75)


@given(SPANS, st.floats(-0.5, 10.0), st.floats(0.1, 10.0))
def test_hodges_lehmann_moves_and_scales_with_the_readings(spans: list[float], shift: float, scale: float) -> None:
    moved = hodges_lehmann([scale * span + shift for span in spans])
    assert moved == pytest.approx(scale * hodges_lehmann(spans) + shift)


def test_one_wild_reading_hardly_moves_the_estimates() -> None:
    quiet = [30.0 + 0.032 * (i % 3) for i in range(20)]
    assert abs(hodges_lehmann([*quiet, 900.0]) - hodges_lehmann(quiet)) < 0.05
    assert abs(trimmed_mean([*quiet, 900.0]) - trimmed_mean(quiet)) < 0.05
    assert statistics.fmean([*quiet, 900.0]) > 60


@given(SPANS, st.floats(0.2, 5.0))
def test_a_paired_ratio_cancels_what_both_readings_share(reference: list[float], ratio: float) -> None:
    assert paired_ratio([ratio * span for span in reference], reference) == pytest.approx(ratio)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    import random

    rng = random.Random(7)
    inside = 0
    for study in range(100):
        reference = [30.0] * 40
        samples = [30.0 * 0.95 * math.exp(rng.gauss(0.0, 0.02)) for _ in reference]
        low, high = ratio_interval(samples, reference, level=0.9, draws=300, seed=study)
        assert low < high
        inside += low <= 0.95 <= high
    assert 80 <= inside <= 98


def test_rotation_leaves_l2_between_two_uses_of_a_set() -> None:
    cold = Protocol()
    assert cold.num_sets(60 << 20, 74_000_000) == 4
    assert cold.num_sets(60 << 20, 26_214_400) == 10
    assert cold.num_sets(60 << 20, 0) > 1000
    assert Protocol(l2="warm").num_sets(60 << 20, 1) == 1


class FakeRun:
    """An "executable" that writes `y = 2 x` on the current variant, with faults on demand."""

    def __init__(self) -> None:
        self.x = torch.zeros(4)
        self.y = torch.full((4,), float("nan"))
        self.replays = 0

    def load(self, variant: Variant) -> None:
        self.x = variant.tensors["x"]
        self.y = torch.full((4,), float("nan"))

    def right(self) -> None:
        self.replays += 1
        self.y = self.x * 2

    def skips_an_element(self) -> None:
        self.right()
        self.y[2] = float("nan")

    def stale(self) -> None:
        self.y = torch.tensor([2.0, 4.0, 6.0, 8.0])  # the first variant's answer, always

    def other_bits(self) -> None:
        self.right()
        self.y[1] = torch.nextafter(self.y[1], torch.tensor(9.0))

    def changes_its_mind(self) -> None:
        self.right()
        if self.replays > 2:
            self.y[0] = torch.nextafter(self.y[0], torch.tensor(9.0))

    def verifier(self) -> Verifier:
        variants = [
            Variant({"x": x}, {"y": x * 2})
            for x in (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.0, 2.0, 1.0]))
        ]

        def compare(got: object, want: object, _: str) -> list[str]:
            mine, other = got["y"], want["y"]  # type: ignore[index]
            return [] if torch.allclose(mine, other, rtol=1e-5) else ["y: differs"]

        return Verifier(variants, self.load, lambda: {"y": self.y}, compare)


def test_the_first_plan_of_a_key_is_judged_by_the_reference_and_later_ones_by_bits() -> None:
    run = FakeRun()
    verifier = run.verifier()
    assert verifier.check("k", run.right).stage == "reference"
    assert verifier.check("k", run.right).stage == "bits"
    assert verifier.check("other", run.right).stage == "reference"


@pytest.mark.parametrize("fault", ["skips_an_element", "stale"])
def test_wrong_outputs_fail_against_the_reference(fault: str) -> None:
    run = FakeRun()
    verdict = run.verifier().check("k", getattr(run, fault))
    assert not verdict.passed
    assert verdict.stage == "reference"


def test_one_other_bit_fails_though_the_reference_would_allow_it() -> None:
    run = FakeRun()
    verifier = run.verifier()
    assert verifier.check("k", run.right).passed
    verdict = verifier.check("k", run.other_bits)
    assert not verdict.passed
    assert verdict.stage == "bits"
    assert "1 bytes differ" in verdict.message
    assert verifier.check("another key", run.other_bits).passed


def test_a_plan_that_does_not_repeat_its_own_bits_fails_and_sets_no_standard() -> None:
    run = FakeRun()
    verifier = run.verifier()
    assert not verifier.check("k", run.changes_its_mind).passed
    assert verifier.check("k", run.right).stage == "reference"

"""Estimates over span readings. Readings step by the timer's 32 ns, so no estimate here is a single reading."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence


def hodges_lehmann(samples: Sequence[float]) -> float:
    """Median of all pairwise means (Hodges and Lehmann 1963): robust, and finer than the timer's step."""
    ordered = list(samples)
    return statistics.median((ordered[i] + ordered[j]) / 2 for i in range(len(ordered)) for j in range(i, len(ordered)))


def trimmed_mean(samples: Sequence[float], share: float = 0.1) -> float:
    """Mean without the lowest and highest `share` of the readings."""
    ordered = sorted(samples)
    cut = int(len(ordered) * share)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def paired_ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Hodges-Lehmann estimate of candidate / reference over the rounds that both were read in."""
    logs = [math.log(a / b) for a, b in zip(samples, reference, strict=True)]
    return math.exp(hodges_lehmann(logs))


def ratio_interval(
    samples: Sequence[float], reference: Sequence[float], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval (percentile) of the paired ratio, over rounds; deterministic for a seed."""
    logs = [math.log(a / b) for a, b in zip(samples, reference, strict=True)]
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(draws))
    low = means[int((1 - level) / 2 * draws)]
    high = means[min(int((1 + level) / 2 * draws), draws - 1)]
    return math.exp(low), math.exp(high)

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


def location_interval(samples: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Interval of the Hodges-Lehmann estimate: order statistics of the pairwise means, by the signed-rank test.

    Ranks by the normal approximation of the test's null distribution (Hollander, Wolfe and Chicken 2014, section 3.3),
    whose mean is n(n + 1)/4 and whose variance is n(n + 1)(2n + 1)/24 for n readings.
    """
    n = len(samples)
    means = sorted((a + b) / 2 for i, a in enumerate(samples) for b in samples[i:])
    quantile = statistics.NormalDist().inv_cdf(0.5 + level / 2)
    rank = n * (n + 1) / 4 - quantile * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    low = min(max(round(rank), 0), (len(means) - 1) // 2)
    return means[low], means[len(means) - 1 - low]


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

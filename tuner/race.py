"""The race: which configs earn more replays than the first rounds.

A config is dropped when even the optimistic end of its interval lies clearly above the best ratio so far. Paired
log-ratios are judged, so that drift common to a config and the reference cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from backends.measure.stats import hodges_lehmann

FIRST_ROUNDS = 10  # after which the race may drop a config
FULL_ROUNDS = 20  # paired rounds of a scored trial
MARGIN = 0.03  # how far above the best ratio "clearly" begins
QUANTILE = 1.833  # Student's t, one-sided 95 %, for the nine degrees of freedom of ten rounds


def lower_limit(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Lower 95 % limit of candidate / reference: Hodges-Lehmann centre, spread from the paired log-ratios."""
    logs = [math.log(a / b) for a, b in zip(samples, reference, strict=True)]
    if len(logs) < 2:
        return 0.0
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(hodges_lehmann(logs) - QUANTILE * error)


def drops(samples: Sequence[float], reference: Sequence[float], best_ratio: float | None) -> bool:
    """Whether a config may stop after these rounds. Nothing is dropped while there is no best ratio."""
    return best_ratio is not None and lower_limit(samples, reference) > best_ratio * (1 + MARGIN)

"""How spans are taken, in one place, and printable into every record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any


@dataclass(frozen=True)
class Protocol:
    """The measuring protocol.

    Attributes:
        l2: `cold` (sets rotate) or `warm` (one set).
        warmups: untimed replays of the same config, on other sets, before each timed one.
        bracket_replays: replays of the empty bracket whose trimmed mean is subtracted from every reading.
        min_rounds: paired rounds of a scored trial.
        race_rounds: rounds after which the race may drop a config.
        timer: what a stamp reads.
    """

    l2: str = "cold"
    warmups: int = 2
    bracket_replays: int = 200
    min_rounds: int = 20
    race_rounds: int = 10
    timer: str = "%globaltimer"

    def num_sets(self, l2_bytes: int, set_bytes: int) -> int:
        """Rotation sets: max(4, ceil(4 x L2 / bytes)) when cold, so that a set has left L2 when its turn comes."""
        return 1 if self.l2 == "warm" else max(4, ceil(4 * l2_bytes / max(set_bytes, 1)))

    def describe(self) -> dict[str, Any]:
        return asdict(self)

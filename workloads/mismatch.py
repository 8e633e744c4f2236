"""How a comparison with a reference tells one difference. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """One tensor that breaks one rule.

    Attributes:
        tensor: its name.
        rule: what was broken, in words.
        count: elements (or rows, bytes: the rule says so) that break it.
        index: of the worst one.
        got: its value.
        want: the reference's.
    """

    tensor: str
    rule: str
    count: int
    index: tuple[int, ...]
    got: float
    want: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return (
            f"{self.tensor}: {self.rule}, {self.count} times; worst at [{place}]: got {self.got:g}, want {self.want:g}"
        )

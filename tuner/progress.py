"""Progress of a study: a value, and a printer that never floods a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

from results.record import Outcome

TTY_INTERVAL_S = 0.2
LOG_INTERVAL_S = 10.0
FAILURES = tuple(o for o in Outcome if o not in (Outcome.SCORED, Outcome.DROPPED, Outcome.DUPLICATE))


@dataclass(frozen=True)
class Progress:
    """Where a study stands.

    Attributes:
        phase: `opening`, `searching`, `confirming` or `done`.
        done: trials that count against the budget, resumed ones included.
        trials: the budget.
        resumed: trials that an earlier run had finished.
        best_us: span of the best so far.
        best_ratio: its ratio to the default config.
        rate: scored trials per second of this run.
        eta_s: seconds to the end of the search, where the rate tells.
        counts: trials by outcome.
        seconds: since the search began.
    """

    phase: str
    done: int
    trials: int
    resumed: int = 0
    best_us: float | None = None
    best_ratio: float | None = None
    rate: float = 0.0
    eta_s: float | None = None
    counts: Mapping[Outcome, int] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        """One line for people."""
        if self.phase == "opening":
            return "opening the device"
        parts = [f"{self.phase} {self.done}/{self.trials}"]
        if self.best_us is not None and self.best_ratio is not None:
            parts.append(f"best {self.best_us:.3f} us ({self.best_ratio:.4f} of the default)")
        parts.append(f"{self.rate:.1f} scored/s")
        if self.eta_s is not None:
            parts.append(f"{_duration(self.eta_s)} left")
        if self.counts.get(Outcome.DUPLICATE):
            parts.append(f"{self.counts[Outcome.DUPLICATE]} duplicates")
        parts += [f"{self.counts[o]} {o.value}" for o in FAILURES if self.counts.get(o)]
        return ", ".join(parts)


class ProgressPrinter:
    """Prints progress: one rewritten line on a terminal, else a line at each change of phase and every ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tty = stream.isatty()
        self._last = 0.0
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "opening" and not self._tty:
            return
        now = time.monotonic()
        changed = progress.phase != self._phase
        if not changed and now - self._last < (TTY_INTERVAL_S if self._tty else LOG_INTERVAL_S):
            return
        self._last, self._phase = now, progress.phase
        self._stream.write(f"\r\033[K{progress.line()}" if self._tty else f"{progress.line()}\n")
        self._stream.flush()

    def finish(self) -> None:
        """Leaves the cursor on a fresh line."""
        if self._tty and self._phase:
            self._stream.write("\r\033[K")
            self._stream.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"

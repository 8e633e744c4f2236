"""Ctrl-C as a flag, so that it never cuts a write or a message in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopFlag:
    """While active, the first Ctrl-C sets the flag and the second one interrupts as usual.

    Outside the main thread, where Python takes no signals, the flag stays unset.
    """

    def __init__(self) -> None:
        self._set = False
        self._active = False

    def __bool__(self) -> bool:
        return self._set

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)
            self._active = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._set:
            raise KeyboardInterrupt
        self._set = True

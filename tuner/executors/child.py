"""One measuring process as its parent sees it: spawned, spoken to, watched, killed with its whole group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.base import SessionSpec
from tuner.executors.scoring import one_line

ROOT = Path(__file__).parents[2]  # the folder of the packages, in a checkout and when installed
GRACE_S = 5.0
KILL_S = 60.0


class Died(Exception):
    """The process ended without being asked to; the text is the last thing it said."""


class Child:
    """A measuring process that is starting or running.

    Attributes:
        opened: whether its session is open.
        deadline: monotonic time by which its next message must come.
    """

    def __init__(self, spec: SessionSpec, factory: str, open_timeout_s: float, keep_open: Sequence[int]) -> None:
        self.opened = False
        self.deadline = time.monotonic() + open_timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `kill`
        self._pipe, far = multiprocessing.Pipe()
        with far:
            # A plain interpreter instead of a multiprocessing spawn: it does not run the parent's main module again,
            # and it starts in a session of its own, so that no Ctrl-C reaches it even before its first line. -P keeps
            # folders of the working directory that are named like our packages out.
            module = ["-P", "-m", "tuner.executors.worker"]
            self._process = subprocess.Popen(
                [sys.executable, *module, str(far.fileno()), str(os.getpid())],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                pass_fds=(far.fileno(), *keep_open),
            )
        self._pipe.send((spec, factory))

    def send(self, message: Any) -> None:
        """Sends a job.

        Raises:
            Died: nobody is there.
        """
        try:
            self._pipe.send(message)
        except OSError as error:
            raise Died(self._last_words()) from error

    def receive(self, timeout_s: float) -> tuple[Any, ...] | None:
        """The next message, or None when none came in time.

        Raises:
            Died: the process is gone.
        """
        try:
            if not self._pipe.poll(max(timeout_s, 0.0)):
                return None
            message: tuple[Any, ...] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Died(self._last_words()) from error
        return message

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.poll()
        how = "is stuck" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        lines = self._log.read().decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "")
        return one_line(f"the measuring process {how}" + (f": {said}" if said else ""))

    def stop(self) -> None:
        """Asks the process to close its session, then kills what is left."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._pipe.send(None)
            self._process.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kills the whole process group and reaps the process. Safe to call twice.

        Caveats: the driver may hold a process whose kernels never end; after a minute it is left to the system, and
        what opens the device next will say what is wrong.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        self._pipe.close()
        self._log.close()


def _environment() -> dict[str, str]:
    """This process's environment, with our packages in front of what Python searches."""
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])}

"""The measuring process: opens one session and serves jobs until it is told to stop.

It runs in a process group of its own, ignores Ctrl-C (the parent decides when it ends), and is killed by the kernel
when the parent dies. It never imports Optuna.

Messages to the parent: `opened`, `refused`, `at`, `alive`, `record`, `done`, `failed`, `lost`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from backends.base import Session, SessionSpec
from backends.errors import CudaFailed
from tuner.executors.base import Job
from tuner.executors.scoring import ReferenceFailed, Scorer, clocks_of, one_line
from workloads.errors import InputError, SpantuneError

PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serves one parent over an inherited pipe end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    connection: Connection[Any, Any] = Connection(descriptor)
    spec, factory = connection.recv()
    try:
        session = _open(spec, factory)
        connection.send(("opened", describe(session)))
    except InputError as error:
        connection.send(("refused", "input", one_line(str(error))))
        return
    except SpantuneError as error:
        connection.send(("refused", "session", one_line(str(error))))
        return
    except Exception as error:  # noqa: BLE001 - reported to the parent, then the process ends
        connection.send(("refused", "session", _blame(error)))
        return
    _serve(connection, session)


def _open(spec: SessionSpec, factory: str) -> Session:
    """Calls a session factory named `module:function`."""
    module, _, name = factory.partition(":")
    make: Callable[[SessionSpec], Session] = getattr(importlib.import_module(module), name)
    return make(spec)


def describe(session: Session) -> dict[str, Any]:
    """See `tuner.executors.base.Executor.describe`."""
    info = session.info
    return {
        "gpu": asdict(info.record),
        "simulated": info.simulated,
        "uuid": info.uuid,
        "versions": dict(info.versions),
        "protocol": dict(session.protocol),
        "clocks": clocks_of(session),
    }


def _serve(connection: Connection[Any, Any], session: Session) -> None:
    scorer = Scorer(session, lambda *message: connection.send(message))
    while True:
        job: Job | None = connection.recv()
        if job is None:
            session.close()
            return
        try:
            connection.send(("done", scorer.run(job)))
        except ReferenceFailed as error:
            connection.send(("failed", "reference", one_line(str(error))))
        except CudaFailed as error:
            connection.send(("lost", one_line(str(error))))
            return
        except SpantuneError as error:
            connection.send(("failed", "measure", one_line(str(error))))
        except Exception as error:  # noqa: BLE001 - reported to the parent, then the process ends
            connection.send(("lost", _blame(error)))
            return


def _blame(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})")


def _die_with(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies; ends at once when it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

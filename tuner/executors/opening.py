"""How a measuring process opens its session: binaries first, in parallel, then the device."""

from __future__ import annotations

import contextlib

from backends import sessions
from backends.base import Session, SessionSpec
from backends.errors import BuildFailed


def open_session(spec: SessionSpec) -> Session:
    """Builds every binary of the space, so that no trial waits for a compiler, and opens the session.

    A binary that does not compile is left to the configs that need it, whose records then say so.

    Raises:
        InputError: the device, the workload or what building needs is missing.
    """
    with contextlib.suppress(BuildFailed):
        sessions.build_ahead(spec)
    return sessions.open_session(spec)

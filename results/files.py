"""Files that appear whole and have one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_TIMEOUT_S = 60.0
LOCK_POLL_S = 0.02


class LockTimeout(OSError):
    """Another process held a lock for longer than a writer waits."""


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by a new text, or leaves it as it was: whoever reads sees one of the two, also after a crash.

    The text goes to a temporary file in the same folder, is synced, and is renamed over the old file. Call it under
    `locked(path)`: temporary files that an earlier writer left when it was killed are removed.

    Raises:
        OSError: the folder is not writable or the disk is full.
    """
    for stale in path.parent.glob(f".{path.name}.*.tmp"):
        stale.unlink(missing_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        # Mode 0666 less the user's mask, as for any new file: a private file would hide results from colleagues.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Holds the right to write a file. The lock is a file beside it, which goes away with the last holder.

    The kernel drops the lock when its holder dies, so a lock file that a killed process leaves blocks nobody.

    Args:
        path: the file to be written; its folder must exist.
        timeout_s: how long to wait for another writer.

    Raises:
        LockTimeout: another process still holds it.
        OSError: the folder is not writable.
    """
    lock = path.parent / f".{path.name}.lock"
    deadline = time.monotonic() + timeout_s
    descriptor = _acquire(lock)
    while descriptor is None:
        if time.monotonic() >= deadline:
            raise LockTimeout(f"another process has been writing it for {timeout_s:g} s (lock file {lock})")
        time.sleep(LOCK_POLL_S)
        descriptor = _acquire(lock)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it before sees below that it is no longer the file of that name.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(lock: Path) -> int | None:
    """One attempt; None when another process holds the lock or has just removed the file."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(lock).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None

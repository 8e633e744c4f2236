"""Opens a session on a device by its name: `cuda:N` or `sim:NAME`."""

from __future__ import annotations

import re

from backends.base import Session, SessionSpec
from backends.errors import DeviceError


def open_session(spec: SessionSpec) -> Session:
    """Opens a session in this process.

    Raises:
        DeviceError: the device does not exist or cannot run spantune; the text says what would be right.
        WorkloadError: unknown workload, op or shape.
    """
    if spec.device.startswith("sim:"):
        from backends.simulator.session import SimulatedSession

        return SimulatedSession(spec)
    match = re.fullmatch(r"cuda:(\d+)", spec.device)
    if match is None:
        raise DeviceError(f"unknown device {spec.device!r}: use cuda:N or sim:NAME, such as sim:b300")
    from backends.cuda.session import CudaSession

    return CudaSession(spec, int(match.group(1)))

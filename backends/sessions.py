"""Opens a session on a device by its name: `cuda:N` or `sim:NAME`."""

from __future__ import annotations

import re

from backends.base import Session, SessionSpec
from backends.errors import DeviceError
from backends.plan.launches import space_binaries
from search_spaces.cmp import CmpSpace
from workloads import registry


def build_ahead(spec: SessionSpec) -> int:
    """Builds every binary that the space of a spec can ask for, in processes, so that a study never waits for one.

    Returns:
        The number of binaries; 0 on a simulated device, which needs none.

    Raises:
        DeviceError: the device does not exist or cannot run spantune.
    """
    match = re.fullmatch(r"cuda:(\d+)", spec.device)
    if match is None:
        return 0
    from backends.cuda.driver import read_record
    from backends.cuda.jit import build_all
    from backends.cuda.sources import grid_source

    workload = registry.get(spec.workload)
    graph = workload.graph(workload.shape(spec.params))
    space = CmpSpace(graph.subgraph(spec.ops) if spec.ops else graph, read_record(int(match.group(1))))
    keys = space_binaries(space)
    build_all((grid_source((key,)), key.arch) for key in keys)
    return len(keys)


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

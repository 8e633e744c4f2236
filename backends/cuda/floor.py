"""The floor: kernels that only stream the workload's compulsory bytes, in the bracket that plans are measured in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from backends.cmp.build import KernelLaunch
from backends.cuda.kernels import Kernels

BULK_PIECE = 16384
BULK_SHARED = 6 * BULK_PIECE + 64

Launch = Callable[[Kernels, int, int, int], KernelLaunch]


def stream_launches(sm_count: int) -> list[Launch]:
    """The candidates for the floor: plain loads and bulk copies, each over several grids.

    Each takes (kernels, address, bytes, sink address).
    """
    return [_loads(sm_count * n) for n in (1, 2, 3, 4)] + [_bulk(sm_count * n) for n in (1, 2)]


def _loads(grid: int) -> Launch:
    def launch(kernels: Kernels, address: int, size: int, sink: int) -> KernelLaunch:
        arguments = [ctypes.c_void_p(address), ctypes.c_int64(size // 16), ctypes.c_void_p(sink)]
        return KernelLaunch(kernels.system("stream_loads"), (grid, 1, 1), 512, 0, arguments)

    return launch


def _bulk(grid: int) -> Launch:
    def launch(kernels: Kernels, address: int, size: int, _sink: int) -> KernelLaunch:
        arguments = [ctypes.c_void_p(address), ctypes.c_int64(size // BULK_PIECE)]
        return KernelLaunch(kernels.system("stream_bulk"), (grid, 1, 1), 32, BULK_SHARED, arguments)

    return launch

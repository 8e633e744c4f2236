"""Queue plan to one persistent launch: instruction tensor, operand tables, tensor maps, counters on the device."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence

from backends.cmp.build import KernelLaunch, MapCache
from backends.cuda import driver
from backends.cuda.kernels import Kernels
from backends.errors import BackendError
from backends.plan.encode import MAP_BYTES, map_specs, table_row
from backends.plan.queues import QueuePlan

THREADS = 384  # PersistentShell::kThreads
SHARED_BYTES = 13 * 16384 + 4096 + 32 * 8 + 128 + 16 * 8  # PersistentShell::kSharedBytes
WATCHDOG_US = 2_000_000


class ResidentPlan:
    """A queue plan on the device. Owns its counters and epochs, zeroed when it is loaded."""

    def __init__(self, plan: QueuePlan, kernels: Kernels, stream: object) -> None:
        self._plan = plan
        self._kernel = kernels.persistent(plan.distinct_specs())
        if driver.ctas_per_sm(self._kernel, THREADS, SHARED_BYTES) < 1:
            raise BackendError("the persistent kernel does not fit one multiprocessor: its grid cannot be resident")
        self._stream = stream
        self._blocks: list[int] = []
        self._instructions = self._upload(plan.instructions().tobytes())
        self._counters = self._upload(bytes(4 * (len(plan.tasks.events) + plan.workers + 4)))

    def _upload(self, content: bytes) -> int:
        address = driver.allocate(max(len(content), 4))
        self._blocks.append(address)
        driver.copy_from_host(address, content)
        return address

    def launch(self, addresses: Mapping[str, int], maps: MapCache) -> KernelLaunch:
        """The launch over one set of tensor addresses; uploads its operand table and tensor maps."""
        encoded: list[bytes] = []
        rows: list[Sequence[int]] = []
        count = sum(len(map_specs(operands)) for operands in self._plan.operands)
        base = self._upload(bytes(MAP_BYTES * max(count, 1) + 64))
        first = -(-base // 64) * 64
        for operands in self._plan.operands:
            places = []
            for spec in map_specs(operands):
                places.append(first + MAP_BYTES * len(encoded))
                encoded.append(maps.get(spec, addresses[spec.tensor]))
            rows.append(table_row(operands, addresses, places))
        driver.copy_from_host(first, b"".join(encoded) or bytes(4))
        table = self._upload(b"".join(struct.pack("<16Q", *row) for row in rows))
        epochs = self._counters + 4 * len(self._plan.tasks.events)
        notes = epochs + 4 * self._plan.workers
        body = struct.pack(
            "<5Q2i", self._instructions, table, self._counters, epochs, notes, self._plan.max_queue, WATCHDOG_US
        )
        arguments = [ctypes.create_string_buffer(body, len(body))]
        return KernelLaunch(self._kernel, (self._plan.workers, 1, 1), THREADS, SHARED_BYTES, arguments)

    def close(self) -> None:
        """Frees the device memory. Safe to call twice."""
        for block in self._blocks:
            driver.free(block)
        self._blocks = []

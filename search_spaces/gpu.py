"""A GPU as a record: the limits that legality and residency are computed from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRecord:
    """Limits of one GPU, read off the device or from a calibration file; sizes in bytes.

    Attributes:
        name: as the driver prints it, such as `NVIDIA H200`.
        arch: compile target with its feature suffix, such as `sm_90a`.
        sm_count: multiprocessors.
        l2_bytes: L2 cache.
        shared_per_sm: shared memory of one multiprocessor.
        shared_per_block: most dynamic shared memory of one CTA.
        registers_per_sm: 32-bit registers of one multiprocessor.
        threads_per_sm: resident threads of one multiprocessor.
        reserved_shared: shared memory that the driver takes for every resident CTA.
    """

    name: str
    arch: str
    sm_count: int
    l2_bytes: int
    shared_per_sm: int
    shared_per_block: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    reserved_shared: int = 1024

    def ctas_by_shared(self, shared_bytes: int) -> int:
        """CTAs of one kind that fit one multiprocessor by shared memory alone."""
        if shared_bytes > self.shared_per_block:
            return 0
        return self.shared_per_sm // (shared_bytes + self.reserved_shared)

    def cores(self) -> tuple[str, ...]:
        """MMA cores that this GPU can run, the portable one first."""
        return ("mma_sync", "wgmma") if self.arch == "sm_90a" else ("mma_sync",)

"""Whether a GPU was undisturbed while spans were read: clocks, throttling, other processes. By NVML, read only.

NVML is the driver's own library; without it nothing can be told, and a record says so.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

SM_CLOCK = 1  # NVML_CLOCK_SM
MAX_DRIFT = 0.01
# Reasons that slow a busy GPU: power cap, hardware slowdown, thermal (software, hardware), power brake.
THROTTLING = {0x4: "power cap", 0x8: "slowdown", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake"}
NO_SPACE = 7  # NVML_ERROR_INSUFFICIENT_SIZE: more processes than asked for


@dataclass(frozen=True)
class Reading:
    """One look at a GPU.

    Attributes:
        sm_mhz: SM clock.
        reasons: bit mask of what holds the clock.
        others: compute processes besides this one.
    """

    sm_mhz: int
    reasons: int
    others: int


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Health:
    """Reads one GPU. Readings are None where NVML is missing or refuses.

    Args:
        uuid: the GPU's 16 bytes as hex, as the CUDA driver tells them.
    """

    def __init__(self, uuid: str) -> None:
        self._busy_mhz = 0
        self._nvml: Any = None
        self._device = ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        dashed = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
        name = f"GPU-{dashed}".encode()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._device)) == 0:
            self._nvml = nvml

    def read(self) -> Reading | None:
        """One reading; tens of microseconds."""
        if self._nvml is None:
            return None
        clock, reasons = ctypes.c_uint(0), ctypes.c_ulonglong(0)
        count, processes = ctypes.c_uint(32), (_Process * 32)()
        codes = (
            self._nvml.nvmlDeviceGetClockInfo(self._device, SM_CLOCK, ctypes.byref(clock)),
            self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(reasons)),
        )
        if any(codes):
            return None
        code = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(self._device, ctypes.byref(count), processes)
        pids = {processes[i].pid for i in range(count.value)} if code == 0 else set()
        # One of them is this process, by whatever number the driver's side of a container knows it.
        others = 32 if code == NO_SPACE else max(len(pids) - 1, 0)
        return Reading(clock.value, reasons.value, others)

    def driver(self) -> str:
        """The driver's release, such as `580.95.05`; empty where NVML is missing."""
        text = ctypes.create_string_buffer(96)
        if self._nvml is None or self._nvml.nvmlSystemGetDriverVersion(text, len(text)) != 0:
            return ""
        return text.value.decode()

    def disturbance(self) -> str | None:
        """Why readings that were just taken must not be used, or None; to be asked while the GPU is still busy."""
        reading = self.read()
        if reading is None:
            return None
        first = self._busy_mhz == 0
        self._busy_mhz = max(self._busy_mhz, reading.sm_mhz)
        return judge(reading, None if first else self._busy_mhz)


def judge(reading: Reading, busy_mhz: int | None) -> str | None:
    """Why a reading voids a round, or None.

    Args:
        reading: taken right after the round.
        busy_mhz: highest SM clock that the session has seen, or None at its first round.
    """
    held = [text for bit, text in THROTTLING.items() if reading.reasons & bit]
    if held:
        return f"the GPU throttles ({held[0]})"
    if reading.others:
        return f"{reading.others} other process{'es' if reading.others > 1 else ''} on the GPU"
    if busy_mhz is not None and reading.sm_mhz < busy_mhz * (1 - MAX_DRIFT):
        return f"the SM clock fell from {busy_mhz} to {reading.sm_mhz} MHz"
    return None

"""Which devices there are, and the lock that lets one process measure on a GPU. Loads libcuda, makes no context."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re

from backends.base import SessionSpec
from backends.cuda.jit import default_cache
from backends.errors import DeviceError
from search_spaces.gpu import GpuRecord
from tuner.errors import DeviceBusy

DEFAULT_SIMULATED = "sim:b300"
CUDA_DEVICE = re.compile(r"cuda:(\d+)")


def check_device(device: str) -> None:
    """Refuses a malformed device name.

    Raises:
        DeviceError: it is neither `cuda:N` nor `sim:NAME`.
    """
    if CUDA_DEVICE.fullmatch(device) is None and re.fullmatch(r"sim:[\w.-]+", device) is None:
        raise DeviceError(f"unknown device {device!r}: use cuda:N or sim:NAME, such as {DEFAULT_SIMULATED}")


def gpu_uuids() -> tuple[str, ...]:
    """UUIDs of the GPUs that the CUDA driver shows to this process; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found: list[str] = []
    for index in range(count.value):
        uuid = (ctypes.c_ubyte * 16)()
        if cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), index) != 0:
            return tuple(found)
        found.append(bytes(uuid).hex())
    return tuple(found)


def default_device() -> str:
    """The first GPU, or a simulated one where there is none."""
    return "cuda:0" if gpu_uuids() else DEFAULT_SIMULATED


def gpu_record(spec: SessionSpec) -> GpuRecord:
    """The limits of a device, without the workload's memory on it.

    Raises:
        DeviceError: no such device.
    """
    check_device(spec.device)
    match = CUDA_DEVICE.fullmatch(spec.device)
    if match is not None:
        from backends.cuda import driver

        return driver.read_record(int(match.group(1)))
    from backends.sessions import open_session

    session = open_session(spec)
    try:
        return session.info.record
    finally:
        session.close()


def device_label(spec: SessionSpec) -> str:
    """The name that results on a device are filed under: the GPU's, or the simulated device's own."""
    return gpu_record(spec).name if CUDA_DEVICE.fullmatch(spec.device) else spec.device


class DeviceLock:
    """The right to measure on one GPU, held by this process and by the children that inherit it.

    A lock file per GPU UUID lies in the cache folder. The kernel drops the lock when the last holder dies, so nothing
    is left to clean up after a kill. Simulated devices need none.

    Raises:
        DeviceBusy: another process holds it.
    """

    def __init__(self, device: str) -> None:
        self._descriptor: int | None = None
        match = CUDA_DEVICE.fullmatch(device)
        uuids = gpu_uuids() if match is not None else ()
        if match is not None and int(match.group(1)) < len(uuids):
            self._acquire(device, uuids[int(match.group(1))])

    def _acquire(self, device: str, uuid: str) -> None:
        folder = default_cache() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"gpu-{uuid}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise DeviceBusy(f"{device} is being measured by another process (pid {holder or 'unknown'})") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def descriptors(self) -> tuple[int, ...]:
        """What a child must inherit to hold the lock too."""
        return () if self._descriptor is None else (self._descriptor,)

    def release(self) -> None:
        """Gives the lock up. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

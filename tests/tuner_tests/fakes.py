"""A session without a device: spans from a formula, and faults on demand, chosen by the name after `sim:`."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import DeviceInfo, SessionSpec, Verdict
from backends.errors import BuildFailed, CudaFailed, DeviceError, MeasurementVoid, UnsafePlan
from backends.plan import launches
from search_spaces.cmp import CmpSpace
from search_spaces.config import CmpConfig, Config, numerics_key
from search_spaces.gpu import GpuRecord
from workloads import registry

FACTORY = "tests.tuner_tests.fakes:open_fake"
GPU = GpuRecord("Fake GPU", "sm_90a", 132, 50 << 20, 233472, 232448)
NOISE = 0.002


@dataclass
class FakeExecutable:
    config: CmpConfig
    plan_key: str
    numerics_key: str
    closed: bool = False

    def close(self) -> None:
        self.closed = True


def span_of(config: CmpConfig) -> float:
    """Microseconds: programmatic edges help, so do early triggers, extra streams cost a little."""
    span = 50.0 - 1.5 * len(config.programmatic) + 0.3 * len(set(config.streams))
    gains = {"none": 0.0, "entry": 0.5, "set_up": 0.8, "weights_issued": 1.0, "inputs_read": 1.4, "stored": 0.2}
    return span - sum(gains[schedule.trigger] for schedule in config.ops.values())


def guilty(config: Config) -> bool:
    """Configs that the faulty devices punish: every kernel triggers when its outputs are stored."""
    return isinstance(config, CmpConfig) and all(s.trigger == "stored" for s in config.ops.values())


class FakeSession:
    """See the module."""

    def __init__(self, spec: SessionSpec) -> None:
        self.fault = spec.device.partition(":")[2]
        workload = registry.get(spec.workload)
        self.graph = workload.graph(workload.shape(spec.params))
        self.space = CmpSpace(self.graph, GPU)
        self.info = DeviceInfo(GPU, True, "fake", {"fake": "1"})
        self.protocol: dict[str, Any] = {"timer": "formula", "source_hash": "0123456789abcdef"}
        self.calls: list[tuple[int, int]] = []
        self.rng = random.Random(spec.seed)

    def prepare(self, config: Config) -> FakeExecutable:
        assert isinstance(config, CmpConfig)
        self.space.check(config)
        if guilty(config):
            if self.fault == "unsafe":
                raise UnsafePlan("L1 reads h1, but no path orders it after L0")
            if self.fault == "build":
                raise BuildFailed("ptxas gave up", "log")
            if self.fault == "bug":
                raise ZeroDivisionError("a bug of the backend")
        plan = launches.lower(self.graph, config, GPU.arch)
        return FakeExecutable(config, plan.key(), numerics_key(self.graph, config, GPU.arch))

    def verify(self, executable: FakeExecutable) -> Verdict:
        if guilty(executable.config):
            self._punish()
            if self.fault == "wrong":
                return Verdict(False, "reference", "y: 3 of 4096 differ")
        return Verdict(True, "reference")

    def _punish(self) -> None:
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "crash" or (self.fault == "crash-once" and _first_time()):
            os.abort()
        if self.fault == "sticky":
            raise CudaFailed("cuGraphLaunch", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        if self.fault == "refused-launch":
            raise CudaFailed("cuGraphLaunch", 1, "CUDA_ERROR_INVALID_VALUE")

    def measure(self, executables: Sequence[FakeExecutable], rounds: int) -> list[list[float]]:
        self.calls.append((len(executables), rounds))
        if self.fault == "slow":
            time.sleep(0.15)
        if self.fault == "void" and any(guilty(e.config) for e in executables):
            raise MeasurementVoid("another process used the GPU")
        if self.fault == "shared":
            raise MeasurementVoid("1 other process on the GPU")
        if self.fault == "measure-hang" and any(guilty(e.config) for e in executables):
            time.sleep(3600)
        readings: list[list[float]] = [[] for _ in executables]
        for _ in range(rounds):
            for mine, executable in zip(readings, executables, strict=True):
                mine.append(span_of(executable.config) * math.exp(self.rng.gauss(0.0, NOISE)))
        return readings

    def floor_us(self) -> float:
        return 20.0

    def close(self) -> None:
        """Nothing is held."""


def _first_time() -> bool:
    """True once per working directory, over all processes."""
    marker = Path("fault-happened")
    if marker.exists():
        return False
    marker.touch()
    return True


def open_fake(spec: SessionSpec) -> FakeSession:
    """The factory that the measuring process calls."""
    if spec.device == "sim:missing":
        raise DeviceError("no device sim:missing: use sim:b300")
    if spec.device == "sim:dead":
        os.abort()
    return FakeSession(spec)

"""The seams of the backends: what a device, a session and an executable owe their callers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from search_spaces.config import Config
from search_spaces.gpu import GpuRecord

if TYPE_CHECKING:
    from backends.measure.trace import Trace
    from backends.plan.launches import LaunchPlan


@dataclass(frozen=True)
class Verdict:
    """Outcome of checking outputs (or, on a simulated device, the plan alone).

    Attributes:
        passed: whether a number may be taken.
        stage: `plan`, `reference` or `bits`: the check that decided.
        message: what was wrong, with tensor, count and worst index; empty when passed.
    """

    passed: bool
    stage: str
    message: str = ""


@dataclass(frozen=True)
class DeviceInfo:
    """What a record says about where its numbers come from."""

    record: GpuRecord
    simulated: bool
    uuid: str
    versions: dict[str, str] = field(default_factory=dict)


class Executable(Protocol):
    """A config that is built and loaded on a device: one instance per rotation set behind one handle.

    Attributes:
        plan_key: canonical key of its plan; equal keys need not be measured twice.
        numerics_key: names the output bits.
    """

    plan_key: str
    numerics_key: str

    def close(self) -> None:
        """Frees what the executable holds on the device. Safe to call twice."""


class Session(Protocol):
    """One workload at one shape on one device: builds, checks and measures configs.

    A session belongs to one thread of one process and owns its device context. Duties:
      - `verify` comes before `measure` for every executable, and the two never share a function;
      - `measure` interleaves: each round replays every executable once, in random order, each on a cold set;
      - a sticky device error raises `CudaFailed` with `sticky` set; the session is then useless and must be dropped.
    """

    info: DeviceInfo
    protocol: dict[str, Any]

    def prepare(self, config: Config) -> Executable:
        """Lowers, proves, builds and loads a config.

        Raises:
            IllegalConfig: the graph or the GPU cannot run it, or the spec asks for streams and they cannot express it;
                the text is the reason.
            UnsafePlan: the plan verifier found a witness.
            BuildFailed: a binary does not compile.
        """

    def verify(self, executable: Executable) -> Verdict:
        """Checks outputs against the reference once per numerics key, and bitwise against it for every plan."""

    def probe(self, verified: Executable, plan: LaunchPlan) -> Executable:
        """An executable of a plan that leaves out kernels, edges or waits of a verified one. For timing only: what it
        writes means nothing, and `verify` refuses it."""

    def traced(self, verified: Executable) -> Executable:
        """A verified plan that writes trace records as it runs; it can be verified and measured like others."""

    def trace(self, traced: Executable, replays: int) -> Sequence[Trace]:
        """Records of so many cold replays of a traced executable."""

    def steady(self, verified: Executable, layers: int) -> Executable:
        """A verified plan for several layers in a row, each on weights of its own, programmatic edges between them. Its
        span is that of all layers."""

    def streams(self, size: int) -> Sequence[Executable]:
        """Executables that only stream `size` bytes, cold, in the bracket of plans; the fastest one is the floor."""

    def measure(self, executables: Sequence[Executable], rounds: int) -> list[list[float]]:
        """Spans in microseconds, bracket subtracted: one list of `rounds` readings per executable.

        Readings of one round are paired across executables. Untimed warm-up replays come first.

        Raises:
            MeasurementVoid: the round was disturbed.
        """

    def floor_us(self) -> float:
        """Microseconds to stream the workload's compulsory bytes once, cold, in the same bracket and run."""

    def close(self) -> None:
        """Frees the device. Safe to call twice."""


@dataclass(frozen=True)
class SessionSpec:
    """What a session is opened on; plain data, so that it crosses a process boundary.

    Attributes:
        workload: registered name.
        params: shape parameters.
        device: `cuda:N` or `sim:NAME`.
        ops: names of the sub-graph's ops, or None for the whole graph.
        l2: `cold` or `warm`.
        seed: of inputs and of replay order.
        construction: of CUDA graphs from launch plans: `direct` or `streams`.
    """

    workload: str
    params: dict[str, int | str]
    device: str
    ops: tuple[str, ...] | None = None
    l2: str = "cold"
    seed: int = 0
    construction: str = "direct"

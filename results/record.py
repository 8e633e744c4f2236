"""The record of one trial and of one measurement: versioned, JSON, with protocol and provenance."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Outcome(StrEnum):
    """How a trial ended. Config failures train the sampler; `lost` is infrastructure and is never held against one."""

    SCORED = "scored"
    DROPPED = "dropped"  # verified and measured, but the race gave it only the first rounds
    DUPLICATE = "duplicate"  # its plan was scored before; carries that score
    ILLEGAL = "illegal"
    UNSAFE = "unsafe"
    BUILD_FAILED = "build_failed"
    WRONG = "wrong"
    HANG = "hang"
    CRASH = "crash"
    LOST = "lost"

    @property
    def measured(self) -> bool:
        return self in (Outcome.SCORED, Outcome.DROPPED)


@dataclass(frozen=True)
class TrialRecord:
    """One trial of a study.

    Attributes:
        outcome: how it ended.
        config: the config as JSON.
        message: reason of a failure, one line.
        plan_key: canonical key of the plan, empty when there is none.
        numerics_key: names the output bits.
        verdict: `reference`, `bits` or `plan`: the last check passed; empty when none was.
        span_us: Hodges-Lehmann estimate of the cold span, bracket subtracted.
        ratio: median over rounds of span / reference span of the same round.
        samples_us: raw readings.
        reference_us: readings of the reference config, paired with `samples_us` by index.
        simulated: whether the numbers are predictions.
        seconds: wall time of the trial.
    """

    outcome: Outcome
    config: dict[str, Any]
    message: str = ""
    plan_key: str = ""
    numerics_key: str = ""
    verdict: str = ""
    span_us: float | None = None
    ratio: float | None = None
    samples_us: tuple[float, ...] = ()
    reference_us: tuple[float, ...] = ()
    simulated: bool = False
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "outcome": self.outcome.value}


@dataclass(frozen=True)
class Provenance:
    """Where numbers come from: device, software, protocol, sources.

    Attributes:
        device: GPU name, or the simulated device's name.
        device_id: `cuda:N` or `sim:NAME` as asked for.
        uuid: of the GPU.
        simulated: whether numbers are predictions.
        versions: library and driver versions by name.
        protocol: how spans were taken.
        source_hash: content hash of the device sources.
        clocks: SM clock in MHz before and after, and throttle reasons, where the driver tells.
    """

    device: str
    device_id: str
    uuid: str
    simulated: bool
    versions: dict[str, str]
    protocol: dict[str, Any]
    source_hash: str
    clocks: dict[str, Any] = field(default_factory=dict)

"""A session on a modelled GPU: same plans, same protocol, predicted spans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.base import DeviceInfo, Executable, SessionSpec, Verdict
from backends.errors import UnsafePlan
from backends.measure.protocol import Protocol
from backends.measure.trace import Trace
from backends.plan import launches
from backends.plan.streams import constructed
from backends.plan.verify import verify as verify_plan
from backends.simulator.calibration import Calibration, load
from backends.simulator.model import Model
from backends.simulator.timeline import Timeline, records
from search_spaces.cmp import CmpSpace
from search_spaces.config import Config, MegakernelConfig, numerics_key
from search_spaces.errors import IllegalConfig
from workloads import registry
from workloads.ops import compulsory_bytes

MODEL_VERSION = 2
TIMER_US = 0.032  # step of the timer that real readings come from
NOISE = 0.005  # relative spread of the made-up reading noise


@dataclass
class SimulatedExecutable:
    """A proved plan with its predicted timeline."""

    plan: launches.LaunchPlan | None
    plan_key: str
    numerics_key: str
    span_us: float
    timeline: Timeline | None = None

    def close(self) -> None:
        """Holds nothing."""


class SimulatedSession:
    """See `backends.base.Session`. Verdicts are about plans; readings are predictions with made-up noise."""

    def __init__(self, spec: SessionSpec) -> None:
        self.calibration = load(spec.device.removeprefix("sim:"))
        workload = registry.get(spec.workload)
        graph = workload.graph(workload.shape(spec.params))
        self.graph = graph.subgraph(spec.ops) if spec.ops else graph
        self.space = CmpSpace(self.graph, self.calibration.gpu)
        self._model = Model(self.graph, self._rates(spec.l2))
        self.info = DeviceInfo(self.calibration.gpu, True, f"sim-{self.calibration.name}", {})
        self.protocol: dict[str, Any] = {
            **Protocol(l2=spec.l2).describe(),
            "construction": spec.construction,
            "timer": "predicted",
            "model": MODEL_VERSION,
            "calibration": self.calibration.name,
            "source_hash": f"model{MODEL_VERSION}-{self.calibration.digest}",
        }
        self._construction = spec.construction
        self._round = 0

    def _rates(self, l2: str) -> Calibration:
        """The calibration, or with `warm` one whose weights come from L2, if L2 holds them."""
        c = self.calibration
        if l2 != "warm" or compulsory_bytes(self.graph) > c.gpu.l2_bytes:
            return c
        return replace(c, hbm_bytes_per_us=c.l2_bytes_per_us, load_latency_us=c.input_latency_us)

    def prepare(self, config: Config) -> SimulatedExecutable:
        """See `Session.prepare`."""
        if isinstance(config, MegakernelConfig):
            raise IllegalConfig("backend megakernel: queue plans have no model on a simulated device, use cmp")
        self.space.check(config)
        plan = constructed(launches.lower(self.graph, config, self.calibration.gpu.arch), self._construction)
        verdict = verify_plan(self.graph, plan, self.calibration.gpu.sm_count)
        if not verdict.passed:
            raise UnsafePlan(verdict.message)
        key = numerics_key(self.graph, config, self.calibration.gpu.arch)
        timeline = self._model.predict(plan)
        return SimulatedExecutable(plan, plan.key(), key, timeline.span_us, timeline)

    def probe(self, verified: Executable, plan: launches.LaunchPlan) -> SimulatedExecutable:
        """Predicts a plan that is derived from a verified one by leaving out kernels or edges."""
        timeline = self._model.predict(plan, _own(verified).plan)
        return SimulatedExecutable(plan, plan.key(), "", timeline.span_us, timeline)

    def traced(self, verified: Executable) -> SimulatedExecutable:
        """The executable itself: predicted records cost nothing."""
        return _own(verified)

    def trace(self, traced: Executable, replays: int) -> list[Trace]:
        """The predicted CTAs, the same in every replay. Which multiprocessor holds one is made up: the emptiest."""
        run = _own(traced)
        if run.plan is None or run.timeline is None:
            raise ValueError("only a whole plan has a timeline")
        names = {part.op: node.op for node in run.plan.nodes for part in node.parts}
        sm_count = self.calibration.gpu.sm_count
        return [Trace(records(run.timeline, names, sm_count), run.span_us, sm_count)] * replays

    def steady(self, verified: Executable, layers: int) -> SimulatedExecutable:
        """Predicts a plan for several layers in a row."""
        source = _own(verified)
        if source.plan is None:
            raise ValueError("only a plan can be repeated")
        timeline = self._model.predict(launches.chained(source.plan, layers), source.plan)
        return SimulatedExecutable(source.plan, f"{source.plan_key}x{layers}", source.numerics_key, timeline.span_us)

    def streams(self, size: int) -> list[SimulatedExecutable]:
        """The floor of so many bytes, as the one candidate there is."""
        return [SimulatedExecutable(None, f"stream{size}", "", self._model.floor_us(size))]

    def verify(self, executable: Executable) -> Verdict:
        """The plan's proof: nothing runs, so no output can be checked."""
        run = _own(executable)
        if run.plan is None or not run.numerics_key:
            raise ValueError("a part of a plan is for timing only: it has no verdict of its own")
        return verify_plan(self.graph, run.plan, self.calibration.gpu.sm_count)

    def measure(self, executables: Sequence[Executable], rounds: int) -> list[list[float]]:
        """Predicted spans, one list per executable, with noise that repeats for a plan and a round."""
        self._round += 1
        return [[self._reading(_own(e), number) for number in range(rounds)] for e in executables]

    def _reading(self, executable: SimulatedExecutable, number: int) -> float:
        noise = random.Random(f"{executable.plan_key}/{self._round}/{number}").gauss(0.0, NOISE)
        return round(executable.span_us * (1.0 + noise) / TIMER_US) * TIMER_US

    def floor_us(self) -> float:
        """Time to stream the compulsory bytes at the modelled rate."""
        return self._model.floor_us(compulsory_bytes(self.graph))

    def close(self) -> None:
        """Holds nothing."""


def _own(executable: Executable) -> SimulatedExecutable:
    if not isinstance(executable, SimulatedExecutable):
        raise TypeError(f"an executable of another session: {type(executable).__name__}")
    return executable

"""A discrete-event model of a launch plan on a modelled GPU.

CTAs of one kernel that start together move together as a group: set-up, streaming ahead of the wait, the wait, the rest
of the stream, the body. HBM is a shared rate (processor sharing with a cap per CTA); multiprocessors are slots by
footprint. Programmatic dependent launch is exact: a consumer starts once all CTAs of its programmatic producers have
triggered or exited and its ordinary ones have ended; its wait returns when all producers have ended; residents keep
their slots while they wait. Everything is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.plan.launches import POINTS, EdgeKind, LaunchPlan
from backends.simulator.calibration import Calibration
from backends.simulator.cost import KernelCost, kernel_cost
from workloads.graph import OpGraph

NEVER = float("inf")
SMALL = 1e-9


@dataclass(frozen=True)
class OpTimes:
    """One kernel on the timeline, microseconds after the first op may start."""

    start_us: float
    input_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """A predicted run.

    Attributes:
        span_us: until the last op's stores are visible.
        ops: times by op name.
        critical: ops of the longest chain of decisive producers, first to last.
    """

    span_us: float
    ops: dict[str, OpTimes]
    critical: tuple[str, ...]


@dataclass
class _Group:
    """CTAs that move together. `left` is bytes of the current streaming stage, `until` the end of a timed one."""

    kernel: _Kernel
    count: int
    stage: str = "set_up"
    until: float = NEVER
    left: float = 0.0
    rate: float = 0.0


@dataclass
class _Kernel:
    name: str
    cost: KernelCost
    trigger: int
    priority: int
    order: int
    unplaced: int
    launch: float = NEVER
    first: float = NEVER
    input: float = NEVER
    ready: float = NEVER
    end: float = NEVER
    triggered: int = 0
    trigger_time: float = NEVER
    finished: int = 0
    groups: list[_Group] = field(default_factory=list)


class _Run:
    def __init__(self, graph: OpGraph, plan: LaunchPlan, calibration: Calibration) -> None:
        self.c = calibration
        self.now = 0.0
        self.free = float(calibration.gpu.sm_count)
        self.kernels = {
            node.op: _Kernel(node.op, kernel_cost(graph, node, calibration), node.trigger, node.priority, i, node.ctas)
            for i, node in enumerate(plan.nodes)
        }
        self.parents = {node.op: [e for e in plan.edges if e.consumer == node.op] for node in plan.nodes}
        self.rank = self._ranks(plan)
        self.active: list[_Group] = []

    def _ranks(self, plan: LaunchPlan) -> dict[tuple[str, str], int]:
        """Place of each consumer among those of its producer: later ones start later."""
        seen: dict[str, int] = {}
        ranks = {}
        for edge in plan.edges:
            ranks[edge.producer, edge.consumer] = seen.get(edge.producer, 0)
            seen[edge.producer] = seen.get(edge.producer, 0) + 1
        return ranks

    def run(self) -> None:
        while any(k.end == NEVER for k in self.kernels.values()):
            self._launch()
            self._place()
            self._share()
            step = self._next()
            if step == NEVER:
                raise RuntimeError("the model is stuck: a plan that no edge order can finish")
            self._advance(step)

    def _launch(self) -> None:
        """Sets launch and wait times of kernels whose producers allow it."""
        for kernel in self.kernels.values():
            edges = self.parents[kernel.name]
            if kernel.launch == NEVER:
                times = [self._edge_start(e.producer, kernel.name, e.kind) for e in edges]
                kernel.launch = max(times, default=0.0)
            if kernel.ready == NEVER and all(self.kernels[e.producer].end < NEVER for e in edges):
                ends = [self.kernels[e.producer].end for e in edges if e.kind is EdgeKind.PROGRAMMATIC]
                kernel.ready = max([end + self.c.wait_us for end in ends], default=0.0)

    def _edge_start(self, producer: str, consumer: str, kind: EdgeKind) -> float:
        late = self.rank[producer, consumer] * self.c.fan_out_us
        parent = self.kernels[producer]
        if kind is EdgeKind.ORDINARY:
            return parent.end + self.c.ordinary_us + late
        return min(parent.trigger_time + self.c.early_us, parent.end + self.c.ordinary_us) + late

    def _place(self) -> None:
        """Puts CTAs of launched kernels on free slots, by priority, then creation order."""
        waiting = [k for k in self.kernels.values() if k.unplaced and k.launch <= self.now + SMALL]
        for kernel in sorted(waiting, key=lambda k: (-k.priority, k.order)):
            resident = sum(g.count for g in kernel.groups if g.stage != "done")
            most = kernel.cost.per_sm * self.c.gpu.sm_count - resident
            count = min(kernel.unplaced, most, int(self.free / kernel.cost.footprint + SMALL))
            if count < 1:
                continue
            self.free -= count * kernel.cost.footprint
            kernel.unplaced -= count
            kernel.first = min(kernel.first, self.now)
            group = _Group(kernel, count, until=self.now + self.c.start_us + kernel.cost.set_up_us)
            kernel.groups.append(group)
            self.active.append(group)
            self._trigger(group, "entry", "set_up")
            if kernel.cost.ahead_bytes >= kernel.cost.stream_bytes:
                self._trigger(group, "weights_issued")

    def _trigger(self, group: _Group, *points: str) -> None:
        kernel = group.kernel
        if kernel.trigger in [POINTS[point] for point in points]:
            kernel.triggered += group.count
            if kernel.triggered >= kernel.cost.ctas:
                kernel.trigger_time = self.now

    def _share(self) -> None:
        """Divides the HBM rate among streaming groups: equal per CTA, none above its cap."""
        left, groups = self.c.hbm_rate, [g for g in self.active if g.left > 0]
        for group in sorted(groups, key=lambda g: g.kernel.cost.rate_cap):
            ctas = sum(g.count for g in groups if g.rate == 0.0 or g is group)
            fair = left / max(ctas, 1)
            group.rate = group.count * min(fair, group.kernel.cost.rate_cap)
            left = max(left - group.rate, 0.0)

    def _next(self) -> float:
        """Time to the next change."""
        times = [g.until - self.now for g in self.active if g.until < NEVER]
        times += [g.left / g.rate for g in self.active if g.left > 0 and g.rate > 0]
        times += [g.kernel.ready - self.now for g in self.active if g.stage == "wait" and g.kernel.ready < NEVER]
        times += [k.launch - self.now for k in self.kernels.values() if self.now < k.launch < NEVER and k.unplaced]
        return max(min(times, default=NEVER), 0.0)

    def _advance(self, step: float) -> None:
        self.now += step
        for group in self.active:
            if group.left > 0:
                group.left = max(group.left - group.rate * step, 0.0)
                group.left = 0.0 if group.left < 1.0 else group.left
            group.rate = 0.0
        for group in list(self.active):
            self._move(group)
        self.active = [g for g in self.active if g.stage != "done"]

    def _move(self, group: _Group) -> None:
        """Takes a group through every stage that has ended by now."""
        kernel, cost = group.kernel, group.kernel.cost
        if group.stage == "set_up" and group.until <= self.now + SMALL:
            group.stage, group.until, group.left = "ahead", NEVER, cost.ahead_bytes * group.count
        if group.stage == "ahead" and group.left == 0:
            group.stage = "wait"
        if group.stage == "wait" and kernel.ready <= self.now + SMALL:
            kernel.input = min(kernel.input, self.now)
            group.stage, group.until = "input", self.now + cost.input_us
            group.left = (cost.stream_bytes - cost.ahead_bytes) * group.count
        if group.stage == "input" and group.until <= self.now + SMALL:
            group.stage, group.until = "stream", NEVER
        if group.stage == "stream" and group.left == 0:
            self._trigger(group, "inputs_read")
            if cost.ahead_bytes < cost.stream_bytes:
                self._trigger(group, "weights_issued")
            group.stage, group.until = "body", self.now + cost.body_us
        if group.stage == "body" and group.until <= self.now + SMALL:
            self._finish(group)

    def _finish(self, group: _Group) -> None:
        kernel = group.kernel
        group.stage, group.until = "done", NEVER
        self._trigger(group, "stored", "none")
        self.free += group.count * kernel.cost.footprint
        kernel.finished += group.count
        if kernel.finished >= kernel.cost.ctas:
            kernel.end = self.now


def predict(graph: OpGraph, plan: LaunchPlan, calibration: Calibration) -> Timeline:
    """Predicts the timeline of a launch plan."""
    run = _Run(graph, plan, calibration)
    run.run()
    ops = {k.name: OpTimes(k.first, k.input, k.end) for k in run.kernels.values()}
    last = max(ops, key=lambda name: ops[name].end_us)
    chain = [last]
    while run.parents[chain[-1]]:
        chain.append(max((e.producer for e in run.parents[chain[-1]]), key=lambda name: ops[name].end_us))
    return Timeline(ops[last].end_us, ops, tuple(reversed(chain)))

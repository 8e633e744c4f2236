"""What changes during a simulation: kernels, groups of CTAs that move together, bytes on their way."""

from __future__ import annotations

from collections.abc import Callable

from backends.plan.launches import EdgeKind, KernelNode
from backends.simulator.cost import KernelCost

NEVER = float("inf")


class Kernel:
    """State of one node during a run."""

    __slots__ = (
        "begun", "blocker", "cost", "end", "finished", "first", "groups", "input", "launch", "launched", "memory_us",
        "node", "order", "out", "parents", "placed_all", "ready", "reached", "slot_us", "trigger_time", "triggered",
        "unended", "unplaced", "waiting",
    )  # fmt: skip

    def __init__(self, order: int, node: KernelNode, cost: KernelCost) -> None:
        self.order, self.node, self.cost = order, node, cost
        self.unplaced = cost.ctas
        self.parents: list[tuple[Kernel, EdgeKind, int]] = []
        self.out: list[Kernel] = []
        self.unended = 0
        self.launch = self.ready = self.end = self.trigger_time = NEVER
        self.first = self.input = self.placed_all = self.begun = self.reached = NEVER
        self.launched = False
        self.triggered = self.finished = 0
        self.waiting: list[Callable[[], None]] = []
        self.groups: list[Group] = []
        self.blocker: Kernel | None = None
        self.slot_us = self.memory_us = 0.0


class Group:
    """CTAs of one kernel that were placed together.

    `pending` counts what the main loop still waits for, `landed` is when the ring's first filling is on chip.
    """

    __slots__ = ("count", "end", "kernel", "landed", "number", "pending", "per_sm", "start")

    def __init__(self, kernel: Kernel, number: int, count: int, per_sm: int, start: float) -> None:
        self.kernel, self.number, self.count, self.per_sm, self.start = kernel, number, count, per_sm, start
        self.pending = 0
        self.landed = 0.0
        self.end = NEVER


class Flow:
    """Bytes on their way to a group: `left` per CTA, `cap` the CTA's own rate, `hbm` and `l2` rates used per byte."""

    __slots__ = ("alone", "cap", "done", "group", "hbm", "l2", "left", "rate", "since")

    def __init__(self, group: Group, left: float, cap: float, hbm: float, l2: float, done: Callable[[], None]) -> None:
        self.group, self.left, self.cap = group, left, cap
        self.hbm, self.l2 = hbm * cap * group.count, l2 * cap * group.count
        self.alone, self.rate, self.since = left / cap, cap, 0.0
        self.done = done

"""A discrete-event model of a launch plan on a modelled GPU.

CTAs of one kernel that start together move together as a group: set-up, weights ahead of the wait, the wait, the rest
of the weights with the inputs, the body. HBM and L2 are shared rates: each CTA has so many bytes in flight, and all
flows slow down by one factor when a rate is full. A multiprocessor holds CTAs by threads, shared memory and registers.

Programmatic dependent launch is exact: a kernel starts once all CTAs of its programmatic producers have triggered or
exited, those of its launch-completion producers have begun, and its ordinary producers have ended; its wait returns
when all producers have ended; residents keep their slots while they wait. Everything is deterministic.

A finaliser that runs as its producer's tiles arrive adds its latencies, tile after tile of a group, to the end of the
kernel; the room of its CTA is free meanwhile, and the arrival itself costs nothing.

Caveats: an L2 prefetch is not modelled, the last wave of a grid starts as slots come free, and a CTA's bytes in flight
are those of its own ring, whatever else its multiprocessor holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from backends.plan.launches import POINTS, EdgeKind, KernelNode, KernelPart, LaunchPlan
from backends.simulator.calibration import Calibration
from backends.simulator.cost import KernelCost, finaliser_us, kernel_cost, splits_of
from backends.simulator.slots import Slots
from backends.simulator.state import NEVER, Flow, Group, Kernel
from backends.simulator.timeline import OpTimes, Placement, Timeline
from workloads.graph import OpGraph

SMALL = 1e-9


class Model:
    """Predicts plans of one graph on one modelled GPU; costs of kernels are kept between plans."""

    def __init__(self, graph: OpGraph, calibration: Calibration) -> None:
        self.graph, self.calibration = graph, calibration
        self._costs: dict[tuple[object, ...], KernelCost] = {}

    def predict(self, plan: LaunchPlan, whole: LaunchPlan | None = None) -> Timeline:
        """Predicts the timeline of a launch plan, which may be a part of a whole one.

        Raises:
            ValueError: the plan cannot finish: its edges form a cycle, or a CTA fits no multiprocessor.
        """
        splits = splits_of(self.graph, whole or plan)
        apart = one_op_a_node(plan)
        run = _Run(apart, [self._node_cost(node, splits) for node in apart.nodes], self.calibration)
        return run.timeline()

    def floor_us(self, size: int) -> float:
        """Microseconds to stream so many bytes from HBM in a kernel of its own, in the bracket of a span."""
        c = self.calibration
        return 2 * c.ordinary_us - c.bracket_us + c.start_us + c.load_latency_us + size / c.hbm_bytes_per_us

    def _node_cost(self, node: KernelNode, splits: dict[str, int]) -> KernelCost:
        """Of the node's one op, with what the finalisers behind it add to its end."""
        cost = self._cost(node.parts[0], splits)
        behind = [finaliser_us(self.graph, part, splits, self.calibration) for part in node.parts[1:]]
        return replace(cost, finaliser_us=sum(behind))

    def _cost(self, part: KernelPart, splits: dict[str, int]) -> KernelCost:
        read = tuple(splits.get(tensor) for tensor in self.graph.ops[part.op].reads.values())
        key = (part.op, part.binary.tiling, part.grid, part.wait, part.w_ahead, read)
        if key not in self._costs:
            self._costs[key] = kernel_cost(self.graph, part, splits, self.calibration)
        return self._costs[key]


def predict(graph: OpGraph, plan: LaunchPlan, calibration: Calibration) -> Timeline:
    """Predicts one plan; for many plans of one graph keep a `Model`."""
    return Model(graph, calibration).predict(plan)


def one_op_a_node(plan: LaunchPlan) -> LaunchPlan:
    """A plan whose shared launches are taken apart: their ops launch together and each has all of their edges.

    Finalisers that run behind the tiles of their producer stay with it.
    """
    parts = {node.op: [replace(node, parts=parts) for parts in _with_finalisers(node)] for node in plan.nodes}
    edges = (
        replace(edge, producer=p.op, consumer=c.op)
        for edge in plan.edges
        for p in parts[edge.producer]
        for c in parts[edge.consumer]
    )
    return replace(plan, nodes=tuple(node for node in plan.nodes for node in parts[node.op]), edges=tuple(edges))


def _with_finalisers(node: KernelNode) -> list[tuple[KernelPart, ...]]:
    """Each part with CTAs of its own, and the parts behind it."""
    groups: list[tuple[KernelPart, ...]] = []
    for part in node.parts:
        if part.arrival is None:
            groups.append((part,))
        else:
            groups[-1] = (*groups[-1], part)
    return groups


class _Run:
    """One simulation: a heap of timed events, and flows whose ends move when rates are shared anew."""

    def __init__(self, plan: LaunchPlan, costs: list[KernelCost], calibration: Calibration) -> None:
        self.c, self.now = calibration, 0.0
        self.kernels = [Kernel(i, node, cost) for i, (node, cost) in enumerate(zip(plan.nodes, costs, strict=True))]
        self.slots = Slots(calibration.gpu)
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.pushed = 0
        self.flows: list[Flow] = []
        self.hungry: list[Kernel] = []
        self.groups: list[Group] = []
        self.freed_by: Kernel | None = None
        by_name = {kernel.node.op: kernel for kernel in self.kernels}
        for edge in plan.edges:
            producer, consumer = by_name[edge.producer], by_name[edge.consumer]
            consumer.parents.append((producer, edge.kind, len(producer.out)))
            consumer.unended += 1
            producer.out.append(consumer)
        for kernel in self.kernels:
            if not kernel.node.parts[0].binary.waits:
                kernel.ready = 0.0
        roots = [kernel for kernel in self.kernels if not kernel.parents]
        for rank, kernel in enumerate(roots):
            kernel.ready = 0.0
            self._launch_at(kernel, self.c.ordinary_us + rank * self.c.fan_out_us)

    # Time.

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, self.pushed, act))
        self.pushed += 1

    def _run(self) -> None:
        while self.queue or self.flows:
            timed = self.queue[0][0] if self.queue else NEVER
            flowing = self.now + min((flow.left / flow.rate for flow in self.flows), default=NEVER)
            self._advance(min(timed, flowing))
            changed = self._end_flows()
            while self.queue and self.queue[0][0] <= self.now + SMALL:
                heapq.heappop(self.queue)[2]()
            if self.hungry:
                self._place()
            if changed or self.flows:
                self._share()
        if any(kernel.end == NEVER for kernel in self.kernels):
            late = ", ".join(kernel.node.op for kernel in self.kernels if kernel.end == NEVER)
            raise ValueError(f"a plan that cannot finish: {late} never end on {self.c.gpu.name}")

    def _advance(self, time: float) -> None:
        step, self.now = time - self.now, time
        for flow in self.flows:
            flow.left -= flow.rate * step

    def _end_flows(self) -> bool:
        ended = [flow for flow in self.flows if flow.left <= SMALL * flow.cap]
        if ended:
            self.flows = [flow for flow in self.flows if flow.left > SMALL * flow.cap]
            for flow in ended:
                flow.group.kernel.memory_us += (self.now - flow.since - flow.alone) * flow.group.count
                flow.done()
        return bool(ended)

    def _share(self) -> None:
        """Slows flows by one factor per full rate: whoever has more bytes in flight gets more."""
        hbm = l2 = 0.0
        for flow in self.flows:
            hbm += flow.hbm
            l2 += flow.l2
        slow_hbm = min(1.0, self.c.hbm_bytes_per_us / hbm) if hbm else 1.0
        slow_l2 = min(1.0, self.c.l2_bytes_per_us / max(l2 * slow_hbm, 1.0))
        for flow in self.flows:
            flow.rate = flow.cap * slow_l2 * (slow_hbm if flow.hbm else 1.0)

    def _flow(self, group: Group, size: float, hbm: float, l2: float, done: Callable[[], None]) -> None:
        """Starts bytes on their way to each CTA of a group; `done` is called when they have landed."""
        if size <= 0:
            done()
            return
        cost = group.kernel.cost
        cap = min(cost.flow_rate if hbm else NEVER, self.c.sm_bytes_per_us / group.per_sm)
        if group.pending == 0:  # the main loop, in which math must keep up
            cap = min(cap, cost.compute_rate / group.per_sm)
        flow = Flow(group, size, cap, hbm, l2, done)
        flow.since = self.now
        self.flows.append(flow)

    def _queue_us(self) -> float:
        """How long inputs queue now behind the bytes in flight."""
        flying = sum(min(flow.left, flow.group.kernel.cost.ring_bytes) * flow.group.count for flow in self.flows)
        return self.c.queue_share * flying / self.c.hbm_bytes_per_us

    # Launching.

    def _launch_at(self, kernel: Kernel, time: float) -> None:
        kernel.launch, kernel.launched = time, True
        self._at(time, partial(self.hungry.append, kernel))

    def _try_launch(self, kernel: Kernel) -> None:
        """Launches a kernel whose last in-edge has just fired."""
        if kernel.launched:
            return
        times = [self._edge_start(*parent) for parent in kernel.parents]
        if max(times) < NEVER:
            self._launch_at(kernel, max(max(times), self.now))

    def _edge_start(self, producer: Kernel, kind: EdgeKind, rank: int) -> float:
        late = rank * self.c.fan_out_us
        if kind is EdgeKind.ORDINARY:
            return producer.end + self.c.ordinary_us + late
        if kind is EdgeKind.LAUNCH_COMPLETION:
            return producer.begun + self.c.early_us + late
        return producer.trigger_time + self.c.early_us + late

    def _place(self) -> None:
        """Puts CTAs of launched kernels on free slots, by priority, then creation order."""
        self.hungry.sort(key=lambda kernel: (-kernel.node.priority, kernel.order))
        for kernel in self.hungry:
            placed, per_sm = self.slots.place(len(self.groups), kernel.cost.demand, kernel.unplaced)
            if not placed:
                continue
            if self.now > kernel.launch + SMALL and self.freed_by is not kernel:
                kernel.blocker = self.freed_by
            kernel.unplaced -= placed
            kernel.first = min(kernel.first, self.now)
            group = Group(kernel, len(self.groups), placed, per_sm, self.now)
            kernel.groups.append(group)
            self.groups.append(group)
            self._at(self.now + self.c.start_us, partial(self._enter, group))
            if not kernel.unplaced:
                kernel.placed_all, kernel.slot_us = self.now, self.now - kernel.launch
                self._at(self.now + self.c.start_us, partial(self._begun, kernel))
        self.hungry[:] = [kernel for kernel in self.hungry if kernel.unplaced]

    def _begun(self, kernel: Kernel) -> None:
        """All CTAs have begun: consumers that wait for no more may launch."""
        kernel.begun = self.now
        for consumer in kernel.out:
            self._try_launch(consumer)

    # The life of a group.

    def _enter(self, group: Group) -> None:
        self._trigger(group, "entry")
        set_up_us = group.kernel.cost.set_up_us
        self._wait_at("entry", group, lambda: self._at(self.now + set_up_us, partial(self._set_up, group)))

    def _set_up(self, group: Group) -> None:
        self._trigger(group, "set_up")
        self._wait_at("set_up", group, partial(self._issue, group))

    def _wait_at(self, point: str, group: Group, then: Callable[[], None]) -> None:
        """Goes on at once, unless the kernel waits at this point."""
        if group.kernel.node.parts[0].wait == POINTS[point]:
            self._acquire(group, then)
        else:
            then()

    def _acquire(self, group: Group, then: Callable[[], None]) -> None:
        """Goes on when the kernel's wait has returned."""
        kernel = group.kernel
        if kernel.ready <= self.now + SMALL:
            kernel.input = min(kernel.input, self.now)
            then()
            return
        kernel.reached = min(kernel.reached, self.now)
        kernel.waiting.append(partial(self._acquire, group, then))

    def _issue(self, group: Group) -> None:
        """Starts the weights that may precede the wait, and waits."""
        kernel, cost = group.kernel, group.kernel.cost
        open_gate = kernel.ready <= self.now + SMALL
        ahead = cost.ring_bytes if open_gate else cost.ahead_bytes
        group.pending = 2
        if ahead >= cost.stream_bytes:
            self._trigger(group, "weights_issued")
        self._flow(group, ahead, cost.hbm_share, 1.0, partial(self._sent, group))

        def acquired() -> None:
            rest = cost.ring_bytes - ahead
            if rest > 0:
                group.pending += 1
                if cost.ring_bytes >= cost.stream_bytes:
                    self._trigger(group, "weights_issued")
                self._flow(group, rest, cost.hbm_share, 1.0, partial(self._sent, group))
            self._at(self.now + cost.input_latency_us + self._queue_us(), read)

        def read() -> None:
            self._flow(group, 0.0 if cost.loaders else cost.input_bytes, 0.0, 1.0, partial(self._gate, group))

        self._acquire(group, acquired)

    def _sent(self, group: Group) -> None:
        """The ring's first filling, or a part of it, has landed."""
        group.landed = self.now
        self._gate(group)

    def _gate(self, group: Group) -> None:
        """When the ring has been filled and the first inputs are there, the main loop runs."""
        group.pending -= 1
        if group.pending:
            return
        cost = group.kernel.cost
        rest = cost.stream_bytes - cost.ring_bytes
        last = min(rest, cost.ring_bytes)  # in flight when the last copy is issued

        def issued() -> None:
            if cost.ring_bytes < cost.stream_bytes:
                self._trigger(group, "weights_issued")
            self._trigger(group, "inputs_read")
            self._flow(group, last, cost.hbm_share, cost.l2_share, landed)

        def landed() -> None:
            self._at(self.now + cost.body_us + cost.math_us * group.per_sm, partial(self._store, group))

        def flow() -> None:
            self._flow(group, rest - last, cost.hbm_share, cost.l2_share, issued)

        # A full ring that waited for its inputs has nothing in flight: the next bytes are a latency away.
        idle = min(self.now - group.landed, self.c.load_latency_us) if rest > 0 else 0.0
        self._at(self.now + idle, flow)

    def _store(self, group: Group) -> None:
        self._trigger(group, "stored")
        self._at(self.now + self.c.flush_us, partial(self._exit, group))

    def _exit(self, group: Group) -> None:
        kernel = group.kernel
        group.end = self.now
        self.slots.release(group.number, kernel.cost.demand)
        self.freed_by = kernel
        kernel.finished += group.count
        if kernel.finished == kernel.cost.ctas:
            self._at(self.now + kernel.cost.finaliser_us, partial(self._end, kernel))

    def _end(self, kernel: Kernel) -> None:
        """Completion: implicit trigger, and waits of consumers whose producers have all ended."""
        kernel.end = self.now
        if kernel.trigger_time == NEVER:
            kernel.trigger_time = self.now
        for consumer in kernel.out:
            consumer.unended -= 1
            if not consumer.unended:
                soft = any(kind is not EdgeKind.ORDINARY for _, kind, _ in consumer.parents)
                consumer.ready = min(consumer.ready, self.now + (self.c.wait_us if soft else 0.0))
                self._at(max(consumer.ready, self.now), partial(self._wake, consumer))
            self._try_launch(consumer)

    def _wake(self, kernel: Kernel) -> None:
        waiting, kernel.waiting = kernel.waiting, []
        for go_on in waiting:
            go_on()

    def _trigger(self, group: Group, point: str) -> None:
        kernel = group.kernel
        if kernel.node.parts[0].trigger != POINTS[point]:
            return
        kernel.triggered += group.count
        if kernel.triggered == kernel.cost.ctas:
            kernel.trigger_time = self.now
            for consumer in kernel.out:
                self._try_launch(consumer)

    # The answer.

    def timeline(self) -> Timeline:
        """Runs and reads off the timeline."""
        self._run()
        last = max(self.kernels, key=lambda kernel: kernel.end)
        sinks = sorted(kernel.end for kernel in self.kernels if not kernel.out)
        ops = {part.op: _times(kernel) for kernel in self.kernels for part in kernel.node.parts}
        placements = tuple(Placement(g.kernel.node.parts[0].op, g.count, g.per_sm, g.start, g.end) for g in self.groups)
        span = sinks[-1] + self.c.ordinary_us - self.c.bracket_us
        return Timeline(span, ops, _critical(last), placements)


def _times(kernel: Kernel) -> OpTimes:
    waited = max(kernel.input - kernel.reached, 0.0) if kernel.reached < NEVER else 0.0
    stalls = {"slot": kernel.slot_us, "wait": waited, "memory": kernel.memory_us / kernel.cost.ctas}
    return OpTimes(kernel.first, kernel.input, kernel.end, stalls)


def _critical(last: Kernel) -> tuple[str, ...]:
    """Walks back from the last op: to what held its slots where its last CTAs came late, else to its last producer."""
    chain, seen = [last], {id(last)}
    while True:
        kernel = chain[-1]
        late = kernel.slot_us > SMALL and kernel.placed_all > kernel.ready
        producer = max((parent for parent, _, _ in kernel.parents), key=lambda parent: parent.end, default=None)
        before = kernel.blocker if late and kernel.blocker is not None else producer
        if before is None or id(before) in seen:
            return tuple(part.op for item in reversed(chain) for part in item.node.parts)
        chain.append(before)
        seen.add(id(before))

"""The queue plan: what the megakernel runs, pure data."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from backends.base import Verdict
from backends.plan.launches import CompileKey, compile_key
from backends.plan.tasks import Task, TaskGraph, lower_tasks
from search_spaces.config import MegakernelConfig, splits_of
from search_spaces.errors import ConfigError, IllegalConfig
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Operand

# Instruction layout, mirrored by shells/persistent.cuh.
WORDS = 32
MAX_WAITS = 6
MAX_SIGNALS = 4
WAIT_WORD = 12
SIGNAL_WORD = 24


@dataclass(frozen=True)
class QueuePlan:
    """Queues of one persistent launch.

    Attributes:
        workload: graph name.
        ops: op names in opcode order: opcode i + 1 is `ops[i]`'s binary, operand row i is `ops[i]`'s.
        specs: compile key of each op.
        operands: operand row of each op.
        queues: task indices per worker.
        tasks: the task graph.
    """

    workload: str
    ops: tuple[str, ...]
    specs: tuple[CompileKey, ...]
    operands: tuple[tuple[Operand, ...], ...]
    queues: tuple[tuple[int, ...], ...]
    tasks: TaskGraph

    @property
    def workers(self) -> int:
        return len(self.queues)

    @property
    def max_queue(self) -> int:
        return max(len(queue) for queue in self.queues)

    def distinct_specs(self) -> tuple[CompileKey, ...]:
        """Compile keys without repeats: the opcodes of the one kernel, from 1."""
        return tuple(dict.fromkeys(self.specs))

    def key(self) -> str:
        """Canonical content hash."""
        text = repr((self.workload, self.ops, self.specs, self.operands, self.queues, self.tasks))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def instructions(self) -> array[int]:
        """The instruction tensor [workers, max_queue, 32] as uint32, padded with zeros: opcode 0 does nothing."""
        opcodes = {spec: i + 1 for i, spec in enumerate(self.distinct_specs())}
        words = array("I", bytes(4 * self.workers * self.max_queue * WORDS))
        rows = {op: i for i, op in enumerate(self.ops)}
        for worker, queue in enumerate(self.queues):
            for place, number in enumerate(queue):
                task = self.tasks.tasks[number]
                row = rows[task.op]
                base = (worker * self.max_queue + place) * WORDS
                words[base : base + WORDS] = self._encode(task, opcodes[self.specs[row]], row)
        return words

    def _encode(self, task: Task, opcode: int, row: int) -> array[int]:
        tile = task.tile
        words = array("I", bytes(4 * WORDS))
        head = (opcode, len(task.waits), len(task.signals), row, tile.m, tile.n, tile.k_begin, tile.k_end, tile.split)
        words[: len(head)] = array("I", head)
        for i, event in enumerate(task.waits):
            words[WAIT_WORD + 2 * i], words[WAIT_WORD + 2 * i + 1] = event, self.tasks.events[event].threshold
        for i, event in enumerate(task.signals):
            words[SIGNAL_WORD + 2 * i], words[SIGNAL_WORD + 2 * i + 1] = event, 1
        return words


def lower_queues(graph: OpGraph, config: MegakernelConfig, arch: str, sm_count: int) -> QueuePlan:
    """Lowers a graph under a megakernel config.

    Raises:
        ConfigError: the config does not fit the graph.
        IllegalConfig: a tiling is illegal, or a wait list does not fit an instruction.
    """
    if set(config.order) != set(graph.ops) or set(config.ops) != set(graph.ops):
        raise ConfigError(f"config orders {', '.join(config.order)}, but {graph.name} has {', '.join(graph.ops)}")
    if config.policy != "round_robin":
        raise ConfigError(f"unknown queue policy {config.policy!r}: use round_robin")
    workers = config.workers or sm_count
    if not 1 <= workers <= sm_count:
        raise IllegalConfig(f"workers={workers}: use 1 to {sm_count}, one per multiprocessor")
    splits = splits_of(graph, config)
    for name, tiling in config.ops.items():
        reason = KINDS[graph.ops[name].kind].illegal(graph.ops[name], graph, tiling)
        if reason is not None:
            raise IllegalConfig(reason)
    tasks = lower_tasks(graph, config.ops, config.order)
    for task in tasks.tasks:
        if len(task.waits) > MAX_WAITS or len(task.signals) > MAX_SIGNALS:
            raise IllegalConfig(f"{task.op}: {len(task.waits)} waits do not fit an instruction, at most {MAX_WAITS}")
    ops = config.order
    kinds = [KINDS[graph.ops[name].kind] for name in ops]
    return QueuePlan(
        workload=graph.name,
        ops=ops,
        specs=tuple(compile_key(graph.ops[n], config.ops[n], "persistent", arch) for n in ops),
        operands=tuple(k.operands(graph.ops[n], graph, config.ops[n], splits) for k, n in zip(kinds, ops, strict=True)),
        queues=round_robin(len(tasks.tasks), workers),
        tasks=tasks,
    )


def round_robin(num_tasks: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Deals task i to worker i mod workers, in order."""
    return tuple(tuple(range(worker, num_tasks, workers)) for worker in range(min(workers, num_tasks)))


def verify_queues(graph: OpGraph, plan: QueuePlan) -> Verdict:
    """Proves a queue plan safe with all workers resident: every data edge waits, thresholds are reachable, no deadlock.

    The progress argument: queues are run to a fixed point with unbounded speed; counters only grow, so if this greedy
    run ends with every task done, every interleaving does.
    """
    events, tasks = plan.tasks.events, plan.tasks.tasks
    for producer, consumer in graph.op_edges():
        numbers = {e.number for e in events if e.producer == producer and e.threshold == _tiles(tasks, producer)}
        if any(t.op == consumer and not numbers & set(t.waits) for t in tasks):
            return Verdict(False, "plan", f"a tile of {consumer} does not wait for all tiles of {producer}")
    return _check_progress(plan.queues, tasks, {e.number: e.threshold for e in events})


def _tiles(tasks: Sequence[Task], op: str) -> int:
    return sum(task.op == op for task in tasks)


def _check_progress(queues: Sequence[Sequence[int]], tasks: Sequence[Task], thresholds: dict[int, int]) -> Verdict:
    counters = dict.fromkeys(thresholds, 0)
    heads = [0] * len(queues)
    moved = True
    while moved:
        moved = False
        for worker, queue in enumerate(queues):
            while heads[worker] < len(queue):
                task = tasks[queue[heads[worker]]]
                if any(counters[e] < thresholds[e] for e in task.waits):
                    break
                for event in task.signals:
                    counters[event] += 1
                heads[worker] += 1
                moved = True
    for worker, queue in enumerate(queues):
        if heads[worker] < len(queue):
            task = tasks[queue[heads[worker]]]
            event = next(e for e in task.waits if counters[e] < thresholds[e])
            reached = f"{counters[event]} of {thresholds[event]}"
            return Verdict(
                False, "plan", f"worker {worker} stops at {task.op} tile {task.tile}: event {event} at {reached}"
            )
    done = sum(len(queue) for queue in queues)
    if done != len(tasks):
        return Verdict(False, "plan", f"queues hold {done} tasks of {len(tasks)}")
    return Verdict(True, "plan")

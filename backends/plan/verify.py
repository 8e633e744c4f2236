"""Proofs over launch plans. A verdict comes back with a witness; nothing here raises on an unsafe plan.

What makes a path of edges enough, ordinary or programmatic: every kernel waits for its in-edges in every role before
its first access to mutable data, so a kernel's completion implies that of all its ancestors. What an op kind reads
before the wait (`OpKind.early_slots`) has no such path to lean on: no op of the graph may write it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

from backends.base import Verdict
from backends.plan.arrivals import fault_of
from backends.plan.launches import LaunchPlan
from workloads.graph import Op, OpGraph, Role
from workloads.ops import KINDS
from workloads.ops.base import EarlyRead, Region, Tiling


def verify(graph: OpGraph, plan: LaunchPlan, sm_count: int = 0) -> Verdict:
    """Proves that a plan orders every read after its writer and every two writers of one place.

    Checked: nodes run the graph's ops, edges join known nodes, the plan is acyclic, each data edge and each pair of
    overlapping writers, or of a writer and an unrelated reader, is joined by a path, what is brought into L2 ahead of
    its use is a weight, and what is read before a wait is written by no op. Ops of one launch run side by side: no path
    joins them. A finaliser inside the launch of its producer is ordered after it in what it reads of it alone, where
    each of its tiles' group holds exactly the tiles of the producer that write what it reads.

    CTAs that share a finaliser's work wait for others of their launch, so there must be fewer of them in the plan than
    multiprocessors: one is then left on which everything else ends, and the CTAs that they wait for find room there.
    (A kernel that was launched early and waits holds room too, but all CTAs of what it waits for have begun.)

    Args:
        graph: that the plan was lowered from.
        plan: to be proved.
        sm_count: multiprocessors of the GPU; by default no CTA may wait for others of its launch.
    """
    fault = _check_parts(graph, plan) or _check_early(graph, plan)
    if fault is not None:
        return fault
    before = ancestors(plan)
    if before is None:
        return _unsafe("the edges form a cycle")
    if plan.waiting() and plan.waiting() >= sm_count:
        return _unsafe(f"{plan.waiting()} CTAs may wait for others of their launch, on {sm_count} multiprocessors")
    arrived = _arrived(graph, plan)
    if isinstance(arrived, Verdict):
        return arrived
    for data in graph.edges():
        if (data.producer, data.consumer, data.tensor) in arrived:
            continue
        if data.producer not in before[data.consumer]:
            return _unsafe(f"{data.consumer} reads {data.tensor}, but no path orders it after {data.producer}")
    return _check_hazards(graph, plan, before, arrived) or Verdict(True, "plan")


def _check_parts(graph: OpGraph, plan: LaunchPlan) -> Verdict | None:
    """Whether a plan runs the graph's ops, joins launches that it has, and prefetches weights only."""
    names = [part.op for part in plan.parts()]
    if sorted(names) != sorted(graph.ops):
        return _unsafe(f"plan runs {', '.join(names)}, but {graph.name} has {', '.join(graph.ops)}")
    nodes = {node.op for node in plan.nodes}
    for edge in plan.edges:
        if edge.producer not in nodes or edge.consumer not in nodes:
            return _unsafe(f"edge {edge.producer} -> {edge.consumer} names a launch that is not in the plan")
    for part in plan.parts():
        if part.prefetch is not None and graph.tensors[part.prefetch.tensor].role is not Role.WEIGHT:
            return _unsafe(f"{part.op} brings {part.prefetch.tensor} into L2, which is no weight")
    return None


def _arrived(graph: OpGraph, plan: LaunchPlan) -> set[tuple[str, str, str]] | Verdict:
    """What finalisers read of their producer in the same launch, as (producer, finaliser, tensor), or a fault."""
    found: set[tuple[str, str, str]] = set()
    for node in plan.nodes:
        producer = node.parts[0]
        for part in node.parts:
            if part.arrival is None:
                producer = part
                continue
            if part.arrival.producer != producer.op:
                return _unsafe(f"{part.op} runs as tiles of {producer.op} arrive, not of {part.arrival.producer}")
            fault = fault_of(graph, part.op, part.arrival, producer.tiling, part.tiling)
            if fault is not None:
                return _unsafe(f"{part.op} runs as tiles of {producer.op} arrive: {fault}")
            if part.arrival.sharers > 1 and producer.ctas_x < producer.tiles[0]:
                return _unsafe(f"a CTA of {producer.op} would wait for a tile that it takes later, to share {part.op}")
            written = graph.ops[producer.op].writes.values()
            found |= {(producer.op, part.op, t) for t in graph.ops[part.op].reads.values() if t in written}
    return found


def ancestors(plan: LaunchPlan) -> dict[str, set[str]] | None:
    """All ops that a path leads from, per op; None when the edges form a cycle."""
    parents: dict[str, list[str]] = {node.op: [] for node in plan.nodes}
    for edge in plan.edges:
        parents[edge.consumer].append(edge.producer)
    found: dict[str, set[str]] = {}
    waiting = dict(parents)
    while waiting:
        ready = [name for name, before in waiting.items() if all(p in found for p in before)]
        if not ready:
            return None
        for name in ready:
            found[name] = set(waiting[name]).union(*(found[p] for p in waiting.pop(name)))
    ops = {node.op: {part.op for part in node.parts} for node in plan.nodes}
    before = {name: set().union(*(ops[n] for n in nodes)) for name, nodes in found.items()}
    return {op: before[name] for name in ops for op in ops[name]}


def _check_early(graph: OpGraph, plan: LaunchPlan) -> Verdict | None:
    """Reads before the wait: each must be of what the caller or an earlier run wrote, whatever the plan's edges."""
    for part in plan.parts():
        kind = KINDS[graph.ops[part.op].kind]
        for slot, operand in zip(kind.slots, part.operands, strict=True):
            if slot not in kind.early_slots or isinstance(operand, int):
                continue
            tensor, reason = graph.tensors[operand.tensor], kind.early_slots[slot]
            read = f"{part.op} may read {tensor.name} ({slot}) before its wait as {reason}"
            if tensor.role not in (Role.WEIGHT, Role.INPUT, Role.STATE):
                return _unsafe(f"{read}, but the run computes it: its role is {tensor.role}")
            for writer in graph.writers(tensor.name):
                if reason is not EarlyRead.OLD_ROWS:
                    return _unsafe(f"{read}, but {writer} writes it")
                if not _appends(graph, graph.ops[writer], tensor.name):
                    return _unsafe(f"{read}, but {writer} may write any row of it")
    return None


def _appends(graph: OpGraph, op: Op, tensor: str) -> bool:
    """Whether an op writes only rows of the run's own tokens, by a table that the caller wrote before the run."""
    rows = KINDS[op.kind].appends
    return all(
        operand in rows and graph.tensors[op.tensor(rows[operand])].role is Role.INPUT
        for operand, written in op.writes.items()
        if written == tensor
    )


def _check_hazards(
    graph: OpGraph, plan: LaunchPlan, before: dict[str, set[str]], arrived: set[tuple[str, str, str]]
) -> Verdict | None:
    """Write after write and write after read, between ops that no path joins."""
    parts = {part.op: part for part in plan.parts()}
    for tensor in graph.tensors.values():
        if tensor.role in (Role.WEIGHT, Role.INPUT):
            continue
        touching = [op for op in graph.ops.values() if tensor.name in (*op.reads.values(), *op.writes.values())]
        for a, b in combinations(touching, 2):
            writes = tensor.name in a.writes.values() or tensor.name in b.writes.values()
            if not writes or a.name in before[b.name] or b.name in before[a.name]:
                continue
            if (a.name, b.name, tensor.name) in arrived:
                continue
            hull_a, hull_b = (_hull(graph, x.name, tensor.name, parts[x.name].tiling) for x in (a, b))
            if hull_a is None or hull_b is None or hull_a.overlaps(hull_b):
                return _unsafe(f"{a.name} and {b.name} touch the same part of {tensor.name} and no path orders them")
    return None


@lru_cache(maxsize=1024)
def _hull(graph: OpGraph, name: str, tensor: str, tiling: Tiling) -> Region | None:
    """Smallest box that holds what an op writes of a tensor; None when it only reads it."""
    op = graph.ops[name]
    kind = KINDS[op.kind]
    regions = [
        region
        for tile in kind.domain(op, graph, tiling)
        for region in kind.writes(op, graph, tiling, tile)
        if region.tensor == tensor
    ]
    if not regions:
        return None
    axes = zip(*(region.box for region in regions), strict=True)
    return Region(tensor, tuple((min(low for low, _ in axis), max(high for _, high in axis)) for axis in axes))


def _unsafe(witness: str) -> Verdict:
    return Verdict(False, "plan", witness)

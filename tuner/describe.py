"""A config in words: what was chosen per op, and which edges are programmatic."""

from __future__ import annotations

from search_spaces.cmp import arrival_hosts
from search_spaces.config import CmpConfig, Config, OpSchedule, tiling_of
from workloads.graph import OpGraph
from workloads.ops import KINDS
from workloads.ops.base import Tiling

MOST_LINES = 16
MOST_EDGES = 32


def describe_config(config: Config, graph: OpGraph) -> list[str]:
    """One line per op in launch order, then the programmatic edges; long chains are cut and say by how much.

    Only what an op can be tuned by is shown: a row op has no tiling to speak of.
    """
    width = max(len(name) for name in config.order)
    lines = [f"{name:<{width}}  {_op(config, graph, place)}" for place, name in enumerate(config.order)]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} ops more, all of them in the stored config"]
    if isinstance(config, CmpConfig):
        lines.append("programmatic: " + _edges(config.programmatic))
        if config.launch_completion:
            lines.append("launch completion: " + _edges(config.launch_completion))
    return lines


def _op(config: Config, graph: OpGraph, place: int) -> str:
    name = config.order[place]
    op, tiling, schedule = graph.ops[name], tiling_of(config, name), config.ops[name]
    kind = KINDS[op.kind]
    words = tiling_words(graph, name, tiling)
    if isinstance(config, CmpConfig) and isinstance(schedule, OpSchedule):
        words += [f"stream {config.streams[place]}", f"trigger {schedule.trigger}", f"wait {schedule.wait}"]
        if kind.loaders:
            words.append(f"w_ahead {schedule.w_ahead}")
        words.append(f"priority {schedule.priority}")
        if schedule.host:
            behind = schedule.host in arrival_hosts(graph, name)
            words.append(f"{'behind the tiles' if behind else 'in the launch'} of {schedule.host}")
            words += [f"shared by {schedule.sharers}"] if behind and schedule.sharers > 1 else []
        words += [f"at most {schedule.grid_cap} CTAs"] if schedule.grid_cap else []
        if schedule.prefetch_of:
            words.append(f"prefetches {schedule.prefetch_kib} KiB for {schedule.prefetch_of} at {schedule.prefetch_at}")
    return ", ".join(words)


def tiling_words(graph: OpGraph, name: str, tiling: Tiling) -> list[str]:
    """What an op can be tuned by, and how it is tuned."""
    op = graph.ops[name]
    kind = KINDS[op.kind]
    return [f"{field} {getattr(tiling, field)}" for field in kind.tunables(op, graph)] if kind.tiled else []


def _edges(pairs: frozenset[tuple[str, str]]) -> str:
    edges = sorted(f"{producer}>{consumer}" for producer, consumer in pairs)
    if len(edges) > MOST_EDGES:
        return f"{' '.join(edges[:MOST_EDGES])} ... and {len(edges) - MOST_EDGES} more"
    return " ".join(edges) or "none"

"""Launch plan to CUDA graph: nodes and edges exactly as planned, read back and compared."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.cuda import driver
from backends.cuda.kernels import Kernels
from backends.errors import GraphMismatch
from backends.plan.encode import arrival_args, grid_args, map_specs
from backends.plan.launches import EdgeKind, KernelNode, LaunchPlan


class MapCache:
    """Tensor maps by spec and address: schedules of one study share them."""

    def __init__(self) -> None:
        self._maps: dict[tuple[object, int], bytes] = {}

    def get(self, spec: Any, address: int) -> bytes:
        key = (spec, address)
        if key not in self._maps:
            self._maps[key] = driver.encode_map(spec, address)
        return self._maps[key]


@dataclass(frozen=True)
class Bracket:
    """What stands around a plan in a measured graph: the writer that warms the inputs, and two time stamps.

    Attributes:
        refresh: (source, target, 16-byte pieces) of at most two buffers.
        stamps: address of two 64-bit stamps.
    """

    refresh: tuple[tuple[int, int, int], ...]
    stamps: int


def build_graph(
    plan: LaunchPlan | None,
    kernels: Kernels,
    addresses: Mapping[str, int],
    maps: MapCache,
    stream: object,
    *,
    bracket: Bracket | None = None,
    delay_us: int = 0,
) -> driver.Graph:
    """Builds, checks and instantiates the graph of a plan; with a bracket and no plan, the empty bracket.

    Raises:
        GraphMismatch: the driver holds other edges than the plan.
    """
    graph = driver.Graph()
    try:
        _fill(graph, plan, kernels, addresses, maps, bracket, delay_us)
        graph.instantiate(stream)
    except BaseException:
        graph.close()
        raise
    return graph


def _fill(
    graph: driver.Graph,
    plan: LaunchPlan | None,
    kernels: Kernels,
    addresses: Mapping[str, int],
    maps: MapCache,
    bracket: Bracket | None,
    delay_us: int,
) -> None:
    """Adds nodes and edges, then reads the edges back."""
    wanted: set[tuple[int, int, str]] = set()
    nodes: list[Any] = []

    def edge(producer: int, consumer: int, kind: EdgeKind = EdgeKind.ORDINARY) -> None:
        graph.add_edge(nodes[producer], nodes[consumer], kind.value)
        wanted.add((producer, consumer, kind.value))

    place: dict[str, int] = {}
    first = None
    if bracket is not None:
        nodes.append(_refresh(graph, kernels, bracket))
        nodes.append(_stamp(graph, kernels, bracket.stamps))
        edge(0, 1)
        first = 1
    for node in plan.nodes if plan else ():
        arguments = _arguments(node, addresses, maps, delay_us)
        place[node.op] = len(nodes)
        nodes.append(
            graph.add_kernel(kernels.grid(node), node.grid, node.threads, node.shared_bytes, arguments, node.priority)
        )
    for planned in plan.edges if plan else ():
        edge(place[planned.producer], place[planned.consumer], planned.kind)
    if bracket is not None and first is not None:
        nodes.append(_stamp(graph, kernels, bracket.stamps + 8))
        end = len(nodes) - 1
        for root in plan.roots() if plan else ():
            edge(first, place[root])
        for sink in plan.sinks() if plan else ():
            edge(place[sink], end)
        if plan is None:
            edge(first, end)
    found = graph.edges()
    if found != wanted:
        raise GraphMismatch(f"the graph holds {len(found)} edges, {len(found ^ wanted)} of them unlike the plan's")


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel with its arguments, outside of any plan."""

    kernel: Any
    grid: int
    threads: int
    shared_bytes: int
    arguments: list[Any]


def bracketed_kernel(kernels: Kernels, launch: KernelLaunch, bracket: Bracket) -> driver.Graph:
    """A graph, not yet instantiated, of one kernel between the bracket's stamps."""
    graph = driver.Graph()
    chain = [
        _refresh(graph, kernels, bracket),
        _stamp(graph, kernels, bracket.stamps),
        graph.add_kernel(launch.kernel, (launch.grid, 1, 1), launch.threads, launch.shared_bytes, launch.arguments),
        _stamp(graph, kernels, bracket.stamps + 8),
    ]
    for producer, consumer in zip(chain, chain[1:], strict=False):
        graph.add_edge(producer, consumer)
    return graph


def _arguments(
    node: KernelNode, addresses: Mapping[str, int], maps: MapCache, delay_us: int
) -> list[ctypes.Array[ctypes.c_char]]:
    """The parameter of a node: the blocks of its parts, one behind the other, finalisers behind their producers."""
    body, first = b"", 0
    producer = node.parts[0]
    for part in node.parts:
        if part.arrival is not None:
            body += arrival_args(part, producer, addresses)
            continue
        producer = part
        encoded = [maps.get(spec, addresses[spec.tensor]) for spec in map_specs(part.operands)]
        body += grid_args(part, addresses, encoded, first_cta=first, delay_us=delay_us)
        first += part.ctas
    return [ctypes.create_string_buffer(body, len(body))]


def _stamp(graph: driver.Graph, kernels: Kernels, address: int) -> Any:
    return graph.add_kernel(kernels.system("stamp"), (1, 1, 1), 1, 0, [ctypes.c_void_p(address)])


def _refresh(graph: driver.Graph, kernels: Kernels, bracket: Bracket) -> Any:
    arguments: list[Any] = []
    for source, target, pieces in (*bracket.refresh, (0, 0, 0), (0, 0, 0))[:2]:
        arguments += [ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_int(pieces)]
    return graph.add_kernel(kernels.system("refresh"), (32, 1, 1), 256, 0, arguments)

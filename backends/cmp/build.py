"""Launch plan to CUDA graph: nodes and edges exactly as planned, read back and compared."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.cuda import driver
from backends.cuda.kernels import Kernels
from backends.errors import GraphMismatch
from backends.measure.trace import RECORD_BYTES
from backends.plan.encode import arrival_args, grid_args, map_specs
from backends.plan.launches import KernelNode, LaunchPlan, PlanEdge
from backends.plan.outline import END, REFRESH, START, outline


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
    later: Sequence[Mapping[str, int]] = (),
    trace: int = 0,
) -> driver.Graph:
    """Builds, checks and instantiates the graph of a plan; with a bracket and no plan, the empty bracket.

    `addresses` are those of a plan's first layer; `later` those of the layers after it. `trace` is where a traced plan
    writes its records, CTA after CTA in node order.

    Raises:
        GraphMismatch: the driver holds other edges than the plan.
    """
    graph = driver.Graph()
    try:
        made = outline(plan, bracket is not None)
        launches = kernel_launches(plan, kernels, (addresses, *later), maps, bracket, delay_us, trace)
        nodes = {name: _add(graph, launch) for name, launch in launches.items()}
        for edge in made.edges:
            graph.add_edge(nodes[edge.producer], nodes[edge.consumer], edge.kind.value)
        check_edges(tuple(nodes), made.edges, graph.edges())
        graph.instantiate(stream)
    except BaseException:
        graph.close()
        raise
    return graph


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel with its arguments, outside of any plan."""

    kernel: Any
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: list[Any]
    priority: int = 0


def kernel_launches(
    plan: LaunchPlan | None,
    kernels: Kernels,
    layers: Sequence[Mapping[str, int]],
    maps: MapCache,
    bracket: Bracket | None,
    delay_us: int,
    trace: int = 0,
) -> dict[str, KernelLaunch]:
    """What each node of `backends.plan.outline.outline` launches, in its order; loads kernels and encodes maps."""
    found: dict[str, KernelLaunch] = {}
    if bracket is not None:
        found = {REFRESH: _refresh(kernels, bracket), START: _stamp(kernels, bracket.stamps)}
    for node in plan.nodes if plan else ():
        arguments = _arguments(node, layers[node.layer], maps, delay_us, trace)
        trace += RECORD_BYTES * node.ctas if trace else 0
        found[node.op] = KernelLaunch(
            kernels.grid(node), node.grid, node.threads, node.shared_bytes, arguments, node.priority
        )
    if bracket is not None:
        found[END] = _stamp(kernels, bracket.stamps + 8)
    return found


def check_edges(names: Sequence[str], wanted: Iterable[PlanEdge], held: set[tuple[int, int, str]]) -> None:
    """Compares the edges that a graph was built for with those that the driver holds.

    Args:
        names: of the nodes, by their number in `held`.
        wanted: edges by name.
        held: edges as `driver.Graph.edges` reads them.

    Raises:
        GraphMismatch: they differ; the text says how often, and the first difference.
    """
    expected = {(edge.producer, edge.consumer, edge.kind.value) for edge in wanted}
    found = {(names[producer], names[consumer], kind) for producer, consumer, kind in held}
    place = {name: i for i, name in enumerate(names)}
    unlike = sorted(expected ^ found, key=lambda edge: (place[edge[0]], place[edge[1]], edge not in expected))
    if unlike:
        producer, consumer, kind = unlike[0]
        state = "is missing" if unlike[0] in expected else "is not the plan's"
        raise GraphMismatch(
            f"the graph holds {len(found)} edges, {len(unlike)} of them unlike the plan's; "
            f"first, the {kind} edge {producer} -> {consumer} {state}"
        )


def bracketed_kernel(kernels: Kernels, launch: KernelLaunch, bracket: Bracket) -> driver.Graph:
    """A graph, not yet instantiated, of one kernel between the bracket's stamps."""
    return _bracketed(kernels, lambda graph: _add(graph, launch), bracket)


def bracketed_graph(kernels: Kernels, raw: int, bracket: Bracket) -> driver.Graph:
    """A graph, not yet instantiated, of somebody else's captured graph between the bracket's stamps."""
    return _bracketed(kernels, lambda graph: graph.add_child(raw), bracket)


def _bracketed(kernels: Kernels, add: Callable[[driver.Graph], Any], bracket: Bracket) -> driver.Graph:
    graph = driver.Graph()
    chain = [
        _add(graph, _refresh(kernels, bracket)),
        _add(graph, _stamp(kernels, bracket.stamps)),
        add(graph),
        _add(graph, _stamp(kernels, bracket.stamps + 8)),
    ]
    for producer, consumer in zip(chain, chain[1:], strict=False):
        graph.add_edge(producer, consumer)
    return graph


def _add(graph: driver.Graph, launch: KernelLaunch) -> Any:
    return graph.add_kernel(
        launch.kernel, launch.grid, launch.threads, launch.shared_bytes, launch.arguments, launch.priority
    )


def _arguments(
    node: KernelNode, addresses: Mapping[str, int], maps: MapCache, delay_us: int, trace: int
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
        records = trace + RECORD_BYTES * first if trace else 0
        body += grid_args(part, addresses, encoded, first_cta=first, delay_us=delay_us, trace=records)
        first += part.ctas
    return [ctypes.create_string_buffer(body, len(body))]


def _stamp(kernels: Kernels, address: int) -> KernelLaunch:
    return KernelLaunch(kernels.system("stamp"), (1, 1, 1), 1, 0, [ctypes.c_void_p(address)])


def _refresh(kernels: Kernels, bracket: Bracket) -> KernelLaunch:
    arguments: list[Any] = []
    for source, target, pieces in (*bracket.refresh, (0, 0, 0), (0, 0, 0))[:2]:
        arguments += [ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_int(pieces)]
    return KernelLaunch(kernels.system("refresh"), (32, 1, 1), 256, 0, arguments)

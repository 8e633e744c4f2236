"""Launch plan to CUDA graph by stream capture: streams with programmatic events, edges read back and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backends.cmp.build import Bracket, KernelLaunch, MapCache, check_edges, kernel_launches
from backends.cuda import driver
from backends.cuda.kernels import Kernels
from backends.plan.launches import EdgeKind, LaunchPlan
from backends.plan.streams import Action, Event, Launch, Record, stream_program


class StreamPool:
    """Streams and events, made ahead of the captures that use them in turn."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._events: list[Any] = []

    def streams(self, labels: Iterable[int]) -> dict[int, Any]:
        """A stream for each label, the same one each time."""
        labels = tuple(labels)
        for label in labels:
            if label not in self._streams:
                self._streams[label] = driver.create_stream()
        return {label: self._streams[label] for label in labels}

    def events(self, wanted: Iterable[Event]) -> dict[Event, Any]:
        """A new event for each of a program's; those of the program before are freed.

        One program records an event that another lets a launch signal, and the driver refuses a launch the former.
        """
        wanted = tuple(wanted)
        self._free_events()
        self._events = [driver.create_event() for _ in wanted]
        return dict(zip(wanted, self._events, strict=True))

    def _free_events(self) -> None:
        for event in self._events:
            driver.destroy_event(event)
        self._events = []

    def close(self) -> None:
        """Frees them. Safe to call twice."""
        self._free_events()
        for stream in self._streams.values():
            driver.destroy_stream(stream)
        self._streams = {}


def capture_graph(
    plan: LaunchPlan | None,
    kernels: Kernels,
    addresses: Mapping[str, int],
    maps: MapCache,
    stream: object,
    pool: StreamPool,
    *,
    bracket: Bracket | None = None,
    delay_us: int = 0,
) -> driver.Graph:
    """Captures, checks and instantiates the graph of a plan: `build.build_graph` by the other construction.

    Raises:
        IllegalConfig: streams and events cannot give the plan's edges.
        GraphMismatch: the captured graph holds other edges than the plan's and the declared stream-order edges.
    """
    program = stream_program(plan, bracketed=bracket is not None)
    # Loading a module or encoding a tensor map would break a capture, so all of it is done before.
    launches = kernel_launches(plan, kernels, (addresses,), maps, bracket, delay_us)
    streams, events = pool.streams(program.streams()), pool.events(program.events())
    capture = driver.Capture(streams[program.origin])
    nodes: dict[str, Any] = {}
    try:
        for action in program.actions:
            node = _perform(capture, action, launches, streams, events)
            if isinstance(action, Launch):
                nodes[action.node] = node
    except BaseException:
        capture.abandon()
        raise
    graph = capture.end(list(nodes.values()))
    try:
        check_edges(tuple(nodes), program.edges, graph.edges())
        graph.instantiate(stream)
    except BaseException:
        graph.close()
        raise
    return graph


def _perform(
    capture: driver.Capture,
    action: Action,
    launches: Mapping[str, KernelLaunch],
    streams: Mapping[int, Any],
    events: Mapping[Event, Any],
) -> Any:
    """Makes the call of one action; returns the node of a launch."""
    stream = streams[action.stream]
    if isinstance(action, Launch):
        launch, signals = launches[action.node], action.signals
        return capture.launch(
            stream,
            launch.kernel,
            launch.grid,
            launch.threads,
            launch.shared_bytes,
            launch.arguments,
            launch.priority,
            early=action.early,
            event=events[signals] if signals else None,
            at_start=signals is not None and signals.kind is EdgeKind.LAUNCH_COMPLETION,
        )
    event = events[action.event]
    return capture.record(stream, event) if isinstance(action, Record) else capture.wait(stream, event)

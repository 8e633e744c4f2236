"""A stand-in for the CUDA bindings: graphs and captures, with the bindings' own types."""

from __future__ import annotations

import ctypes
from typing import Any

from backends.plan.encode import GRID_HEADER_BYTES
from tests.backends_tests.capture_model import CaptureError, CaptureModel

SYSTEM_KERNELS = {"stamp": 1, "refresh": 2, "": 3}  # handles below 100 take one pointer first
EDGE = {"ordinary": (0, 0), "programmatic": (1, 1), "launch_completion": (1, 2)}


class CapturingDriver:
    """The entry points that graphs and captures use, in place of `cuda.bindings.driver`.

    Attributes:
        launched: per node handle, what its kernel was launched with.
        live: handles of streams, events and graphs that exist.
        forget: entry points whose next call does nothing (planted faults).
    """

    def __init__(self, types: Any) -> None:
        self._types = types
        self._next = 1000
        self._capture: CaptureModel | None = None
        self._edges: dict[int, set[tuple[Any, Any, str]]] = {}
        self._priority: dict[int, int] = {}
        self.launched: dict[int, dict[str, Any]] = {}
        self.live: set[tuple[str, int]] = set()
        self.forget: list[str] = []
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(self._types, name)
        raise AttributeError(f"the stand-in has no {name}")

    @property
    def capturing(self) -> bool:
        return self._capture is not None

    def _new(self, kind: str) -> int:
        self._next += 1
        if kind != "node":
            assert not self.capturing or kind == "graph", f"a {kind} is made during a capture"
            self.live.add((kind, self._next))
        return self._next

    def _ok(self, *values: Any) -> tuple[Any, ...]:
        return (self._types.CUresult.CUDA_SUCCESS, *values)

    def _forgets(self, name: str) -> bool:
        self.calls.append(name)
        if name in self.forget:
            self.forget.remove(name)
            return True
        return False

    # --- Streams, events, captures ---

    def cuStreamCreate(self, flags: int) -> Any:
        assert flags == 1
        return self._ok(self._types.CUstream(self._new("stream")))

    def cuStreamDestroy(self, stream: Any) -> Any:
        self.live.remove(("stream", int(stream)))
        return self._ok()

    def cuEventCreate(self, flags: int) -> Any:
        assert flags == int(self._types.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return self._ok(self._types.CUevent(self._new("event")))

    def cuEventDestroy(self, event: Any) -> Any:
        self.live.remove(("event", int(event)))
        return self._ok()

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:
        assert mode == self._types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._capture = CaptureModel(int(stream))
        return self._ok()

    def cuStreamEndCapture(self, stream: Any) -> Any:
        assert self._capture is not None and self._capture.origin == int(stream)
        capture, self._capture = self._capture, None
        try:
            edges = capture.end()
        except CaptureError:
            return (self._types.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, self._types.CUgraph(0))
        graph = self._new("graph")
        self._edges[graph] = edges
        return self._ok(self._types.CUgraph(graph))

    def cuEventRecordWithFlags(self, event: Any, stream: Any, flags: int) -> Any:
        if self._forgets("cuEventRecordWithFlags") or self._capture is None:
            return self._ok()
        self._capture.record(int(stream), int(event))
        return self._ok()

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> Any:
        assert self._capture is not None
        if not self._forgets("cuStreamWaitEvent"):
            try:
                self._capture.wait(int(stream), int(event))
            except CaptureError:
                return (self._types.CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,)
        return self._ok()

    def cuLaunchKernelEx(self, config: Any, kernel: Any, table: int, extra: int) -> Any:
        assert self._capture is not None and len(config.attrs) == config.numAttrs
        ids = self._types.CUlaunchAttributeID
        given = {attribute.id: attribute.value for attribute in config.attrs}
        node, event, kind = self._new("node"), None, ""
        early = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION in given and not self._forgets(
            "serialization"
        )
        if ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT in given:
            signalled = given[ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT].programmaticEvent
            event = int(signalled.event)
            kind = "launch_completion" if signalled.triggerAtBlockStart else "programmatic"
        if ids.CU_LAUNCH_ATTRIBUTE_PRIORITY in given:
            self._priority[node] = given[ids.CU_LAUNCH_ATTRIBUTE_PRIORITY].priority
        try:
            self._capture.launch(int(config.hStream), node, early=early, event=event, kind=kind)
        except CaptureError:
            return (self._types.CUresult.CUDA_ERROR_ILLEGAL_STATE,)
        self._keep(node, config, kernel, table)
        return self._ok()

    def cuStreamGetCaptureInfo(self, stream: Any) -> Any:
        assert self._capture is not None
        waiting = self._capture.waiting[int(stream)]
        nodes = [self._types.CUgraphNode(node) for node, _ in waiting]
        return self._ok(1, 1, self._types.CUgraph(0), nodes, [], len(nodes))

    # --- Graphs ---

    def cuGraphCreate(self, flags: int) -> Any:
        graph = self._new("graph")
        self._edges[graph] = set()
        return self._ok(self._types.CUgraph(graph))

    def cuGraphAddKernelNode(self, graph: Any, nodes: Any, count: int, params: Any) -> Any:
        node = self._new("node")
        self._keep(node, params, params.func, int(params.kernelParams))
        return self._ok(self._types.CUgraphNode(node))

    def cuGraphKernelNodeSetAttribute(self, node: Any, attribute: Any, value: Any) -> Any:
        assert attribute == self._types.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
        self._priority[int(node)] = value.priority
        self.launched[int(node)]["priority"] = value.priority
        return self._ok()

    def cuGraphAddDependencies(self, graph: Any, sources: Any, targets: Any, data: Any, count: int) -> Any:
        assert count == 1
        kind = {edge: name for name, edge in EDGE.items()}[(int(data[0].type), int(data[0].from_port))]
        self._edges[int(graph)].add((int(sources[0]), int(targets[0]), kind))
        return self._ok()

    def cuGraphGetEdges(self, graph: Any, count: int = 0) -> Any:
        edges = sorted(self._edges[int(graph)])
        data = []
        for *_, kind in edges:
            data.append(self._types.CUgraphEdgeData())
            data[-1].type, data[-1].from_port = EDGE[kind]
        nodes = [[self._types.CUgraphNode(edge[side]) for edge in edges] for side in (0, 1)]
        return self._ok(*nodes, data, len(edges))

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return self._ok(self._types.CUgraphExec(self._new("exec")))

    def cuGraphUpload(self, executable: Any, stream: Any) -> Any:
        return self._ok()

    def cuGraphExecDestroy(self, executable: Any) -> Any:
        self.live.remove(("exec", int(executable)))
        return self._ok()

    def cuGraphDestroy(self, graph: Any) -> Any:
        self.live.remove(("graph", int(graph)))
        return self._ok()

    def _keep(self, node: int, params: Any, kernel: Any, table: int) -> None:
        """What a kernel runs with; its argument is copied now, as the driver does."""
        first = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[0]
        assert first is not None
        size = 8 if int(kernel) < 100 else GRID_HEADER_BYTES
        self.launched[node] = {
            "kernel": int(kernel),
            "grid": (params.gridDimX, params.gridDimY, params.gridDimZ),
            "block": (params.blockDimX, params.blockDimY, params.blockDimZ),
            "shared": params.sharedMemBytes,
            "argument": ctypes.string_at(first, size),
            "priority": self._priority.get(node, 0),
        }

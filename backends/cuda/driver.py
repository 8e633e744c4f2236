"""The CUDA driver, as the few verbs that spantune needs. The only module that calls `cuda.bindings.driver`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from backends.errors import CudaFailed, DeviceError, GraphMismatch
from search_spaces.gpu import GpuRecord
from workloads.ops.base import TensorMapSpec

MIN_CAPABILITY = (9, 0)
USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY; without it priorities are ignored
# Ports of an edge: CU_GRAPH_KERNEL_NODE_PORT_DEFAULT, _PROGRAMMATIC (triggered) and _LAUNCH_ORDER (begun).
PORTS = {"ordinary": 0, "programmatic": 1, "launch_completion": 2}


@lru_cache(maxsize=1)
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError("CUDA bindings are not installed: install spantune[cuda13]") from error
    try:
        code = driver.cuInit(0)[0]
    except Exception as error:  # the loader raises its own type when libcuda is missing
        raise DeviceError("no CUDA driver on this machine: use --device sim:b300, or install the driver") from error
    if int(code) != 0:
        raise DeviceError(f"the CUDA driver does not start ({code.name}): use --device sim:b300, or check the driver")
    return driver


def call(name: str, *arguments: object) -> Any:
    """Calls a driver entry point and returns its values (None, one, or a tuple).

    Raises:
        CudaFailed: the driver's code is not success.
    """
    code, *values = getattr(_bindings(), name)(*arguments)
    if int(code) != 0:
        raise CudaFailed(name, int(code), code.name)
    return values[0] if len(values) == 1 else tuple(values) or None


@dataclass(frozen=True)
class Gpu:
    """A GPU whose primary context is current in this thread."""

    index: int
    record: GpuRecord
    uuid: str
    driver_version: str
    stream: Any


def read_record(index: int) -> GpuRecord:
    """Reads a GPU's record without making a context.

    Raises:
        DeviceError: no such GPU, or one below compute capability 9.0.
    """
    driver = _bindings()
    count = call("cuDeviceGetCount")
    if not 0 <= index < count:
        raise DeviceError(f"no device cuda:{index}: this machine has {count} GPU{'s' if count != 1 else ''}")
    device = call("cuDeviceGet", index)

    def read(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", attribute, device))

    major, minor = read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")
    name = call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()
    if (major, minor) < MIN_CAPABILITY:
        raise DeviceError(f"{name} is sm_{major}{minor}: programmatic dependent launch needs sm_90 or newer")
    return GpuRecord(
        name=name,
        arch=f"sm_{major}{minor}a",
        sm_count=read("MULTIPROCESSOR_COUNT"),
        l2_bytes=read("L2_CACHE_SIZE"),
        shared_per_sm=read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        shared_per_block=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        registers_per_sm=read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        threads_per_sm=read("MAX_THREADS_PER_MULTIPROCESSOR"),
        reserved_shared=read("RESERVED_SHARED_MEMORY_PER_BLOCK"),
    )


def open_gpu(index: int) -> Gpu:
    """Makes a GPU's primary context current in this thread.

    Raises:
        DeviceError: no such GPU, or one below compute capability 9.0.
    """
    record = read_record(index)
    device = call("cuDeviceGet", index)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    uuid = bytes(call("cuDeviceGetUuid", device).bytes).hex()
    version = int(call("cuDriverGetVersion"))
    return Gpu(index, record, uuid, f"{version // 1000}.{version % 1000 // 10}", create_stream())


def allocate(size: int) -> int:
    """Plain device memory; returns its address."""
    return int(call("cuMemAlloc", size))


def free(address: int) -> None:
    call("cuMemFree", address)


def allocate_host(size: int) -> int:
    """Pinned host memory; returns its address."""
    return int(call("cuMemHostAlloc", size, 0))


def free_host(address: int) -> None:
    call("cuMemFreeHost", address)


def fill(address: int, byte: int, size: int, stream: object) -> None:
    call("cuMemsetD8Async", address, byte, size, stream)


def copy(target: int, source: int, size: int, stream: object) -> None:
    """Device to device, in stream order."""
    call("cuMemcpyDtoDAsync", target, source, size, stream)


def copy_from_host(target: int, content: bytes) -> None:
    """Host to device; returns when the content has been copied."""
    call("cuMemcpyHtoD", target, content, len(content))


def copy_to_host(target: int, source: int, size: int, stream: object) -> None:
    call("cuMemcpyDtoHAsync", target, source, size, stream)


def synchronize(stream: object) -> None:
    call("cuStreamSynchronize", stream)


def load_kernel(path: Path, name: str, shared_limit: int) -> Any:
    """Loads a cubin and returns one kernel, ready for its most shared memory and with the maximal carve-out.

    NOTE: every kernel of a graph asks for the same carve-out, or a kernel with large shared memory starts only when a
    small one beside it has ended.
    """
    module = call("cuModuleLoadData", path.read_bytes())
    kernel = call("cuModuleGetFunction", module, name.encode())
    attributes = _bindings().CUfunction_attribute
    static = int(call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel))
    call("cuFuncSetAttribute", kernel, attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
    call(
        "cuFuncSetAttribute", kernel, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_limit - static
    )
    return kernel


def ctas_per_sm(kernel: object, threads: int, shared_bytes: int) -> int:
    """Resident CTAs that the driver grants a kernel on one multiprocessor."""
    return int(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, threads, shared_bytes))


def encode_map(spec: TensorMapSpec, address: int) -> bytes:
    """The 128 bytes of a tensor map over a tensor at `address`."""
    driver = _bindings()
    kinds = driver.CUtensorMapDataType
    kind = {
        "u8": kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[spec.element]
    swizzles = driver.CUtensorMapSwizzle
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B if spec.swizzle else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    rank = len(spec.dims)
    encoded = call(
        "cuTensorMapEncodeTiled",
        kind,
        rank,
        address + spec.offset_bytes,
        [driver.cuuint64_t(d) for d in spec.dims],
        [driver.cuuint64_t(s) for s in spec.strides],
        [driver.cuuint32_t(b) for b in spec.box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def create_stream() -> Any:
    return call("cuStreamCreate", 1)  # non-blocking


def destroy_stream(stream: object) -> None:
    call("cuStreamDestroy", stream)


def create_event() -> Any:
    """An event without timing, as programmatic events must be."""
    return call("cuEventCreate", int(_bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING))


def destroy_event(event: object) -> None:
    call("cuEventDestroy", event)


Arguments: TypeAlias = "Sequence[ctypes.Array[Any] | ctypes._SimpleCData[Any]]"


def _table(arguments: Arguments) -> ctypes.Array[ctypes.c_void_p]:
    """The array of addresses that a launch takes its arguments from; it must outlive the call."""
    return (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))


class Graph:
    """A CUDA graph under construction, and then its executable."""

    def __init__(self, captured: object = None, nodes: Sequence[Any] = ()) -> None:
        """An empty graph, or one that a capture has made of these nodes; it owns the graph."""
        self._graph: Any = call("cuGraphCreate", 0) if captured is None else captured
        self._exec: Any = None
        self._ids = {int(node): i for i, node in enumerate(nodes)}

    def add_kernel(
        self,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Arguments,
        priority: int = 0,
    ) -> Any:
        """Adds a kernel node without edges. The driver copies the arguments here."""
        driver = _bindings()
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = kernel
        params.gridDimX, params.gridDimY, params.gridDimZ = grid
        params.blockDimX, params.blockDimY, params.blockDimZ = threads, 1, 1
        params.sharedMemBytes = shared_bytes
        table = _table(arguments)
        params.kernelParams = ctypes.addressof(table)
        node = call("cuGraphAddKernelNode", self._graph, [], 0, params)
        if priority:
            value = driver.CUkernelNodeAttrValue()
            value.priority = -priority  # the driver counts down
            call("cuGraphKernelNodeSetAttribute", node, driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY, value)
        self._ids[int(node)] = len(self._ids)
        return node

    def add_child(self, raw: int) -> Any:
        """Adds a copy of somebody else's graph, given by its raw handle, as one node without edges."""
        node = call("cuGraphAddChildGraphNode", self._graph, [], 0, _bindings().CUgraph(raw))
        self._ids[int(node)] = len(self._ids)
        return node

    def add_edge(self, producer: object, consumer: object, kind: str = "ordinary") -> None:
        """Adds one edge; `kind` is one of `PORTS`.

        NOTE: one edge a call. With a list, the driver applies the first element's data to every edge of the call.
        """
        driver = _bindings()
        data = driver.CUgraphEdgeData()
        data.from_port = PORTS[kind]
        if data.from_port:
            data.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        call("cuGraphAddDependencies", self._graph, [producer], [consumer], [data], 1)

    def edges(self) -> set[tuple[int, int, str]]:
        """Edges as the driver holds them: (producer, consumer) by order of addition, and the kind."""
        count = call("cuGraphGetEdges", self._graph, 0)[-1]
        if count == 0:
            return set()
        sources, targets, data, count = call("cuGraphGetEdges", self._graph, count)
        kinds = {(int(port > 0), port): kind for kind, port in PORTS.items()}
        return {
            (
                self._ids[int(sources[i])],
                self._ids[int(targets[i])],
                kinds.get((int(data[i].type), int(data[i].from_port)), "unknown"),
            )
            for i in range(count)
        }

    def instantiate(self, stream: object) -> None:
        """Makes the graph launchable and uploads it."""
        self._exec = call("cuGraphInstantiate", self._graph, USE_NODE_PRIORITY)
        call("cuGraphUpload", self._exec, stream)

    def launch(self, stream: object) -> None:
        call("cuGraphLaunch", self._exec, stream)

    def close(self) -> None:
        """Frees the graph. Safe to call twice."""
        if self._exec is not None:
            call("cuGraphExecDestroy", self._exec)
            self._exec = None
        if self._graph is not None:
            call("cuGraphDestroy", self._graph)
            self._graph = None


class Capture:
    """A graph that is captured from streams, launch by launch.

    NOTE: nothing may be loaded, allocated or encoded between begin and end, and streams and events must exist before.
    """

    def __init__(self, origin: object) -> None:
        mode = _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", origin, mode)
        self._origin = origin

    def launch(
        self,
        stream: object,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Arguments,
        priority: int = 0,
        *,
        early: bool = False,
        event: object = None,
        at_start: bool = False,
    ) -> Any:
        """Captures a launch and returns its node. The driver copies the arguments here.

        Args:
            stream: that is capturing, or that waits for an event of the capture.
            kernel: loaded.
            grid: CTAs in x, y, z.
            threads: of a CTA.
            shared_bytes: dynamic.
            arguments: of the kernel.
            priority: higher runs first.
            early: allows programmatic stream serialization.
            event: that the launch signals at its trigger.
            at_start: the event is triggered when all CTAs have begun, instead.
        """
        driver = _bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        attributes = []
        if priority:
            attributes.append(_attribute("PRIORITY", "priority", -priority))
        if early:
            attributes.append(
                _attribute("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed", 1)
            )
        if event is not None:
            attributes.append(_event_attribute(event, at_start))
        config.attrs, config.numAttrs = attributes, len(attributes)
        table = _table(arguments)
        call("cuLaunchKernelEx", config, kernel, ctypes.addressof(table), 0)
        return self._last(stream)

    def _last(self, stream: object) -> Any:
        """The node of the launch just captured: the one that the stream now waits for."""
        _status, _id, _graph, nodes, _data, count = call("cuStreamGetCaptureInfo", stream)
        if count != 1:
            raise GraphMismatch(f"a captured launch left {count} nodes on its stream, not one")
        return nodes[0]

    def record(self, stream: object, event: object) -> None:
        call("cuEventRecordWithFlags", event, stream, 0)

    def wait(self, stream: object, event: object) -> None:
        call("cuStreamWaitEvent", stream, event, 0)

    def end(self, nodes: Sequence[Any]) -> Graph:
        """Ends the capture.

        Args:
            nodes: what `launch` returned, in the order that `Graph.edges` is to number them in.

        Raises:
            CudaFailed: a stream was not joined, or a call was not allowed during a capture. Nothing is left behind.
        """
        return Graph(call("cuStreamEndCapture", self._origin), nodes)

    def abandon(self) -> None:
        """Ends a capture that failed and frees what it holds."""
        try:
            graph = call("cuStreamEndCapture", self._origin)
        except CudaFailed:
            return  # the driver has dropped the graph with the capture that it refuses
        call("cuGraphDestroy", graph)


def _attribute(name: str, field: str, content: object) -> Any:
    driver = _bindings()
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    setattr(value, field, content)
    attribute.value = value
    return attribute


def _event_attribute(event: object, at_start: bool) -> Any:
    """The attribute of an event that the launch signals.

    NOTE: also for the begin, a programmatic event that is triggered at block start. `griddepcontrol.wait` does not see
    a launch completion event, so a consumer that waited for one would read too early.
    """
    value = _bindings().CUlaunchAttributeValue()
    content = value.programmaticEvent  # lives in `value`, which must outlive it
    content.event, content.flags, content.triggerAtBlockStart = event, 0, int(at_start)
    return _attribute("PROGRAMMATIC_EVENT", "programmaticEvent", content)

"""A config made runnable on a caller's tensors, for inference: no measuring, no verifier, no search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from backends.errors import DeviceError, UnsafePlan
from search_spaces.config import Config


class OpenLayer(Protocol):
    """A layer that is built and loaded."""

    outputs: dict[str, Any]

    def run(self, stream: int = 0) -> None:
        """Queues one run on a stream, given by its raw handle; returns at once."""

    def close(self) -> None:
        """Frees graph and workspaces. Safe to call twice."""


def open_layer(
    workload: str,
    shape_params: Mapping[str, int | str],
    config: Config,
    tensors: Mapping[str, Any],
    device: str = "cuda:0",
) -> OpenLayer:
    """Builds a config over the caller's tensors as they are: weights, inputs and caches by graph tensor name.

    Outputs that the caller passes are written in place; others are allocated and found in `outputs`.

    Raises:
        DeviceError: the device cannot run it.
        IllegalConfig: the config does not fit this shape or GPU.
    """
    if not device.startswith("cuda:") or not device[5:].isdigit():
        raise DeviceError(f"a layer needs a CUDA device, not {device!r}: use cuda:N")
    return CudaLayer(workload, shape_params, config, tensors, int(device[5:]))


class CudaLayer:
    """See `OpenLayer`."""

    def __init__(
        self,
        workload: str,
        shape_params: Mapping[str, int | str],
        config: Config,
        tensors: Mapping[str, Any],
        index: int,
    ) -> None:
        from backends.cmp.build import MapCache, build_graph
        from backends.cuda import driver, memory
        from backends.cuda.kernels import Kernels
        from backends.plan.launches import lower
        from backends.plan.verify import verify
        from search_spaces.cmp import CmpSpace
        from search_spaces.config import CmpConfig, splits_of
        from search_spaces.errors import IllegalConfig
        from workloads import registry

        if not isinstance(config, CmpConfig):
            raise IllegalConfig(f"backend {config.backend} cannot be loaded as a layer: use a cmp config")
        known = registry.get(workload)
        given = {name: tuple(int(extent) for extent in tensor.shape) for name, tensor in tensors.items()}
        graph = known.graph(known.shape(shape_params)).fitted(given)
        gpu = driver.open_gpu(index)
        CmpSpace(graph, gpu.record).check(config)
        plan = lower(graph, config, gpu.record.arch)
        verdict = verify(graph, plan, gpu.record.sm_count)
        if not verdict.passed:
            raise UnsafePlan(verdict.message)
        written = memory.written_sizes(graph, splits_of(graph, config))
        self._arena = memory.allocate({name: size for name, size in written.items() if name not in tensors})
        self._counters = memory.allocate_counters(graph)
        own = self._arena.addresses() | self._counters.addresses()
        addresses = own | {n: int(t.data_ptr()) for n, t in tensors.items() if n in graph.tensors}
        self._graph = build_graph(plan, Kernels(gpu.record), addresses, MapCache(), gpu.stream)
        driver.synchronize(gpu.stream)
        self.outputs = {
            n: tensors[n] if n in tensors else _view(graph.tensors[n], addresses[n]) for n in graph.outputs()
        }

    def run(self, stream: int = 0) -> None:
        self._graph.launch(stream)

    def close(self) -> None:
        self._graph.close()
        self._arena.close()
        self._counters.close()


def _view(tensor: Any, address: int) -> Any:
    from backends.cuda.binding import tensor_at

    return tensor_at(address, tensor.shape, tensor.dtype)

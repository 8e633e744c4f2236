"""Loading at inference: finds the best config, checks the caller's tensors, and gives a layer that runs on them.

Needs neither Optuna nor Ray, and no compiler when the binaries are in the cache.

    with load_layer("attention_pre", tensors, requests=2, tokens=8, kv=8192) as layer:
        print(layer.match.how, layer.match.reason.text)
        layer.run(torch.cuda.current_stream())
        logits = layer.outputs["logits"]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from backends.errors import DeviceError
from results.errors import LayerClosedError
from results.matching import How, Match, MatchWarning, Reason, Target, find, target_of
from results.tensors import check_tensors, facts_of
from search_spaces.config import CmpConfig
from workloads import registry

if TYPE_CHECKING:
    from backends.layer import OpenLayer

__all__ = ["How", "Layer", "Match", "MatchWarning", "Reason", "Target", "find", "load_layer"]

LAYER_BACKEND = CmpConfig.backend  # what `backends.layer` can open


class Layer:
    """A workload's best config on a caller's tensors, built and loaded.

    It keeps the tensors alive and uses their memory as it is: the caller writes new inputs into them before a run.

    Attributes:
        match: how its config was found.
    """

    def __init__(self, opened: OpenLayer, match: Match, tensors: Mapping[str, Any]) -> None:
        self.match = match
        self._opened: OpenLayer | None = opened
        self._tensors = dict(tensors)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Tensors that a run writes, by graph name: the caller's own where given, else the layer's.

        Raises:
            LayerClosedError: the layer is closed, and its outputs' memory with it.
        """
        return self._open().outputs

    def run(self, stream: Any = None) -> None:
        """Queues one run and returns at once.

        Args:
            stream: a stream of torch or CuPy, a raw handle, or None for the legacy default stream. Work that another
                stream has queued on the tensors is not waited for: pass the stream that filled them.

        Raises:
            LayerClosedError: the layer is closed.
        """
        self._open().run(stream_handle(stream))

    def close(self) -> None:
        """Frees what the layer holds on the device; the caller's tensors stay. Safe to call twice."""
        opened, self._opened = self._opened, None
        self._tensors = {}
        if opened is not None:
            opened.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> OpenLayer:
        if self._opened is None:
            raise LayerClosedError("the layer is closed: load it again")
        return self._opened


def load_layer(
    workload: str,
    tensors: Mapping[str, Any],
    *,
    device: str = "cuda:0",
    results: str | Path | None = None,
    backend: str | None = None,
    **shape: int | str,
) -> Layer:
    """Loads the best config of a workload at a shape on a GPU, over the caller's tensors.

    Args:
        workload: registered name, such as `attention_pre`.
        tensors: weights, inputs and caches by graph tensor name, and outputs that the caller wants to own.
        device: `cuda:N`.
        results: first folder of the search path of best files.
        backend: whose configs to choose from; those that can be loaded as a layer when None.
        **shape: shape parameters, such as `requests=2`; those left out take their default.

    Raises:
        WorkloadError: unknown workload, or a shape out of range.
        TensorError: a tensor is missing, unknown, or of another shape, dtype, device or layout.
        DeviceError: the device is not `cuda:N`, or there is no such GPU.
        BestFileError: a best file on the search path is corrupted or newer.
        NoConfigError: no config of that backend is stored and none can be made.
    """
    from backends.layer import open_layer

    if re.fullmatch(r"cuda:\d+", device) is None:
        raise DeviceError(f"a layer needs a CUDA device, not {device!r}: use cuda:N")
    known = registry.get(workload)
    validated = known.shape(shape)
    facts = {name: facts_of(name, t) for name, t in tensors.items()}
    graph = known.graph(validated).fitted({name: fact.shape for name, fact in facts.items()})
    check_tensors(graph, facts, device)
    match = find(
        workload, validated.params(), device=target_of(device), backend=backend or LAYER_BACKEND, results=results
    )
    opened = open_layer(workload, validated.params(), match.config, tensors, device)
    return Layer(opened, match, tensors)


def stream_handle(stream: Any) -> int:
    """The raw handle of a stream of torch (`cuda_stream`) or CuPy (`ptr`), of a number, or of None."""
    if stream is None:
        return 0
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    return int(stream)

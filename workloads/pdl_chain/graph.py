"""The chain of small dependent layers: out = relu(in) * w + b, layer after layer, each with weights of its own.

The usual first example of programmatic dependent launch: 200 layers of 16,384 floats, so that each kernel is shorter
than its launch boundary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from workloads.errors import WorkloadError
from workloads.graph import OpGraph, Role
from workloads.ops.scale_bias_relu import scale_bias_relu


@dataclass(frozen=True)
class PdlChainShape:
    """`layers` layers of `n` floats."""

    layers: int = 200
    n: int = 16384

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= 1000:
            raise WorkloadError(f"layers={self.layers} is out of range: use 1 to 1000")
        if self.n % 1024 or not 1024 <= self.n <= 1 << 22:
            raise WorkloadError(f"n={self.n} is out of range: use a multiple of 1024 up to {1 << 22}")

    def key(self) -> str:
        return f"l{self.layers}n{self.n}"

    def params(self) -> dict[str, int | str]:
        return asdict(self)


def build_graph(shape: PdlChainShape) -> OpGraph:
    """Captures the chain. Layer i reads `h{i}` and writes `h{i+1}`; `h0` is the input `x` and the last is `y`.

    Each layer has a buffer of its own, so no buffer is reused while an older layer may still read it.
    """
    graph = OpGraph("pdl_chain")
    graph.tensor("x", (shape.n,), "f32", Role.INPUT)
    source = "x"
    for i in range(shape.layers):
        last = i == shape.layers - 1
        out = graph.tensor("y" if last else f"h{i + 1}", (shape.n,), "f32", Role.OUTPUT if last else Role.INNER)
        weight = graph.tensor(f"w{i}", (shape.n,), "f32", Role.WEIGHT)
        bias = graph.tensor(f"b{i}", (shape.n,), "f32", Role.WEIGHT)
        scale_bias_relu(graph, f"L{i}", x=source, weight=weight, bias=bias, out=out)
        source = out
    return graph

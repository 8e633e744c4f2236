"""The workloads by name. Graph building is pure; inputs and references load torch when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from workloads.attention_pre.graph import STAGES as attention_pre_stages
from workloads.attention_pre.graph import build_graph as attention_pre_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.errors import WorkloadError
from workloads.graph import OpGraph
from workloads.output_norm.graph import OutputNormShape
from workloads.output_norm.graph import build_graph as output_norm_graph
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as pdl_chain_graph


class Shape(Protocol):
    """A validated shape of one workload."""

    def key(self) -> str:
        """A short name, usable in file names."""

    def params(self) -> dict[str, int | str]:
        """The parameters that rebuild it."""


@dataclass(frozen=True)
class Workload:
    """A family of op graphs with shapes, inputs and a reference answer.

    Attributes:
        name: as users call it.
        shape_type: dataclass of the shape parameters.
        build: graph of a shape.
        package: where `inputs` and `reference` live.
        stages: ops that are added together when the graph is grown step by step; empty for one op each, finalisers with
            their producers.
    """

    name: str
    shape_type: Callable[..., Any]
    build: Callable[[Any], OpGraph]
    package: str
    stages: tuple[tuple[str, ...], ...] = ()

    def shape(self, params: Mapping[str, int | str]) -> Shape:
        """A validated shape.

        Raises:
            WorkloadError: a parameter is unknown or out of range.
        """
        known = self.shape_type.__dataclass_fields__  # type: ignore[attr-defined]
        for name in params:
            if name not in known:
                raise WorkloadError(f"unknown parameter {name!r} of {self.name}: use some of {', '.join(known)}")
        shape: Shape = self.shape_type(**params)
        return shape

    def graph(self, shape: Shape) -> OpGraph:
        return self.build(shape)

    def inputs(self) -> Any:
        """The module with `make_inputs` and `refresh`; imports torch."""
        return importlib.import_module(f"{self.package}.inputs")

    def reference(self) -> Any:
        """The module with `reference` and `compare`; imports torch."""
        return importlib.import_module(f"{self.package}.reference")


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "attention_pre", AttentionPreShape, attention_pre_graph, "workloads.attention_pre", attention_pre_stages
        ),
        Workload("output_norm", OutputNormShape, output_norm_graph, "workloads.output_norm"),
        Workload("pdl_chain", PdlChainShape, pdl_chain_graph, "workloads.pdl_chain"),
    )
}


def get(name: str) -> Workload:
    """A workload by name.

    Raises:
        WorkloadError: no such workload; the text lists what there is.
    """
    if name not in WORKLOADS:
        raise WorkloadError(f"unknown workload {name!r}: use one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]

"""Op graphs: ops and tensors with def-use edges, captured on the host.

A graph is captured by calling one method of `workloads.ops` per op on an `OpGraph`; each call records what the op reads
and writes and returns the tensors that it defines. Nothing here knows a device, a tile or a schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod

from workloads.errors import WorkloadError

DTYPE_BYTES = {"bf16": 2, "e4m3": 1, "f32": 4, "i32": 4, "i64": 8, "u8": 1}


class Role(StrEnum):
    """Who owns a tensor and when it may change."""

    WEIGHT = "weight"  # constant between loads; may be read before an op's inputs are ready
    INPUT = "input"  # written by the caller before the first op of a run
    STATE = "state"  # a cache: read and written in place, survives the run
    INNER = "inner"  # written and read within the run
    PARTIAL = "partial"  # split-K partials: an extra leading axis of `split_k` slices
    OUTPUT = "output"  # written by the run, read by the caller


@dataclass(frozen=True)
class Tensor:
    """A named tensor; `shape` in elements, row-major. A partial's shape leaves out the leading split axis.

    `least` is set where a caller's tensor may have another leading extent, no smaller than that: caches of any number
    of pages, tables of any length. It changes no schedule, so it is not part of a graph's identity.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    least: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise WorkloadError(
                f"tensor {self.name}: unknown dtype {self.dtype!r}, use one of {', '.join(DTYPE_BYTES)}"
            )
        if any(extent < 1 for extent in self.shape):
            raise WorkloadError(f"tensor {self.name}: shape {self.shape} has an empty axis")

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Op:
    """One op of a graph: `kind` names its definition in `workloads.ops`, `roles` maps its operands to tensor names."""

    name: str
    kind: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    params: Mapping[str, int | float | bool] = field(default_factory=dict)

    def tensor(self, role: str) -> str:
        """The tensor name behind an operand role such as `weight` or `out`."""
        return self.reads[role] if role in self.reads else self.writes[role]


@dataclass(frozen=True)
class DataEdge:
    """`consumer` reads (or updates in place) `tensor`, which `producer` writes."""

    producer: str
    consumer: str
    tensor: str


class OpGraph:
    """An op graph under capture. Ops are kept in call order, which must be a topological order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.ops: dict[str, Op] = {}
        self._writers: dict[str, list[str]] = {}

    def tensor(self, name: str, shape: Iterable[int], dtype: str, role: Role, *, least: int | None = None) -> str:
        """Declares a tensor and returns its name; see `Tensor` for `least`."""
        if name in self.tensors:
            raise WorkloadError(f"graph {self.name}: tensor {name} is declared twice")
        self.tensors[name] = Tensor(name, tuple(shape), dtype, role, least)
        return name

    def record(self, op: Op) -> None:
        """Records one op.

        Raises:
            WorkloadError: a name is used twice, an operand is undeclared, read before it is written, or written twice.
                Only an output may have several writers (each writes its own region: the plan verifier proves it).
        """
        if op.name in self.ops:
            raise WorkloadError(f"graph {self.name}: op {op.name} is recorded twice")
        for name in (*op.reads.values(), *op.writes.values()):
            if name not in self.tensors:
                raise WorkloadError(f"op {op.name}: tensor {name} is not declared")
        for name in op.reads.values():
            written_here = self.tensors[name].role in (Role.INNER, Role.PARTIAL, Role.OUTPUT)
            if written_here and name not in self._writers:
                raise WorkloadError(f"op {op.name} reads {name} before any op writes it")
        for name in op.writes.values():
            if self.tensors[name].role in (Role.WEIGHT, Role.INPUT):
                raise WorkloadError(f"op {op.name} writes {name}, which is a {self.tensors[name].role}")
            if name in self._writers and self.tensors[name].role is not Role.OUTPUT:
                raise WorkloadError(f"op {op.name} writes {name}, which op {self._writers[name][0]} writes already")
        for name in op.writes.values():
            self._writers.setdefault(name, []).append(op.name)
        self.ops[op.name] = op

    def writers(self, tensor: str) -> tuple[str, ...]:
        """The ops that write a tensor; empty for inputs, weights and tables."""
        return tuple(self._writers.get(tensor, ()))

    def edges(self) -> tuple[DataEdge, ...]:
        """Data edges in consumer order, one per (producer, consumer, tensor)."""
        found: list[DataEdge] = []
        for op in self.ops.values():
            for name in dict.fromkeys(op.reads.values()):
                found += [DataEdge(producer, op.name, name) for producer in self.writers(name) if producer != op.name]
        return tuple(found)

    def op_edges(self) -> tuple[tuple[str, str], ...]:
        """(producer, consumer) pairs without repeats."""
        return tuple(dict.fromkeys((edge.producer, edge.consumer) for edge in self.edges()))

    def outputs(self) -> tuple[str, ...]:
        """Names of the tensors that a caller may read after a run."""
        return tuple(n for n in self._writers if self.tensors[n].role in (Role.OUTPUT, Role.STATE))

    def subgraph(self, names: Iterable[str]) -> OpGraph:
        """The sub-graph of the named ops, closed under its inputs.

        Raises:
            WorkloadError: an op is unknown, or one reads what an op outside of the selection writes.
        """
        chosen = list(names)
        for name in chosen:
            if name not in self.ops:
                raise WorkloadError(f"unknown op {name!r} in {self.name}: use some of {', '.join(self.ops)}")
        sub = OpGraph(self.name)
        for op in self.ops.values():
            if op.name not in chosen:
                continue
            for tensor in (*op.reads.values(), *op.writes.values()):
                for writer in self.writers(tensor):
                    if writer not in chosen and tensor in op.reads.values():
                        raise WorkloadError(f"op {op.name} reads {tensor}, so the selection must contain {writer} too")
                sub.tensors.setdefault(tensor, self.tensors[tensor])
            sub.record(op)
        return sub

    def fitted(self, shapes: Mapping[str, tuple[int, ...]]) -> OpGraph:
        """This graph with the leading extents that a caller's tensors have, where `Tensor.least` allows them."""
        fitted = OpGraph(self.name)
        fitted.tensors, fitted.ops, fitted._writers = dict(self.tensors), self.ops, self._writers
        for name, shape in shapes.items():
            own = self.tensors.get(name)
            if own is not None and own.least is not None and shape[1:] == own.shape[1:] and shape[0] >= own.least:
                fitted.tensors[name] = replace(own, shape=tuple(shape))
        return fitted

    def digest(self) -> str:
        """Content hash of the graph: ops, operands, shapes, dtypes, parameters."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        for t in self.tensors.values():
            lines.append(f"  tensor {t.name} {t.dtype}[{', '.join(map(str, t.shape))}] {t.role}")
        for op in self.ops.values():
            reads = ", ".join(f"{role}={name}" for role, name in op.reads.items())
            writes = ", ".join(f"{role}={name}" for role, name in op.writes.items())
            params = "".join(f" {key}={value}" for key, value in sorted(op.params.items()))
            lines.append(f"  {op.name}: {op.kind}({reads}) -> {writes}{params}")
        return "\n".join(lines)

"""Whether a caller's tensors fit a graph: names, shapes, dtypes, device, layout. Knows no tensor library.

A tensor is described by `TensorFacts`; `facts_of` reads them off anything with torch's attributes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from results.errors import TensorError
from workloads.graph import DTYPE_BYTES, OpGraph, Role, Tensor

NEEDED = (Role.WEIGHT, Role.INPUT, Role.STATE)
ALIGNMENT = 16  # bytes: what bulk copies and tensor maps ask of an address
DTYPE_NAMES = {
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "f32": "float32",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}


@dataclass(frozen=True)
class TensorFacts:
    """What of a tensor matters here.

    Attributes:
        shape: extents in elements.
        dtype: as its library names it, without the library, such as `float8_e4m3fn`.
        device: such as `cuda:0`.
        contiguous: whether it is dense and row-major.
        address: of its first element.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    contiguous: bool
    address: int


def facts_of(name: str, tensor: Any) -> TensorFacts:
    """Reads the facts off a tensor.

    Raises:
        TensorError: it lacks what a tensor has.
    """
    try:
        return TensorFacts(
            shape=tuple(int(extent) for extent in tensor.shape),
            dtype=str(tensor.dtype).rpartition(".")[2],
            device=str(tensor.device),
            contiguous=bool(tensor.is_contiguous()),
            address=int(tensor.data_ptr()),
        )
    except (AttributeError, TypeError) as error:
        raise TensorError(f"{name} is a {type(tensor).__name__}, not a tensor: {error}") from None


def check_tensors(graph: OpGraph, given: Mapping[str, TensorFacts], device: str) -> None:
    """Refuses tensors that a graph cannot run on.

    Weights, inputs and caches must be given; outputs may be.

    Args:
        graph: whose tensors they are.
        given: facts by tensor name.
        device: where all of them must live.

    Raises:
        TensorError: names the first tensor at fault, what it is and what it must be.
    """
    allowed = {t.name: t for t in graph.tensors.values() if t.role in (*NEEDED, Role.OUTPUT)}
    for name in given:
        if name not in allowed:
            raise TensorError(_unknown(graph, name, allowed))
    missing = [t.name for t in allowed.values() if t.role in NEEDED and t.name not in given]
    if missing:
        wanted = "; ".join(describe(allowed[name]) for name in missing[:3])
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TensorError(f"{graph.name} needs tensors that are not given: {wanted}{more}")
    for name, facts in given.items():
        fault = _fault(allowed[name], facts, device)
        if fault is not None:
            raise TensorError(f"tensor {name} {fault}")
    _check_overlap(graph, given)


def describe(tensor: Tensor) -> str:
    """A tensor as a caller must make it: `w_b0 float8_e4m3fn[2624, 6144] weight`."""
    return f"{tensor.name} {DTYPE_NAMES[tensor.dtype]}[{', '.join(map(str, tensor.shape))}] {tensor.role}"


def _unknown(graph: OpGraph, name: str, allowed: Iterable[str]) -> str:
    if name in graph.tensors:
        return f"tensor {name} is made during a run: do not give it"
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"{graph.name} has no tensor {name!r}: " + (f"{close[0]}?" if close else f"use {', '.join(allowed)}")


def _fault(tensor: Tensor, facts: TensorFacts, device: str) -> str | None:
    dtype = DTYPE_NAMES[tensor.dtype]
    if facts.shape != tensor.shape:
        return f"has shape {list(facts.shape)}, not {list(tensor.shape)}"
    if facts.dtype != dtype:
        return f"has dtype {facts.dtype}, not {dtype}"
    if facts.device != device:
        return f"is on {facts.device}, not on {device}"
    if not facts.contiguous:
        return "is not contiguous: pass tensor.contiguous()"
    if facts.address % ALIGNMENT:
        return f"starts at an address that is not a multiple of {ALIGNMENT} bytes: pass a copy of the view"
    return None


def _check_overlap(graph: OpGraph, given: Mapping[str, TensorFacts]) -> None:
    """Two tensors may share memory only if no op writes either: plans order accesses by tensor, not by address."""
    spans = sorted(
        (facts.address, facts.address + prod(facts.shape) * DTYPE_BYTES[graph.tensors[name].dtype], name)
        for name, facts in given.items()
    )
    # Each is compared with the one that reaches farthest so far, among all and among the written ones.
    farthest: tuple[int, str] = (0, "")
    farthest_written: tuple[int, str] = (0, "")
    for begin, end, name in spans:
        written = bool(graph.writers(name))
        reach, other = farthest if written else farthest_written
        if begin < reach:
            raise TensorError(f"tensors {other} and {name} share memory, and a run writes to it: give them their own")
        farthest = max(farthest, (end, name))
        if written:
            farthest_written = max(farthest_written, (end, name))

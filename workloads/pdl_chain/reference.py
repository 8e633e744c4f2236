"""The chain in torch, bit for bit what fused multiply-adds give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from workloads.mismatch import Mismatch
from workloads.pdl_chain.graph import PdlChainShape

Tensors = Mapping[str, torch.Tensor]


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 tensors, rounded once to float32.

    The float64 product is exact (48 bits). The float64 sum is rounded to odd: where it is inexact and its last bit is
    zero, it moves one unit towards the exact value. 53 bits rounded to odd still tell on which side of a float32 tie
    the exact value lies, so the second rounding gives what a single one would. A plain float64 sum does not.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    towards = torch.where(error > 0, torch.inf, -torch.inf)
    move = (error != 0) & (total.view(torch.int64) & 1 == 0)
    return torch.where(move, torch.nextafter(total, towards), total).float()


def reference(shape: PdlChainShape, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Every layer's output [n] float32 by the op graph's names: `h1`, `h2`, ... and the last one `y`."""
    results: dict[str, torch.Tensor] = {}
    current = tensors["x"]
    for i in range(shape.layers):
        current = fma(current.clamp(min=0), tensors["w"][i], tensors["b"][i])
        results["y" if i == shape.layers - 1 else f"h{i + 1}"] = current
    return results


def compare(
    shape: PdlChainShape, got: Tensors, want: Tensors, *, names: Iterable[str] | None = None, core: str = "mma_sync"
) -> list[Mismatch]:
    """Tensors whose bits differ from the reference's; empty when the run is right.

    Args:
        shape: of the chain.
        got: what the run wrote, by name.
        want: the result of `reference`.
        names: tensors to check; without it `y`, which must be there, and whatever layer outputs are.
        core: not used, no op has an MMA core.
    """
    found = []
    for name in dict.fromkeys(names if names is not None else ["y", *(n for n in want if n in got)]):
        if name not in got:
            found.append(Mismatch(name, "is missing", 1, (), float("nan"), float("nan")))
            continue
        bits = [side[name].view(torch.int32) for side in (got, want)]
        bad = (bits[0] != bits[1]).nonzero()
        if len(bad):
            first = int(bad[0])
            values = float(got[name][first]), float(want[name][first])
            found.append(Mismatch(name, "differs in its bits (the first is given)", len(bad), (first,), *values))
    return found

"""Inputs of the chain: a vector, and weights and biases of each layer."""

from __future__ import annotations

import torch

from workloads.pdl_chain.graph import PdlChainShape


def make_inputs(shape: PdlChainShape, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Inputs that depend on (shape, seed) only, the same on every device.

    Returns:
        `x` [n] N(0, 1); `w` [layers, n] in [0.5, 1.5] and `b` [layers, n] in [-0.1, 0.1], and their rows under the op
        graph's names `w0`, `b0`, `w1`, ... (views of the same memory). All float32.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape.n, generator=generator)
    weight, bias = torch.rand(2, shape.layers, shape.n, generator=generator) - 0.5
    tensors = {"x": x.to(device), "w": (weight + 1.0).to(device), "b": (bias * 0.2).to(device)}
    for name in ("w", "b"):
        tensors |= {f"{name}{i}": row for i, row in enumerate(tensors[name])}
    return tensors


def refresh(shape: PdlChainShape, tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A new `x` for the same weights, on the device of `tensors["x"]`."""
    x = torch.randn(shape.n, generator=torch.Generator().manual_seed(seed))
    return {"x": x.to(tensors["x"].device)}

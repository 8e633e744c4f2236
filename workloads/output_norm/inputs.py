"""Inputs of the output projection: quantised attention outputs, the residual, and weights."""

from __future__ import annotations

import torch

from workloads.attention_pre.numerics import quantise, quantise_weight
from workloads.output_norm.graph import HIDDEN, OutputNormShape


def make_inputs(shape: OutputNormShape, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Weights N(0, 1 / K) in FP8 and one step's inputs, named as in the op graph; they depend on (shape, seed) only."""
    generator = torch.Generator().manual_seed(seed)
    weight, scale = quantise_weight(torch.randn(HIDDEN, shape.k, generator=generator) * shape.k**-0.5)
    norm = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    tensors = {"w_o": weight, "w_o_sf": scale, "ln_w": norm.bfloat16(), **_step(shape, generator)}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def refresh(shape: OutputNormShape, tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """New attention outputs and a new residual for the same weights, on the device of `tensors["residual"]`."""
    device = tensors["residual"].device
    return {name: t.to(device) for name, t in _step(shape, torch.Generator().manual_seed(seed)).items()}


def _step(shape: OutputNormShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Activations N(0, 1) with a gain of up to 2 either way per group of 128, so that scales differ."""
    groups = shape.k // 128
    gain = torch.exp2(torch.rand(shape.tokens, groups, 1, generator=generator) * 2 - 1)
    values = torch.randn(shape.tokens, groups, 128, generator=generator) * gain
    quantised = quantise(values.flatten(1))
    scale = torch.zeros(groups, shape.m_aligned)
    scale[:, : shape.tokens] = quantised.scale.T
    residual = torch.randn(shape.tokens, HIDDEN, generator=generator).bfloat16()
    return {"attn_fp8": quantised.values, "attn_sf": scale, "residual": residual}

"""Rounding, quantisation, rotation and scoring in torch: each formula of docs/attention_pre.md once.

Scales are always computed in float32 and powers of two are read from the exponent bits, as the kernels do; everything
else runs in the dtype of its input (float32, or float64 for the wider reference). No global torch switch is touched:
torch multiplies float32 matrices in full precision unless someone asked for TF32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from workloads.attention_pre.shapes import PAGE_TOKENS, SCALE_BLOCK, AttentionPreShape

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4  # smallest amax that a power-of-two scale is made for
FLT_MIN = 2.0**-126  # smallest scale of the latent cache
LOGITS_POISON = float("nan")  # value of logits that no run may write
SCORE_CHUNK = 1 << 14  # cached positions scored at a time

Tensors = Mapping[str, torch.Tensor]


class Quantised(NamedTuple):
    """Values with one scale per 128 of the last axis.

    Attributes:
        values: [..., K] e4m3, or plain floats when quantisation is off.
        scale: [..., K / 128] float32.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Values times scales, [..., K] in `dtype`; exact for power-of-two scales."""
        grouped = self.values.to(dtype).unflatten(-1, (-1, SCALE_BLOCK))
        return (grouped * self.scale.to(dtype).unsqueeze(-1)).flatten(-2)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Nearest bf16 (ties to even), in the dtype of `x`."""
    return x.to(torch.bfloat16).to(x.dtype)


def pow2_scale(amax: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(max(amax, 1e-4) / 448)) from the exponent bits, float32."""
    bits = (amax.float().clamp(min=AMAX_FLOOR) / E4M3_MAX).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 (ties to even), saturated at 448; NaN stays NaN."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantise(x: torch.Tensor) -> Quantised:
    """Power-of-two quantisation of [..., K] per group of 128; the division by the scale is exact."""
    grouped = x.float().unflatten(-1, (-1, SCALE_BLOCK))
    scale = pow2_scale(grouped.abs().amax(-1))
    return Quantised(to_e4m3(grouped / scale.unsqueeze(-1)).flatten(-2), scale)


def quantise_latent(x: torch.Tensor) -> Quantised:
    """Quantisation of the latent cache: scale amax / 448 in float32, not a power of two, at least FLT_MIN."""
    grouped = x.float().unflatten(-1, (-1, SCALE_BLOCK))
    scale = (grouped.abs().amax(-1) / E4M3_MAX).clamp(min=FLT_MIN)
    return Quantised(to_e4m3(grouped / scale.unsqueeze(-1)).flatten(-2), scale)


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Power-of-two quantisation of float32 [N, K] per 128 x 128 block; the last row block may be short.

    Returns:
        e4m3 [N, K] and float32 scales [ceil(N / 128), K / 128].
    """
    rows, k = weight.shape
    row_blocks = -(-rows // SCALE_BLOCK)
    row_amax = torch.linalg.vector_norm(weight.view(rows, -1, SCALE_BLOCK), float("inf"), dim=-1)
    padded = row_amax.new_zeros(row_blocks * SCALE_BLOCK, k // SCALE_BLOCK)
    padded[:rows] = row_amax
    scale = pow2_scale(padded.view(row_blocks, SCALE_BLOCK, -1).amax(1))
    return to_e4m3(scale_blocks(weight.clone(), scale.reciprocal())), scale


def dequantise_weight(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in `dtype` from e4m3 [N, K] and scales [ceil(N / 128), K / 128]; exact, since scales are powers of two."""
    return scale_blocks(weight.to(dtype), scale)


def scale_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiplies [N, K] in place by one factor per 128 x 128 block, [ceil(N / 128), K / 128], and returns it."""
    by_row = scale.to(weight.dtype).repeat_interleave(SCALE_BLOCK, 0)[: len(weight)]
    weight.view(len(weight), -1, SCALE_BLOCK).mul_(by_row.unsqueeze(-1))
    return weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, not rounded."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last axis with the biased variance, not rounded."""
    centred = x - x.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * inverse * weight.to(x.dtype) + bias.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Rotary embedding of [..., 2 n] by angles [..., n], not rounded.

    Pairs are (x[2i], x[2i + 1]), or (x[i], x[n + i]) with `neox`; every result stays where its input was.
    """
    if neox:
        even, odd = x.chunk(2, -1)
    else:
        even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = even * cos - odd * sin, odd * cos + even * sin
    return torch.cat((first, second), -1) if neox else torch.stack((first, second), -1).flatten(-2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis (a power of two) in Sylvester order, by XOR butterflies."""
    size = x.shape[-1]
    half = 1
    while half < size:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x * size**-0.5


def score(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scale: torch.Tensor) -> torch.Tensor:
    """E1 for the tokens of one request: key_scale[s] * sum_h weights[t, h] * relu(query[t, h] . keys[s]).

    Args:
        query: [T, heads, 128], scales left out.
        weights: [T, heads], query scales included.
        keys: [S, 128], scales left out.
        key_scale: [S].

    Returns:
        [T, S] in the dtype of `weights`.
    """
    dots = torch.einsum("thd,sd->ths", query.to(weights.dtype), keys.to(weights.dtype)).relu()
    return torch.einsum("ths,th->ts", dots, weights) * key_scale.to(weights.dtype)


def paged_score(
    shape: AttentionPreShape, query: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, tensors: Tensors
) -> torch.Tensor:
    """E1 over the paged indexer cache: [M, logits_stride] float32, poison from each token's context length on."""
    logits = torch.full((shape.m, shape.logits_stride), LOGITS_POISON, device=cache.device)
    dim = shape.dims.index_dim
    for request, pages in enumerate(tensors["block_table"].long()):
        rows = slice(request * shape.tokens, (request + 1) * shape.tokens)
        contexts = tensors["context_lens"][rows, None]
        for begin in range(0, shape.kv, SCORE_CHUNK):
            chunk = cache[pages[begin // PAGE_TOKENS : (begin + SCORE_CHUNK) // PAGE_TOKENS]]
            keys = chunk[:, : PAGE_TOKENS * dim].reshape(-1, dim).view(E4M3)
            scales = chunk[:, PAGE_TOKENS * dim :].reshape(-1, 4).view(torch.float32).squeeze(-1)
            columns = torch.arange(begin, min(begin + len(keys), shape.kv), device=cache.device)
            scored = score(query[rows], weights[rows], keys[: len(columns)], scales[: len(columns)]).float()
            logits[rows, columns] = torch.where(columns < contexts, scored, LOGITS_POISON)
    return logits

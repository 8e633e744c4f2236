"""The attention-pre layer in torch, op by op, with exactly the rounding points of docs/attention_pre.md.

Each op is a pure function of tensors; `reference` chains them from the inputs of one step to everything that a run
writes. `Flags` choose the numerics: float32 or float64 between rounding points, the order of split-K sums, the variant
of the indexer, and no rounding at all (to compare with a model in plain floats).

Rounding points to bf16: the residual, the normed hidden, `projected` before its norms and both latents after them, the
rotated key, q_nope, the absorbed query, the indexer query before and after its rotation, the indexer key before and
after its LayerNorm and after its rotation. The rotary part of the main query is rotated before its only rounding, since
the projection does so in its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from workloads.attention_pre import numerics
from workloads.attention_pre.comparison import compare
from workloads.attention_pre.numerics import Quantised, Tensors, paged_score
from workloads.attention_pre.shapes import MLA_TOKEN_BYTES, PAGE_TOKENS, SCALE_BLOCK, AttentionPreShape

__all__ = ["Flags", "compare", "reference"]


@dataclass(frozen=True)
class Flags:
    """Numerics of a reference run.

    Attributes:
        hadamard: transforms the indexer's query and key before quantisation.
        neox: half-split rotary pairs in the indexer; None takes the model's form.
        dtype: of everything between rounding points, float32 or float64.
        k_splits: chunks of K that each projection sums in ascending order.
        quantise: off leaves out every rounding, to bf16 as well as to FP8 (per-op functions only).
    """

    hadamard: bool = True
    neox: bool | None = None
    dtype: torch.dtype = torch.float32
    k_splits: int = 1
    quantise: bool = True

    def bf16(self, x: torch.Tensor) -> torch.Tensor:
        """A bf16 rounding point."""
        return numerics.round_bf16(x) if self.quantise else x

    def fp8(self, x: torch.Tensor) -> Quantised:
        """An FP8 rounding point with power-of-two scales."""
        return numerics.quantise(x) if self.quantise else _unscaled(x)

    def latent_fp8(self, x: torch.Tensor) -> Quantised:
        """The FP8 rounding point of the latent cache."""
        return numerics.quantise_latent(x) if self.quantise else _unscaled(x)


class Angles(NamedTuple):
    """Cosines and sines of each token, [M, 32]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def over_heads(self) -> Angles:
        """The same, [M, 1, 32]."""
        return Angles(self.cos.unsqueeze(1), self.sin.unsqueeze(1))


def _unscaled(x: torch.Tensor) -> Quantised:
    return Quantised(x, torch.ones(*x.shape[:-1], x.shape[-1] // SCALE_BLOCK, dtype=x.dtype, device=x.device))


def angles(cos_sin: torch.Tensor, positions: torch.Tensor) -> Angles:
    """Rows of [max_pos, 64] (cosines, then sines) at positions [M]."""
    return Angles(*cos_sin[positions.long()].chunk(2, -1))


def project(x: torch.Tensor, weight: torch.Tensor, flags: Flags) -> torch.Tensor:
    """X[M, K] . W[N, K]^T, not rounded; K is summed in `flags.k_splits` chunks of whole 128-blocks, in order."""
    blocks = x.shape[1] // SCALE_BLOCK
    splits = min(flags.k_splits, blocks)
    cuts = [i * blocks // splits * SCALE_BLOCK for i in range(splits + 1)]
    cuts[-1] = x.shape[1]
    weight = weight.to(flags.dtype)
    total = x[:, : cuts[1]] @ weight[:, : cuts[1]].T
    for begin, end in zip(cuts[1:-1], cuts[2:], strict=True):
        total = total + x[:, begin:end] @ weight[:, begin:end].T
    return total


def add_norm_quant(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, flags: Flags
) -> tuple[torch.Tensor, torch.Tensor, Quantised]:
    """A0 on [M, H]: the sum, its RMSNorm, and the norm quantised. The variance is that of the rounded sum."""
    total = flags.bf16(hidden.to(flags.dtype) + residual.to(flags.dtype))
    norm = flags.bf16(numerics.rms_norm(total, weight, eps))
    return total, norm, flags.fp8(norm)


def qkv_finalise(
    projected: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    angle: Angles,
    eps: float,
    flags: Flags,
) -> tuple[Quantised, Quantised, torch.Tensor]:
    """B0f on [M, q_lora + kv_lora + 64]: quantised query latent, quantised KV latent, rotated key [M, 64]."""
    sizes = [len(q_weight), len(kv_weight), 2 * angle.cos.shape[-1]]
    q, kv, key = flags.bf16(projected).split(sizes, -1)
    q_latent = flags.fp8(flags.bf16(numerics.rms_norm(q, q_weight, eps)))
    kv_latent = flags.latent_fp8(flags.bf16(numerics.rms_norm(kv, kv_weight, eps)))
    return q_latent, kv_latent, flags.bf16(numerics.rotate(key, *angle, neox=False))


def split_query(query: torch.Tensor, heads: int, angle: Angles, flags: Flags) -> tuple[torch.Tensor, torch.Tensor]:
    """D0's epilogue on [M, heads * (nope + 64)]: q_nope [M, heads, nope] and the rotated part [M, heads, 64]."""
    by_head = query.unflatten(-1, (heads, -1))
    rope = 2 * angle.cos.shape[-1]
    plain, rotary = by_head[..., :-rope], by_head[..., -rope:]
    return flags.bf16(plain), flags.bf16(numerics.rotate(rotary, *angle.over_heads(), neox=False))


def absorb(q_nope: torch.Tensor, weight: torch.Tensor, flags: Flags) -> torch.Tensor:
    """D2: [M, heads, nope] by [heads, nope, kv_lora] per head, [M, heads, kv_lora]."""
    return flags.bf16(torch.einsum("mhk,hkn->mhn", q_nope.to(flags.dtype), weight.to(flags.dtype)))


def index_key(
    key: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, angle: Angles, eps: float, neox: bool, flags: Flags
) -> Quantised:
    """B1's finaliser on [M, 128]: LayerNorm, rotation of the first 64, Hadamard, quantisation."""
    normed = flags.bf16(numerics.layer_norm(flags.bf16(key), weight, bias, eps))
    return flags.fp8(_rotate_first(normed, angle, neox, flags))


def index_query(query: torch.Tensor, heads: int, angle: Angles, neox: bool, flags: Flags) -> Quantised:
    """D1's finaliser on [M, heads * 128]: rotation of each head's first 64, Hadamard, quantisation [M, heads, 128]."""
    by_head = flags.bf16(query).unflatten(-1, (heads, -1))
    return flags.fp8(_rotate_first(by_head, angle.over_heads(), neox, flags))


def _rotate_first(x: torch.Tensor, angle: Angles, neox: bool, flags: Flags) -> torch.Tensor:
    rope = 2 * angle.cos.shape[-1]
    rotated = flags.bf16(numerics.rotate(x[..., :rope], *angle, neox=neox))
    joined = torch.cat((rotated, x[..., rope:]), -1)
    return numerics.hadamard(joined) if flags.hadamard else joined


def head_weights(gate: torch.Tensor, query_scale: torch.Tensor, dim: int) -> torch.Tensor:
    """gate [M, heads] times the query's scales [M, heads, 1], heads^-0.5 and dim^-0.5."""
    return gate * query_scale.squeeze(-1).to(gate.dtype) * (gate.shape[1] ** -0.5 * dim**-0.5)


def write_latents(cache: torch.Tensor, slots: torch.Tensor, latent: Quantised, key: torch.Tensor) -> torch.Tensor:
    """A copy of [pages, 64, 656] u8 with the tokens' rows written; slot -1 writes none."""
    updated, kept = cache.clone(), slots >= 0
    parts = (latent.values, latent.scale.float(), key.bfloat16())
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    updated.view(-1, MLA_TOKEN_BYTES)[slots[kept]] = rows[kept]
    return updated


def write_keys(cache: torch.Tensor, slots: torch.Tensor, key: Quantised) -> torch.Tensor:
    """A copy of [pages, 64 * 132] u8 with the tokens' keys and scales written; slot -1 writes none."""
    updated, kept = cache.clone(), slots >= 0
    page, offset, dim = slots[kept] // PAGE_TOKENS, slots[kept] % PAGE_TOKENS, key.values.shape[1]
    data, scales = updated[:, : PAGE_TOKENS * dim], updated[:, PAGE_TOKENS * dim :]
    data.view(-1, PAGE_TOKENS, dim)[page, offset] = key.values.view(torch.uint8)[kept]
    scales.view(-1, PAGE_TOKENS, 4)[page, offset] = key.scale.float().contiguous().view(torch.uint8)[kept]
    return updated


def _mn_major(scale: torch.Tensor, stride: int) -> torch.Tensor:
    """Scales [M, K / 128] as the kernels store them: [K / 128, m_aligned], padding zero."""
    stored = scale.new_zeros(scale.shape[1], stride)
    stored[:, : len(scale)] = scale.T
    return stored


def reference(shape: AttentionPreShape, tensors: Tensors, *, flags: Flags = Flags()) -> dict[str, torch.Tensor]:  # noqa: B008
    """Everything that a run of the layer writes, on the inputs' device, by the op graph's names.

    Adds `gate_raw` (the head gate before scaling) and, for `compare`, the inputs that say what is written and scored.
    """
    d, dtype = shape.dims, flags.dtype
    neox = d.index_neox if flags.neox is None else flags.neox
    angle = angles(tensors["cos_sin"], tensors["positions"])

    def gemm(x: Quantised, name: str) -> torch.Tensor:
        weight = numerics.dequantise_weight(tensors[name], tensors[f"{name}_sf"], dtype)
        return project(x.dequantise(dtype), weight, flags)

    total, norm, h = add_norm_quant(tensors["hidden"], tensors["residual"], tensors["ln_w"], d.eps, flags)
    q, latent, key = qkv_finalise(gemm(h, "w_b0"), tensors["q_a_ln_w"], tensors["kv_a_ln_w"], angle, d.eps, flags)
    q_nope, q_rope = split_query(gemm(q, "w_d0"), shape.heads, angle, flags)
    indexed = index_key(gemm(h, "w_b1"), tensors["k_norm_w"], tensors["k_norm_b"], angle, d.index_eps, neox, flags)
    query = index_query(gemm(q, "w_d1"), d.index_heads, angle, neox, flags)
    gate = project(norm, tensors["w_c0"], flags)
    weights = head_weights(gate, query.scale, d.index_dim)
    indexer_cache = write_keys(tensors["indexer_cache"], tensors["slot_mapping"], indexed)
    return {
        "residual_out": total.bfloat16(),
        "norm_out": norm.bfloat16(),
        "h_fp8": h.values,
        "h_sf": _mn_major(h.scale, shape.m_aligned),
        "q_fp8": q.values,
        "q_sf": _mn_major(q.scale, shape.m_aligned),
        "mla_cache": write_latents(tensors["mla_cache"], tensors["slot_mapping"], latent, key),
        "q_nope": q_nope.bfloat16(),
        "q_for_sparse_mla": torch.cat((absorb(q_nope, tensors["w_d2"], flags), q_rope), -1).bfloat16(),
        "indexer_cache": indexer_cache,
        "indexer_q_fp8": query.values,
        "head_weights": weights.float(),
        "gate_raw": gate.float(),
        "logits": paged_score(shape, query.values, weights, indexer_cache, tensors),
        **{name: tensors[name] for name in ("slot_mapping", "block_table", "context_lens")},
    }

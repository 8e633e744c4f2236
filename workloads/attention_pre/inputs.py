"""Inputs of the attention-pre layer: weights, activations, block table and caches of one decode step.

Everything is a function of (shape, seed) on one kind of device: each tensor has a generator of its own. Large tensors
are drawn on the device that they live on, so a CPU and a GPU give different, equally good inputs.

Weights are N(0, 1/K) with a gain of up to 2 either way per 128 x 128 block, activations N(0, 1) with such a gain per
group of 128: without it nearly every scale would be the same power of two and a wrong scale index would go unseen.
"""

from __future__ import annotations

import zlib

import torch

from workloads.attention_pre.graph import num_pages
from workloads.attention_pre.numerics import quantise, quantise_weight, scale_blocks
from workloads.attention_pre.shapes import (
    INDEX_TOKEN_BYTES,
    MLA_TOKEN_BYTES,
    PAGE_TOKENS,
    SCALE_BLOCK,
    AttentionPreShape,
)

ROPE_THETA = {"glm5": 1e6, "dsv32": 1e4}  # without YaRN: the table is an input, its values are free
POISON = 0xFF  # NaN as e4m3, bf16 and float32
OUTLIER = 200.0  # size of the large-outlier token's few outliers
OUTLIER_CHANNELS = 5
MAX_REWIND = 63  # positions that `refresh` may set a request back
CHUNK_ROWS = 1 << 17  # cached tokens made at a time


def make_inputs(
    shape: AttentionPreShape, seed: int, device: str = "cpu", *, skip_slot: bool = False
) -> dict[str, torch.Tensor]:
    """Weights and one step's inputs, named as in the op graph.

    With two tokens or more one is all zero and one has large outliers. Cache rows of older tokens are valid, those of
    this step and of unused pages are poisoned.

    Args:
        shape: of the step.
        seed: of every draw.
        device: where the tensors live.
        skip_slot: gives one token the slot -1 (no cache write); the row that it would have written is valid.
    """
    tensors = _weights(shape, seed, device)
    tensors["cos_sin"] = _cos_sin(shape).to(device)
    contexts = torch.full((shape.requests,), shape.kv)
    return tensors | _step(shape, seed, device, contexts, skip_slot)


def refresh(
    shape: AttentionPreShape, tensors: dict[str, torch.Tensor], seed: int, *, skip_slot: bool = False
) -> dict[str, torch.Tensor]:
    """New activations, positions, contexts, slots, block table and caches for the same weights.

    Every request is set back by 1 to 63 positions where `kv` allows it, so positions, slots and context lengths all
    differ from those of `make_inputs`.

    Returns:
        The changed tensors only, on the device of `tensors["hidden"]`.
    """
    room = min(MAX_REWIND, shape.kv - shape.tokens)
    rewind = torch.zeros(shape.requests, dtype=torch.int64)
    if room:
        rewind = torch.randint(1, room + 1, (shape.requests,), generator=_generator(seed, "rewind", "cpu"))
    return _step(shape, seed, tensors["hidden"].device.type, shape.kv - rewind, skip_slot)


def _generator(seed: int, name: str, device: str) -> torch.Generator:
    """A generator that depends on the seed and the tensor only."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def _normal(extents: tuple[int, ...], seed: int, name: str, device: str) -> torch.Tensor:
    """N(0, 1) in float32."""
    return torch.randn(extents, generator=_generator(seed, name, device), device=device)


def _gain(extents: tuple[int, ...], seed: int, name: str, device: str) -> torch.Tensor:
    """2^U(-1, 1) divided by its root mean square, float32."""
    exponent = torch.rand(extents, generator=_generator(seed, f"{name}/gain", device), device=device) * 2 - 1
    return torch.exp2(exponent) * 0.86


def _weights(shape: AttentionPreShape, seed: int, device: str) -> dict[str, torch.Tensor]:
    d, h = shape.dims, shape.dims.hidden
    result: dict[str, torch.Tensor] = {}
    quantised = {
        "w_b0": (d.qkv_a_rows, h),
        "w_d0": (shape.heads * shape.head_rows, d.q_lora),
        "w_b1": (d.index_dim, h),
        "w_d1": (d.index_heads * d.index_dim, d.q_lora),
    }
    for name, (rows, k) in quantised.items():
        gain = _gain((-(-rows // SCALE_BLOCK), k // SCALE_BLOCK), seed, name, device) * k**-0.5
        weight = scale_blocks(_normal((rows, k), seed, name, device), gain)
        result[name], result[f"{name}_sf"] = quantise_weight(weight)
    result["w_c0"] = _normal((d.index_heads, h), seed, "w_c0", device).mul_(h**-0.5).bfloat16()
    w_d2 = _normal((shape.heads, d.nope, d.kv_lora), seed, "w_d2", device)
    result["w_d2"] = w_d2.mul_(d.nope**-0.5).bfloat16()

    norms = {name: 1 + 0.1 * _normal((size,), seed, name, device) for name, size in _norm_sizes(shape).items()}
    query_gain = _gain((d.q_lora // SCALE_BLOCK,), seed, "q_a_ln_w", device).repeat_interleave(SCALE_BLOCK)
    result["ln_w"], result["kv_a_ln_w"] = norms["ln_w"].bfloat16(), norms["kv_a_ln_w"].bfloat16()
    result["q_a_ln_w"] = (norms["q_a_ln_w"] * query_gain).bfloat16()
    result["k_norm_w"] = norms["k_norm_w"]
    result["k_norm_b"] = 0.1 * _normal((d.index_dim,), seed, "k_norm_b", device)
    return result


def _norm_sizes(shape: AttentionPreShape) -> dict[str, int]:
    d = shape.dims
    return {"ln_w": d.hidden, "q_a_ln_w": d.q_lora, "kv_a_ln_w": d.kv_lora, "k_norm_w": d.index_dim}


def _cos_sin(shape: AttentionPreShape) -> torch.Tensor:
    """[kv, 64] float32: cosines in the first half of a row, sines in the second."""
    half = shape.dims.rope // 2
    frequency = ROPE_THETA[shape.model] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(shape.kv, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def _step(
    shape: AttentionPreShape, seed: int, device: str, contexts: torch.Tensor, skip_slot: bool
) -> dict[str, torch.Tensor]:
    """Everything that changes from step to step; `contexts` [requests] counts each request's positions after it."""
    table = _block_table(shape, seed)
    positions = (contexts[:, None] - shape.tokens + torch.arange(shape.tokens)).flatten()
    rows = torch.arange(shape.requests).repeat_interleave(shape.tokens)
    slots = table[rows, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    valid = _cached_slots(table, contexts - shape.tokens, shape.kv)
    if skip_slot:
        skipped = int(torch.randint(shape.m, (1,), generator=_generator(seed, "skip_slot", "cpu")))
        valid = torch.cat((valid, slots[skipped : skipped + 1]))
        slots[skipped] = -1
    poisoned = torch.ones(num_pages(shape) * PAGE_TOKENS, dtype=torch.bool)
    poisoned[valid] = False
    hidden, residual = _activations(shape, seed, device)
    return {
        "hidden": hidden,
        "residual": residual,
        "positions": positions.int().to(device),
        "slot_mapping": slots.to(device),
        "block_table": table.int().to(device),
        "context_lens": (positions + 1).int().to(device),
        "mla_cache": _mla_cache(shape, seed, device, poisoned.to(device)),
        "indexer_cache": _indexer_cache(shape, seed, device, poisoned.to(device)),
    }


def _activations(shape: AttentionPreShape, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden and residual [M, H] bf16, with the zero token and the outlier token where there are two tokens or more."""
    m, h = shape.m, shape.dims.hidden
    gain = _gain((m, h // SCALE_BLOCK, 1), seed, "hidden", device)
    pair = [_normal((m, h // SCALE_BLOCK, SCALE_BLOCK), seed, name, device) * gain for name in ("hidden", "residual")]
    hidden, residual = (x.view(m, h) for x in pair)
    if m >= 2:
        generator = _generator(seed, "special", "cpu")
        zero, outlier = torch.randperm(m, generator=generator)[:2].tolist()
        channels = torch.randperm(h, generator=generator)[:OUTLIER_CHANNELS].to(device)
        hidden[zero] = 0
        residual[zero] = 0
        hidden[outlier, channels] *= OUTLIER
    return hidden.bfloat16(), residual.bfloat16()


def _block_table(shape: AttentionPreShape, seed: int) -> torch.Tensor:
    """[requests, pages_per_request] int64: shuffled, never in order, pages of different requests interleaved."""
    generator = _generator(seed, "block_table", "cpu")
    pages, needed = num_pages(shape), shape.requests * shape.pages_per_request
    while True:
        table = torch.randperm(pages, generator=generator)[:needed].view(shape.requests, shape.pages_per_request)
        order = table.amin(1).argsort()
        low, high = table.amin(1)[order], table.amax(1)[order]
        apart = shape.requests > 1 and shape.pages_per_request > 1 and bool((high[:-1] < low[1:]).all())
        if not apart and not torch.equal(table.flatten(), torch.arange(needed)):
            return table


def _cached_slots(table: torch.Tensor, lengths: torch.Tensor, kv: int) -> torch.Tensor:
    """Slots of the tokens that were cached before this step, flat int64."""
    positions = torch.arange(kv)
    slots = table[:, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    return slots[positions < lengths[:, None]]


def _mla_cache(shape: AttentionPreShape, seed: int, device: str, poisoned: torch.Tensor) -> torch.Tensor:
    """[pages, 64, 656] u8: 512 e4m3 without NaN, 4 positive float32 scales, 64 bf16."""
    cache = torch.empty(poisoned.numel(), MLA_TOKEN_BYTES, dtype=torch.uint8, device=device)
    generator = _generator(seed, "mla_cache", device)
    for rows in cache.split(CHUNK_ROWS):
        n = len(rows)
        latent = torch.randint(256, (n, 512), generator=generator, device=device, dtype=torch.uint8)
        rows[:, :512] = latent & 0xBF  # a clear top exponent bit leaves no NaN
        scale = (torch.rand(n, 4, generator=generator, device=device) + 0.5) / SCALE_BLOCK
        rows[:, 512:528] = scale.view(torch.uint8)
        rows[:, 528:] = torch.randn(n, 64, generator=generator, device=device).bfloat16().view(torch.uint8)
    cache[poisoned] = POISON
    return cache.view(-1, PAGE_TOKENS, MLA_TOKEN_BYTES)


def _indexer_cache(shape: AttentionPreShape, seed: int, device: str, poisoned: torch.Tensor) -> torch.Tensor:
    """[pages, 64 * 132] u8: per page 64 x 128 e4m3 keys, then 64 float32 scales (powers of two)."""
    pages, dim = poisoned.numel() // PAGE_TOKENS, shape.dims.index_dim
    cache = torch.empty(pages, PAGE_TOKENS * INDEX_TOKEN_BYTES, dtype=torch.uint8, device=device)
    generator = _generator(seed, "indexer_cache", device)
    for rows in cache.split(CHUNK_ROWS // PAGE_TOKENS):
        n = len(rows) * PAGE_TOKENS
        gain = torch.exp2(torch.rand(n, 1, generator=generator, device=device) * 2 - 1)
        keys = quantise(torch.randn(n, dim, generator=generator, device=device) * gain)
        rows[:, : PAGE_TOKENS * dim] = keys.values.view(torch.uint8).view(len(rows), -1)
        rows[:, PAGE_TOKENS * dim :] = keys.scale.view(torch.uint8).view(len(rows), -1)
    mask = poisoned.view(pages, PAGE_TOKENS)
    cache[:, : PAGE_TOKENS * dim].view(pages, PAGE_TOKENS, dim)[mask] = POISON
    cache[:, PAGE_TOKENS * dim :].view(pages, PAGE_TOKENS, 4)[mask] = POISON
    return cache

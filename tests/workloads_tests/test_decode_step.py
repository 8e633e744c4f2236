"""The kernels of a decode step: their bytes, fusion that keeps them, and what is out of range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads.decode_step import DIMENSIONS, MODELS, DecodeStep, ModelDims, get_model
from workloads.errors import WorkloadError

SMALL = ModelDims("small", hidden=8, intermediate=16, layers=2, heads=4, kv_heads=2, head_dim=3, vocab=100)


def test_bytes_of_each_kernel() -> None:
    kernels = DecodeStep(SMALL, batch=5, context=7, element_bytes=2).kernels()
    layer = [
        ("add_rmsnorm", 5 * 8 * 4 * 2),
        ("qkv_proj", 8 * (12 + 6 + 6) * 2),
        ("qk_norm_rope", 2 * 5 * (12 + 6) * 2),
        ("kv_cache_write", 5 * (6 + 6) * 2),
        ("attention", 5 * 7 * (6 + 6) * 2),
        ("o_proj", 12 * 8 * 2),
        ("add_rmsnorm", 5 * 8 * 4 * 2),
        ("gate_up_proj", 8 * 32 * 2),
        ("silu_mul", 3 * 5 * 16 * 2),
        ("down_proj", 16 * 8 * 2),
    ]
    tail = [("final_norm", 2 * 5 * 8 * 2), ("lm_head", 8 * 100 * 2), ("sample", 5 * 100 * 4)]
    assert [(kernel.name, kernel.moved_bytes) for kernel in kernels] == 2 * layer + tail


@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_fusion_keeps_bytes_and_order(model: ModelDims, count: int) -> None:
    whole, fused = DecodeStep(model), DecodeStep(model, kernels_per_layer=count)
    assert len(fused.layer_kernels()) == count
    assert len(fused.kernels()) == model.layers * count + 3
    assert sum(k.moved_bytes for k in fused.kernels()) == sum(k.moved_bytes for k in whole.kernels())
    names = [name for kernel in fused.layer_kernels() for name in kernel.name.split("+")]
    assert names == [kernel.name for kernel in whole.layer_kernels()]


def test_fusion_takes_small_neighbours_first() -> None:
    names = [kernel.name for kernel in DecodeStep(get_model("Qwen3-0.6B"), kernels_per_layer=9).layer_kernels()]
    assert "qk_norm_rope+kv_cache_write" in names and "gate_up_proj" in names


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_dimensions_out_of_range(dimension: str, value: int) -> None:
    with pytest.raises(WorkloadError, match=f"^{dimension}={value} is out of range: use 1 to "):
        replace(SMALL, **{dimension: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("batch", -1),
        ("batch", 0),
        ("context", 0),
        ("element_bytes", 9),
        ("kernels_per_layer", 0),
        ("kernels_per_layer", 11),
    ],
)
def test_settings_out_of_range(setting: str, value: int) -> None:
    with pytest.raises(WorkloadError, match=f"^{setting}={value} is out of range"):
        replace(DecodeStep(SMALL), **{setting: value})


def test_heads_share_evenly() -> None:
    with pytest.raises(WorkloadError, match="heads=4 is no multiple of kv_heads=3"):
        replace(SMALL, kv_heads=3)


def test_unknown_model() -> None:
    with pytest.raises(WorkloadError, match=r"unknown model 'Qwen9': use one of Qwen3-0\.6B, Qwen3-8B"):
        get_model("Qwen9")

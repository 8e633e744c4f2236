"""The torch reference: against a second implementation, and its own building blocks against exact values."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the reference needs torch")

from tests.workloads_tests.attention_pre_oracle import Oracle, bf16, decode, encode  # noqa: E402
from workloads.attention_pre import inputs, numerics, shapes  # noqa: E402
from workloads.attention_pre.comparison import compare  # noqa: E402
from workloads.attention_pre.reference import Flags, project, reference  # noqa: E402
from workloads.attention_pre.shapes import AttentionPreShape, ModelDims  # noqa: E402

TINY = ModelDims("tiny", hidden=256, heads=2, q_lora=128, nope=32, index_heads=2, eps=1e-5, index_neox=False)
TINY_NEOX = ModelDims("tiny_neox", hidden=256, heads=2, q_lora=128, nope=16, index_heads=3, eps=1e-6, index_neox=True)


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for dims in (TINY, TINY_NEOX):
        monkeypatch.setitem(shapes.MODELS, dims.name, dims)
        monkeypatch.setitem(inputs.ROPE_THETA, dims.name, 1e4)


@pytest.mark.parametrize(("model", "use_hadamard"), [("tiny", True), ("tiny", False), ("tiny_neox", True)])
def test_agrees_with_plain_loops(tiny_models: None, model: str, use_hadamard: bool) -> None:
    shape = AttentionPreShape(requests=2, tokens=2, kv=70, model=model)
    tensors = inputs.make_inputs(shape, 11, skip_slot=True)
    want = Oracle(shape, tensors, use_hadamard=use_hadamard).run()
    got = reference(shape, tensors, flags=Flags(dtype=torch.float64, hadamard=use_hadamard))
    for name in ("h_fp8", "q_fp8", "indexer_q_fp8", "mla_cache", "indexer_cache"):
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name
    for name in ("h_sf", "q_sf", "residual_out", "norm_out", "q_nope", "q_for_sparse_mla"):
        assert torch.equal(got[name], want[name]), name
    for name in ("gate_raw", "head_weights", "logits"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7, equal_nan=True)
    passed_on = {name: got[name] for name in ("slot_mapping", "block_table", "context_lens")}
    assert compare(shape, reference(shape, tensors, flags=Flags(hadamard=use_hadamard)), want | passed_on) == []


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    values = [decode(byte) for byte in range(127)]
    midpoints = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    beyond = [0.0, -0.0, 2.0**-11, 449.0, 464.0, 1e9, -1e9]
    probes = [*values, *midpoints, *(math.nextafter(v, 0) for v in midpoints), *beyond]
    # float32 probes: a midpoint's neighbour in float64 rounds to the midpoint itself.
    tensor = torch.tensor(probes)
    got = numerics.to_e4m3(tensor).view(torch.uint8).tolist()
    assert got == [encode(v) for v in tensor.double().tolist()]
    assert numerics.to_e4m3(torch.tensor([math.nan])).isnan().all()


def test_bf16_rounds_to_nearest_even() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 100
    x[:2048] = x[:2048].bfloat16().float() * (1 + 2.0**-8)
    assert numerics.round_bf16(x).tolist() == [bf16(v) for v in x.tolist()]


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 2.0**-22),
        (1e-4, 2.0**-22),
        (448.0, 1.0),
        (math.nextafter(448.0, 0), 1.0),
        (448.0 * (1 + 2.0**-23), 2.0),
        (224.0, 0.5),
        (3.0, 2.0**-7),
    ],
)
def test_power_of_two_scale(amax: float, scale: float) -> None:
    assert numerics.pow2_scale(torch.tensor([amax])).item() == scale


def test_quantised_values_use_the_scale_fully() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 64)[:, None]
    values, scale = numerics.quantise(x)
    top = values.float().view(64, 4, 128).abs().amax(-1)
    floored = x.view(64, 4, 128).abs().amax(-1) < 1e-4
    assert bool(((top > 223) | floored).all())
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    assert numerics.Quantised(values, scale).dequantise(torch.float32).sub(x).norm() < 0.04 * x.norm()


def test_latent_scale_is_not_a_power_of_two_and_never_zero() -> None:
    x = torch.cat((torch.zeros(1, 128), torch.full((1, 128), 3.0)))
    values, scale = numerics.quantise_latent(x)
    assert scale.flatten().tolist() == [2.0**-126, torch.tensor(3.0).div(448).item()]
    assert values.float()[0].abs().sum() == 0
    assert bool((values.float()[1] == 448).all())


def test_weights_survive_their_quantisation() -> None:
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(3))
    values, scale = numerics.quantise_weight(weight)
    assert scale.shape == (2, 2)
    again = numerics.dequantise_weight(values, scale, torch.float64)
    assert (again - weight).norm() < 0.04 * weight.norm()
    for block_row, rows in enumerate((slice(0, 128), slice(128, 200))):
        expected = numerics.pow2_scale(weight[rows, 128:].abs().amax())
        assert scale[block_row, 1] == expected


def test_hadamard_is_sylvesters_and_its_own_inverse() -> None:
    matrix = numerics.hadamard(torch.eye(128, dtype=torch.float64)) * math.sqrt(128)
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(128)] for i in range(128)]
    torch.testing.assert_close(matrix, torch.tensor(signs, dtype=torch.float64))
    x = torch.randn(3, 5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(numerics.hadamard(numerics.hadamard(x)), x)


def test_rotation_keeps_lengths_and_places() -> None:
    x = torch.zeros(64)
    x[3] = 2.0
    cos, sin = torch.full((32,), 0.6), torch.full((32,), 0.8)
    paired, halved = (numerics.rotate(x, cos, sin, neox=neox) for neox in (False, True))
    assert {i: round(v, 5) for i, v in enumerate(paired.tolist()) if v} == {2: -1.6, 3: 1.2}
    assert {i: round(v, 5) for i, v in enumerate(halved.tolist()) if v} == {3: 1.2, 35: 1.6}


@pytest.mark.parametrize("splits", [1, 2, 3, 6, 100])
def test_split_sums_cover_all_of_k(splits: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(n, 640, dtype=torch.float64, generator=generator) for n in (3, 7))
    got = project(x, weight, Flags(dtype=torch.float64, k_splits=splits))
    torch.testing.assert_close(got, x @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_token_and_skipped_slot(dtype: torch.dtype) -> None:
    shape = AttentionPreShape(requests=2, tokens=2, kv=130, tp=8)
    tensors = inputs.make_inputs(shape, 5, skip_slot=True)
    got = reference(shape, tensors, flags=Flags(dtype=dtype))
    zero = int((tensors["hidden"].abs().sum(1) == 0).nonzero())
    assert bool((got["h_sf"][:, zero] == 2.0**-22).all())
    for name in ("h_fp8", "q_fp8", "q_for_sparse_mla", "gate_raw"):
        assert not got[name][zero].float().any(), name
    context = int(tensors["context_lens"][zero])
    assert not got["logits"][zero, :context].any()
    for token, length in enumerate(tensors["context_lens"].tolist()):
        assert bool(got["logits"][token, :length].isfinite().all())
        assert bool(got["logits"][token, length:].isnan().all())
    for name, width in (("mla_cache", 656), ("indexer_cache", 132)):
        changed = (got[name] != tensors[name]).sum()
        assert 0 < changed <= (shape.m - 1) * width


def test_inputs_are_left_alone() -> None:
    shape = AttentionPreShape(requests=1, tokens=1, kv=64, tp=8)
    tensors = inputs.make_inputs(shape, 6)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    reference(shape, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name

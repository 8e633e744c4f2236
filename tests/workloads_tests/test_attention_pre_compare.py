"""The comparison: honest runs pass with room to spare, planted faults are caught and named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the reference needs torch")

from workloads.attention_pre import inputs, numerics, tolerances  # noqa: E402
from workloads.attention_pre import reference as ref  # noqa: E402
from workloads.attention_pre.comparison import compare  # noqa: E402
from workloads.attention_pre.reference import Flags, reference  # noqa: E402
from workloads.attention_pre.shapes import AttentionPreShape  # noqa: E402
from workloads.attention_pre.tolerances import Band  # noqa: E402

SHAPE = AttentionPreShape(requests=2, tokens=4, kv=258, tp=8)
FLOATS = ("residual_out", "norm_out", "q_nope", "q_for_sparse_mla", "head_weights", "gate_raw", "logits")
SCALES = ("h_sf", "q_sf")
QUANTISED = ("h_fp8", "q_fp8", "indexer_q_fp8")


@pytest.fixture(scope="module")
def step() -> SimpleNamespace:
    """One step, its reference, a later step of the same layer, and a token that is neither zero nor an outlier."""
    tensors = inputs.make_inputs(SHAPE, 3)
    later = tensors | inputs.refresh(SHAPE, tensors, 4)
    size = tensors["hidden"].float().norm(dim=1)
    plain = int((size - size.median()).abs().argmin())
    return SimpleNamespace(tensors=tensors, want=reference(SHAPE, tensors), later=reference(SHAPE, later), row=plain)


def copy(want: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in want.items()}


def names_of(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], **options: str) -> set[str]:
    return {mismatch.tensor for mismatch in compare(SHAPE, got, want, **options)}


def test_reference_equals_itself(step: SimpleNamespace) -> None:
    assert compare(SHAPE, step.want, step.want) == []


@pytest.mark.parametrize("flags", [Flags(dtype=torch.float64), Flags(k_splits=6)], ids=["float64", "6 splits"])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        AttentionPreShape(requests=1, tokens=1, kv=65, tp=8),
        AttentionPreShape(requests=3, tokens=2, kv=100, tp=8, model="dsv32"),
    ],
    ids=AttentionPreShape.key,
)
def test_other_orders_of_sums_pass_at_half_the_limits(
    shape: AttentionPreShape, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in vars(tolerances).items():
        if isinstance(value, Band):
            monkeypatch.setattr(tolerances, name, Band(value.settled / 2, value.unsettled / 2))
        elif isinstance(value, dict) and name.endswith("FLIPS"):
            halves = {core: Band(band.settled / 2, band.unsettled / 2) for core, band in value.items()}
            monkeypatch.setattr(tolerances, name, halves)
    tensors = inputs.make_inputs(shape, 0, skip_slot=shape.m > 1)
    for data in (tensors, tensors | inputs.refresh(shape, tensors, 1)):
        assert compare(shape, reference(shape, data, flags=flags), reference(shape, data)) == []


def noisy_project(error: float) -> Callable[..., torch.Tensor]:
    """`project` with a relative error on the FP8 products, as an accumulator of fewer bits makes it."""
    exact, generator = ref.project, torch.Generator().manual_seed(1)

    def project(x: torch.Tensor, weight: torch.Tensor, flags: Flags) -> torch.Tensor:
        product = exact(x, weight, flags)
        if weight.dtype == torch.bfloat16:  # the gate's weight
            return product
        return product * (1 + error * torch.randn(product.shape, generator=generator))

    return project


@pytest.mark.parametrize(("error", "core"), [(3e-7, "mma_sync"), (1.3e-4, "wgmma")])
def test_noise_of_each_core_passes(
    step: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: float, core: str
) -> None:
    monkeypatch.setattr(ref, "project", noisy_project(error))
    for _ in range(2):
        assert compare(SHAPE, reference(SHAPE, step.tensors), step.want, core=core) == []


def test_one_flipped_byte_upstream_in_every_row_passes(step: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, generator = ref.add_norm_quant, torch.Generator().manual_seed(2)

    def flipped(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, numerics.Quantised]:
        total, norm, h = exact(*arguments)
        data = h.values.view(torch.uint8).clone()
        rows, columns = torch.arange(SHAPE.m), torch.randint(data.shape[1], (SHAPE.m,), generator=generator)
        data[rows, columns] -= (data[rows, columns] & 0x7F).clamp(max=1)
        return total, norm, numerics.Quantised(data.view(numerics.E4M3), h.scale)

    monkeypatch.setattr(ref, "add_norm_quant", flipped)
    assert compare(SHAPE, reference(SHAPE, step.tensors), step.want) == []


def test_a_scale_flipped_at_its_tie_passes(step: SimpleNamespace) -> None:
    got = copy(step.want)
    group, block = step.want["h_fp8"][step.row, 128:256].float(), 1
    got["h_sf"][block, step.row] *= 2
    got["h_fp8"][step.row, 128:256] = (group / 2).to(numerics.E4M3)
    head = step.want["indexer_q_fp8"][step.row, 5].float()
    got["indexer_q_fp8"][step.row, 5] = (head / 2).to(numerics.E4M3)
    got["head_weights"][step.row, 5] *= 2
    assert compare(SHAPE, got, step.want) == []


@pytest.mark.parametrize("name", [*FLOATS, *SCALES])
def test_one_nan_is_caught(step: SimpleNamespace, name: str) -> None:
    got = copy(step.want)
    index = (1, step.row) if name in SCALES else (step.row, 1, 1)[: got[name].dim()]
    got[name][index] = float("nan")
    found = [m for m in compare(SHAPE, got, step.want) if m.tensor == name]
    assert [(m.rule, m.count, m.index) for m in found] == [("is not finite", 1, index)]
    assert str(list(index))[1:-1] in str(found[0])


@pytest.mark.parametrize("name", QUANTISED)
def test_one_nan_byte_is_caught(step: SimpleNamespace, name: str) -> None:
    got = copy(step.want)
    got[name].view(torch.uint8).view(SHAPE.m, -1)[step.row, 7] = 0x7F
    assert name in names_of(got, step.want)


@pytest.mark.parametrize("name", [*FLOATS, *QUANTISED])
def test_a_stale_row_is_caught(step: SimpleNamespace, name: str) -> None:
    got = copy(step.want)
    width = int(step.later["context_lens"].min()) if name == "logits" else step.want[name].shape[1]
    got[name][step.row, :width] = step.later[name][step.row, :width]
    assert name in names_of(got, step.want)


@pytest.mark.parametrize("name", ["q_nope", "q_for_sparse_mla", "indexer_q_fp8", "head_weights"])
def test_swapped_heads_are_caught(step: SimpleNamespace, name: str) -> None:
    got = copy(step.want)
    got[name] = step.want[name][:, [1, 0, *range(2, step.want[name].shape[1])]]
    assert name in names_of(got, step.want)


def test_swapped_heads_of_one_token_are_caught(step: SimpleNamespace) -> None:
    got = copy(step.want)
    got["q_for_sparse_mla"][step.row, :2] = step.want["q_for_sparse_mla"][step.row, [1, 0]]
    assert names_of(got, step.want) == {"q_for_sparse_mla"}


@pytest.mark.parametrize("weight", ["w_b0_sf", "w_d0_sf", "w_b1_sf", "w_d1_sf"])
@pytest.mark.parametrize("fault", [torch.ones_like, lambda scale: scale.roll(1, 1)], ids=["missing", "next block's"])
def test_wrong_weight_scales_are_caught(
    step: SimpleNamespace, weight: str, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    got = reference(SHAPE, step.tensors | {weight: fault(step.tensors[weight])})
    # A LayerNorm and a quantisation hide a constant factor of one head, not that of a block of K.
    expected = {"w_b0_sf": "q_fp8", "w_d0_sf": "q_nope", "w_b1_sf": "indexer_cache", "w_d1_sf": "indexer_q_fp8"}[weight]
    assert expected in names_of(got, step.want)


@pytest.mark.parametrize("name", ["h_sf", "q_sf"])
@pytest.mark.parametrize("fault", [torch.ones_like, lambda scale: scale.roll(1, 0)], ids=["missing", "next block's"])
def test_wrong_activation_scales_are_caught(
    step: SimpleNamespace, name: str, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert name in names_of(copy(step.want) | {name: fault(step.want[name])}, step.want)


@pytest.mark.parametrize("flags", [Flags(neox=True), Flags(hadamard=False)], ids=["NeoX rotation", "no Hadamard"])
def test_another_indexer_is_caught(step: SimpleNamespace, flags: Flags) -> None:
    assert names_of(reference(SHAPE, step.tensors, flags=flags), step.want) >= {"indexer_cache", "indexer_q_fp8"}


def test_wrong_rotation_of_the_main_query_is_caught(step: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = numerics.rotate
    monkeypatch.setattr(numerics, "rotate", lambda x, cos, sin, neox: exact(x, cos, sin, neox=True))
    assert names_of(reference(SHAPE, step.tensors), step.want) >= {"mla_cache", "q_for_sparse_mla", "indexer_cache"}


def test_a_missing_bf16_rounding_is_caught(step: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm must be rounded to bf16 before it is quantised."""
    exact = ref.add_norm_quant

    def unrounded(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, numerics.Quantised]:
        total, norm, _ = exact(*arguments)
        return total, norm, numerics.quantise(numerics.rms_norm(total, arguments[2], arguments[3]))

    monkeypatch.setattr(ref, "add_norm_quant", unrounded)
    assert "h_fp8" in names_of(reference(SHAPE, step.tensors), step.want)


@pytest.mark.parametrize("name", ["gate_raw", "head_weights"])
def test_a_gate_in_bf16_is_caught(step: SimpleNamespace, name: str) -> None:
    assert name in names_of(copy(step.want) | {name: step.want[name].bfloat16().float()}, step.want)


@pytest.mark.parametrize("core", ["mma_sync", "wgmma"])
def test_truncated_quantisation_is_caught(step: SimpleNamespace, core: str) -> None:
    got = copy(step.want)
    data = got["q_fp8"].view(torch.uint8)
    rounded_up = (torch.rand(data.shape, generator=torch.Generator().manual_seed(3)) < 0.5) & (data & 0x7F > 0)
    data -= rounded_up.to(torch.uint8)
    assert "q_fp8" in names_of(got, step.want, core=core)


@pytest.mark.parametrize("name", ["mla_cache", "indexer_cache"])
def test_cache_faults_are_caught(step: SimpleNamespace, name: str) -> None:
    width = 656 if name == "mla_cache" else 128
    slot = int(step.want["slot_mapping"][step.row])
    page, offset = divmod(slot, 64)
    row = slice(offset * width, (offset + 1) * width)

    unwritten = copy(step.want)
    unwritten[name].flatten(1)[page, row] = 0xFF
    assert name in names_of(unwritten, step.want)

    elsewhere = copy(step.want)
    spare = next(p for p in range(len(step.want[name])) if p not in step.tensors["block_table"])
    elsewhere[name].flatten(1)[spare, 5] ^= 1
    found = [m for m in compare(SHAPE, elsewhere, step.want) if m.tensor == name]
    assert [m.count for m in found] == [1]
    assert found[0].index[0] // 64 == spare

    shifted = copy(step.want)
    shifted[name].flatten(1)[page, row] = step.want[name].flatten(1)[page, row].roll(1)
    assert name in names_of(shifted, step.want)


def test_a_write_to_a_skipped_slot_is_caught() -> None:
    tensors = inputs.make_inputs(SHAPE, 3, skip_slot=True)
    skipped = int((tensors["slot_mapping"] < 0).nonzero())
    request, position = skipped // SHAPE.tokens, int(tensors["positions"][skipped])
    slots = tensors["slot_mapping"].clone()
    slots[skipped] = tensors["block_table"][request, position // 64].long() * 64 + position % 64
    got = reference(SHAPE, tensors | {"slot_mapping": slots})
    assert names_of(got, reference(SHAPE, tensors)) >= {"mla_cache", "indexer_cache", "logits"}


@pytest.mark.parametrize("core", ["mma_sync", "wgmma"])
def test_a_score_of_an_old_key_is_caught(step: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    """One position that only the last token sees, scored before its key was written, from an old but valid key."""
    if core == "wgmma":
        monkeypatch.setattr(ref, "project", noisy_project(1.3e-4))
    got, request = reference(SHAPE, step.tensors), step.row // SHAPE.tokens
    last = (request + 1) * SHAPE.tokens - 1
    page, offset = divmod(int(step.tensors["slot_mapping"][last]), 64)
    stale = got["indexer_cache"].clone()
    stale[page, offset * 128 : offset * 128 + 128] = stale[step.tensors["block_table"][request, 0], :128]
    got["logits"] = ref.paged_score(SHAPE, got["indexer_q_fp8"], got["head_weights"], stale, step.tensors)
    assert names_of(got, step.want, core=core) == {"logits"}


def test_logits_past_the_context(step: SimpleNamespace) -> None:
    """Token 0 sees 255 positions: its tile ends at 256. Token 3 sees 258: its tile is the rest of the row."""
    inside, outside = copy(step.want), copy(step.want)
    inside["logits"][0, 255] = 7.0
    inside["logits"][3, 258:] = 7.0
    assert compare(SHAPE, inside, step.want) == []
    outside["logits"][0, 300] = 7.0
    assert [(m.tensor, m.index) for m in compare(SHAPE, outside, step.want)] == [("logits", (0, 300))]


def test_what_is_missing_or_of_another_kind_is_named(step: SimpleNamespace) -> None:
    outputs = {name: step.want[name] for name in tolerances.REQUIRED}
    assert compare(SHAPE, outputs, step.want) == []
    assert names_of({}, step.want) == set(tolerances.REQUIRED)
    assert names_of(outputs | {"logits": step.want["logits"][:, :256]}, step.want) == {"logits"}
    assert names_of(outputs | {"residual_out": step.want["residual_out"].float()}, step.want) == {"residual_out"}
    wrong = copy(step.want) | {"norm_out": step.want["norm_out"] + 1, "q_nope": step.want["q_nope"] + 1}
    assert {m.tensor for m in compare(SHAPE, wrong, step.want, names=["q_nope"])} == {"q_nope"}

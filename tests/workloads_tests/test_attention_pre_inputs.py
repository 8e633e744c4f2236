"""Inputs of the layer: deterministic, consistent with each other, and hard enough to see faults."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the inputs are torch tensors")

from backends.cuda import jit  # noqa: E402
from workloads.attention_pre.graph import build_graph, num_pages  # noqa: E402
from workloads.attention_pre.inputs import make_inputs, refresh  # noqa: E402
from workloads.attention_pre.shapes import AttentionPreShape  # noqa: E402
from workloads.graph import Role  # noqa: E402

DTYPES = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
SHAPE = AttentionPreShape(requests=3, tokens=4, kv=200, tp=8)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "shape", [SHAPE, AttentionPreShape(requests=1, tokens=1, kv=1, tp=4, model="dsv32")], ids=AttentionPreShape.key
)
def test_names_shapes_and_dtypes_are_the_graphs(shape: AttentionPreShape) -> None:
    tensors = make_inputs(shape, 0)
    roles = (Role.WEIGHT, Role.INPUT, Role.STATE)
    declared = {t.name: (t.shape, DTYPES[t.dtype]) for t in build_graph(shape).tensors.values() if t.role in roles}
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == declared
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_same_seed_same_bytes_other_seed_other_bytes() -> None:
    first, second, other = (make_inputs(SHAPE, seed) for seed in (7, 7, 8))
    fixed = {"cos_sin", "positions", "context_lens"}
    for name, tensor in first.items():
        assert torch.equal(raw(tensor), raw(second[name])), name
        assert torch.equal(raw(tensor), raw(other[name])) == (name in fixed), name


def test_one_zero_token_and_one_outlier() -> None:
    tensors = make_inputs(SHAPE, 0)
    total = tensors["hidden"].float() + tensors["residual"].float()
    assert sorted(total.abs().amax(1).gt(0).tolist()) == [False] + [True] * (SHAPE.m - 1)
    assert int((total.abs().amax(1) > 100).sum()) == 1
    single = make_inputs(AttentionPreShape(requests=1, tokens=1, kv=9, tp=8), 0)
    assert 0 < single["hidden"].abs().max() < 20


def test_scales_are_powers_of_two_and_differ() -> None:
    tensors = make_inputs(SHAPE, 0)
    for name in ("w_b0", "w_d0", "w_b1", "w_d1"):
        scale = tensors[f"{name}_sf"]
        assert bool((torch.frexp(scale).mantissa == 0.5).all())
        assert len(scale.unique()) >= 2, name
        assert not tensors[name].float().isnan().any()


@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("requests", [1, 3])
def test_slots_table_positions_and_caches_agree(requests: int, skip: bool, renewed: bool) -> None:
    shape = AttentionPreShape(requests=requests, tokens=4, kv=200, tp=8)
    tensors = make_inputs(shape, 1, skip_slot=skip and not renewed)
    if renewed:
        changed = refresh(shape, tensors, 2, skip_slot=skip)
        moved = ("positions", "slot_mapping", "context_lens", "hidden", "residual", "mla_cache", "indexer_cache")
        for name in moved:
            assert not torch.equal(changed[name], tensors[name]), name
        assert set(changed) == {*moved, "block_table"}
        tensors = tensors | changed
    table, slots = tensors["block_table"].long(), tensors["slot_mapping"]
    assert torch.equal(tensors["context_lens"], tensors["positions"] + 1)
    assert len(table.unique()) == table.numel() < num_pages(shape)
    assert not torch.equal(table.flatten(), torch.arange(table.numel()))
    valid = torch.zeros(num_pages(shape) * 64, dtype=torch.bool)
    for token in range(shape.m):
        request, position = token // shape.tokens, int(tensors["positions"][token])
        slot = int(table[request, position // 64]) * 64 + position % 64
        assert int(slots[token]) in ((slot, -1) if skip else (slot,))
        valid[slot] = int(slots[token]) < 0
        if token % shape.tokens == 0:
            old = torch.arange(position)
            valid[table[request, old // 64] * 64 + old % 64] = True
    assert int((slots < 0).sum()) == int(skip)
    latents = tensors["mla_cache"].view(-1, 656)
    assert torch.equal((latents == 0xFF).all(1), ~valid)
    assert bool((latents[valid][:, 512:528].contiguous().view(torch.float32) > 0).all())
    assert bool(((latents[valid][:, :512] & 0x7F) != 0x7F).all())
    keys = tensors["indexer_cache"][:, : 64 * 128].reshape(-1, 128)
    scales = tensors["indexer_cache"][:, 64 * 128 :].reshape(-1, 4).view(torch.float32).squeeze(1)
    assert torch.equal((keys == 0xFF).all(1), ~valid)
    assert torch.equal(scales.isnan(), ~valid)
    assert bool((scales[valid] > 0).all())
    assert len(scales[valid].unique()) > 1


def test_requests_share_ranges_of_pages() -> None:
    for seed in range(5):
        shape = AttentionPreShape(requests=2, tokens=1, kv=130, tp=8)
        low, high = refresh(shape, {"hidden": torch.zeros(1)}, seed)["block_table"].aminmax(dim=1)
        assert int(low.max()) < int(high.min())


def old_page_rule() -> str:
    """The device code's own words for "page `page` of a request is constant in this run", which happen to be Python."""
    text = (jit.INCLUDE / "spantune" / "ops" / "paged_score.cuh").read_text()
    (rule,) = re.findall(r"bool old\(int first_context\) const \{ return exists && (.*?); \}", text)
    return str(rule)


@given(
    requests=st.integers(1, 4),
    tokens=st.integers(1, 8),
    kv=st.integers(1, 300),
    skip=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_old_pages_hold_no_slot_of_this_step(requests: int, tokens: int, kv: int, skip: bool, seed: int) -> None:
    """What the score reads before its wait: all pages but those of this step, two at most, and nothing poisoned."""
    shape = AttentionPreShape(requests=requests, tokens=min(tokens, kv), kv=kv, tp=8)
    tensors = refresh(shape, {"hidden": torch.zeros(1)}, seed, skip_slot=skip)
    contexts, table = tensors["context_lens"].view(requests, -1), tensors["block_table"]
    assert bool((contexts.diff(dim=1) == 1).all()), "neighbours of one request ascend"
    rule, written = compile(old_page_rule(), "old page", "eval"), set((tensors["slot_mapping"] // 64).tolist())
    for request in range(requests):
        first_context = int(contexts[request, 0])
        old = [
            page
            for page in range(shape.pages_per_request)
            if eval(rule, {"page": page, "first_context": first_context, "kPageTokens": 64})
        ]
        places = table[request, old].long()
        assert not written & set(places.tolist())
        assert len(old) >= int(contexts[request, -1]) // 64 - 1
        assert not bool((tensors["indexer_cache"][places, 64 * 128 :].view(torch.float32)).isnan().any())

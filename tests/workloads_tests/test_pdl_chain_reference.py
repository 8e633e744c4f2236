"""The chain's reference: one rounding per layer, checked against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest

torch = pytest.importorskip("torch", reason="the reference needs torch")

from workloads.graph import Role  # noqa: E402
from workloads.pdl_chain.graph import PdlChainShape, build_graph  # noqa: E402
from workloads.pdl_chain.inputs import make_inputs, refresh  # noqa: E402
from workloads.pdl_chain.reference import compare, fma, reference  # noqa: E402

SHAPE = PdlChainShape(layers=7, n=1024)


def nearest_float(exact: Fraction) -> float:
    """The float32 nearest to a rational within float32's normal range; ties go to the even mantissa."""
    if not exact:
        return 0.0
    exponent = 0
    while abs(exact) >= 1 << 24:
        exact, exponent = exact / 2, exponent + 1
    while abs(exact) < 1 << 23:
        exact, exponent = exact * 2, exponent - 1
    return float(round(exact)) * 2.0**exponent


def test_fma_rounds_once_on_random_values() -> None:
    a, b, c = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1))
    c = c * torch.logspace(-8, 8, 2000, base=2)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert fma(a, b, c).tolist() == [nearest_float(value) for value in exact]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("side", [1.0, -1.0])
@pytest.mark.parametrize("last", [0.0, 2.0**-23])
def test_fma_sees_what_a_float64_sum_loses(sign: float, side: float, last: float) -> None:
    """The product is half a unit of the addend, a hair more or less: below what the float64 sum can hold."""
    a = torch.tensor([2.0**-24 * (1 + side * 2.0**-23)]) * sign
    b = torch.tensor([1 + 2.0**-23 if side < 0 else 1 - 2.0**-23])
    c = torch.tensor([1.0 + last]) * sign
    exact = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
    assert fma(a, b, c).item() == nearest_float(exact)


def test_fma_differs_from_a_float64_sum_where_that_rounds_twice() -> None:
    a, b = torch.tensor([2.0**-24 * (1 + 2.0**-20)]), torch.tensor([1 - 2.0**-20])
    c = torch.tensor([1 + 2.0**-23])
    twice = (a.double() * b.double() + c.double()).float()
    assert fma(a, b, c).item() == 1 + 2.0**-23
    assert twice.item() == 1 + 2.0**-22


def test_inputs_have_the_graphs_names() -> None:
    tensors = make_inputs(SHAPE, 0)
    declared = [t for t in build_graph(SHAPE).tensors.values() if t.role in (Role.WEIGHT, Role.INPUT)]
    assert {t.name for t in declared} | {"w", "b"} == set(tensors)
    for t in declared:
        assert tuple(tensors[t.name].shape) == t.shape
        assert tensors[t.name].is_contiguous()
    assert torch.equal(tensors["w3"], tensors["w"][3])
    assert 0.5 <= tensors["w"].min() < 0.6 < 1.4 < tensors["w"].max() <= 1.5
    assert -0.1 <= tensors["b"].min() < -0.09 < 0.09 < tensors["b"].max() <= 0.1
    assert torch.equal(make_inputs(SHAPE, 0)["x"], tensors["x"])
    changed = refresh(SHAPE, tensors, 1)
    assert set(changed) == {"x"}
    assert not torch.equal(changed["x"], tensors["x"])


def test_reference_covers_what_the_graph_writes_and_stays_alive() -> None:
    shape = PdlChainShape()
    results = reference(shape, make_inputs(shape, 0))
    graph = build_graph(shape)
    assert set(results) == {name for name in graph.tensors if graph.writers(name)}
    assert all(tensor.dtype == torch.float32 for tensor in results.values())
    assert 0.1 < (results["y"] > 0).float().mean() < 0.9
    assert len(results["y"].unique()) > shape.n * 0.9


def test_one_layer_by_hand() -> None:
    shape = PdlChainShape(layers=1, n=1024)
    x = torch.full((1024,), -3.0)
    x[0] = 2.0
    tensors = {"x": x, "w": torch.full((1, 1024), 0.75), "b": torch.full((1, 1024), -0.25)}
    assert reference(shape, tensors)["y"][:2].tolist() == [1.25, -0.25]


def test_compare_is_bitwise() -> None:
    want = reference(SHAPE, make_inputs(SHAPE, 0))
    assert compare(SHAPE, want, want) == []
    assert [m.rule for m in compare(SHAPE, {}, want)] == ["is missing"]
    off = {name: tensor.clone() for name, tensor in want.items()}
    off["h3"].view(torch.int32)[5] ^= 1
    off["y"][9] = float("nan")
    found = compare(SHAPE, off, want, core="wgmma")
    assert [(m.tensor, m.count, m.index) for m in found] == [("y", 1, (9,)), ("h3", 1, (5,))]
    assert [m.tensor for m in compare(SHAPE, off, want, names=["h3"])] == ["h3"]

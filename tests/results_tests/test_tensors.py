"""Checks of a caller's tensors, on facts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from results.errors import TensorError
from results.tensors import DTYPE_NAMES, NEEDED, TensorFacts, check_tensors, facts_of
from workloads import registry
from workloads.graph import DTYPE_BYTES, OpGraph

Given = dict[str, TensorFacts]
Change = Callable[[Given], object]


def graph_of(workload: str = "attention_pre") -> OpGraph:
    known = registry.get(workload)
    return known.graph(known.shape({}))


def fitting(graph: OpGraph) -> Given:
    """What a graph needs, each tensor in memory of its own."""
    given, address = {}, 1 << 20
    for t in graph.tensors.values():
        if t.role in NEEDED:
            given[t.name] = TensorFacts(t.shape, DTYPE_NAMES[t.dtype], "cuda:0", True, address)
            address += -(-t.bytes // 256) * 256
    return given


def test_fitting_tensors_pass() -> None:
    for workload in registry.WORKLOADS:
        check_tensors(graph_of(workload), fitting(graph_of(workload)), "cuda:0")


def test_every_dtype_has_a_name() -> None:
    assert set(DTYPE_NAMES) == set(DTYPE_BYTES)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPE_NAMES.values())


def changed(name: str, **changes: object) -> Change:
    return lambda given: given.update({name: replace(given[name], **changes)})  # type: ignore[arg-type]


FAULTS: dict[str, tuple[Change, str]] = {
    "missing": (lambda g: g.pop("hidden"), r"attention_pre needs .*: hidden bfloat16\[16, 6144\] input"),
    "many missing": (lambda g: g.clear(), "ln_w bfloat16.*; and 21 more"),
    "misspelt": (lambda g: g.update(hiden=g.pop("hidden")), "has no tensor 'hiden': hidden"),
    "unknown": (lambda g: g.update(xyzzy=g["hidden"]), "has no tensor 'xyzzy': use ln_w"),
    "inner": (lambda g: g.update(q_fp8=g["hidden"]), "tensor q_fp8 is made during a run"),
    "shape": (changed("hidden", shape=(8, 6144)), r"tensor hidden has shape \[8, 6144\], not \[16, 6144\]"),
    "dtype": (changed("w_b0", dtype="bfloat16"), "tensor w_b0 has dtype bfloat16, not float8_e4m3fn"),
    "device": (changed("w_b0", device="cpu"), "tensor w_b0 is on cpu, not on cuda:0"),
    "layout": (changed("w_b0", contiguous=False), "tensor w_b0 is not contiguous"),
    "alignment": (changed("w_b0", address=(1 << 20) + 8), "not a multiple of 16 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_one_line(fault: str) -> None:
    change, message = FAULTS[fault]
    graph = graph_of()
    given = fitting(graph)
    change(given)
    with pytest.raises(TensorError, match=message) as raised:
        check_tensors(graph, given, "cuda:0")
    assert "\n" not in str(raised.value)


def test_outputs_may_be_given() -> None:
    graph = graph_of()
    given = fitting(graph)
    given["logits"] = TensorFacts(graph.tensors["logits"].shape, "float32", "cuda:0", True, 1 << 40)
    check_tensors(graph, given, "cuda:0")


def test_memory_that_a_run_writes_is_not_shared() -> None:
    graph = graph_of()
    given = fitting(graph)
    given["residual_out"] = given["residual"]
    with pytest.raises(TensorError, match="residual and residual_out share memory|residual_out and residual share"):
        check_tensors(graph, given, "cuda:0")
    # Inside a long tensor, with other tensors between their beginnings.
    given = fitting(graph)
    given["k_norm_b"] = replace(given["k_norm_b"], address=given["mla_cache"].address + 4096)
    with pytest.raises(TensorError, match="mla_cache and k_norm_b share memory"):
        check_tensors(graph, given, "cuda:0")


def test_memory_that_is_only_read_may_be_shared() -> None:
    graph = graph_of()
    given = fitting(graph)
    given["residual"] = given["hidden"]
    check_tensors(graph, given, "cuda:0")


def test_facts_of_a_torch_tensor() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
    facts = facts_of("w", tensor)
    assert facts == TensorFacts((4, 6), "float8_e4m3fn", "cpu", True, tensor.data_ptr())
    assert not facts_of("w", tensor.t()).contiguous
    with pytest.raises(TensorError, match="w is a list, not a tensor"):
        facts_of("w", [1.0])

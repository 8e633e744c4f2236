"""On a GPU: a layer over a caller's tensors, with caches and tables larger than the shape asks for."""

from __future__ import annotations

from typing import Any

import pytest

from backends.cuda.driver import read_record
from backends.layer import open_layer
from search_spaces.cmp import CmpSpace, default
from workloads import registry

pytestmark = pytest.mark.gpu

PARAMS: dict[str, int | str] = {"kv": 512}


def test_larger_caches_and_tables_change_no_output() -> None:
    import torch

    workload = registry.get("attention_pre")
    shape = workload.shape(PARAMS)
    graph = workload.graph(shape)
    config = default(CmpSpace(graph, read_record(0)))
    tensors: dict[str, Any] = {
        name: tensor
        for name, tensor in workload.inputs().make_inputs(shape, 3, "cuda").items()
        if name in graph.tensors
    }
    larger = dict(tensors)
    for name, rows in (("mla_cache", 50), ("indexer_cache", 70), ("cos_sin", 1000)):
        more = torch.full((rows, *tensors[name].shape[1:]), 127, dtype=tensors[name].dtype, device="cuda")
        larger[name] = torch.cat([tensors[name], more])
    written = []
    for given in (dict(tensors), larger):
        given["logits"] = torch.zeros(graph.tensors["logits"].shape, device="cuda")
        layer = open_layer("attention_pre", PARAMS, config, given)
        torch.cuda.synchronize()
        layer.run()
        torch.cuda.synchronize()
        written.append({name: layer.outputs[name].clone() for name in ("residual_out", "q_for_sparse_mla", "logits")})
        layer.close()
    for name, tensor in written[0].items():
        assert torch.equal(tensor, written[1][name]), name
    assert written[0]["logits"].abs().sum() > 0

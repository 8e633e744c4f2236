"""Thousands of replays of a config on inputs, positions and slots that change every time, against its reference.

The reference is the same set of kernels on one stream with ordinary edges; every output and cache byte must be equal
after every replay. Both run as loaded layers, on a caller's tensors.
"""

from __future__ import annotations

from typing import Any

from backends.layer import open_layer
from search_spaces.config import CmpConfig
from tuner.ablation import linear
from workloads import registry
from workloads.attention_pre.shapes import PAGE_TOKENS
from workloads.graph import Role

READ_EVERY = 250  # replays between two looks at the device's count of mismatches


def soak(device: str, config: CmpConfig, params: dict[str, int | str], replays: int, seed: int) -> dict[str, int]:
    """Counts the replays whose bytes differ from the reference's.

    Every fourth replay is run twice without a pause, so that one generation's writes meet the reads of the one before.
    """
    import torch

    from backends.cuda.binding import DTYPES

    workload = registry.get("attention_pre")
    shape: Any = workload.shape(params)
    base = dict(workload.inputs().make_inputs(shape, seed, "cuda"))
    graph = workload.graph(shape)
    own = {t.name for t in graph.tensors.values() if t.role is Role.STATE}
    outputs = [t for t in graph.tensors.values() if t.role is Role.OUTPUT]
    sides = [
        {n: t.clone() if n in own else t for n, t in base.items() if n in graph.tensors}
        | {t.name: torch.zeros(t.shape, dtype=DTYPES[t.dtype], device="cuda") for t in outputs}
        for _ in range(2)
    ]
    layers = [
        open_layer("attention_pre", params, variant, tensors, device)
        for variant, tensors in zip((config, linear(config, programmatic=False)), sides, strict=True)
    ]
    generator = torch.Generator("cuda").manual_seed(seed)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream()
    found = 0
    try:
        for replay in range(replays):
            _step(shape, base, generator)
            for layer in layers:
                layer.run(stream.cuda_stream)
                if replay % 4 == 0:
                    layer.run(stream.cuda_stream)
            pairs = [(layers[0].outputs[n], layers[1].outputs[n]) for n in layers[0].outputs]
            pairs += [(sides[0][n], sides[1][n]) for n in own]
            differs = torch.stack([(_bytes(a) != _bytes(b)).any() for a, b in pairs]).any()
            bad += differs
            if replay % READ_EVERY == READ_EVERY - 1 or replay == replays - 1:
                found = int(bad)
    finally:
        for layer in layers:
            layer.close()
    return {"soak_replays": replays, "soak_mismatches": found}


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _step(shape: Any, tensors: dict[str, Any], generator: Any) -> None:
    """Writes new activations, context lengths, positions, block table and slots into the caller's tensors."""
    import torch

    for name in ("hidden", "residual"):
        tensors[name].normal_(generator=generator)
    pages = shape.pages_per_request
    order = torch.randperm(shape.requests * pages, device="cuda", generator=generator)
    table = order.view(shape.requests, pages)
    contexts = torch.randint(shape.tokens, shape.kv + 1, (shape.requests, 1), device="cuda", generator=generator)
    positions = (contexts - shape.tokens + torch.arange(shape.tokens, device="cuda")).flatten()
    rows = torch.arange(shape.requests, device="cuda").repeat_interleave(shape.tokens)
    slots = table[rows, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    tensors["block_table"].copy_(table)
    tensors["positions"].copy_(positions)
    tensors["context_lens"].copy_(positions + 1)
    tensors["slot_mapping"].copy_(slots)

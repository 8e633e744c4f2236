"""Loads a stored best config in a fresh process and prints the hash of what it writes.

    python -m benchmarks.load_check --results DIR --seed N [--device cuda:0]

The parent compares the hash with that of the tuned run: the same inputs must give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from workloads import registry
from workloads.graph import Role

POISON = 0xFF


def digest(tensors: Mapping[str, Any]) -> str:
    """SHA-256 over names and bytes of tensors on a GPU."""
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    import torch

    import spantune
    from backends.cuda.binding import DTYPES

    workload = registry.get("attention_pre")
    shape = workload.shape({})
    graph = workload.graph(shape)
    tensors = dict(workload.inputs().make_inputs(shape, arguments.seed, "cuda"))
    for tensor in graph.tensors.values():
        if tensor.role is Role.OUTPUT:
            made = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="cuda")
            made.view(-1).view(torch.uint8).fill_(POISON)
            tensors[tensor.name] = made
    wanted = {t.name for t in graph.tensors.values()}
    torch.cuda.synchronize()
    with spantune.load_layer(
        "attention_pre",
        {n: t for n, t in tensors.items() if n in wanted},
        device=arguments.device,
        results=arguments.results,
    ) as layer:
        layer.run()
        torch.cuda.synchronize()
        answer = {"digest": digest(layer.outputs), "match": str(layer.match.how)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""On a GPU: the chain from `spantune tune` to a loaded layer, each in a process of its own, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

LOAD = """
import json, sys, torch
from spantune import load_layer
from workloads import registry

workload = registry.get("pdl_chain")
shape = workload.shape({"layers": 20})
tensors = workload.inputs().make_inputs(shape, 7, "cuda")
names = set(workload.graph(shape).tensors)
given = {name: tensor for name, tensor in tensors.items() if name in names}
with load_layer("pdl_chain", given, results=sys.argv[1], layers=20) as layer:
    layer.run()
    torch.cuda.synchronize()
    same = torch.equal(layer.outputs["y"], workload.reference().reference(shape, tensors)["y"])
    print(json.dumps({"how": str(layer.match.how), "same": same}))
"""


def test_the_chain_goes_from_tune_to_load(tmp_path: Path) -> None:
    """No process of this test holds the GPU while another one measures: that would void every round."""
    command = [sys.executable, "-m", "spantune", "tune", "pdl_chain", "--layers", "20", "--device", "cuda:0"]
    options = ["--trials", "12", "--storage", f"journal:{tmp_path}/chain.journal", "--results", str(tmp_path / "best")]
    tuned = subprocess.run([*command, *options], capture_output=True, text=True)
    assert tuned.returncode in (0, 3), tuned.stderr
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "best")], capture_output=True, text=True, check=True
    )
    assert json.loads(loaded.stdout.splitlines()[-1]) == {"how": "exact", "same": True}

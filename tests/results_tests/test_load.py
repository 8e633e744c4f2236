"""Loading a layer, with the device behind it replaced; and what loading imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backends.errors import BuildFailed, DeviceError
from results import best
from results.errors import LayerClosedError, TensorError
from results.load import How, load_layer, stream_handle
from results.tensors import DTYPE_NAMES, NEEDED
from search_spaces.config import Config, to_json
from tests.project import ROOT
from tests.results_tests.entries import GPU, entry, provenance
from workloads import registry

CHAIN = {"layers": 2, "n": 1024}


@dataclass
class FakeTensor:
    """What of a tensor is looked at."""

    shape: tuple[int, ...]
    dtype: str
    address: int
    device: str = "cuda:0"

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.address


class FakeLayer:
    """Stands behind `Layer` in place of a graph on a GPU."""

    def __init__(self, config: Config, tensors: Mapping[str, Any]) -> None:
        self.config, self.tensors = config, tensors
        self.outputs: dict[str, Any] = {"y": tensors.get("y", "allocated")}
        self.streams: list[int] = []
        self.closed = 0

    def run(self, stream: int = 0) -> None:
        self.streams.append(stream)

    def close(self) -> None:
        self.closed += 1


def chain_tensors() -> dict[str, FakeTensor]:
    known = registry.get("pdl_chain")
    graph = known.graph(known.shape(CHAIN))
    needed = [t for t in graph.tensors.values() if t.role in NEEDED]
    return {t.name: FakeTensor(t.shape, f"torch.{DTYPE_NAMES[t.dtype]}", 1 << 16 << i) for i, t in enumerate(needed)}


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeLayer]:
    """The layers that were opened, on a GPU that answers as the tests' GPU does; best files in `best`."""
    layers: list[FakeLayer] = []

    def open_layer(
        workload: str, shape: Mapping[str, Any], config: Config, tensors: Mapping[str, Any], device: str
    ) -> FakeLayer:
        assert (workload, shape, device) == ("pdl_chain", CHAIN, "cuda:0")
        layers.append(FakeLayer(config, tensors))
        return layers[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("backends.layer.open_layer", open_layer)
    monkeypatch.setattr("backends.cuda.driver.read_record", lambda index: GPU)
    monkeypatch.setattr("backends.cuda.driver.call", lambda name: 13000)
    monkeypatch.setattr("backends.cuda.jit.source_hash", lambda: provenance().source_hash)
    best.publish(tmp_path / "best", entry("pdl_chain", **CHAIN))
    return layers


def test_a_layer_runs_the_best_config_on_the_given_tensors(opened: list[FakeLayer]) -> None:
    tensors = chain_tensors()
    with load_layer("pdl_chain", tensors, results="best", **CHAIN) as layer:
        assert layer.match.how is How.EXACT and layer.match.entry is not None
        assert to_json(opened[0].config) == layer.match.entry.config and opened[0].tensors is tensors
        layer.run()
        layer.run(7)
        assert opened[0].streams == [0, 7] and layer.outputs["y"] == "allocated"
    assert opened[0].closed == 1


def test_a_given_output_is_written_in_place(opened: list[FakeLayer]) -> None:
    tensors = chain_tensors()
    tensors["y"] = replace(tensors["x"], address=1 << 40)
    assert load_layer("pdl_chain", tensors, results="best", **CHAIN).outputs["y"] is tensors["y"]


def test_a_closed_layer_refuses(opened: list[FakeLayer]) -> None:
    layer = load_layer("pdl_chain", chain_tensors(), results="best", **CHAIN)
    layer.close()
    layer.close()
    assert opened[0].closed == 1
    with pytest.raises(LayerClosedError):
        layer.run()
    with pytest.raises(LayerClosedError):
        _ = layer.outputs


def test_a_layer_is_closed_when_its_block_fails(opened: list[FakeLayer]) -> None:
    with pytest.raises(ZeroDivisionError), load_layer("pdl_chain", chain_tensors(), results="best", **CHAIN):
        raise ZeroDivisionError
    assert opened[0].closed == 1


def test_bad_tensors_are_refused_before_anything_is_opened(opened: list[FakeLayer]) -> None:
    tensors = chain_tensors()
    tensors["w0"].device = "cpu"
    with pytest.raises(TensorError, match="tensor w0 is on cpu, not on cuda:0"):
        load_layer("pdl_chain", tensors, results="best", **CHAIN)
    assert opened == []


@pytest.mark.parametrize("device", ["cuda", "sim:b300", "cuda:first"])
def test_a_layer_needs_a_cuda_device(device: str) -> None:
    with pytest.raises(DeviceError, match="needs a CUDA device.*use cuda:N"):
        load_layer("pdl_chain", {}, device=device)


def test_errors_of_the_backend_pass_through(opened: list[FakeLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise BuildFailed("ptxas gave up")

    monkeypatch.setattr("backends.layer.open_layer", fail)
    with pytest.raises(BuildFailed):
        load_layer("pdl_chain", chain_tensors(), results="best", **CHAIN)


def test_streams_of_other_libraries() -> None:
    class Torch:
        cuda_stream = 11

    class Cupy:
        ptr = 12

    assert [stream_handle(s) for s in (None, 5, Torch(), Cupy())] == [0, 5, 11, 12]


def loaded_by(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("module", ["best", "compare", "load", "matching", "paths", "tensors"])
def test_reading_results_loads_no_heavy_package(module: str) -> None:
    loaded = loaded_by(f"import sys, results.{module}; print(*sys.modules)")
    assert loaded.isdisjoint({"optuna", "ray", "torch", "numpy", "cuda", "cupy", "tuner"})


def test_finding_and_checking_load_no_heavy_package(tmp_path: Path) -> None:
    """The whole way to a layer, up to the device: published entry, match, tensors."""
    best.publish(tmp_path, entry())
    code = f"""
import sys
from results.load import find, load_layer
from results.errors import TensorError
match = find("attention_pre", {{}}, device="Test GPU", results={str(tmp_path)!r}, source_hash="0123456789abcdef")
assert match.how == "exact"
try:
    load_layer("attention_pre", {{}}, results={str(tmp_path)!r})
except TensorError:
    print(*sys.modules)
"""
    assert loaded_by(code).isdisjoint({"optuna", "ray", "torch", "numpy", "cuda", "cupy", "tuner"})

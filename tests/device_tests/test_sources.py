"""Every device source assembles for every target, without spills, and rounds alike in both shells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.cuda import jit
from backends.cuda.sass import disassembler
from backends.cuda.sources import DEVICE_OPS, SYSTEM_SOURCE, grid_source, persistent_source
from backends.errors import BuildFailed
from backends.plan.launches import CompileKey, compile_key
from search_spaces.cmp import CmpSpace
from search_spaces.gpu import GpuRecord
from tests.device_tests.sass import rounding_kinds
from tuner.alone import tilings
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.ops import KINDS
from workloads.ops.base import Tiling
from workloads.output_norm.graph import OutputNormShape
from workloads.output_norm.graph import build_graph as build_output
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as build_chain

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
H200 = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)


def default_keys(arch: str) -> dict[str, CompileKey]:
    """One compile key per op of the workloads, at default tilings, on the portable core and on wgmma."""
    keys = {}
    for graph in (
        build_graph(AttentionPreShape()),
        build_output(OutputNormShape()),
        build_chain(PdlChainShape(layers=1)),
    ):
        space = CmpSpace(graph, replace(H200, arch=arch))
        for name, schedule in space.decode({}).ops.items():
            op = graph.ops[name]
            cores = KINDS[op.kind].tunables(op, graph).get("core", ("mma_sync",))
            for core in (c for c in cores if c in space.gpu.cores()):
                keys[f"{name}-{core}"] = compile_key(op, replace(schedule.tiling, core=str(core)), "grid", arch)
    return keys


KEYS = [(arch, name) for arch in TARGETS for name in default_keys(arch)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own: the test must see the compiler work."""
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize(("arch", "name"), KEYS)
def test_grid_kernel_assembles_without_spills(arch: str, name: str, cache: Path) -> None:
    cubin = jit.build(grid_source((default_keys(arch)[name],)), arch, cache)
    assert cubin.registers > 0
    assert cubin.spill_bytes == 0


@pytest.mark.parametrize("arch", TARGETS)
def test_system_kernels_assemble(arch: str, cache: Path) -> None:
    assert jit.build(SYSTEM_SOURCE, arch, cache).spill_bytes == 0


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm (extra `test`)")
@pytest.mark.parametrize(("arch", "name"), [(a, n) for a, n in KEYS if a != "sm_100a"])
def test_both_shells_round_alike(arch: str, name: str, cache: Path) -> None:
    key = default_keys(arch)[name]
    grid = jit.build(grid_source((key,)), arch, cache)
    resident = jit.build(persistent_source([key]), arch, cache)
    assert rounding_kinds(grid.path) == rounding_kinds(resident.path)


@pytest.mark.parametrize("arch", TARGETS)
def test_persistent_kernels_assemble(arch: str, cache: Path) -> None:
    """The first three ops in one kernel without spills, and the whole layer in one kernel."""
    keys = default_keys(arch)
    first = [keys["A0-mma_sync"], keys["B0-mma_sync"], keys["B0f-mma_sync"]]
    assert jit.build(persistent_source(first), arch, cache).spill_bytes == 0
    layer = {key.kind: key for name, key in keys.items() if name[0] not in "LON"}
    assert jit.build(persistent_source(list(layer.values())), arch, cache).registers > 0


def test_each_op_kind_has_device_code() -> None:
    assert set(DEVICE_OPS) == set(KINDS)


def test_a_broken_source_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="does not compile for sm_90a") as caught:
        jit.build("__global__ void broken() { no_such_function(); }", "sm_90a", tmp_path)
    assert "no_such_function" in caught.value.log
    assert not list((tmp_path / "cubins").glob("*")) if (tmp_path / "cubins").exists() else True


def test_a_cubin_is_built_once_and_appears_whole(tmp_path: Path) -> None:
    first = jit.build(SYSTEM_SOURCE, "sm_90a", tmp_path)
    stamp = first.path.stat().st_mtime_ns
    assert jit.build(SYSTEM_SOURCE, "sm_90a", tmp_path) == first
    assert first.path.stat().st_mtime_ns == stamp
    assert {p.suffix for p in (tmp_path / "cubins").iterdir()} == {".cubin", ".log"}


def test_headers_compile_alone(cache: Path) -> None:
    for header in sorted((jit.INCLUDE / "spantune").rglob("*.cuh")):
        name = header.relative_to(jit.INCLUDE).as_posix()
        jit.build(f'#include "{name}"\nextern "C" __global__ void alone() {{}}\n', "sm_90a", cache)


def test_slots_match_the_device_enums() -> None:
    """Operand slots are stated twice, in Python and in the header; both must have as many, in one order."""
    for name, kind in KINDS.items():
        text = (jit.INCLUDE / "spantune" / DEVICE_OPS[name].header).read_text()
        enums = [part.split("}")[0] for part in text.split("enum : int {")[1:]]
        listed = [[word.strip().split("=")[0].strip() for word in enum.split(",") if word.strip()] for enum in enums]
        wanted = ["k" + "".join(word.capitalize() for word in slot.split("_")) for slot in kind.slots]
        assert wanted in listed, f"{name}: {wanted} is not among {listed}"


@pytest.mark.parametrize("requests", [1, 2, 4, 8, 32])
def test_pages_of_every_legal_tiling_match_the_device_code(requests: int, cache: Path) -> None:
    """The host allocates by its own formula; the device code's static assertions hold for all that is legal, too."""
    graph = build_graph(AttentionPreShape(requests=requests))
    space = CmpSpace(graph, H200)
    lines = {
        f"static_assert(spantune::{DEVICE_OPS[op.kind].expression(compile_key(op, tiling, 'grid', 'sm_90a'))}::kPages"
        f" == {KINDS[op.kind].pages(op, tiling)});"
        for name, op in graph.ops.items()
        if name in ("B0", "D0", "D2")
        for tiling in (found[name] for found in tilings(space, (name,)))
    }
    headers = dict.fromkeys(DEVICE_OPS[graph.ops[name].kind].header for name in ("B0", "D2"))
    includes = [f'#include "spantune/{header}"' for header in headers]
    source = "\n".join([*includes, *sorted(lines), 'extern "C" __global__ void nothing() {}', ""])
    assert len(lines) > 20
    jit.build(source, "sm_90a", cache)


def test_tilings_that_share_a_binary_share_a_key() -> None:
    op = build_graph(AttentionPreShape()).ops["B0"]
    assert compile_key(op, Tiling(split_k=3), "grid", "sm_90a") == compile_key(op, Tiling(split_k=6), "grid", "sm_90a")

"""Every grid kernel waits before it reads, by its machine code; kernels with planted faults are caught."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backends.cuda import jit
from backends.cuda.lint import Report, Slots, lint, lint_kernel, slots_of
from backends.cuda.sass import Kernel, disassemble, disassembler, parse
from backends.cuda.sources import grid_source
from backends.plan.encode import OPERAND_SLOTS
from backends.plan.launches import CompileKey, EdgeKind, KernelNode, PlanEdge, compile_key, lower
from search_spaces.cmp import CmpSpace, serial
from search_spaces.config import splits_of, to_json
from search_spaces.gpu import GpuRecord
from tests.device_tests.sass import rounding_kinds
from tuner import cli
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.ops import KINDS
from workloads.ops.base import Tiling
from workloads.output_norm.graph import OutputNormShape
from workloads.output_norm.graph import build_graph as build_output
from workloads.pdl_chain.graph import PdlChainShape
from workloads.pdl_chain.graph import build_graph as build_chain

TARGETS = ("sm_90a", "sm_103a")
H200 = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
needs_disassembler = pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm (extra `test`)")


def kernels(arch: str) -> Iterator[tuple[str, CompileKey, Slots]]:
    """Each op of the workloads at its default tiling, on every core of the target, with what it can be built with."""
    for graph in (
        build_graph(AttentionPreShape()),
        build_output(OutputNormShape()),
        build_chain(PdlChainShape(layers=1)),
    ):
        space = CmpSpace(graph, replace(H200, arch=arch))
        config = space.decode({})
        for name, schedule in config.ops.items():
            op = graph.ops[name]
            cores = KINDS[op.kind].tunables(op, graph).get("core", ("mma_sync",))
            for core in (core for core in cores if core in space.gpu.cores()):
                tiling = replace(schedule.tiling, core=str(core))
                kind = KINDS[op.kind]
                slots = slots_of([(kind, kind.operands(op, graph, tiling, splits_of(graph, config)))], graph)
                key = compile_key(op, tiling, "grid", arch)
                yield f"{name} {core}", key, slots
                rare = {"loops": True} if kind.loaders else {"prefetches": True}
                yield f"{name} {core} {rare}", replace(key, delays=True, **rare), slots


@needs_disassembler
@pytest.mark.parametrize("arch", TARGETS)
def test_every_grid_kernel_waits_first(arch: str, tmp_path: Path) -> None:
    seen: dict[tuple[CompileKey, Slots], Report] = {}
    found = list(kernels(arch))
    jit.build_all([(grid_source((key,)), arch) for _, key, _ in found], tmp_path)
    for name, key, slots in found:
        if (key, slots) not in seen:
            seen[key, slots] = lint(jit.build(grid_source((key,)), arch, tmp_path).path, slots)
        report = seen[key, slots]
        assert not report.findings, f"{name}: {report.findings[0]}"
        assert report.waits >= 3 and report.guarded > 0
        reads_early = name.split()[0] != "D1f"  # it has no constants
        assert (report.early > 0) == reads_early, name


MANY_TOKENS = {
    "sm_90a": [("wgmma", 32, 64), ("wgmma", 64, 64), ("wgmma", 64, 128), ("wgmma", 128, 64), ("wgmma", 128, 128)],
    "sm_103a": [("mma_sync", 32, 64), ("mma_sync", 32, 16)],
}


@needs_disassembler
@pytest.mark.parametrize(("arch", "tile"), [(arch, tile) for arch, tiles in MANY_TOKENS.items() for tile in tiles])
@pytest.mark.parametrize("name", ["B0", "D0"])
def test_tiles_of_many_tokens_wait_first(name: str, arch: str, tile: tuple[str, int, int], tmp_path: Path) -> None:
    """At the most CTAs a multiprocessor that are legal, in one CTA a tile and in loops, without spills."""
    core, block_m, rows = tile
    graph = build_graph(AttentionPreShape(requests=max(block_m // 8, 4)))
    op, stages = graph.ops[name], max(4, 128 // rows)
    kind = KINDS[op.kind]
    tilings = [Tiling(core=core, block_m=block_m, rows=rows, stages=stages, ctas_per_sm=n) for n in (3, 2, 1)]
    tiling = next(t for t in tilings if kind.illegal(op, graph, t) is None)
    slots = slots_of([(kind, kind.operands(op, graph, tiling, splits_of(graph, serial(CmpSpace(graph, H200)))))], graph)
    key = compile_key(op, tiling, "grid", arch)
    for variant in (key, replace(key, loops=True)):
        cubin = jit.build(grid_source((variant,)), arch, tmp_path)
        assert cubin.spill_bytes == 0
        report = lint(cubin.path, slots)
        assert not report.findings, report.findings[0]
        assert report.waits >= 3 and report.guarded > 0 and report.early > 0


def shared_launch(arch: str, host: str, *guests: str) -> KernelNode:
    """The node of a launch that ops share, at default tilings."""
    graph = build_graph(AttentionPreShape())
    config = CmpSpace(graph, replace(H200, arch=arch)).decode({f"{guest}.host": host for guest in guests})
    return lower(graph, config, arch).node(host)


@needs_disassembler
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("ops", [("B0", "C0"), ("B0", "B1", "C0"), ("D0", "D1")])
def test_a_shared_launch_assembles_and_waits_first(arch: str, ops: tuple[str, ...], tmp_path: Path) -> None:
    node = shared_launch(arch, *ops)
    graph = build_graph(AttentionPreShape())
    slots = slots_of([(KINDS[graph.ops[part.op].kind], part.operands) for part in node.parts], graph)
    cubin = jit.build(grid_source(node.binary), arch, tmp_path)
    assert cubin.spill_bytes == 0
    report = lint(cubin.path, slots)
    assert not report.findings, report.findings[0]
    assert report.waits >= 3 and report.guarded > 0 and report.early > 0
    # The proof looks at each op's own row: without the weights of one of them it must fail.
    for row in range(len(ops)):
        other = frozenset(slot for slot in slots.constants if slot // OPERAND_SLOTS != row)
        assert lint(cubin.path, replace(slots, constants=other)).findings


def behind_its_producer(arch: str, finaliser: str, core: str) -> KernelNode:
    """The node of a finaliser that runs as the tiles of its producer arrive."""
    graph, host = build_graph(AttentionPreShape()), finaliser[:2]
    ctas = 2 if core == "wgmma" else 1
    point = {f"{finaliser}.host": host, f"{host}.core": core, f"{host}.ctas_per_sm": ctas}
    return lower(graph, CmpSpace(graph, replace(H200, arch=arch)).decode(point), arch).node(finaliser)


@needs_disassembler
@pytest.mark.parametrize(("arch", "core"), [("sm_90a", "wgmma"), ("sm_90a", "mma_sync"), ("sm_103a", "mma_sync")])
@pytest.mark.parametrize("finaliser", ["B0f", "B1f", "D1f"])
def test_a_finaliser_behind_its_producer_waits_first(arch: str, core: str, finaliser: str, tmp_path: Path) -> None:
    node = behind_its_producer(arch, finaliser, core)
    assert [part.op for part in node.parts] == [finaliser[:2], finaliser]
    cubin = jit.build(grid_source(node.binary), arch, tmp_path)
    assert cubin.spill_bytes == 0
    graph = build_graph(AttentionPreShape())
    slots = slots_of([(KINDS[graph.ops[part.op].kind], part.operands) for part in node.parts], graph)
    report = lint(cubin.path, slots)
    assert not report.findings, report.findings[0]
    alone = lint(jit.build(grid_source(node.binary[:1]), arch, tmp_path).path, Slots())
    assert report.waits == alone.waits  # the finaliser needs none of its own
    assert report.guarded > alone.guarded
    # Both ops round by the opcodes of their own kernels.
    own = replace(node.binary[1], shell="grid")
    producer, finaliser_alone = (
        rounding_kinds(jit.build(grid_source((key,)), arch, tmp_path).path) for key in (node.binary[0], own)
    )
    assert rounding_kinds(cubin.path) == producer | finaliser_alone
    assert arrival_order(cubin.path) == [
        "BAR.SYNC",
        "MEMBAR",
        "ATOMG.E.INC.STRONG.GPU",
        "MEMBAR",
        "CCTL.IVALL",
        "BAR.RED",
    ]


def arrival_order(cubin: Path) -> list[str]:
    """What orders the one arrival in a kernel, from the barrier before it to the one that tells all threads."""
    (code,) = disassemble(cubin)
    opcodes = [one.opcode for one in code.instructions]
    (at,) = [i for i, opcode in enumerate(opcodes) if opcode.startswith("ATOM")]
    first = max(i for i in range(at) if opcodes[i].startswith("BAR"))
    last = min(i for i in range(at, len(opcodes)) if opcodes[i].startswith("BAR"))
    order = [opcode for opcode in opcodes[first : last + 1] if re.match(r"(MEMBAR\..*GPU|ATOM|CCTL|BAR)", opcode)]
    if order[2:3] == ["CCTL.IVALL"]:  # of the release: it orders no load that matters
        del order[2]
    return [re.sub(r"^(MEMBAR|BAR\.\w+)\..*", r"\1", opcode) for opcode in order]


@needs_disassembler
@pytest.mark.parametrize(
    "fence", ["    ptx::fence_acq_rel_gpu();\n    const", "      ptx::fence_acq_rel_gpu();\n    }"]
)
def test_an_arrival_without_one_of_its_fences_is_seen(
    fence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(jit.INCLUDE, tmp_path / "include")
    path = tmp_path / "include" / "spantune" / "shells" / "grid.cuh"
    assert path.read_text().count(fence) == 1
    path.write_text(path.read_text().replace(fence, fence.split("\n")[1]))
    monkeypatch.setattr(jit, "INCLUDE", tmp_path / "include")
    source = grid_source(behind_its_producer("sm_90a", "D1f", "wgmma").binary)
    assert arrival_order(jit.build(source, "sm_90a", tmp_path).path).count("MEMBAR") == 1


# Fault: op, header, text that is replaced, by what, and what the finding must say.
ACQUIRE_MATH = "shell.template acquire<Group::kMath>();"
READ_X = "load<kWidth>(x, shell.template pointer<float>(Slots::kX) + at);"
FAULTS = {
    "no acquire": (
        "L0",
        "shells/grid.cuh",
        "const {\n    if constexpr (Part::kWaits) ptx::grid_dependency_wait();",
        "const {",
        "LDG",
    ),
    "no acquire, loaders": (
        "B0",
        "shells/grid.cuh",
        "const {\n    if constexpr (Part::kWaits) ptx::grid_dependency_wait();",
        "const {",
        "UTMALDG",
    ),
    "early load": ("L0", "ops/scale_bias_relu.cuh", f"{ACQUIRE_MATH}\n    {READ_X}", READ_X + ACQUIRE_MATH, "slot 0"),
    "early read-only load": (
        "L0",
        "ops/scale_bias_relu.cuh",
        f"{ACQUIRE_MATH}\n    {READ_X}",
        # Without a use before the acquire the assembler may move such a load behind it.
        "x[0] = __ldg(shell.template pointer<float>(Slots::kX) + at); access::store_shared(shell.scratch(), x[0]);"
        + ACQUIRE_MATH,
        "slot 0",
    ),
    "early store": (
        "L0",
        "ops/scale_bias_relu.cuh",
        ACQUIRE_MATH,
        f"shell.template pointer<float>(Slots::kOut)[at] = w[0]; {ACQUIRE_MATH}",
        "STG",
    ),
    "early prefetch into L1": (
        "L0",
        "ops/scale_bias_relu.cuh",
        ACQUIRE_MATH,
        'asm volatile("prefetch.global.L1 [%0];" ::"l"(shell.template pointer<float>(Slots::kX) + at));' + ACQUIRE_MATH,
        "CCTL",
    ),
    "acquire on a condition": (
        "L0",
        "ops/scale_bias_relu.cuh",
        ACQUIRE_MATH,
        f"if (shell.w_ahead() > 0) {ACQUIRE_MATH}",
        "LDG",
    ),
    "A loader skips": ("B0", "ops/gemm_fp8.cuh", "shell.template acquire<Group::kInputs>();", "", "slot 1"),
    "math skips": ("B0", "ops/gemm_fp8.cuh", ACQUIRE_MATH, "", "STG"),
    "W loader reads inputs": (
        "B0",
        "ops/gemm_fp8.cuh",
        "shell.map(GemmSlots::kWeightMap)",
        "shell.map(GemmSlots::kInputMap)",
        "slot 1",
    ),
    "queries among old keys": (
        "E1",
        "ops/paged_score.cuh",
        "if (mine && lane < ahead) issue_keys(shell, page.place);",
        "if (mine && lane < ahead) { issue_keys(shell, page.place); issue_queries(shell, block); }",
        "slot 0",
    ),
    "head weights are early": (
        "E1",
        "ops/paged_score.cuh",
        f"const QueryBlock block(shell, tile);\n    {ACQUIRE_MATH}",
        "const QueryBlock block(shell, tile); access::store_shared(head_weights(shell, shell.lane()),"
        " shell.template pointer<float>(ScoreSlots::kHeadWeights)[shell.lane()]);" + ACQUIRE_MATH,
        "slot 3",
    ),
    "new keys do not wait": ("E1", "ops/paged_score.cuh", "shell.template acquire<Group::kInputs>();", "", "slot 0"),
}


def plant(fault: str, folder: Path) -> str:
    """Copies the device headers with one fault in them; returns the op that shows it."""
    op, header, old, new, _ = FAULTS[fault]
    shutil.copytree(jit.INCLUDE, folder)
    path = folder / "spantune" / header
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return op


@needs_disassembler
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = plant(fault, tmp_path / "include")
    monkeypatch.setattr(jit, "INCLUDE", tmp_path / "include")
    key, slots = next((key, slots) for name, key, slots in kernels(arch) if name.split()[0] == op)
    report = lint(jit.build(grid_source((key,)), arch, tmp_path).path, slots)
    assert any(FAULTS[fault][-1] in str(finding) for finding in report.findings), report
    assert all(finding.witness[0] == "spantune_kernel" for finding in report.findings)


@needs_disassembler
def test_the_command_prints_a_line_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lint", "pdl_chain", "--layers", "2", "--device", "sim:h200"]
    monkeypatch.setenv("SPANTUNE_CACHE_DIR", str(tmp_path / "sound"))
    assert cli.main(command) == 0
    sound = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in sound] == ["L0 sm_90a ok", "L1 sm_90a ok"]
    graph = build_chain(PdlChainShape(layers=2))
    (tmp_path / "config.json").write_text(json.dumps(to_json(serial(CmpSpace(graph, H200)))))
    assert cli.main([*command, "--config", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out.splitlines() == sound
    monkeypatch.setenv("SPANTUNE_CACHE_DIR", str(tmp_path / "broken"))
    plant("early store", tmp_path / "include")
    monkeypatch.setattr(jit, "INCLUDE", tmp_path / "include")
    assert cli.main(command) == 1
    broken = capsys.readouterr().out.splitlines()
    assert len(broken) == 4 and "1 unsafe accesses" in broken[0]
    assert "STG" in broken[1] and "path spantune_kernel" in broken[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "neither"), ("{", "cannot be read"), ("{}", "malformed config"), ('{"entries": []}', "schema")],
)
def test_a_bad_config_file_is_bad_input(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.lint_command.require_disassembler", lambda: "nvdisasm")
    path = tmp_path / "config.json"
    path.write_text(text)
    assert cli.main(["lint", "pdl_chain", "--device", "sim:h200", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


@needs_disassembler
def test_a_construction_that_cannot_say_the_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = CmpSpace(build_chain(PdlChainShape(layers=2)), H200)
    config = replace(serial(space), launch_completion=frozenset({("L0", "L1")}))
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    command = ["lint", "pdl_chain", "--layers", "2", "--device", "sim:h200", "--config", str(tmp_path / "config.json")]
    assert cli.main([*command, "--construction", "streams"]) == 2
    assert "construction streams: L1 follows L0 on a stream" in capsys.readouterr().err
    edge = PlanEdge("A0", "D1f", EdgeKind.ORDINARY)
    monkeypatch.setattr(cli, "lint_config", lambda spec, path: ((edge,), []))
    assert cli.main([*command, "--construction", "streams"]) == 0
    assert capsys.readouterr().out == "stream order adds the ordinary edge A0 -> D1f\n"


def test_without_nvdisasm_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("backends.cuda.sass.disassembler", lambda: None)
    assert cli.main(["lint", "pdl_chain", "--device", "sim:h200"]) == 2
    assert "spantune[test]" in capsys.readouterr().err


# --- Made-up machine code: operand slot i is at c[0x0][0x210 + 8 i], slot 0 a weight, slot 1 a number ---

MADE_UP = Slots(frozenset({0}), frozenset({1}))
WEIGHT = "LDC.64 R2, c[0x0][0x210]"
LOAD = "LDG.E R4, desc[UR4][R2.64]"


def kernel(*lines: str) -> Kernel:
    """A kernel of these instructions; a line with a colon is a label."""
    code, address = [], 0
    for line in lines:
        code.append(line if line.endswith(":") else f"        /*{address:04x}*/    {line} ;")
        address += 0 if line.endswith(":") else 16
    info = [
        "//----- nvinfo : EIATTR_KPARAM_INFO",
        *("/*0000*/ .byte 0x04, 0x17", "/*0002*/ .short (.L_2 - .L_1)", "/*0004*/ .word 0x00000000"),
        *("/*0008*/ .short 0x0000", "/*000a*/ .short 0x0000", "/*000c*/ .byte 0x00, 0xf0, 0x01, 0x07"),
        "//----- nvinfo : EIATTR_PARAM_CBANK",
        *("/*0010*/ .byte 0x04, 0x0a", "/*0012*/ .short (.L_4 - .L_3)", "/*0014*/ .word index@(k)"),
        *("/*0018*/ .short 0x0210", "/*001a*/ .short 0x0100"),
    ]
    text = ['.section .nv.info.k,""', *info, '.section .text.k,"ax"', "k:", *code]
    (found,) = parse("\n".join(text))
    return found


@pytest.mark.parametrize(
    "code",
    [
        ("ACQBULK", "LDC.64 R2, c[0x0][0x220]", LOAD, "STG.E desc[UR4][R2.64], R4", "EXIT"),
        (WEIGHT, LOAD, "EXIT"),
        (WEIGHT, "LDC R6, c[0x0][0x218]", "IMAD.WIDE R2, R6, 0x4, R2", LOAD, "EXIT"),
        (WEIGHT, "CCTL.E.PF2 [R2]", "LDS R4, [R2]", "STS [R2], R4", "REDUX.OR UR4, R2", "EXIT"),
        # Both ways wait.
        ("@P0 BRA `(.L_1)", "ACQBULK", "BRA `(.L_2)", ".L_1:", "ACQBULK", ".L_2:", "STG.E [R2.64], R4", "EXIT"),
        # The region's start says where its end is, so the wait inside it counts.
        ("BSSY B0, `(.L_1)", "ACQBULK", "BSYNC B0", ".L_1:", "STG.E [R2.64], R4", "EXIT"),
    ],
)
def test_sound_code_passes(code: tuple[str, ...]) -> None:
    assert not lint_kernel(kernel(*code), MADE_UP).findings


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (("@P0 ACQBULK", "STG.E [R2.64], R4", "EXIT"), "no wait before it; path k"),
        (("@P0 BRA `(.L_1)", "ACQBULK", ".L_1:", "RED.E [R2.64], R4", "EXIT"), "path k > .L_1"),
        (("BRA.U UP0, `(.L_1)", "ACQBULK", ".L_1:", "NEWMEM.E [R2.64]", "ATOM.E R4, [R2.64]", "EXIT"), "path k > .L_1"),
        (("BSSY B0, `(.L_1)", "ACQBULK", "BSYNC B1", ".L_1:", "STG.E [R2.64], R4", "EXIT"), "path k > .L_1"),
        (("BRX R2 -0x10", "ACQBULK", "STG.E [R2.64], R4"), "indirect"),
        (("EXIT", "STG.E [R2.64], R4"), "not understood"),
        ((WEIGHT, "LD.E R4, [R2.64]", "EXIT"), "no wait before it"),
        (("LDC.64 R2, c[0x0][0x220]", "LDG.E.CONSTANT R4, desc[UR4][R2.64]", "EXIT"), "slot 2"),
        (("LDC.64 R2, c[0x0][0x218]", LOAD, "EXIT"), "from no constant"),
        (("LDC.64 R2, c[0x0][R1+0x210]", LOAD, "EXIT"), "cannot be traced"),
        ((WEIGHT, LOAD, "IADD3 R2, P0, R2, R4, RZ", LOAD, "EXIT"), "cannot be traced"),
        ((WEIGHT, "@P0 LDC.64 R2, c[0x0][0x228]", LOAD, "EXIT"), "slot 3"),
        ((WEIGHT, "@P0 BRA `(.L_1)", "LDC.64 R2, c[0x0][0x228]", ".L_1:", LOAD, "EXIT"), "slot 3"),
        ((WEIGHT, "CALL.REL.NOINC `(f)", LOAD, "EXIT", "f:", "RET.REL.NODEC R6 `(k)"), "cannot be traced"),
        (("ULDC.64 UR6, c[0x0][0x230]", "UTMALDG.2D [UR8], [UR6], desc[UR4]", "EXIT"), "slot 4"),
        (("ULDC.64 UR6, c[0x0][0x230]", "UBLKCP.S.G [UR8], [UR6], UR7", "EXIT"), "slot 4"),
    ],
)
def test_unsound_code_is_found(code: tuple[str, ...], message: str) -> None:
    findings = lint_kernel(kernel(*code), MADE_UP).findings
    assert any(message in str(finding) for finding in findings), findings

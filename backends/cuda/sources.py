"""From a compile key to the text of one translation unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.plan.launches import CompileKey

CORE_TYPES = {"mma_sync": "MmaSyncCore", "wgmma": "WgmmaCore"}
KERNEL_NAME = "spantune_kernel"
SYSTEM_SOURCE = '#include "spantune/system.cuh"\n'


@dataclass(frozen=True)
class DeviceOp:
    """Where an op kind's device code is.

    Attributes:
        header: below `include/spantune/`.
        maps: tensor maps of its operand row.
        expression: C++ type of an instance.
    """

    header: str
    maps: int
    expression: Callable[[CompileKey], str]


def _gemm(epilogue: str) -> Callable[[CompileKey], str]:
    def expression(key: CompileKey) -> str:
        t = key.tiling
        return f"GemmFp8<{t.rows}, {t.block_m}, {t.stages}, spantune::{CORE_TYPES[t.core]}, spantune::{epilogue}>"

    return expression


DEVICE_OPS: dict[str, DeviceOp] = {
    "add_rmsnorm_quant": DeviceOp(
        "ops/add_rmsnorm_quant.cuh",
        0,
        lambda k: f"AddRmsnormQuant<{k.constant('hidden_size')}, {k.constant('partials')}>",
    ),
    "qkv_finalise": DeviceOp("ops/qkv_finalise.cuh", 0, lambda k: f"QkvFinalise<{k.constant('q_size')}>"),
    "index_key_finalise": DeviceOp(
        "ops/index_key_finalise.cuh", 0, lambda k: f"IndexKeyFinalise<{k.constant('hadamard')}, {k.constant('neox')}>"
    ),
    "index_query_finalise": DeviceOp(
        "ops/index_query_finalise.cuh",
        0,
        lambda k: f"IndexQueryFinalise<{k.constant('heads')}, {k.constant('hadamard')}, {k.constant('neox')}>",
    ),
    "scale_bias_relu": DeviceOp("ops/scale_bias_relu.cuh", 0, lambda k: f"ScaleBiasRelu<{k.tiling.rows}>"),
    "gemm_fp8_partial": DeviceOp("ops/gemm_fp8.cuh", 2, _gemm("PartialEpilogue")),
    "gemm_fp8_query": DeviceOp("ops/gemm_fp8.cuh", 2, _gemm("QueryRopeEpilogue")),
    "head_gate": DeviceOp("ops/head_gate.cuh", 0, lambda k: f"HeadGate<{k.constant('heads')}, {k.tiling.block_m}>"),
    "bmm_bf16": DeviceOp(
        "ops/bmm_bf16.cuh", 2, lambda k: f"BmmBf16<{k.constant('nope')}, {k.tiling.rows}, {k.tiling.block_m}>"
    ),
    "paged_score": DeviceOp(
        "ops/paged_score.cuh",
        3,
        lambda k: (
            f"PagedScore<{k.constant('heads')}, {k.tiling.block_m}, {k.tiling.rows},"
            f" spantune::{CORE_TYPES[k.tiling.core]}>"
        ),
    ),
}


def grid_source(keys: Sequence[CompileKey]) -> str:
    """The translation unit of one grid kernel, named `KERNEL_NAME`: of one op, or of several that share a launch.

    A finaliser stands behind the producer whose tiles it follows.
    """
    ops = [DEVICE_OPS[key.kind] for key in keys]
    ctas = min(key.tiling.ctas_per_sm for key in keys if key.shell == "grid")
    parts: list[str] = []
    for op, key in zip(ops, keys, strict=True):
        if key.shell == "arrival":
            parts.append(f"spantune::ArrivalPart<{parts.pop()}, spantune::{op.expression(key)}>")
        else:
            parts.append(_part(key, op))
    macro = "SPANTUNE_GRID_KERNEL" if len(parts) == 1 else "SPANTUNE_SHARED_KERNEL"
    includes = "".join(f'#include "spantune/{header}"\n' for header in dict.fromkeys(op.header for op in ops))
    return f'#include "spantune/shells/grid.cuh"\n{includes}{macro}({KERNEL_NAME}, {ctas}, {", ".join(parts)})\n'


def _part(key: CompileKey, op: DeviceOp) -> str:
    extras = ", ".join(str(extra).lower() for extra in (key.loops, key.prefetches, key.delays, key.waits, key.traces))
    return f"spantune::GridPart<spantune::{op.expression(key)}, {op.maps}, {extras}>"


def persistent_source(keys: Sequence[CompileKey]) -> str:
    """The translation unit of the persistent kernel over a set of ops, opcodes in the order of `keys` from 1."""
    ops = [DEVICE_OPS[key.kind] for key in keys]
    headers = "".join(f'#include "spantune/{header}"\n' for header in dict.fromkeys(op.header for op in ops))
    types = ", ".join(f"spantune::{op.expression(key)}" for op, key in zip(ops, keys, strict=True))
    return f'#include "spantune/shells/persistent.cuh"\n{headers}SPANTUNE_PERSISTENT_KERNEL({KERNEL_NAME}, {types})\n'

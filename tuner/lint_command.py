"""What `spantune lint` does: builds a config's kernels for a device and proves each of them from machine code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.base import SessionSpec
from backends.cuda import jit
from backends.cuda.lint import Report, lint, slots_of
from backends.cuda.sass import require_disassembler
from backends.cuda.sources import grid_source
from backends.plan.launches import PlanEdge, lower
from backends.plan.streams import constructed
from search_spaces.cmp import CmpSpace, default
from tuner.config_file import read_config
from tuner.devices import gpu_record
from tuner.options import graph_of
from workloads.ops import KINDS


@dataclass(frozen=True)
class LintedKernel:
    """One kernel of a config and what its machine code says.

    Attributes:
        op: op name.
        arch: compile target.
        report: of its binary.
    """

    op: str
    arch: str
    report: Report

    def lines(self) -> list[str]:
        """For people: a summary, then the faults."""
        return [f"{self.op} {self.arch} {self.report}", *(f"  {finding}" for finding in self.report.findings)]


def lint_config(spec: SessionSpec, config: Path | None = None) -> tuple[tuple[PlanEdge, ...], list[LintedKernel]]:
    """Lints the kernels of a config, in launch order. Builds them where the cache lacks them; runs nothing.

    Returns:
        The edges that the spec's construction adds to the plan, and the kernels.

    Args:
        spec: the workload, its shape and the device whose target is built for.
        config: file with a config or with best configs; None stands for the untuned config.

    Raises:
        OptionError: the file holds no config for this.
        InputError: nvdisasm or the compiler is missing, or the config does not fit the device or the construction.
        BuildFailed: a kernel does not compile.
    """
    graph, gpu = graph_of(spec), gpu_record(spec)
    require_disassembler()
    space = CmpSpace(graph, gpu)
    chosen = default(space) if config is None else read_config(config, spec, graph)
    space.check(chosen)
    planned = lower(graph, chosen, gpu.arch)
    plan = constructed(planned, spec.construction)
    jit.build_all((grid_source(node.binary), gpu.arch) for node in plan.nodes)
    found: dict[tuple[object, object], Report] = {}
    kernels = []
    for node in plan.nodes:
        slots = slots_of([(KINDS[graph.ops[part.op].kind], part.operands) for part in node.parts], graph)
        key = (node.binary, slots)
        if key not in found:
            found[key] = lint(jit.build(grid_source(node.binary), gpu.arch).path, slots)
        kernels.append(LintedKernel(node.op, gpu.arch, found[key]))
    return tuple(edge for edge in plan.edges if edge not in planned.edges), kernels

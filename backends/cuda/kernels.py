"""Kernels of a process on one GPU: built or found in the cache, loaded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from backends.cuda import driver, jit
from backends.cuda.sources import KERNEL_NAME, SYSTEM_SOURCE, grid_source, persistent_source
from backends.errors import BuildFailed
from backends.plan.launches import CompileKey, KernelNode
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord


class Kernels:
    """Loads kernels by compile key."""

    def __init__(self, gpu: GpuRecord, cache: Path | None = None) -> None:
        self._gpu = gpu
        self._cache = cache
        self._loaded: dict[tuple[CompileKey, ...], Any] = {}
        self._persistent: dict[tuple[CompileKey, ...], Any] = {}
        self._system: dict[str, Any] = {}

    def build(self, binaries: Iterable[tuple[CompileKey, ...]], workers: int | None = None) -> None:
        """Builds binaries ahead of use, in processes."""
        jit.build_all([(grid_source(keys), self._gpu.arch) for keys in binaries], self._cache, workers)

    def grid(self, node: KernelNode) -> Any:
        """The kernel of a plan node.

        Raises:
            BuildFailed: it does not compile, or spills.
            IllegalConfig: fewer CTAs fit one multiprocessor than its tiling promises.
        """
        key = node.binary
        if key not in self._loaded:
            cubin = jit.build(grid_source(key), self._gpu.arch, self._cache)
            if cubin.spill_bytes:
                raise BuildFailed(f"{node.op}: {cubin.spill_bytes} bytes spilled at {cubin.registers} registers")
            kernel = driver.load_kernel(cubin.path, KERNEL_NAME, self._gpu.shared_per_block)
            fits = driver.ctas_per_sm(kernel, node.threads, node.shared_bytes)
            if fits < node.ctas_per_sm:
                raise IllegalConfig(f"{node.op}: {fits} CTAs fit one multiprocessor, {node.ctas_per_sm} promised")
            self._loaded[key] = kernel
        return self._loaded[key]

    def persistent(self, keys: Sequence[CompileKey]) -> Any:
        """The persistent kernel over a set of ops.

        Raises:
            BuildFailed: it does not compile, or spills.
        """
        specs = tuple(keys)
        if specs not in self._persistent:
            cubin = jit.build(persistent_source(specs), self._gpu.arch, self._cache)
            if cubin.spill_bytes:
                raise BuildFailed(f"persistent kernel: {cubin.spill_bytes} bytes spilled")
            self._persistent[specs] = driver.load_kernel(cubin.path, KERNEL_NAME, self._gpu.shared_per_block)
        return self._persistent[specs]

    def system(self, name: str) -> Any:
        """A kernel of system.cuh by its name without the prefix."""
        if name not in self._system:
            cubin = jit.build(SYSTEM_SOURCE, self._gpu.arch, self._cache)
            self._system[name] = driver.load_kernel(cubin.path, f"spantune_{name}", self._gpu.shared_per_block)
        return self._system[name]

"""A session on a real GPU: builds graphs over rotation sets, checks them, and reads their spans."""

from __future__ import annotations

import ctypes
import platform
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from backends.base import DeviceInfo, Executable, SessionSpec, Verdict
from backends.cmp.build import Bracket, MapCache, bracketed_graph, bracketed_kernel, build_graph
from backends.cmp.capture import StreamPool, capture_graph
from backends.cuda import binding, driver, jit, memory
from backends.cuda.floor import stream_launches
from backends.cuda.health import Health
from backends.cuda.kernels import Kernels
from backends.errors import MeasurementVoid, UnsafePlan
from backends.measure.protocol import Protocol
from backends.measure.stats import hodges_lehmann, trimmed_mean
from backends.measure.trace import RECORD_BYTES, RECORD_WORDS, Trace, parse
from backends.measure.verify import POISON, Variant, Verifier
from backends.megakernel.build import ResidentPlan
from backends.plan import launches
from backends.plan.queues import QueuePlan, lower_queues, verify_queues
from backends.plan.streams import constructed
from backends.plan.verify import verify as verify_plan
from search_spaces.cmp import CmpSpace
from search_spaces.config import Config, MegakernelConfig, numerics_key
from workloads import registry
from workloads.graph import Role
from workloads.ops import compulsory_bytes

SLOTS = 4096  # stamp pairs that one measuring call may hold before it reads them


@dataclass
class CudaExecutable:
    """A config's graphs, one per rotation set; `verified` once its outputs have a passing verdict.

    `evict` tells that it touches so little of a set that rotation alone would leave that in L2. `records` is where a
    traced one writes.
    """

    plan: launches.LaunchPlan | QueuePlan | None
    plan_key: str
    numerics_key: str
    graphs: list[driver.Graph]
    resident: ResidentPlan | None = None
    verified: bool = False
    evict: bool = False
    records: int = 0

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()
        self.graphs = []
        if self.records:
            driver.free(self.records)
            self.records = 0
        if self.resident is not None:
            self.resident.close()
            self.resident = None


class CudaSession:
    """One workload at one shape on one GPU. See `backends.base.Session` for its duties."""

    def __init__(self, spec: SessionSpec, index: int) -> None:
        self._workload = registry.get(spec.workload)
        self._shape = self._workload.shape(spec.params)
        graph = self._workload.graph(self._shape)
        self.graph = graph.subgraph(spec.ops) if spec.ops else graph
        self._gpu = driver.open_gpu(index)
        self.space = CmpSpace(self.graph, self._gpu.record)
        self.kernels = Kernels(self._gpu.record)
        self._protocol = Protocol(l2=spec.l2)
        self._rng = random.Random(spec.seed)
        self._maps = MapCache()
        self._construction = spec.construction
        self._pool = StreamPool()
        self._next_set = 0
        self._evictors: dict[int, driver.Graph] = {}
        self._allocate()
        self._load_data(spec.seed)
        self._health = Health(self._gpu.uuid)
        versions = _versions(self._gpu.driver_version, self._health.driver())
        self.info = DeviceInfo(self._gpu.record, False, self._gpu.uuid, versions)
        self.bracket_us = self._read_bracket()
        self.protocol: dict[str, Any] = {
            **self._protocol.describe(),
            "construction": spec.construction,
            "sets": len(self._sets),
            "bracket_us": round(self.bracket_us, 4),
            "source_hash": jit.source_hash(),
        }

    # --- Memory ---

    def _allocate(self) -> None:
        self._inputs = memory.allocate(memory.input_sizes(self.graph))
        written = memory.written_sizes(self.graph, memory.largest_splits(self.graph))
        self._written = memory.allocate(written)
        self._counters = memory.allocate_counters(self.graph)
        sizes = memory.set_sizes(self.graph)
        count = self._protocol.num_sets(self._gpu.record.l2_bytes, compulsory_bytes(self.graph))
        self._sets = [memory.allocate(sizes) for _ in range(count)]
        self._warm = [t for t in self.graph.tensors.values() if t.role is Role.INPUT and t.dtype in ("bf16", "f32")][:2]
        self._pristine = memory.allocate({t.name: t.bytes for t in self._warm})
        self._stamps = driver.allocate(16 * len(self._sets))
        self._readings = driver.allocate_host(16 * SLOTS)

    def _addresses(self, index: int) -> dict[str, int]:
        arenas = (self._inputs, self._written, self._counters, self._sets[index])
        return {name: address for arena in arenas for name, address in arena.addresses().items()}

    def _load_data(self, seed: int) -> None:
        inputs, reference = self._workload.inputs(), self._workload.reference()
        base = dict(inputs.make_inputs(self._shape, seed, "cuda"))
        variants = [base, {**base, **inputs.refresh(self._shape, base, seed + 1)}]
        weights = [t.name for t in self.graph.tensors.values() if t.role is Role.WEIGHT]
        for arena in self._sets:
            self._upload(arena, base, [*weights, *self._states()])
        bound = [Variant(v, reference.reference(self._shape, v)) for v in variants]
        self._verifier = Verifier(bound, self._load_variant, self._outputs, self._compare)
        self._base = bound[0]
        self._load_variant(self._base)

    def _compare(self, got: Any, want: Any, key: str) -> list[Any]:
        core = "wgmma" if "wgmma" in key else "mma_sync"
        names = [name for name in got if name in want]
        return list(self._workload.reference().compare(self._shape, got, want, names=names, core=core))

    def _states(self) -> list[str]:
        return [t.name for t in self.graph.tensors.values() if t.role is Role.STATE]

    def _upload(self, arena: memory.Arena, tensors: Any, names: Sequence[str]) -> None:
        addresses = arena.addresses()
        for name in names:
            binding.upload(addresses[name], tensors[name])

    def _load_variant(self, variant: Variant) -> None:
        """Inputs and set 0's caches become the variant's; everything that ops write becomes poison."""
        self._upload(self._inputs, variant.tensors, list(self._inputs.slices))
        self._upload(self._pristine, variant.tensors, [t.name for t in self._warm])
        self._upload(self._sets[0], variant.tensors, self._states())
        binding.bytes_at(self._written.base, self._written.bytes).fill_(POISON)
        driver.call("cuCtxSynchronize")

    def _outputs(self) -> dict[str, Any]:
        """Views of what ops write, partials left out, with set 0's caches."""
        addresses = self._addresses(0)
        roles = (Role.INNER, Role.OUTPUT, Role.STATE)
        tensors = [t for t in self.graph.tensors.values() if t.role in roles and self.graph.writers(t.name)]
        return {t.name: binding.tensor_at(addresses[t.name], t.shape, t.dtype) for t in tensors}

    # --- Executables ---

    def _bracket(self, index: int) -> Bracket:
        source, target = self._pristine.addresses(), self._inputs.addresses()
        copies = tuple((source[t.name], target[t.name], t.bytes // 16) for t in self._warm)
        return Bracket(copies, self._stamps + 16 * index)

    def prepare(self, config: Config, *, delay_us: int = 0, construction: str = "") -> CudaExecutable:
        """See `Session.prepare`.

        Args:
            config: of either backend.
            delay_us: every triggering thread sleeps so long after its trigger (fault injection).
            construction: instead of the session's.
        """
        if isinstance(config, MegakernelConfig):
            return self._prepare_megakernel(config)
        self.space.check(config)
        construction = construction or self._construction
        plan = constructed(launches.lower(self.graph, config, self._gpu.record.arch), construction)
        verdict = verify_plan(self.graph, plan, self._gpu.record.sm_count)
        if not verdict.passed:
            raise UnsafePlan(verdict.message)
        if delay_us:
            plan = launches.delayed(plan)
        key = numerics_key(self.graph, config, self._gpu.record.arch)
        executable = CudaExecutable(plan, plan.key(), key, [])
        with _closing_on_error(executable):
            for index in range(len(self._sets)):
                executable.graphs.append(self._graph(plan, index, delay_us, construction))
        return executable

    def probe(self, verified: Executable, plan: launches.LaunchPlan) -> CudaExecutable:
        """Graphs of a plan that leaves out kernels, edges or waits of a verified one. For timing only.

        Raises:
            ValueError: `verified` has no passing verdict, or the plan runs kernels that it does not.
        """
        source = _own(verified)
        if not source.verified or not isinstance(source.plan, launches.LaunchPlan):
            raise ValueError("only a plan with a passing verdict can be taken apart")
        ordered = {tuple(replace(key, waits=True) for key in keys) for keys in plan.binaries()}
        if not ordered <= set(source.plan.binaries()):
            raise ValueError("the plan runs kernels that the verified one does not")
        executable = CudaExecutable(plan, plan.key(), "", [], evict=self._protocol.l2 == "cold")
        with _closing_on_error(executable):
            for index in range(len(self._sets)):
                executable.graphs.append(self._graph(plan, index))
        return executable

    def traced(self, verified: Executable) -> CudaExecutable:
        """A verified plan in a build that writes trace records, for `verify`, `measure` and `trace`.

        Raises:
            ValueError: `verified` has no passing verdict.
        """
        source = _own(verified)
        if not source.verified or not isinstance(source.plan, launches.LaunchPlan):
            raise ValueError("only a plan with a passing verdict can be traced")
        plan = launches.traced(source.plan)
        executable = CudaExecutable(plan, plan.key(), source.numerics_key, [])
        with _closing_on_error(executable):
            executable.records = driver.allocate(RECORD_BYTES * sum(node.ctas for node in plan.nodes))
            for index in range(len(self._sets)):
                executable.graphs.append(self._graph(plan, index, trace=executable.records))
        return executable

    def trace(self, traced: Executable, replays: int) -> list[Trace]:
        """Records of timed replays, each on a cold set behind untimed ones, like the readings of `measure`."""
        run = _own(traced)
        if not run.records or not isinstance(run.plan, launches.LaunchPlan):
            raise ValueError("only a traced executable writes records")
        kernels = [(node.op, node.ctas) for node in run.plan.nodes]
        words = (ctypes.c_uint64 * (RECORD_WORDS * sum(ctas for _, ctas in kernels)))()
        stamps = (ctypes.c_uint64 * 2).from_address(self._readings)
        found = []
        for _ in range(replays):
            self._queue(run, 0)
            driver.synchronize(self._gpu.stream)
            driver.copy_to_host(ctypes.addressof(words), run.records, ctypes.sizeof(words), self._gpu.stream)
            driver.synchronize(self._gpu.stream)
            span_us = (stamps[1] - stamps[0]) / 1000
            found.append(Trace(parse(list(words), kernels, stamps[0]), span_us, self._gpu.record.sm_count))
        return found

    def steady(self, verified: Executable, layers: int) -> CudaExecutable:
        """Graphs of a verified plan for several layers in a row, each on a set of its own; see `launches.chained`.

        Raises:
            ValueError: `verified` has no passing verdict, or there are fewer sets than layers.
        """
        source = _own(verified)
        if not source.verified or not isinstance(source.plan, launches.LaunchPlan):
            raise ValueError("only a plan with a passing verdict can be repeated")
        if not 1 <= layers <= len(self._sets):
            raise ValueError(f"{layers} layers need as many sets, and there are {len(self._sets)}")
        plan = launches.chained(source.plan, layers)
        executable = CudaExecutable(plan, plan.key(), source.numerics_key, [])
        with _closing_on_error(executable):
            for index in range(len(self._sets)):
                before = [(index + 1 + i) % len(self._sets) for i in range(len(self._sets) - 1)]
                executable.graphs.append(self._graph(plan, index, before=before[: layers - 1]))
        return executable

    def views(self, index: int) -> dict[str, Any]:
        """Torch views of every tensor of a set, for a peer's kernels to be measured on the same memory."""
        addresses = self._addresses(index)
        return {t.name: binding.tensor_at(addresses[t.name], t.shape, t.dtype) for t in self.graph.tensors.values()}

    def captured(self, graphs: Sequence[int]) -> CudaExecutable:
        """Somebody else's captured graphs, one per set and given by raw handles, in the bracket of plans."""
        executable = CudaExecutable(None, "", "", [], evict=self._protocol.l2 == "cold")
        with _closing_on_error(executable):
            for index, raw in enumerate(graphs):
                executable.graphs.append(bracketed_graph(self.kernels, raw, self._bracket(index)))
                executable.graphs[-1].instantiate(self._gpu.stream)
        return executable

    @property
    def num_sets(self) -> int:
        """Rotation sets of weights and caches."""
        return len(self._sets)

    def streams(self, size: int) -> list[CudaExecutable]:
        """Kernels that only stream `size` bytes of a set, cold, in the bracket of plans: the candidates for a floor."""
        found = []
        for launch in stream_launches(self._gpu.record.sm_count):
            executable = CudaExecutable(None, "", "", [], evict=self._protocol.l2 == "cold")
            found.append(executable)
            with _closing_on_error(executable):
                for index, arena in enumerate(self._sets):
                    kernel = launch(self.kernels, arena.base, size, self._stamps)
                    executable.graphs.append(bracketed_kernel(self.kernels, kernel, self._bracket(index)))
                    executable.graphs[-1].instantiate(self._gpu.stream)
        return found

    def _prepare_megakernel(self, config: MegakernelConfig) -> CudaExecutable:
        plan = lower_queues(self.graph, config, self._gpu.record.arch, self._gpu.record.sm_count)
        verdict = verify_queues(self.graph, plan)
        if not verdict.passed:
            raise UnsafePlan(verdict.message)
        key = numerics_key(self.graph, config, self._gpu.record.arch)
        resident = ResidentPlan(plan, self.kernels, self._gpu.stream)
        executable = CudaExecutable(plan, plan.key(), key, [], resident)
        with _closing_on_error(executable):
            for index in range(len(self._sets)):
                launch = resident.launch(self._addresses(index), self._maps)
                graph = bracketed_kernel(self.kernels, launch, self._bracket(index))
                executable.graphs.append(graph)
                graph.instantiate(self._gpu.stream)
        return executable

    def _graph(
        self,
        plan: launches.LaunchPlan | None,
        index: int,
        delay_us: int = 0,
        construction: str = "direct",
        before: Sequence[int] = (),
        trace: int = 0,
    ) -> driver.Graph:
        """The graph of a set; `before` are the sets of the layers that come before the last one."""
        first, *later = (self._addresses(i) for i in (*before, index))
        inputs = (plan, self.kernels, first, self._maps, self._gpu.stream)
        if construction == "streams":
            return capture_graph(*inputs, self._pool, bracket=self._bracket(index), delay_us=delay_us)
        return build_graph(*inputs, bracket=self._bracket(index), delay_us=delay_us, later=later, trace=trace)

    def verify(self, executable: Executable) -> Verdict:
        """See `Session.verify`."""
        run = _own(executable)
        if not run.numerics_key:
            raise ValueError("a part of a plan is for timing only: it has no verdict of its own")
        verdict = self._verifier.check(run.numerics_key, lambda: self._replay(run))
        self._load_variant(self._base)
        run.verified = verdict.passed
        return verdict

    def outputs(self, executable: Executable, variant: int = 0) -> dict[str, Any]:
        """Copies of everything that the executable writes for one of the session's input variants."""
        return self._verifier.outputs_for(variant, lambda: self._replay(_own(executable)))

    def _replay(self, executable: CudaExecutable) -> None:
        executable.graphs[0].launch(self._gpu.stream)
        driver.synchronize(self._gpu.stream)

    # --- Spans ---

    def measure(self, executables: Sequence[Executable], rounds: int) -> list[list[float]]:
        """See `Session.measure`."""
        readings: list[list[float]] = [[] for _ in executables]
        found = self._read([_own(executable) for executable in executables], rounds)
        disturbance = self._health.disturbance()
        if disturbance is not None:
            raise MeasurementVoid(disturbance)
        for owner, microseconds in found:
            readings[owner].append(microseconds - self.bracket_us)
        return readings

    def _read(self, runs: Sequence[CudaExecutable], rounds: int) -> list[tuple[int, float]]:
        """Replays every executable `rounds` times in random order; (index, microseconds) in replay order.

        Replays are queued back to back, so that the GPU keeps its clocks; each timed replay follows untimed ones of the
        same executable on other sets.
        """
        found: list[tuple[int, float]] = []
        owners: list[int] = []
        for done in range(rounds):
            order = list(range(len(runs)))
            self._rng.shuffle(order)
            for owner in order:
                self._queue(runs[owner], len(owners))
                owners.append(owner)
            if len(owners) + len(runs) > SLOTS or done == rounds - 1 or len(owners) >= 256:
                found += self._collect(owners)
                owners = []
        return found

    def _queue(self, run: CudaExecutable, slot: int) -> None:
        count = len(run.graphs)
        timed = (self._next_set + self._protocol.warmups) % count
        if run.evict:
            self._evictor(timed).launch(self._gpu.stream)
        for _ in range(self._protocol.warmups + 1):
            index = self._next_set % count
            self._next_set += 1
            run.graphs[index].launch(self._gpu.stream)
        driver.copy_to_host(self._readings + 16 * slot, self._stamps + 16 * index, 16, self._gpu.stream)

    def _evictor(self, index: int) -> driver.Graph:
        """A graph that streams every set but one, so that L2 holds nothing of that one."""
        if index not in self._evictors:
            launch = stream_launches(self._gpu.record.sm_count)[0]
            graph = driver.Graph()
            self._evictors[index] = graph
            before = None
            for other, arena in enumerate(self._sets):
                if other != index:
                    kernel = launch(self.kernels, arena.base, arena.bytes, self._stamps)
                    node = graph.add_kernel(
                        kernel.kernel, kernel.grid, kernel.threads, kernel.shared_bytes, kernel.arguments
                    )
                    if before is not None:
                        graph.add_edge(before, node)
                    before = node
            graph.instantiate(self._gpu.stream)
        return self._evictors[index]

    def _collect(self, owners: Sequence[int]) -> list[tuple[int, float]]:
        driver.synchronize(self._gpu.stream)
        stamps = (ctypes.c_uint64 * (2 * len(owners))).from_address(self._readings)
        return [(owner, (stamps[2 * i + 1] - stamps[2 * i]) / 1000) for i, owner in enumerate(owners)]

    def _read_bracket(self) -> float:
        empty = CudaExecutable(None, "", "", [self._graph(None, index) for index in range(len(self._sets))])
        try:
            self._read([empty], 20)
            return trimmed_mean([us for _, us in self._read([empty], self._protocol.bracket_replays)])
        finally:
            empty.close()

    def floor_us(self) -> float:
        """See `Session.floor_us`. The best of plain loads and bulk copies over several grids."""
        candidates = self.streams(compulsory_bytes(self.graph))
        try:
            readings: list[list[float]] = [[] for _ in candidates]
            for owner, microseconds in self._read(candidates, self._protocol.min_rounds * 2):
                readings[owner].append(microseconds - self.bracket_us)
            return min(hodges_lehmann(samples) for samples in readings)
        finally:
            for candidate in candidates:
                candidate.close()

    def clocks(self) -> dict[str, str]:
        """SM clock, power, throttle reasons and other processes, as nvidia-smi tells; empty where it does not."""
        fields = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_event_reasons.active"
        command = ["nvidia-smi", f"--id={self._gpu.index}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        return dict(zip(fields.split(","), (v.strip() for v in text.split(",")), strict=False))

    def close(self) -> None:
        """Frees the device. Safe to call twice."""
        for graph in self._evictors.values():
            graph.close()
        self._evictors = {}
        for arena in (*self._sets, self._inputs, self._written, self._counters, self._pristine):
            arena.close()
        self._pool.close()
        if self._stamps:
            driver.free(self._stamps)
            driver.free_host(self._readings)
            self._stamps = 0


def _own(executable: Executable) -> CudaExecutable:
    if not isinstance(executable, CudaExecutable):
        raise TypeError(f"an executable of another session: {type(executable).__name__}")
    return executable


@contextmanager
def _closing_on_error(executable: CudaExecutable) -> Iterator[None]:
    try:
        yield
    except BaseException:
        executable.close()
        raise


def _versions(cuda: str, driver_release: str) -> dict[str, str]:
    found = {"driver_cuda": cuda, "nvrtc": jit.compiler_version(), "python": platform.python_version()}
    if driver_release:
        found["driver"] = driver_release
    for name in ("torch", "numpy", "cuda-bindings", "spantune"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

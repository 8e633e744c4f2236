"""Re-asks a GPU the questions that the design builds on: edges, joins, fan-out, carve-out, priorities, bracket.

    python -m benchmarks.probes --out DIR

Writes probes.json: medians of 30 replays, in microseconds from the start of node 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from pathlib import Path
from typing import Any

from backends.cuda import driver, jit

SOURCE = (Path(__file__).parent / "probes.cu").read_text()
REPLAYS = 30
NODES = 8


class Probe:
    """Graphs of probe kernels, and the stamps that they leave."""

    def __init__(self, index: int = 0) -> None:
        self.gpu = driver.open_gpu(index)
        cubin = jit.build(SOURCE, self.gpu.record.arch)
        limit = self.gpu.record.shared_per_block
        self.node = driver.load_kernel(cubin.path, "spantune_node", limit)
        self.occupy = driver.load_kernel(cubin.path, "spantune_occupy", limit)
        self.stamps = driver.allocate(32 * NODES)
        self.data = driver.allocate(4 * NODES)
        self.errors = driver.allocate(4)
        driver.fill(self.errors, 0, 4, self.gpu.stream)

    def add(
        self,
        graph: driver.Graph,
        number: int,
        *,
        waits: int = 0,
        before: int = 0,
        triggers: int = 0,
        after: int = 0,
        parents: tuple[int, ...] = (),
    ) -> Any:
        p0, p1 = (*parents, -1, -1)[:2]
        pointers = [ctypes.c_void_p(a) for a in (self.stamps, self.data, self.errors)]
        numbers = [ctypes.c_int(n) for n in (number, waits, before, triggers, after, p0, p1)]
        return graph.add_kernel(self.node, (1, 1, 1), 32, 0, [*pointers, *numbers])

    def add_occupy(self, graph: driver.Graph, number: int, us: int, shared: int, priority: int = 0) -> Any:
        arguments = [ctypes.c_void_p(self.stamps), ctypes.c_int(number), ctypes.c_int(us)]
        grid = (self.gpu.record.sm_count, 1, 1)
        return graph.add_kernel(self.occupy, grid, 128, shared, arguments, priority)

    def replay(self, graph: driver.Graph) -> list[list[float]]:
        """Medians of the four stamps per node, us after node 0's start."""
        graph.instantiate(self.gpu.stream)
        rows = []
        host = (ctypes.c_uint64 * (4 * NODES))()
        for _ in range(REPLAYS + 2):
            driver.fill(self.stamps, 0, 32 * NODES, self.gpu.stream)
            driver.fill(self.data, 0, 4 * NODES, self.gpu.stream)
            graph.launch(self.gpu.stream)
            driver.copy_to_host(ctypes.addressof(host), self.stamps, 32 * NODES, self.gpu.stream)
            driver.synchronize(self.gpu.stream)
            rows.append([(value - host[0]) / 1000 if value else 0.0 for value in host])
        graph.close()
        medians = [statistics.median(column) for column in zip(*rows[2:], strict=True)]
        return [medians[i : i + 4] for i in range(0, 4 * NODES, 4)]


def _kind(programmatic: bool) -> str:
    return "programmatic" if programmatic else "ordinary"


def run(probe: Probe) -> dict[str, float]:
    """All questions; see the names for the answers."""
    found: dict[str, float] = {}

    def pair(name: str, programmatic: bool) -> None:
        graph = driver.Graph()
        a = probe.add(graph, 0, before=3, triggers=1, after=10)
        b = probe.add(graph, 1, waits=1, parents=(0,))
        graph.add_edge(a, b, _kind(programmatic))
        assert graph.edges() == {(0, 1, programmatic)}
        first, second = probe.replay(graph)[:2]
        found[f"{name}/start_after_trigger"] = second[0] - first[1]
        found[f"{name}/start_after_end"] = second[0] - first[3]
        found[f"{name}/wait_after_end"] = second[2] - first[3]

    pair("ordinary", False)
    pair("programmatic", True)
    for name, kinds in (("join_pp", (True, True)), ("join_op", (False, True))):
        graph = driver.Graph()
        root = probe.add(graph, 0)
        a = probe.add(graph, 1, before=2, triggers=1, after=10)
        b = probe.add(graph, 2, before=5, triggers=1, after=12)
        c = probe.add(graph, 3, waits=1, parents=(1, 2))
        for child in (a, b):
            graph.add_edge(root, child)
        graph.add_edge(a, c, _kind(kinds[0]))
        graph.add_edge(b, c, _kind(kinds[1]))
        rows = probe.replay(graph)
        found[f"{name}/start_after_later_trigger"] = rows[3][0] - max(rows[1][1], rows[2][1])
        found[f"{name}/start_after_first_end"] = rows[3][0] - rows[1][3]
        found[f"{name}/wait_after_later_end"] = rows[3][2] - max(rows[1][3], rows[2][3])
    graph = driver.Graph()
    root = probe.add(graph, 0, before=3, triggers=1, after=10)
    for number in (1, 2, 3):
        graph.add_edge(root, probe.add(graph, number, waits=1, parents=(0,)), "programmatic")
    rows = probe.replay(graph)
    for number in (1, 2, 3):
        found[f"fan_out/{number}_start_after_trigger"] = rows[number][0] - rows[0][1]
    graph = driver.Graph()
    root = probe.add(graph, 0)
    graph.add_edge(root, probe.add_occupy(graph, 1, 20, 0))
    graph.add_edge(root, probe.add(graph, 2, before=3))
    late = probe.add_occupy(graph, 3, 5, 150 * 1024)
    graph.add_edge(root, late)
    rows = probe.replay(graph)
    found["carve_out/large_starts_before_small_ends"] = rows[1][3] - rows[3][0]
    for name, priorities in (("first_high", (2, 0)), ("second_high", (0, 2))):
        graph = driver.Graph()
        root = probe.add(graph, 0)
        for number, priority in ((1, priorities[0]), (2, priorities[1])):
            graph.add_edge(root, probe.add_occupy(graph, number, 10, 180 * 1024, priority))
        rows = probe.replay(graph)
        found[f"priority/{name}_second_minus_first"] = rows[2][0] - rows[1][0]
    host = ctypes.c_int(0)
    driver.copy_to_host(ctypes.addressof(host), probe.errors, 4, probe.gpu.stream)
    driver.synchronize(probe.gpu.stream)
    found["data_errors"] = host.value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    probe = Probe()
    found = run(probe)
    document = {"device": probe.gpu.record.name, "driver_cuda": probe.gpu.driver_version, "summary": found}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "probes.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    for name, value in found.items():
        print(f"{name:45} {value:8.3f}")


if __name__ == "__main__":
    main()

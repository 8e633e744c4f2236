"""Best entries for the tests: real workloads at small shapes, on a GPU that exists only here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from results.best import BestEntry, GpuIdentity
from results.record import Provenance
from search_spaces.cmp import CmpSpace, default
from search_spaces.config import Config, numerics_key, to_json
from search_spaces.gpu import GpuRecord
from workloads import registry

GPU = GpuRecord("Test GPU", "sm_90a", 132, 50 << 20, 233472, 232448)
SOURCES = "0123456789abcdef"
DRIVER = "13.0"


def provenance(**changes: Any) -> Provenance:
    base = Provenance(
        device=GPU.name,
        device_id="cuda:0",
        uuid="00ff",
        simulated=False,
        versions={"driver_cuda": DRIVER},
        protocol={"l2": "cold"},
        source_hash=SOURCES,
        clocks={"before": {"sm_mhz": 1980}},
    )
    return replace(base, **changes)


def entry(
    workload: str = "attention_pre", config: Config | None = None, span_us: float = 40.0, **params: int | str
) -> BestEntry:
    """An entry of a workload at a shape whose config is the default one, unless another is given."""
    known = registry.get(workload)
    shape = known.shape(params)
    graph = known.graph(shape)
    config = config or default(CmpSpace(graph, GPU))
    return BestEntry(
        workload=workload,
        shape_params=shape.params(),
        shape_key=shape.key(),
        graph_digest=graph.digest(),
        backend=config.backend,
        device=GPU.name,
        gpu=GpuIdentity.of(GPU),
        config=to_json(config),
        span_us=span_us,
        interval_us=(span_us * 0.99, span_us * 1.01),
        serial_us=60.0,
        default_us=50.0,
        floor_us=20.0,
        numerics_key=numerics_key(graph, config, GPU.arch),
        provenance=provenance(),
        study="attention_pre/shape/test-gpu/cmp/space/sources",
        trials={"scored": 180, "dropped": 20, "illegal": 7},
    )


def simulated(real: BestEntry) -> BestEntry:
    """The same as a prediction of a simulated device."""
    return replace(real, device="sim:test", provenance=provenance(device="sim:test", simulated=True))

"""A modelled GPU as data: limits and model constants, each with unit and source, one JSON file per GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import DeviceError
from search_spaces.gpu import GpuRecord

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Calibration:
    """Constants of one modelled GPU; times in microseconds, rates in bytes per microsecond.

    Attributes:
        name: as in `sim:NAME`.
        gpu: limits that legality reads.
        hbm_rate: what streaming kernels reach.
        load_latency_us: from the issue of a bulk copy to its landing, under load.
        ordinary_us: from a producer's end to its consumer's start, ordinary edge.
        early_us: from the last trigger to a programmatic consumer's start.
        wait_us: from a producer's end to the return of its consumer's wait, programmatic edge.
        fan_out_us: added start of each further consumer of one producer.
        start_us: from a kernel's start to the first instruction of its CTAs.
        set_up_us: descriptors and barriers of an op with loaders.
        row_us: an op without loaders, from its wait to its last store.
        tail_us: an op with loaders, from its last k-block to its last store.
        input_us: from the wait to the first activations on chip.
        mma_flops: multiply-adds times two per microsecond of the whole GPU, native FP8 or bf16.
        unpack_share: extra streaming time of a core that unpacks FP8 to fp16, as a share.
        sources: where each constant comes from.
    """

    name: str
    gpu: GpuRecord
    hbm_rate: float
    load_latency_us: float
    ordinary_us: float
    early_us: float
    wait_us: float
    fan_out_us: float
    start_us: float
    set_up_us: float
    row_us: float
    tail_us: float
    input_us: float
    mma_flops: float
    unpack_share: float
    sources: dict[str, str]


def names() -> list[str]:
    """The modelled GPUs."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Calibration:
    """Reads a calibration.

    Raises:
        DeviceError: no such modelled GPU; the text lists what there is.
    """
    path = FOLDER / f"{name}.json"
    if name not in names():
        known = ", ".join(f"sim:{known}" for known in names())
        raise DeviceError(f"unknown device 'sim:{name}': use one of {known}")
    document: dict[str, Any] = json.loads(path.read_text())
    constants = {key: entry["value"] for key, entry in document["constants"].items()}
    sources = {key: entry["source"] for key, entry in document["constants"].items()}
    return Calibration(name=name, gpu=GpuRecord(**document["gpu"]), sources=sources, **constants)

"""A modelled GPU as data: limits and model constants, one JSON file per GPU, each value with its unit and source.

A file holds `gpu` (the fields of a `GpuRecord`) and `constants` (the other fields of a `Calibration`), every one as
`{"value": ..., "unit": ..., "source": ...}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import DeviceError
from search_spaces.gpu import GpuRecord

FOLDER = Path(__file__).parent
OTHER = "other"  # entry of a per-kind constant that serves kinds without one of their own


@dataclass(frozen=True, eq=False)
class Calibration:
    """Constants of one modelled GPU; times in microseconds, rates in bytes or operations per microsecond.

    Attributes:
        name: as in `sim:NAME`.
        digest: of the file, so that results name the constants that they came from.
        gpu: limits that legality reads.
        hbm_bytes_per_us: what streaming kernels reach.
        l2_bytes_per_us: what L2 delivers to all multiprocessors, misses included.
        sm_bytes_per_us: what one multiprocessor takes in.
        load_latency_us: from the issue of a copy to its landing, from HBM.
        input_latency_us: the same from L2, where producers leave what they wrote.
        row_latency_us: of a plain load, which ops without loaders use.
        queue_share: of the bytes in flight on the whole GPU, those that arriving inputs queue behind.
        ordinary_us: from a producer's end to its consumer's start, ordinary edge.
        early_us: from the last trigger to a programmatic consumer's start.
        wait_us: from a producer's end to the return of its consumer's wait, programmatic edge.
        fan_out_us: added start of each further consumer of one producer.
        bracket_us: the empty bracket, which every span has subtracted.
        start_us: from the start of a CTA to its first instruction.
        set_up_us: barriers and descriptors of an op with loaders.
        row_set_up_us: an op without loaders, from its first instruction to its first load.
        row_us: an op without loaders, from its inputs on chip to its last store, by op kind.
        tail_us: an op with loaders, from its last k-block to its last store.
        flush_us: from the last store of a CTA to its end.
        wgmma_flops: of one multiprocessor, multiply-adds times two, native FP8.
        mma_flops: the same of the portable core.
        unpack_bytes: FP8 values that one multiprocessor unpacks to fp16 (portable core, tokens included).
        registers: 32-bit registers of a thread by core, `row` for ops without one; launch bounds may allow fewer.
        token_registers: further registers of a thread per token above 16 that a tile has.
        frame_us: a resident kernel without work (megakernel).
        poll_us: one poll of an event counter in L2 (megakernel).
        publish_us: stores and release of a tile's event (megakernel).
    """

    name: str
    digest: str
    gpu: GpuRecord
    hbm_bytes_per_us: float
    l2_bytes_per_us: float
    sm_bytes_per_us: float
    load_latency_us: float
    input_latency_us: float
    row_latency_us: float
    queue_share: float
    ordinary_us: float
    early_us: float
    wait_us: float
    fan_out_us: float
    bracket_us: float
    start_us: float
    set_up_us: float
    row_set_up_us: float
    row_us: Mapping[str, float]
    tail_us: float
    flush_us: float
    wgmma_flops: float
    mma_flops: float
    unpack_bytes: float
    registers: Mapping[str, int]
    token_registers: float
    frame_us: float
    poll_us: float
    publish_us: float


def names() -> list[str]:
    """The modelled GPUs, as after `sim:`."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Calibration:
    """Reads a calibration.

    Raises:
        DeviceError: no such modelled GPU; the text lists what there is.
    """
    if name not in names():
        known = ", ".join(f"sim:{known}" for known in names())
        raise DeviceError(f"unknown device 'sim:{name}': use one of {known}")
    text = (FOLDER / f"{name}.json").read_text()
    document: dict[str, Any] = json.loads(text)
    gpu, constants = ({key: entry["value"] for key, entry in document[part].items()} for part in ("gpu", "constants"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Calibration(name=name, digest=digest, gpu=GpuRecord(**gpu), **constants)

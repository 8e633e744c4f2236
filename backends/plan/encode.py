"""The host side of the device ABI: bytes of kernel parameters. Mirrors backends/cuda/include/spantune."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from backends.plan.arrivals import counters_of
from backends.plan.launches import KernelPart
from workloads.ops.base import Operand, Pointer, TensorMapSpec

OPERAND_SLOTS = 16
MAP_BYTES = 128
START_SLOTS = 32  # starts of groups along n, and their end
GRID_HEADER_BYTES = OPERAND_SLOTS * 8 + 64


def operand_row(operands: Sequence[Operand], addresses: Mapping[str, int]) -> list[int]:
    """The row for a grid kernel: addresses, numbers, and for tensor maps their index in the parameter block."""
    return table_row(operands, addresses, range(OPERAND_SLOTS))


def table_row(operands: Sequence[Operand], addresses: Mapping[str, int], maps: Sequence[int]) -> list[int]:
    """The row of 64-bit slots; `maps[i]` stands for the i-th tensor map (its address, for the operand table)."""
    row, used = [], 0
    for operand in operands:
        if isinstance(operand, Pointer):
            row.append(addresses[operand.tensor])
        elif isinstance(operand, TensorMapSpec):
            row.append(maps[used])
            used += 1
        else:
            row.append(operand)
    if len(row) > OPERAND_SLOTS:
        raise ValueError(f"{len(row)} operands, at most {OPERAND_SLOTS}")
    return row + [0] * (OPERAND_SLOTS - len(row))


def map_specs(operands: Sequence[Operand]) -> list[TensorMapSpec]:
    """The tensor maps of an operand row, in index order."""
    return [operand for operand in operands if isinstance(operand, TensorMapSpec)]


def grid_args(
    part: KernelPart,
    addresses: Mapping[str, int],
    maps: Sequence[bytes],
    *,
    first_cta: int = 0,
    delay_us: int = 0,
    trace: int = 0,
) -> bytes:
    """`GridArgs` of shells/grid.cuh: 16 operand slots, then words, then the tensor maps (at least room for one).

    Args:
        part: of a node.
        addresses: of the graph's tensors.
        maps: encoded, in the order of `map_specs`.
        first_cta: CTAs of the parts before it in the launch.
        delay_us: time that each triggering thread sleeps after its trigger.
        trace: address of this part's stamps, 0 in a build without trace.
    """
    prefetch = part.prefetch
    body = struct.pack(
        "<16Q2Q12i",
        *operand_row(part.operands, addresses),
        addresses[prefetch.tensor] if prefetch else 0,
        trace,
        *divmod(part.k_blocks, part.splits),
        part.trigger,
        part.wait,
        part.w_ahead,
        delay_us,
        part.tiles[0],
        part.ctas_x,
        part.splits,
        first_cta,
        prefetch.bytes_per_cta if prefetch else 0,
        prefetch.at if prefetch else 0,
    )
    return body + (b"".join(maps) if maps else bytes(MAP_BYTES))


def arrival_args(part: KernelPart, producer: KernelPart, addresses: Mapping[str, int]) -> bytes:
    """`ArrivalArgs` of shells/grid.cuh, as large as the block of an op without tensor maps.

    Args:
        part: a finaliser behind its producer.
        producer: the part whose tiles arrive.
        addresses: of the graph's tensors, and of the finaliser's counters.
    """
    arrival = part.arrival
    if arrival is None or map_specs(part.operands):
        raise ValueError(f"{part.op} does not run behind a producer, or has tensor maps")
    starts = ((*arrival.n_starts, producer.tiles[0]), (*arrival.own_starts, part.tiles[0]))
    places = [place for line in starts for place in (*line, *(line[-1:] * (START_SLOTS - len(line))))]
    return struct.pack(
        f"<16Q2Q12i{2 * START_SLOTS}h",
        *operand_row(part.operands, addresses),
        addresses[counters_of(part.op)],
        0,
        arrival.gathered_m,
        producer.tiles[2],
        producer.splits,
        arrival.run_m,
        part.tiles[2],
        len(arrival.n_starts),
        arrival.sharers,
        *(0,) * 5,
        *places,
    )

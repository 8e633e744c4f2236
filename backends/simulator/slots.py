"""Where CTAs sit: multiprocessors as classes of equal occupants, so that placing a grid costs steps, not CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.gpu import GpuRecord

MOST_CTAS = 32  # resident CTAs of one multiprocessor


@dataclass(frozen=True)
class Demand:
    """What one resident CTA takes of its multiprocessor; shared memory with the driver's own part."""

    threads: int
    shared_bytes: int
    registers: int


class _Class:
    """Multiprocessors with equal occupants: CTAs per placement, by placement number."""

    __slots__ = ("count", "ctas", "occupants", "registers", "shared", "threads")

    def __init__(self, count: int, threads: int, shared: int, registers: int) -> None:
        self.count = count
        self.threads, self.shared, self.registers = threads, shared, registers
        self.ctas = MOST_CTAS
        self.occupants: dict[int, int] = {}

    def fits(self, d: Demand) -> bool:
        return (
            self.ctas > 0
            and self.shared >= d.shared_bytes
            and self.threads >= d.threads
            and self.registers >= d.registers
        )

    def take(self, d: Demand, ctas: int) -> None:
        """Takes room for CTAs; gives it back when `ctas` is negative."""
        self.ctas -= ctas
        self.threads -= ctas * d.threads
        self.shared -= ctas * d.shared_bytes
        self.registers -= ctas * d.registers

    def split(self, count: int) -> _Class:
        """Takes `count` multiprocessors out into a class of their own."""
        part = _Class(count, self.threads, self.shared, self.registers)
        part.ctas, part.occupants = self.ctas, dict(self.occupants)
        self.count -= count
        return part


class Slots:
    """Room for CTAs on one GPU. CTAs go to the multiprocessors with most room, one each, then round again."""

    def __init__(self, gpu: GpuRecord) -> None:
        self._classes = [_Class(gpu.sm_count, gpu.threads_per_sm, gpu.shared_per_sm, gpu.registers_per_sm)]

    def place(self, number: int, demand: Demand, wanted: int) -> tuple[int, int]:
        """Places CTAs under a placement number of their own.

        Returns:
            How many found room, and the most that one multiprocessor got.
        """
        placed = most = 0
        while placed < wanted:
            open_classes = [c for c in self._classes if c.fits(demand)]
            if not open_classes:
                break
            best = max(open_classes, key=lambda c: (c.ctas, c.shared, c.threads))
            if best.count > wanted - placed:
                best = best.split(wanted - placed)
                self._classes.append(best)
            best.take(demand, 1)
            best.occupants[number] = best.occupants.get(number, 0) + 1
            most = max(most, best.occupants[number])
            placed += best.count
        return placed, most

    def release(self, number: int, demand: Demand) -> None:
        """Frees all CTAs of a placement; classes that became equal are merged."""
        merged: dict[tuple[tuple[int, int], ...], _Class] = {}
        for item in self._classes:
            ctas = item.occupants.pop(number, 0)
            if ctas:
                item.take(demand, -ctas)
            key = tuple(sorted(item.occupants.items()))
            if key in merged:
                merged[key].count += item.count
            else:
                merged[key] = item
        self._classes = list(merged.values())

    def capacity(self, demand: Demand) -> int:
        """CTAs that would find room now."""
        return sum(
            item.count
            * min(
                item.ctas,
                item.threads // max(demand.threads, 1),
                item.shared // max(demand.shared_bytes, 1),
                item.registers // max(demand.registers, 1),
            )
            for item in self._classes
        )

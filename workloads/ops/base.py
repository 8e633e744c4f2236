"""What an op is: tile domain, regions, resources and tunables, as pure formulas.

An op kind states nothing about how a backend runs it. Device code (backends/cuda/include) follows the same operand
order (`slots`) and the same tile coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from workloads.graph import Op, OpGraph

PAGE_BYTES = 16384
MAX_PAGES = 13
SCRATCH_BYTES = 4096
BARRIER_BYTES = 256
MATH_THREADS = 256
LOADER_THREADS = 64
K_BLOCK = 128  # values of K per k-block, and per scale


@dataclass(frozen=True)
class Tiling:
    """How an op is cut and built. `split_k` is a run-time parameter; the other fields name the binary.

    Attributes:
        core: MMA core of the op, `mma_sync` or `wgmma` (ops without one ignore it).
        block_m: token rows of a tile.
        rows: weight rows (output columns) of a tile.
        split_k: number of ranges that K is cut into.
        stages: depth of the shared-memory ring.
        ctas_per_sm: CTAs that must fit one SM (launch bounds), so that a consumer can sit beside its producer.
    """

    core: str = "mma_sync"
    block_m: int = 16
    rows: int = 64
    split_k: int = 1
    stages: int = 6
    ctas_per_sm: int = 2


@dataclass(frozen=True)
class Tile:
    """One tile: `m` and `n` in tiles, `[k_begin, k_end)` in k-blocks, `split` the index of that range."""

    m: int
    n: int
    k_begin: int
    k_end: int
    split: int


@dataclass(frozen=True)
class Domain:
    """The tiles of one op: `n_tiles` x `splits` x `m_tiles`, n fastest, as the grid numbers them."""

    m_tiles: int
    n_tiles: int
    splits: int = 1
    k_blocks: int = 1

    @property
    def num_tiles(self) -> int:
        return self.m_tiles * self.n_tiles * self.splits

    def split_bound(self, i: int) -> int:
        """First k-block of split `i`; splits are as even as whole k-blocks allow, the longer ones first."""
        per_split, left = divmod(self.k_blocks, self.splits)
        return per_split * i + min(i, left)

    def tile(self, index: int) -> Tile:
        """The tile with a linear index, 0 to `num_tiles` - 1."""
        n, rest = index % self.n_tiles, index // self.n_tiles
        split, m = rest % self.splits, rest // self.splits
        return Tile(m, n, self.split_bound(split), self.split_bound(split + 1), split)

    def __iter__(self) -> Iterator[Tile]:
        return (self.tile(i) for i in range(self.num_tiles))


@dataclass(frozen=True)
class Region:
    """A box of a tensor: one half-open range per axis, in elements. Partials have the split axis first."""

    tensor: str
    box: tuple[tuple[int, int], ...]

    def overlaps(self, other: Region) -> bool:
        return self.tensor == other.tensor and all(
            low < other_high and other_low < high
            for (low, high), (other_low, other_high) in zip(self.box, other.box, strict=True)
        )


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map to be encoded by the driver: innermost axis first.

    Attributes:
        tensor: whose base address it uses.
        dims: extents in elements of `element` type.
        strides: bytes between neighbours of axes 1, 2, ... (multiples of 16).
        box: extents of one copy.
        element: `u8`, `bf16` or `f32`.
        swizzle: whether rows of the box (128 bytes) are swizzled by 128 bytes.
        offset_bytes: added to the base address (a multiple of 16).
    """

    tensor: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: str = "u8"
    swizzle: bool = True
    offset_bytes: int = 0


@dataclass(frozen=True)
class Pointer:
    """An operand slot that holds the address of a tensor."""

    tensor: str


Operand = Pointer | TensorMapSpec | int
Splits = Mapping[str, int]  # partial tensor -> number of splits


class EarlyRead(StrEnum):
    """Why what an operand slot leads to, though no weight, may be read before an op's inputs are ready."""

    TABLE = "a table that the caller writes"  # no op of the run writes the tensor
    OLD_ROWS = "rows that were written before the run"  # all ops of the run that write the tensor append to it


class OpKind(ABC):
    """The definition of one kind of op. Instances are stateless; one per kind lives in `workloads.ops.KINDS`.

    `early_slots` are operand slots that device code may read before its inputs are ready although they hold no weight,
    each with the reason. The plan verifier holds the reason against the other ops of the graph. That device code picks
    old rows only is stated where the op is defined; verifier and lint believe it.

    `appends` names what an op writes at the rows of the run's own tokens only, each with the operand that says which
    rows these are: nothing that is there before the run is changed.
    """

    name: ClassVar[str]
    loaders: ClassVar[bool]  # has a W loader and an A loader warp besides the math group
    slots: ClassVar[tuple[str, ...]]  # operand slots, in the order of the device enum
    early_slots: ClassVar[Mapping[str, EarlyRead]] = {}
    appends: ClassVar[Mapping[str, str]] = {}
    tiled: ClassVar[bool] = True  # whether the binary depends on the tiling at all
    constants: ClassVar[tuple[str, ...]] = ()  # op parameters that are template arguments

    @property
    def threads(self) -> int:
        """Threads of one CTA in the grid shell."""
        return MATH_THREADS + (LOADER_THREADS if self.loaders else 0)

    @abstractmethod
    def tunables(self, op: Op, graph: OpGraph) -> Mapping[str, tuple[int | str, ...]]:
        """Choices per field of `Tiling` that this op may be searched over; the first of each is a safe default."""

    def illegal(self, op: Op, graph: OpGraph, tiling: Tiling) -> str | None:
        """Why a tiling cannot be built for this op, or None. Formulas only; occupancy is the device's business."""
        for field, choices in self.tunables(op, graph).items():
            value = getattr(tiling, field)
            if value not in choices:
                return f"{op.name}: {field}={value} is not one of {', '.join(map(str, choices))}"
        if self.pages(op, tiling) > MAX_PAGES:
            return f"{op.name}: {self.pages(op, tiling)} pages of 16 KiB, at most {MAX_PAGES}"
        return None

    @abstractmethod
    def domain(self, op: Op, graph: OpGraph, tiling: Tiling) -> Domain:
        """The op's tiles under a tiling."""

    @abstractmethod
    def reads(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile, splits: Splits) -> tuple[Region, ...]:
        """What a tile reads of tensors that another op may write (weights and tables left out).

        `splits` gives the split count of every partial tensor, which its producer's tiling decides.
        """

    @abstractmethod
    def writes(self, op: Op, graph: OpGraph, tiling: Tiling, tile: Tile) -> tuple[Region, ...]:
        """What a tile writes."""

    @abstractmethod
    def operands(self, op: Op, graph: OpGraph, tiling: Tiling, splits: Splits) -> tuple[Operand, ...]:
        """The operand row, one entry per slot: an address, a tensor map, or a number."""

    def pages(self, op: Op, tiling: Tiling) -> int:
        """Shared-memory pages of 16 KiB that one tile uses."""
        return 0

    def shared_bytes(self, op: Op, tiling: Tiling) -> int:
        """Dynamic shared memory of one CTA in the grid shell."""
        return self.pages(op, tiling) * PAGE_BYTES + SCRATCH_BYTES + BARRIER_BYTES

    def ctas_with_finaliser(self, tiling: Tiling) -> int:
        """CTAs for which one SM has registers, without spills, when a finaliser runs behind the op's tiles."""
        return 0

    @abstractmethod
    def weight_bytes(self, op: Op, graph: OpGraph) -> int:
        """Bytes of weights (and old cache entries) that the whole op must stream."""

    def flops(self, op: Op, graph: OpGraph) -> int:
        """Multiply-adds of the whole op times two; 0 where bytes always rule."""
        return 0

    def numerics(self, op: Op, tiling: Tiling) -> str:
        """What of the tiling names the output bits, printable; empty when nothing does."""
        return ""


def whole(graph: OpGraph, tensor: str, splits: int | None = None) -> Region:
    """The region of a whole tensor; `splits` gives the leading axis of a partial."""
    box = tuple((0, extent) for extent in graph.tensors[tensor].shape)
    return Region(tensor, ((0, splits), *box) if splits is not None else box)


def rows_of(graph: OpGraph, tensor: str, low: int, high: int, axis: int = 0) -> Region:
    """The region of a tensor with one axis cut to [low, high), clipped to the tensor."""
    shape = graph.tensors[tensor].shape
    cut = (low, min(high, shape[axis]))
    return Region(tensor, tuple(cut if i == axis else (0, extent) for i, extent in enumerate(shape)))

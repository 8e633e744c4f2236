"""How much of a decode step is gaps between kernels, estimated: table data first, text second.

A step takes its data time, which is bytes over bandwidth, plus one gap per kernel. Launched one by one it takes no less
than the CPU needs to issue its kernels. A CUDA graph removes that and leaves the gaps: programmatic launches shorten
them, fusion and a megakernel have fewer. Nothing is measured: every kernel counts as streaming at full rate, and all
gaps of a step as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from backends.errors import DeviceError
from backends.simulator import calibration
from results.table import aligned
from workloads.decode_step import DIMENSIONS, MODELS, DecodeStep, ModelDims, MovingKernel, get_model
from workloads.errors import WorkloadError

SCHEMA = 1
SHORT_US = 1.0  # kernels that move data for less than this are counted: they are no longer than a gap
CUSTOM = "custom"


@dataclass(frozen=True)
class Gap:
    """A gap between two kernels of one stream.

    Attributes:
        name: `assumed`, or what hands off on a simulated GPU: `ordinary` or `programmatic`.
        gap_us: its length.
    """

    name: str
    gap_us: float


@dataclass(frozen=True)
class Machine:
    """What times are computed from.

    Attributes:
        name: as shown.
        bytes_per_us: bandwidth that kernels reach.
        cpu_launch_us: what the CPU needs to issue one kernel.
        launched_gap_us: gap between kernels launched one by one when the CPU is ahead.
        gaps: gaps between kernels of a CUDA graph, one column each.
    """

    name: str
    bytes_per_us: float
    cpu_launch_us: float
    launched_gap_us: float
    gaps: tuple[Gap, ...]


ASSUMED_GAPS = tuple(Gap("assumed", gap_us) for gap_us in (0.5, 1.0, 2.0, 3.0))
H100 = Machine(
    name="H100, 3.35 TB/s at 85 %",
    bytes_per_us=3.35e6 * 0.85,
    cpu_launch_us=5.0,
    launched_gap_us=0.5,
    gaps=ASSUMED_GAPS,
)


@dataclass(frozen=True)
class GraphTime:
    """The step as one CUDA graph with one length of gap; `gap_share` is the gaps' part of `step_us`."""

    gap: Gap
    step_us: float
    gap_share: float


@dataclass(frozen=True)
class StepEstimate:
    """One decode step on one machine.

    Attributes:
        step: model, batch and context.
        layer: kernels of each layer.
        tail: kernels after the last layer.
        num_kernels: of the whole step.
        moved_bytes: of the whole step.
        data_us: time to move them.
        mean_us: data time per kernel.
        num_short: kernels that move data for less than `SHORT_US`.
        launched_us: kernels launched one by one.
        graph: one entry per gap of the machine.
    """

    step: DecodeStep
    layer: tuple[MovingKernel, ...]
    tail: tuple[MovingKernel, ...]
    num_kernels: int
    moved_bytes: int
    data_us: float
    mean_us: float
    num_short: int
    launched_us: float
    graph: tuple[GraphTime, ...]


@dataclass(frozen=True)
class Estimate:
    """A machine and the steps that were estimated on it."""

    machine: Machine
    steps: tuple[StepEstimate, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every number of the table."""
        return {"schema": SCHEMA, **asdict(self)}


def machine(device: str | None) -> Machine:
    """The machine of a device name; None is the H100 with assumed gaps.

    A simulated GPU brings its bandwidth, and its hand-offs as two more gaps; the CPU's part stays.

    Raises:
        DeviceError: not the name of a simulated GPU.
    """
    if device is None:
        return H100
    kind, _, name = device.partition(":")
    if kind != "sim":
        known = ", ".join(f"sim:{known}" for known in calibration.names())
        raise DeviceError(f"no constants of device {device!r} to estimate from: use one of {known}")
    constants = calibration.load(name)
    handoffs = (Gap("ordinary", constants.ordinary_us), Gap("programmatic", constants.early_us))
    return Machine(
        name=f"{device}, {constants.hbm_bytes_per_us / 1e6:.2f} TB/s reached",
        bytes_per_us=constants.hbm_bytes_per_us,
        cpu_launch_us=H100.cpu_launch_us,
        launched_gap_us=constants.ordinary_us,
        gaps=(*ASSUMED_GAPS, *handoffs),
    )


def steps(model: str | None, dimensions: Mapping[str, int], settings: Mapping[str, int]) -> tuple[DecodeStep, ...]:
    """The decode steps that were asked for.

    Args:
        model: name of a known model, or None.
        dimensions: of `ModelDims`; they change those of `model`, or make a model when all are there.
        settings: of `DecodeStep`; without a model, a batch or a context, the default steps stand, else the values
            missing are those of `DecodeStep`.

    Raises:
        WorkloadError: an unknown model, a missing dimension, or a value out of range.
    """
    if model is not None:
        known = get_model(model)
        models = [replace(known, name=f"{known.name} changed", **dimensions) if dimensions else known]
    elif dimensions:
        missing = [name for name in DIMENSIONS if name not in dimensions]
        if missing:
            raise WorkloadError(f"missing dimensions {', '.join(missing)}: give them, or a model to take them from")
        models = [ModelDims(CUSTOM, **dimensions)]
    elif settings.keys().isdisjoint(("batch", "context")):
        small, large = MODELS["Qwen3-0.6B"], MODELS["Qwen3-8B"]
        places = ((small, 1, 1024), (large, 1, 1024), (small, 64, 4096))
        return tuple(DecodeStep(one, batch, context, **settings) for one, batch, context in places)
    else:
        models = list(MODELS.values())
    return tuple(DecodeStep(one, **settings) for one in models)


def estimate(wanted: Iterable[DecodeStep], where: Machine = H100) -> Estimate:
    """Table data of any number of decode steps."""
    return Estimate(where, tuple(_estimate(step, where) for step in wanted))


def _estimate(step: DecodeStep, where: Machine) -> StepEstimate:
    kernels = step.kernels()
    count = len(kernels)
    moved_bytes = sum(kernel.moved_bytes for kernel in kernels)
    data_us = moved_bytes / where.bytes_per_us
    return StepEstimate(
        step=step,
        layer=step.layer_kernels(),
        tail=step.tail_kernels(),
        num_kernels=count,
        moved_bytes=moved_bytes,
        data_us=data_us,
        mean_us=data_us / count,
        num_short=sum(kernel.moved_bytes / where.bytes_per_us < SHORT_US for kernel in kernels),
        # A CPU that issues too slowly is what the GPU waits for.
        launched_us=max(count * where.cpu_launch_us, data_us + count * where.launched_gap_us),
        graph=tuple(_graph_time(data_us, count, gap) for gap in where.gaps),
    )


def _graph_time(data_us: float, num_kernels: int, gap: Gap) -> GraphTime:
    gaps_us = num_kernels * gap.gap_us
    return GraphTime(gap, data_us + gaps_us, gaps_us / (data_us + gaps_us))


# --- Text ---


def render(table: Estimate) -> str:
    """The table as text for a terminal, without a final newline."""
    rows = [_headings(table.machine), *(_cells(row) for row in table.steps)]
    lines = [
        f"One decode step, estimated from {table.machine.name}, {table.machine.cpu_launch_us:g} us per CPU launch",
        "Under a CUDA graph with gaps of g between kernels; in brackets the gaps' share",
    ]
    return "\n".join(lines + aligned(rows) + [f"  {_remark(row)}" for row in table.steps])


def _headings(where: Machine) -> tuple[str, ...]:
    gaps = (
        f"g = {gap.gap_us:g} us" if gap.name == "assumed" else f"{gap.name} {gap.gap_us:g} us" for gap in where.gaps
    )
    return ("", "kernels", "moved", "data", "one by one", *gaps)


def _cells(row: StepEstimate) -> tuple[str, ...]:
    graph = (f"{time.step_us:.0f} us ({time.gap_share:.0%})" for time in row.graph)
    return (
        _title(row.step),
        str(row.num_kernels),
        f"{row.moved_bytes / 1e6:.1f} MB",
        f"{row.data_us:.0f} us",
        f"{row.launched_us:.0f} us",
        *graph,
    )


def _title(step: DecodeStep) -> str:
    return f"{step.model.name} batch {step.batch} context {step.context}"


def _remark(row: StepEstimate) -> str:
    return (
        f"{_title(row.step)}: {row.num_short} of {row.num_kernels} kernels move data for less than {SHORT_US:g} us, "
        f"{row.mean_us:.2f} us each on average"
    )

"""What `spantune trace` does: runs a config's tracing build and says what its CTAs wrote down."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.base import Session, SessionSpec
from backends.measure.trace import (
    KernelWindow,
    Trace,
    Utilisation,
    chrome_trace,
    median_windows,
    typical,
    utilisation,
)
from backends.plan.launches import LaunchPlan
from results.table import aligned
from search_spaces.config import CmpConfig
from tuner.ablation import ROUNDS, Bench, Reading
from tuner.ablation_command import chosen_config, measuring
from tuner.config_file import read_config
from tuner.errors import OptionError, StudyFailed
from tuner.options import graph_of
from workloads.graph import OpGraph

MOST_REPLAYS = 1000


@dataclass(frozen=True)
class Traced:
    """A config's traces.

    Attributes:
        windows: of each kernel, medians over replays.
        streams: stream of each kernel.
        typical: the replay of median span.
        use: of that replay.
        plain: spans of the timed build.
        slowed: spans of the tracing build, in the same rounds.
        replays: how many were traced.
        simulated: whether a model made the numbers.
    """

    windows: tuple[KernelWindow, ...]
    streams: dict[str, int]
    typical: Trace
    use: Utilisation
    plain: Reading
    slowed: Reading
    replays: int
    simulated: bool

    def to_json(self) -> dict[str, Any]:
        ratio, low, high = self.slowed.over(self.plain)
        return {
            "windows": [{**asdict(w), "stream": self.streams[w.kernel]} for w in self.windows],
            "utilisation": asdict(self.use),
            "span_us": self.plain.span_us,
            "traced_us": self.slowed.span_us,
            "perturbation": ratio - 1,
            "perturbation_interval": (low - 1, high - 1),
            "replays": self.replays,
            "simulated": self.simulated,
        }


def trace_config(spec: SessionSpec, config: Path | None, *, replays: int, out: Path | None = None) -> Traced:
    """Traces a config on a device; the replay of median span is written to `out` for Perfetto.

    Args:
        spec: workload, shape and device.
        config: file with a config or with best configs; None stands for the untuned config.
        replays: traced, each on cold weights.
        out: file, or None.

    Raises:
        InputError: what is asked for is not possible.
        StudyFailed: the config's outputs are wrong.
        DeviceBusy: another process measures on the GPU.
    """
    if not 1 <= replays <= MOST_REPLAYS:
        raise OptionError(f"replays={replays} is out of range: use 1 to {MOST_REPLAYS}")
    if out is not None and not out.parent.is_dir():
        raise OptionError(f"{out} cannot be written: {out.parent} is no folder")
    graph = graph_of(spec)
    chosen = None if config is None else read_config(config, spec, graph)
    with measuring(spec) as session:
        found = trace(session, graph, chosen_config(session, graph, chosen), replays=replays)
    if out is not None:
        out.write_text(json.dumps(chrome_trace(found.typical, found.streams)) + "\n", encoding="utf-8")
    return found


def trace(session: Session, graph: OpGraph, config: CmpConfig, *, replays: int, rounds: int = ROUNDS) -> Traced:
    """Traces a config on an open session and reads what tracing costs.

    Raises:
        StudyFailed: the outputs of one of the builds are wrong.
        MeasurementVoid: the machine stays disturbed.
    """
    with Bench(session, graph, session.info.record.arch) as bench:
        plain = bench.verified(config)
        traced = bench.kept(session.traced(plain))
        verdict = session.verify(traced)
        if not verdict.passed:
            raise StudyFailed(f"the tracing build is wrong ({verdict.stage} check): {verdict.message}")
        traces = session.trace(traced, replays)
        plain_spans, traced_spans = bench.read([plain, traced], rounds, lambda: None)
        plan: LaunchPlan = bench.lower(config)
    middle = typical(traces)
    streams = {node.op: node.stream for node in plan.nodes}
    return Traced(
        windows=median_windows(traces),
        streams=streams,
        typical=middle,
        use=utilisation(middle),
        plain=plain_spans,
        slowed=traced_spans,
        replays=len(traces),
        simulated=session.info.simulated,
    )


def render_trace(found: Traced) -> str:
    """The windows and what the multiprocessors did, for a terminal, without a final newline."""
    rows: list[tuple[str, ...]] = [
        ("kernel", "stream", "CTAs", "SMs", "enters", "ready", "all ready", "done", "waiting", "working")
    ]
    for w in found.windows:
        times = (w.entry_us, w.ready_us, w.all_ready_us, w.done_us, w.waiting_us, w.working_us)
        rows.append((w.kernel, *map(str, (found.streams[w.kernel], w.ctas, w.sms)), *(f"{t:.2f}" for t in times)))
    use = found.use
    ratio, low, high = (100 * (x - 1) for x in found.slowed.over(found.plain))
    what = ", predicted by a model" if found.simulated else f", medians of {found.replays} replays"
    held = f"{use.mean_active:.1f} of {found.typical.sm_count} multiprocessors hold a CTA ({100 * use.coverage:.1f} %)"
    spans = f"span {found.plain.span_us:.3f}, of the tracing build {found.slowed.span_us:.3f}"
    return "\n".join(
        [
            f"microseconds after the first stamp{what}",
            *aligned(rows),
            f"  {held}, {use.mean_working:.1f} one with its input ready",
            f"  kernel times sum to {use.kernel_sum_us:.2f} over {use.busy_us:.2f} from first entry to last done",
            f"  {spans}: {ratio:+.2f} % ({low:+.2f} to {high:+.2f})",
        ]
    )

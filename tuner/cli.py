"""The command line: `spantune COMMAND`, with the commands that `spantune --help` lists.

Exit codes: 0 done; 1 it failed; 2 bad input; 3 nothing beats the default config significantly; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from backends.base import SessionSpec
from backends.plan.streams import CONSTRUCTIONS
from results import best, compare, estimate, paths
from results.best import BestKeptWarning
from results.record import Outcome
from search_spaces.cmp import Choice, CmpSpace
from search_spaces.config import from_json
from tuner.ablation import ROUNDS
from tuner.ablation_command import (
    ablate_config,
    render_ablation,
    render_edge,
    render_kernels,
    study_one_edge,
    tune_kernels,
)
from tuner.config_file import read_config
from tuner.confirm import Finalist
from tuner.describe import describe_config
from tuner.devices import default_device, device_label, gpu_record
from tuner.errors import OptionError
from tuner.identity import shape_key
from tuner.lint_command import lint_config
from tuner.options import BACKENDS, Options, graph_of
from tuner.progress import ProgressPrinter
from tuner.residency import residencies
from tuner.sampling import SAMPLERS
from tuner.seeds import seeds
from tuner.study import StudyResult, publish, run_study
from tuner.trace_command import render_trace, trace_config
from workloads import decode_step, registry
from workloads.errors import InputError, SpantuneError

OK, FAILED, BAD_INPUT, NO_GAIN, INTERRUPTED = 0, 1, 2, 3, 130
SHAPE_OPTIONS = ("requests", "tokens", "kv", "tp", "model", "layers", "n")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.run(arguments))
    except InputError as error:
        print(f"spantune: {error}", file=sys.stderr)
        return BAD_INPUT
    except SpantuneError as error:
        print(f"spantune: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of a pipe has left; stdout must not be flushed again on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print("spantune: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="spantune", description="Finds the fastest way to launch a decode-time kernel graph.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    tune = commands.add_parser("tune", help="search, confirm, and publish the best config")
    _add_workload(tune)
    tune.add_argument("--trials", type=int, default=200, help="trials that cost device time (default 200)")
    tune.add_argument("--timeout", type=float, metavar="SECONDS", help="most seconds of searching")
    tune.add_argument("--storage", metavar="WHERE", help="journal:PATH, sqlite:///PATH or postgresql://USER@HOST/NAME")
    tune.add_argument("--seed", type=int, default=0, help="of the sampler and of the inputs")
    tune.add_argument("--sampler", default="tpe", help=" or ".join(SAMPLERS))
    tune.add_argument(
        "--start", type=Path, action="append", default=[], metavar="FILE", help="a config or best file to start from"
    )
    tune.add_argument("--backend", default="cmp", help=" or ".join(BACKENDS))
    _add_results(tune)
    tune.set_defaults(run=_tune)
    space = commands.add_parser("space", help="dimensions, size, and which ops can be co-resident")
    _add_workload(space)
    space.set_defaults(run=_space)
    show = commands.add_parser("show", help="print the op graph")
    _add_workload(show)
    show.set_defaults(run=_show)
    published = commands.add_parser("best", help="print the published configs of a workload and shape")
    _add_workload(published)
    _add_results(published)
    published.set_defaults(run=_best)
    table = commands.add_parser("compare", help="what each way of running is worth, for one shape or for all published")
    _add_workload(table)
    _add_results(table)
    table.add_argument("--json", action="store_true", help="print every number as JSON")
    table.set_defaults(run=_compare)
    lint = commands.add_parser("lint", help="prove from machine code that a config's kernels wait before they read")
    _add_workload(lint)
    lint.add_argument("--config", type=Path, metavar="FILE", help="a config or a best file (default: untuned)")
    lint.add_argument(
        "--construction", choices=CONSTRUCTIONS, default="direct", help="streams: also say which edges they add"
    )
    lint.set_defaults(run=_lint)
    _add_studies_of_one_config(commands)
    _add_estimate(commands.add_parser("estimate", help="how much of a model's decode step is gaps between kernels"))
    return parser


def _add_studies_of_one_config(commands: Any) -> None:
    kernels = commands.add_parser("kernels", help="tune kernel by kernel, each alone: the baseline that a search beats")
    _add_workload(kernels)
    kernels.add_argument("--out", type=Path, metavar="FILE", help="writes the config, a start for tune")
    kernels.set_defaults(run=_kernels)
    parts = commands.add_parser("ablate", help="where a config's time goes: branches, hand-offs, stages, chains")
    edge = commands.add_parser("edge", help="what an early launch is worth on one edge, by where the consumer waits")
    trace = commands.add_parser("trace", help="when each kernel entered, could read its input and was done, and where")
    for parser, run in ((parts, _ablate), (edge, _edge), (trace, _trace)):
        _add_workload(parser)
        parser.add_argument("--config", type=Path, metavar="FILE", help="a config or a best file (default: untuned)")
        parser.set_defaults(run=run)
    for parser in (parts, edge):
        parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"paired rounds of every row (default {ROUNDS})")
    edge.add_argument("--edge", required=True, metavar="'A0>B0'", help="producer and consumer")
    trace.add_argument("--replays", type=int, default=20, help="traced replays (default 20)")
    trace.add_argument("--out", type=Path, metavar="FILE", help="writes the replay of median span for Perfetto")
    for parser in (kernels, parts, edge, trace):
        parser.add_argument("--json", action="store_true", help="print every number as JSON")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help=" or ".join(registry.WORKLOADS))
    for name in SHAPE_OPTIONS:
        parser.add_argument(f"--{name}", type=str if name == "model" else int, help="shape parameter")
    parser.add_argument("--ops", metavar="A0,B0", help="only these ops of the graph")
    parser.add_argument("--device", help="cuda:N or sim:NAME (default: the first GPU, else sim:b300)")
    parser.add_argument("--l2", choices=("cold", "warm"), default="cold", help="whether weights start in L2")


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, metavar="DIR", help="where best configs lie")


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=" or ".join(decode_step.MODELS))
    for name in decode_step.DIMENSIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="dimension of the model")
    parser.add_argument("--batch", type=int, help="requests")
    parser.add_argument("--context", type=int, help="cached positions of each request")
    parser.add_argument("--bytes", type=int, dest="element_bytes", help="of a weight or cached value (default 2)")
    parser.add_argument("--kernels-per-layer", type=int, help="fewer than 10 stand for fusion; the data time stays")
    parser.add_argument("--device", metavar="sim:NAME", help="bandwidth and hand-offs of this simulated GPU")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    parser.set_defaults(run=_estimate)


def _spec(arguments: argparse.Namespace) -> SessionSpec:
    params = {name: getattr(arguments, name) for name in SHAPE_OPTIONS if getattr(arguments, name) is not None}
    shape = registry.get(arguments.workload).shape(params)
    ops = tuple(name.strip() for name in arguments.ops.split(",")) if arguments.ops is not None else None
    return SessionSpec(
        workload=arguments.workload,
        params=shape.params(),
        device=arguments.device or default_device(),
        ops=ops,
        l2=arguments.l2,
        seed=getattr(arguments, "seed", 0),
        construction=getattr(arguments, "construction", "direct"),
    )


# --- Commands ---


def _tune(arguments: argparse.Namespace) -> int:
    spec = _spec(arguments)
    options = Options(
        arguments.trials, arguments.timeout, arguments.storage, arguments.sampler, arguments.seed, arguments.backend
    )
    graph = graph_of(spec)
    options.check()
    starts = [read_config(path, spec, graph, any_shape=True) for path in arguments.start]
    place = paths.write_place(arguments.results)
    stored = best.best_path(place.folder, device_label(spec), spec.workload)
    if stored.exists():
        best.load(stored)  # refused now rather than after the search
    printer = ProgressPrinter(sys.stderr)
    try:
        result = run_study(
            spec,
            trials=options.trials,
            timeout_s=options.timeout_s,
            storage=options.storage,
            sampler=options.sampler,
            seed=options.seed,
            backend=options.backend,
            starts=starts,
            on_progress=printer,
        )
    except KeyboardInterrupt:
        printer.finish()
        print("spantune: interrupted; finished trials are saved, the same command goes on", file=sys.stderr)
        return INTERRUPTED
    finally:
        printer.finish()
    _report(result)
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always", BestKeptWarning)
        path = publish(result, place.folder)
    print(f"kept        {kept[-1].message}" if kept else f"published   {path}")
    return OK if result.gain else NO_GAIN


def _space(arguments: argparse.Namespace) -> int:
    spec = _spec(arguments)
    graph = graph_of(spec)
    space = CmpSpace(graph, gpu_record(spec))
    choices = [d for d in space.dimensions if isinstance(d, Choice)]
    orders = len(space.dimensions) - len(choices)
    print(f"{spec.workload} on {space.gpu.name} ({space.gpu.arch}, {space.gpu.sm_count} multiprocessors)")
    digits = sum(math.log10(len(d.values)) for d in choices)
    print(f"{len(choices)} choices, {orders} priorities; 10^{digits:.0f} points times the orders")
    width = max(len(d.name) for d in space.dimensions)
    for dimension in space.dimensions:
        values = " ".join(map(str, dimension.values)) if isinstance(dimension, Choice) else "[0, 1]"
        print(f"  {dimension.name:<{width}}  {values}")
    print("seeds: " + "; ".join(s.name for s in seeds(space)))
    print("co-residency: a consumer's CTA beside a full complement of its producer's")
    for pair in residencies(space):
        fits = "fits" if pair.default_fits else "does not fit"
        print(
            f"  {pair.producer} > {pair.consumer}: {fits} untuned, {pair.fitting} of {pair.pairs} pairs of tilings fit"
        )
    return OK


def _show(arguments: argparse.Namespace) -> int:
    graph = graph_of(_spec(arguments))
    print(graph)
    print(f"  {len(graph.ops)} ops, {len(graph.op_edges())} edges, digest {graph.digest()}")
    return OK


def _published(arguments: argparse.Namespace, every_shape: bool) -> list[tuple[Path, paths.Place, best.BestEntry]]:
    """Best entries of a workload on a device, along the search path.

    Raises:
        OptionError: there are none.
    """
    spec = _spec(arguments)
    graph = graph_of(spec)
    places = paths.search_path(arguments.results)
    found = [
        (path, place, entry)
        for path, place in paths.best_files(places, device_label(spec), spec.workload)
        for entry in best.load(path)
        if every_shape or (entry.shape_key == shape_key(spec) and entry.graph_digest == graph.digest())
    ]
    if not found:
        what = spec.workload if every_shape else f"{spec.workload} {shape_key(spec)}"
        where = ", ".join(map(str, places)) or "any folder"
        raise OptionError(f"no best config of {what} on {device_label(spec)} in {where}: run spantune tune first")
    return found


def _best(arguments: argparse.Namespace) -> int:
    graph = graph_of(_spec(arguments))
    for path, place, entry in _published(arguments, every_shape=False):
        unit = "us, predicted" if entry.simulated else "us"
        low, high = entry.interval_us
        serial_us = "unknown" if entry.serial_us is None else f"{entry.serial_us:.3f}"
        print(f"{entry.backend}, L2 {entry.l2}: {entry.span_us:.3f} {unit} ({low:.3f} to {high:.3f})")
        print(f"  default {entry.default_us:.3f}, serial {serial_us}, floor {entry.floor_us:.3f}")
        print(f"  numerics {entry.numerics_key}")
        print(f"  study {entry.study}")
        print(f"  from {path} ({place.origin})")
        for line in describe_config(from_json(entry.config), graph):
            print(f"  {line}")
    return OK


def _compare(arguments: argparse.Namespace) -> int:
    every_shape = arguments.ops is None and all(getattr(arguments, name) is None for name in SHAPE_OPTIONS)
    table = compare.compare(entry for _, _, entry in _published(arguments, every_shape))
    print(json.dumps(table.to_json(), indent=1) if arguments.json else compare.render(table))
    return OK


def _estimate(arguments: argparse.Namespace) -> int:
    def given(names: Sequence[str]) -> dict[str, int]:
        return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}

    wanted = estimate.steps(arguments.model, given(decode_step.DIMENSIONS), given(decode_step.SETTINGS))
    table = estimate.estimate(wanted, estimate.machine(arguments.device))
    print(json.dumps(table.to_json(), indent=1) if arguments.json else estimate.render(table))
    return OK


def _ablate(arguments: argparse.Namespace) -> int:
    found = ablate_config(_spec(arguments), arguments.config, rounds=arguments.rounds)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else render_ablation(found))
    return OK


def _kernels(arguments: argparse.Namespace) -> int:
    spec = _spec(arguments)
    found = tune_kernels(spec, arguments.out)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else render_kernels(graph_of(spec), found))
    return OK


def _trace(arguments: argparse.Namespace) -> int:
    found = trace_config(_spec(arguments), arguments.config, replays=arguments.replays, out=arguments.out)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else render_trace(found))
    return OK


def _edge(arguments: argparse.Namespace) -> int:
    found = study_one_edge(_spec(arguments), arguments.edge, arguments.config, rounds=arguments.rounds)
    print(json.dumps(found.to_json(), indent=1) if arguments.json else render_edge(found))
    return OK


def _lint(arguments: argparse.Namespace) -> int:
    added, kernels = lint_config(_spec(arguments), arguments.config)
    for edge in added:
        print(f"stream order adds the {edge.kind.value} edge {edge.producer} -> {edge.consumer}")
    for kernel in kernels:
        print("\n".join(kernel.lines()))
    return FAILED if any(kernel.report.findings for kernel in kernels) else OK


# --- What tune prints ---


def _report(result: StudyResult) -> None:
    unit = "us, predicted" if result.provenance.simulated else "us"
    counts = ", ".join(f"{result.counts[o]} {o.value}" for o in Outcome if result.counts.get(o))
    print(f"study       {result.study}")
    print(f"trials      {counts} ({result.resumed} resumed); {result.scored_per_s:.1f} scored/s; {result.storage}")
    print(f"floor       {result.floor_us:.3f} {unit}")
    for finalist in result.table:
        print(f"{finalist.role:<11} {_row(finalist, finalist is result.best, unit)}")
    record = result.best.record
    if result.gain:
        origin = "a heuristic seed" if result.winner_is_seed else "found by the search"
        print(f"best        {record.span_us:.3f} {unit}: {origin}")
    else:
        print("best        no significant gain over the default, which is published")
    print(f"numerics    {record.numerics_key}")
    for line in describe_config(result.config, graph_of(result.spec)):
        print(f"  {line}")


def _row(finalist: Finalist, won: bool, unit: str) -> str:
    record = finalist.record
    if record.span_us is None or record.ratio is None or finalist.low is None or finalist.high is None:
        return f"{record.outcome.value}: {record.message}"
    text = f"{record.span_us:.3f} {unit}, {record.ratio:.4f} of the default ({finalist.low:.4f} to {finalist.high:.4f})"
    return f"{text} *" if won else text


if __name__ == "__main__":
    raise SystemExit(main())

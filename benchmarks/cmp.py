"""Everything that is claimed of the cmp backend, on one GPU, in one command. Writes cmp.json.

    python -m benchmarks.cmp --out DIR [--device cuda:0] [--trials 1500] [--phases kernels,search,...]

Phases, each in a process of its own, and each on what the ones before it found:

- kernels: every kernel tuned alone, and against the time that streaming its bytes takes;
- search: the study of the headline shape, started from those kernels and from the recorded winner;
- tables: the 2 x 2, the graph as it grows, the chains that bound it, the tuned serial baseline, all in one run;
- edges: what an early launch is worth on an edge, by wait point, over M;
- soak: replays on changing inputs, bit for bit against the serial schedule;
- steady: four layers in a row; delayed producers on every programmatic edge; the trace build's cost;
- shapes: other batch and context sizes, started from the headline's winner;
- peer: FP8 GEMMs against the installed library at large M.

`summary` is flat, name to number; spans are microseconds at M = 16 (2 x 8), KV = 8192, cold L2, bracket subtracted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.base import SessionSpec
from backends.plan.launches import delayed
from backends.sessions import build_ahead, open_session
from results.record import Outcome
from search_spaces.cmp import CmpSpace, default
from search_spaces.config import CmpConfig, from_json, to_json
from tuner.ablation import DAG_ORDINARY, DAG_PDL, LINEAR_ORDINARY, LINEAR_PDL, Bench, ablate, stand_alone
from tuner.alone import tune_alone, with_tilings
from tuner.edge_study import closure, study_edge
from tuner.study import publish, run_study
from workloads import registry

SEED = 1
STEADY_LAYERS = 4
SHAPE_TRIALS = 60
SERIAL = "serial, tuned kernel by kernel"
EDGES = (("attention_pre", ("A0", "B0"), {}), ("output_norm", ("O", "N"), {}))
WITH_FLOOR = ("B0", "D0", "D1", "D2")  # told as a ratio to the time that their bytes take
EDGE_TOKENS = (16, 32, 64, 128, 256)
SHAPES: dict[str, dict[str, int | str]] = {
    **{f"m{m}": {"requests": max(m // 8, 1), "tokens": min(m, 8)} for m in (1, 8, 32, 64, 128, 256)},
    **{f"kv{kv}": {"kv": kv} for kv in (1024, 32768, 131072)},
}
PEER_SHAPES = {f"m{m}": SHAPES[f"m{m}"] for m in (64, 128, 256)}

Found = dict[str, Any]


def spec(device: str, params: dict[str, int | str] | None = None) -> SessionSpec:
    return SessionSpec("attention_pre", params or {}, device, seed=SEED)


# --- Phases ---


def kernels(device: str, found: Found, options: argparse.Namespace) -> Found:
    """Races per stage for the serial baseline, races per op for the kernels' own floors."""
    session = open_session(spec(device))
    try:
        space = CmpSpace(session.graph, session.info.record)
        staged, races = tune_alone(session, space, order=registry.get("attention_pre").stages)
        single, single_races = tune_alone(session, space, order=[(name,) for name in session.graph.ops])
        alone = stand_alone(session, session.graph, single, rounds=options.rounds)
        return {
            "serial": to_json(staged),
            "single": to_json(single),
            "races": [race.to_json() for race in races],
            "single_races": [race.to_json() for race in single_races],
            "alone": {name: one.to_json() for name, one in alone.items()},
            "ratios": {n: one.alone.over(one.floor) for n, one in alone.items() if one.floor is not None},
        }
    finally:
        session.close()


def search(device: str, found: Found, options: argparse.Namespace) -> Found:
    """The headline study. Its winner is what every later phase takes apart."""
    starts = [_config(document) for document in (_recorded(options.start), *_tuned(found)) if document]
    with tempfile.TemporaryDirectory() as folder:
        study = run_study(
            spec(device),
            trials=options.trials,
            storage=f"journal:{folder}/cmp.journal",
            seed=SEED,
            starts=starts,
        )
        if options.publish is not None:
            publish(study, options.publish)
    return {
        "config": study.best.record.config,
        "span_us": study.best.record.span_us,
        "default_us": study.span_us("default"),
        "floor_us": study.floor_us,
        "scored": study.scored,
        "scored_per_s": study.scored_per_s,
        "winner_is_seed": study.winner_is_seed,
        "counts": {outcome.value: count for outcome, count in study.counts.items()},
        "confirmation": [
            {"role": f.role, "low": f.low, "high": f.high, "span_us": f.record.span_us} for f in study.table
        ],
        "provenance": vars(study.provenance),
        "refused": sorted({r.message for r in study.records if r.outcome in (Outcome.WRONG, Outcome.CRASH)}),
    }


def _recorded(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    return document["search"]["config"] if "search" in document else document


def _tuned(found: Found) -> list[dict[str, Any]]:
    """The default schedule with the tilings that won alone, by stage and by op."""
    if "kernels" not in found:
        return []
    space = CmpSpace(registry.get("attention_pre").graph(registry.get("attention_pre").shape({})), _gpu(found))
    documents = []
    for name in ("serial", "single"):
        config = _config(found["kernels"][name])
        documents.append(to_json(with_tilings(default(space), {n: s.tiling for n, s in config.ops.items()})))
    return documents


def _gpu(found: Found) -> Any:
    from search_spaces.gpu import GpuRecord

    return GpuRecord(**found["gpu"])


def _config(document: dict[str, Any]) -> CmpConfig:
    config = from_json(document)
    assert isinstance(config, CmpConfig)
    return config


def tables(device: str, found: Found, options: argparse.Namespace) -> Found:
    session = open_session(spec(device))
    try:
        return ablate(
            session,
            session.graph,
            _config(found["search"]["config"]),
            order=registry.get("attention_pre").stages,
            beside={SERIAL: _config(found["kernels"]["serial"])},
            rounds=options.rounds,
        ).to_json()
    finally:
        session.close()


def edges(device: str, found: Found, options: argparse.Namespace) -> Found:
    tables = {}
    for workload, edge, params in EDGES:
        if workload not in registry.WORKLOADS:
            continue
        for m in EDGE_TOKENS:
            shape = {**params, "requests": m // 8, "tokens": 8} if workload == "attention_pre" else {"tokens": m}
            graph = registry.get(workload).graph(registry.get(workload).shape(shape))
            ops = closure(graph, edge)
            session = open_session(SessionSpec(workload, dict(shape), device, ops=ops, seed=SEED))
            try:
                part = graph.subgraph(ops)
                space = CmpSpace(part, session.info.record)
                tuned, _ = tune_alone(session, space, only=edge)
                config = with_tilings(default(space), {n: s.tiling for n, s in tuned.ops.items()})
                study = study_edge(session, part, config, edge, rounds=options.rounds)
                tables[f"{workload}/{'>'.join(edge)}/m{m}"] = {**study.to_json(), "config": to_json(config)}
            finally:
                session.close()
    return tables


def soak(device: str, found: Found, options: argparse.Namespace) -> Found:
    if not device.startswith("cuda"):
        return {"soak_replays": 0, "soak_mismatches": 0}
    from benchmarks import soak as runner

    return dict(runner.soak(device, _config(found["search"]["config"]), {}, options.replays, SEED))


def steady(device: str, found: Found, options: argparse.Namespace) -> Found:
    """Layers in a row, and producers that sleep after their trigger on every programmatic edge."""
    session: Any = open_session(spec(device))
    try:
        config = _config(found["search"]["config"])
        with Bench(session, session.graph, session.info.record.arch) as bench:
            whole = bench.verified(config)
            row = bench.kept(session.steady(whole, STEADY_LAYERS))
            verdict = session.verify(row)
            alone, several = bench.read([whole, row], options.rounds, lambda: None)
            late = {}
            if device.startswith("cuda"):
                variants = {"winner": config, "every edge": every_edge(session.graph, config)}
                for name, variant in variants.items():
                    bench.verified(variant)
                    session.kernels.build(delayed(bench.lower(variant)).binaries())
                    slow = session.verify(bench.kept(session.prepare(variant, delay_us=100)))
                    edges = sum(e.kind == "programmatic" for e in bench.lower(variant).edges)
                    late[name] = {"passed": slow.passed, "message": slow.message, "programmatic_edges": edges}
            return {
                "steady_us": several.span_us / STEADY_LAYERS,
                "layers": several.to_json(),
                "one_layer": alone.to_json(),
                "verdict": {"passed": verdict.passed, "message": verdict.message},
                "delayed_producers": late,
            }
    finally:
        session.close()


def every_edge(graph: Any, config: CmpConfig) -> CmpConfig:
    """The config with every data edge programmatic and every trigger at entry."""
    ops = {name: replace(schedule, trigger="entry", host="") for name, schedule in config.ops.items()}
    return replace(
        config,
        ops=ops,
        streams=tuple(range(len(config.order))),
        programmatic=frozenset(graph.op_edges()),
        launch_completion=frozenset(),
    )


def shapes(device: str, found: Found, options: argparse.Namespace) -> Found:
    rows: Found = {}
    winner = _config(found["search"]["config"])
    for name, params in SHAPES.items():
        build_ahead(spec(device, params))
        with tempfile.TemporaryDirectory() as folder:
            study = run_study(
                spec(device, params),
                trials=SHAPE_TRIALS,
                storage=f"journal:{folder}/{name}.journal",
                seed=SEED,
                starts=[winner],
            )
            if options.publish is not None:
                publish(study, options.publish)
        rows[name] = {
            "floor_us": study.floor_us,
            "serial_us": study.span_us("serial"),
            "default_us": study.span_us("default"),
            "cmp_us": study.best.record.span_us,
            "over_default": (study.best.low, study.best.high),
            "trials": study.scored,
            "config": study.best.record.config,
        }
        print(f"  {name}: { ({k: v for k, v in rows[name].items() if k.endswith('_us')}) }", flush=True)
    return rows


def peer(device: str, found: Found, options: argparse.Namespace) -> Found:
    if not device.startswith("cuda"):
        return {}
    from benchmarks.peer_gemm import compare

    return {name: compare(device, params, options.rounds, SEED) for name, params in PEER_SHAPES.items()}


PHASES: dict[str, Callable[[str, Found, argparse.Namespace], Found]] = {
    phase.__name__: phase for phase in (kernels, search, tables, edges, soak, steady, shapes, peer)
}
IN_PARENT = ("search", "shapes")  # a study measures in a child of its own, so its parent must hold no context


# --- The record ---


def summary(found: Found) -> dict[str, float]:
    """The flat figures of the phases that have run."""
    flat: dict[str, float] = {}
    if "tables" in found:
        table = found["tables"]
        modes, cmp_us = table["modes"], table["modes"][DAG_PDL]["span_us"]
        serial_us, bound_us = table["beside"][SERIAL]["span_us"], table["bound_us"]
        flat |= {
            "floor_us": table["floor"]["span_us"],
            "serial_us": serial_us,
            "bound_us": bound_us,
            "cmp_us": cmp_us,
            "cmp_over_serial": cmp_us / serial_us,
            "cmp_over_floor": cmp_us / table["floor"]["span_us"],
            "recovered_share": (serial_us - cmp_us) / (serial_us - bound_us),
            "linear_ordinary_us": modes[LINEAR_ORDINARY]["span_us"],
            "linear_pdl_us": modes[LINEAR_PDL]["span_us"],
            "dag_ordinary_us": modes[DAG_ORDINARY]["span_us"],
            "dag_pdl_us": cmp_us,
        }
    if "kernels" in found:
        flat |= {f"{n.lower()}_over_floor": found["kernels"]["ratios"][n][0] for n in WITH_FLOOR}
        alone = found["kernels"]["alone"]
        flat |= {
            f"{n.lower()}_us": alone[n]["alone"]["span_us"] for n in alone if f"{n.lower()}_over_floor" not in flat
        }
    flat |= {"steady_us": found["steady"]["steady_us"]} if "steady" in found else {}
    return flat | found.get("soak", {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--trials", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--resume", type=Path, help="a cmp.json whose phases are kept where they are not run again")
    parser.add_argument("--start", type=Path, help="a config, or a cmp.json whose winner the search starts from")
    parser.add_argument("--publish", type=Path, help="folder that winners are published in")
    options = parser.parse_args()
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    options.out.mkdir(parents=True, exist_ok=True)
    found: Found = json.loads(options.resume.read_text()) if options.resume else {}
    say(f"built {build_ahead(spec(options.device))} binaries")
    found.update(_run(_describe, options.device, found, options))
    failed = []
    for name in options.phases.split(","):
        try:
            run = PHASES[name] if name in IN_PARENT else None
            found[name] = (
                run(options.device, found, options) if run else _run(PHASES[name], options.device, found, options)
            )
        except Exception as error:  # one phase's failure must not cost the others' figures
            failed.append(name)
            say(f"{name} failed: {type(error).__name__}: {error}")
            continue
        found["summary"] = summary(found)
        (options.out / "cmp.json").write_text(json.dumps(found, indent=1, sort_keys=True, default=str) + "\n")
        say(f"{name} done")
    for key, value in found.get("summary", {}).items():
        print(f"{key:20} {value:10.3f}")
    sys.exit(1 if failed else 0)


def _describe(device: str, found: Found, options: argparse.Namespace) -> Found:
    session: Any = open_session(spec(device))
    try:
        record = {"gpu": vars(session.info.record), "protocol": session.protocol, "versions": session.info.versions}
        provenance = {"device_id": device, "simulated": session.info.simulated}
        return {**record, "provenance": {**provenance, "source_hash": session.protocol.get("source_hash", "")}}
    finally:
        session.close()


def _run(phase: Callable[..., Found], *arguments: Any) -> Found:
    """A phase in a fresh process: device contexts must not outlive it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(phase, *arguments).result()


if __name__ == "__main__":
    main()

"""Verdicts of attention_pre over its shapes, and of A0 -> B0 -> B0f in both shells.

    python -m benchmarks.verdicts --out DIR [--device cuda:0]

Each case opens a session of its own and checks serial, default and a few seeded random schedules against the reference
and bit for bit. Writes verdicts.json; exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from backends.base import SessionSpec
from backends.cuda.jit import source_hash
from backends.errors import BackendError
from backends.sessions import open_session
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.config import Config, MegakernelConfig, numerics_key, tiling_of
from search_spaces.errors import IllegalConfig
from tuner.legal import Repair

CASES: dict[str, dict[str, int | str]] = {
    "headline": {},
    "tp8": {"tp": 8},
    "dsv32": {"model": "dsv32"},
    "m1": {"requests": 1, "tokens": 1},
    "m8": {"requests": 1, "tokens": 8},
    "m64": {"requests": 8, "tokens": 8},
    "m256": {"requests": 32, "tokens": 8},
    "kv100": {"kv": 100},
    "m1_kv100": {"requests": 1, "tokens": 1, "kv": 100},
    "tp8_dsv32_kv100": {"tp": 8, "model": "dsv32", "kv": 100},
}
BOTH_SHELLS = ("A0", "B0", "B0f")


def check_case(device: str, params: dict[str, int | str], randoms: int, seed: int = 1) -> dict[str, Any]:
    """Verdicts of one shape: named schedules, then random ones."""
    session = open_session(SessionSpec("attention_pre", params, device, seed=seed))
    try:
        space: CmpSpace = session.space  # type: ignore[attr-defined]
        rng = random.Random(seed)
        named: list[tuple[str, Config]] = [("serial", serial(space)), ("default", default(space))]
        repair = Repair(space, seed)
        named += [(f"random{i}", space.decode(repair(space.sample(rng)))) for i in range(randoms)]
        return {name: _verdict(session, config) for name, config in named}
    finally:
        session.close()


def _verdict(session: Any, config: Config) -> dict[str, Any]:
    try:
        executable = session.prepare(config)
    except (IllegalConfig, BackendError) as error:
        return {"passed": None, "stage": "prepare", "message": str(error)}
    try:
        verdict = session.verify(executable)
        return {"passed": verdict.passed, "stage": verdict.stage, "message": verdict.message}
    finally:
        executable.close()


def check_both_shells(device: str, seed: int = 1) -> dict[str, Any]:
    """A0 -> B0 -> B0f: the grid and the persistent shell must write the same bits at one numerics key."""
    import torch

    session = open_session(SessionSpec("attention_pre", {}, device, ops=BOTH_SHELLS, seed=seed))
    results: dict[str, Any] = {}
    try:
        space: CmpSpace = session.space  # type: ignore[attr-defined]
        for rows, stages, ctas in ((64, 6, 2), (128, 5, 1)):
            for core in space.gpu.cores():
                tile = {"B0.rows": rows, "B0.stages": stages, "B0.ctas_per_sm": ctas, "B0.core": core}
                grid = space.decode(tile)
                tilings = {name: tiling_of(grid, name) for name in grid.ops}
                resident = MegakernelConfig(tilings, grid.order)
                keys = {numerics_key(space.graph, c, space.gpu.arch) for c in (grid, resident)}
                runs = [session.prepare(config) for config in (grid, resident)]
                verdicts = [session.verify(run) for run in runs]
                outputs = [[session.outputs(run, variant) for variant in (0, 1)] for run in runs]
                same = all(
                    torch.equal(a[name].view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8))
                    for a, b in zip(*outputs, strict=True)
                    for name in a
                )
                for run in runs:
                    run.close()
                results[f"rows{rows}/{core}"] = {
                    "passed": same and len(keys) == 1 and all(v.passed for v in verdicts),
                    "stage": "bits",
                    "message": "; ".join(v.message for v in verdicts if v.message) or ("" if same else "bits differ"),
                }
    finally:
        session.close()
    return results


def record(results: dict[str, Any], device: str) -> dict[str, Any]:
    """The record of a round: counts first, then every verdict, then the device sources that it speaks for."""
    states = [verdict["passed"] for case in results.values() for verdict in case.values()]
    counts = {"passed": states.count(True), "failed": states.count(False), "not_run": states.count(None)}
    provenance = {"device_id": device, "simulated": device.startswith("sim:"), "source_hash": source_hash()}
    return {"summary": {"cases": len(results), **counts}, "provenance": provenance, "verdicts": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--randoms", type=int, default=6)
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.cases.split(","):
        start = time.monotonic()
        results[name] = check_case(arguments.device, CASES[name], arguments.randoms)
        _print(name, results[name], time.monotonic() - start)
    if arguments.device.startswith("cuda"):
        results["both_shells"] = check_both_shells(arguments.device)
        _print("both_shells", results["both_shells"], 0.0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = record(results, arguments.device)
    (arguments.out / "verdicts.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    failed = [f"{c}/{n}" for c, r in results.items() for n, v in r.items() if v["passed"] is False]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all verdicts passed")
    sys.exit(1 if failed else 0)


def _print(case: str, verdicts: dict[str, Any], seconds: float) -> None:
    counts = {state: sum(v["passed"] is state for v in verdicts.values()) for state in (True, False, None)}
    print(f"{case:18} passed {counts[True]} failed {counts[False]} not run {counts[None]}  {seconds:.1f} s", flush=True)
    for name, verdict in verdicts.items():
        if verdict["passed"] is not True:
            print(f"    {name}: {verdict['stage']}: {verdict['message']}")


if __name__ == "__main__":
    main()

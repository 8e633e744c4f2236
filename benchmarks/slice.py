"""The headline round on one GPU: verdicts, studies, the winner loaded in a fresh process. Writes slice.json.

    python -m benchmarks.slice --out DIR [--device cuda:0] [--trials 400] [--random-trials 400]

`summary` is flat, name to number; spans are microseconds at M = 16 (2 x 8), KV = 8192, cold L2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from backends.base import SessionSpec
from backends.sessions import build_ahead, open_session
from benchmarks.load_check import digest
from benchmarks.verdicts import CASES, check_both_shells, check_case
from search_spaces.config import from_json, run_key
from tuner import confirm
from tuner.study import StudyResult, publish, run_study
from workloads.graph import Role

SEED = 1


def spec(device: str) -> SessionSpec:
    return SessionSpec("attention_pre", {}, device, seed=SEED)


def tuned_digest(device: str, study: StudyResult) -> str:
    """Hash of the outputs that the tuned config writes in a session."""
    session: Any = open_session(spec(device))
    try:
        run = session.prepare(study.config)
        assert session.verify(run).passed
        written = session.outputs(run)
        names = [t.name for t in session.graph.tensors.values() if t.role in (Role.OUTPUT, Role.STATE)]
        return digest({name: written[name] for name in names})
    finally:
        session.close()


def loaded_digest(device: str, results: Path) -> dict[str, str]:
    """The same, from a fresh process that loads the stored best."""
    command = [sys.executable, "-m", "benchmarks.load_check", "--results", str(results), "--seed", str(SEED)]
    text = subprocess.run([*command, "--device", device], capture_output=True, text=True, check=True).stdout
    answer: dict[str, str] = json.loads(text.strip().splitlines()[-1])
    return answer


def row(finalist: confirm.Finalist) -> dict[str, Any]:
    return {"role": finalist.role, "low": finalist.low, "high": finalist.high, **finalist.record.to_json()}


def summary(tpe: StudyResult, random: StudyResult) -> dict[str, float]:
    best, serial, default = tpe.best.record.span_us, tpe.span_us("serial"), tpe.span_us("default")
    assert best and serial and default
    # The random study tries the heuristic seeds too; its own best is that of the drawn configs, as a ratio of its run.
    seeds = set(random.seed_keys.values())
    drawn = [
        r.ratio for r in random.records if r.ratio and r.outcome.measured and run_key(from_json(r.config)) not in seeds
    ]
    random_best = min(drawn) * default
    return {
        "floor_us": tpe.floor_us,
        "serial_us": serial,
        "default_us": default,
        "cmp_us": best,
        "random_best_us": random_best,
        "cmp_over_serial": best / serial,
        "cmp_over_default": best / default,
        "cmp_over_floor": best / tpe.floor_us,
        "trials_per_s": tpe.scored_per_s,
        "study_trials": float(tpe.scored),
        "random_trials": float(random.scored),
        "winner_is_seed": float(tpe.winner_is_seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--random-trials", type=int, default=400)
    parser.add_argument("--randoms", type=int, default=4, help="random schedules per verdict case")
    arguments = parser.parse_args()
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)

    arguments.out.mkdir(parents=True, exist_ok=True)
    say(f"built {build_ahead(spec(arguments.device))} binaries")
    studies: dict[str, StudyResult] = {}
    with tempfile.TemporaryDirectory() as folder:
        for sampler, trials in (("tpe", arguments.trials), ("random", arguments.random_trials)):
            storage = f"journal:{folder}/{sampler}.journal"
            found = run_study(spec(arguments.device), trials=trials, storage=storage, sampler=sampler, seed=SEED)
            studies[sampler] = found
            rate = f"{found.scored} scored at {found.scored_per_s:.1f}/s"
            say(f"{sampler}: best {found.best.record.span_us:.2f} us, {rate}, counts {found.counts}")
        results = Path(folder) / "best"
        publish(studies["tpe"], results)
        loaded = loaded_digest(arguments.device, results) if arguments.device.startswith("cuda") else {}
    tuned = tuned_digest(arguments.device, studies["tpe"]) if loaded else ""
    say(f"loaded in a fresh process: {loaded.get('match')}, bits equal: {loaded.get('digest') == tuned}")
    verdicts: dict[str, Any] = {}
    for name, params in CASES.items():
        verdicts[name] = check_case(arguments.device, params, arguments.randoms)
        say(f"{name}: {sum(v['passed'] is True for v in verdicts[name].values())} verdicts passed")
    if arguments.device.startswith("cuda"):
        verdicts["both_shells"] = check_both_shells(arguments.device)
    failed = [f"{case}/{n}" for case, found in verdicts.items() for n, v in found.items() if v["passed"] is False]
    tpe = studies["tpe"]
    document = {
        "summary": summary(tpe, studies["random"]),
        "verdicts_failed": failed,
        "verdicts": verdicts,
        "load": {**loaded, "bits_equal": loaded.get("digest") == tuned},
        "confirmation": {name: [row(f) for f in study.table] for name, study in studies.items()},
        "counts": {name: {k.value: n for k, n in study.counts.items()} for name, study in studies.items()},
        "provenance": vars(tpe.provenance),
    }
    (arguments.out / "slice.json").write_text(json.dumps(document, indent=1, sort_keys=True, default=str) + "\n")
    for key, value in document["summary"].items():
        print(f"{key:20} {value:10.3f}")
    say(f"{len(failed)} verdicts failed {failed}")
    sys.exit(1 if failed or (loaded and loaded["digest"] != tuned) else 0)


if __name__ == "__main__":
    main()

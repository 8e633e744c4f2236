"""A study on the fake device in a process of its own: `python -m tests.tuner_tests.driver DEVICE TRIALS FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from backends.base import SessionSpec
from tests.tuner_tests.fakes import FACTORY
from tuner.executors.inline import InlineExecutor
from tuner.progress import Progress
from tuner.study import run_study


def main(device: str, trials: int, folder: Path) -> None:
    spec = SessionSpec("pdl_chain", {"layers": 4, "n": 1024}, device)
    executor = InlineExecutor(spec, factory=FACTORY)
    try:
        run_study(
            spec, trials=trials, storage=f"journal:{folder / 'study.journal'}", executor=executor, on_progress=_say
        )
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
    finally:
        executor.close()


def _say(progress: Progress) -> None:
    print(f"done {progress.done}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

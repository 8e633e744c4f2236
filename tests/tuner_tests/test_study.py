"""Whole studies on the fake device: scoring, duplicates, resuming, faults, Ctrl-C and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.base import SessionSpec
from backends.simulator.calibration import load
from results.record import Outcome
from search_spaces.cmp import CmpSpace
from search_spaces.config import CmpConfig, from_json
from tests.tuner_tests.fakes import FACTORY, guilty, span_of
from tuner.confirm import DEFAULT, SERIAL
from tuner.errors import SessionRefused, StudyFailed
from tuner.executors.inline import InlineExecutor
from tuner.options import graph_of
from tuner.screen import screen
from tuner.storage import TrialStore, parse_location
from tuner.study import StudyResult, run_study

ROOT = Path(__file__).resolve().parents[2]


def spec_of(device: str = "sim:fake") -> SessionSpec:
    return SessionSpec("pdl_chain", {"layers": 4, "n": 1024}, device)


@contextmanager
def executor_of(device: str, **options: float) -> Iterator[InlineExecutor]:
    executor = InlineExecutor(spec_of(device), factory=FACTORY, **options)
    try:
        yield executor
    finally:
        executor.close()


def study(
    folder: Path, device: str = "sim:fake", trials: int = 24, sampler: str = "tpe", **options: float
) -> StudyResult:
    with executor_of(device, **options) as executor:
        return run_study(
            spec_of(device),
            trials=trials,
            storage=f"journal:{folder / 'study.journal'}",
            sampler=sampler,
            executor=executor,
        )


def stored(folder: Path, name: str) -> list[Outcome]:
    store = TrialStore(parse_location(f"journal:{folder / 'study.journal'}"), name)
    return [record.outcome for _, record in store.load()]


def test_a_study_scores_confirms_and_beats_the_default(tmp_path: Path) -> None:
    result = study(tmp_path, trials=60)
    assert result.gain and result.scored == 60
    assert isinstance(result.config, CmpConfig)
    default_us = result.span_us(DEFAULT)
    serial_us = result.span_us(SERIAL)
    assert default_us is not None and serial_us is not None and default_us < serial_us
    assert result.best.record.span_us == pytest.approx(span_of(result.config), rel=0.01)
    assert result.best.high is not None and result.best.high < 1
    assert len(result.best.record.samples_us) >= 60
    assert result.floor_us == 20.0 and result.provenance.simulated
    assert result.study.startswith("pdl_chain/l4n1024/sim-fake/cmp/")


def test_records_carry_paired_readings_and_races_stop_early(tmp_path: Path) -> None:
    result = study(tmp_path, trials=40)
    for record in result.records:
        if record.outcome.measured:
            assert len(record.samples_us) == len(record.reference_us)
            assert len(record.samples_us) == (20 if record.outcome is Outcome.SCORED else 10)
            assert record.verdict
    assert result.counts[Outcome.DROPPED] > 0


def test_no_plan_is_measured_twice(tmp_path: Path) -> None:
    result = study(tmp_path, trials=60)
    measured = [r.plan_key for r in result.records if r.outcome.measured]
    assert len(measured) == len(set(measured))
    twins = [r for r in result.records if r.outcome is Outcome.DUPLICATE]
    assert twins and all(r.ratio is not None and not r.samples_us for r in twins)


def test_heuristic_seeds_come_first(tmp_path: Path) -> None:
    result = study(tmp_path, trials=2)
    first, second = (from_json(r.config) for r in result.records[:2])
    assert isinstance(first, CmpConfig) and isinstance(second, CmpConfig)
    assert not first.programmatic and second.programmatic


def test_the_same_command_resumes(tmp_path: Path) -> None:
    first = study(tmp_path, trials=15)
    again = study(tmp_path, trials=30)
    assert first.study == again.study
    assert again.resumed == 15 and again.scored == 30
    assert again.records[: len(first.records)] == first.records
    assert study(tmp_path, trials=30).resumed == 30


def test_a_resumed_study_does_not_repeat_its_draws(tmp_path: Path) -> None:
    study(tmp_path, trials=20, sampler="random")
    result = study(tmp_path, trials=40, sampler="random")
    assert result.counts.get(Outcome.DUPLICATE, 0) < 20


def test_without_a_gain_the_default_wins(tmp_path: Path) -> None:
    result = study(tmp_path, trials=2)
    assert not result.gain and result.best.role == DEFAULT


@pytest.mark.parametrize(
    ("device", "outcome", "text"),
    [
        ("sim:hang", Outcome.HANG, "no sign of life"),
        ("sim:measure-hang", Outcome.HANG, "no sign of life"),
        ("sim:crash", Outcome.CRASH, "SIGABRT"),
        ("sim:sticky", Outcome.CRASH, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("sim:refused-launch", Outcome.CRASH, "CUDA_ERROR_INVALID_VALUE"),
        ("sim:bug", Outcome.CRASH, "ZeroDivisionError: a bug of the backend"),
        ("sim:wrong", Outcome.WRONG, "reference check: y: 3 of 4096 differ"),
        ("sim:unsafe", Outcome.UNSAFE, "no path orders it"),
        ("sim:build", Outcome.BUILD_FAILED, "ptxas gave up"),
    ],
)
def test_faults_are_typed_and_the_study_goes_on(tmp_path: Path, device: str, outcome: Outcome, text: str) -> None:
    result = study(tmp_path, device, trials=20, step_timeout_s=0.7)
    blamed = [r for r in result.records if r.outcome is outcome]
    assert len(blamed) == 1 and guilty(from_json(blamed[0].config))
    assert text in blamed[0].message and "\n" not in blamed[0].message
    others = [r for r in result.records if r.outcome not in (outcome, Outcome.DUPLICATE)]
    assert len(others) == 19 and all(r.outcome.measured for r in others)
    assert stored(tmp_path, result.study) == [r.outcome for r in result.records]


def test_a_config_that_fails_once_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = study(tmp_path, "sim:crash-once", trials=20)
    assert (tmp_path / "fault-happened").exists()
    assert Outcome.CRASH not in result.counts and result.scored == 20


def test_void_measurements_are_lost_not_blamed(tmp_path: Path) -> None:
    result = study(tmp_path, "sim:void", trials=20)
    lost = [r for r in result.records if r.outcome is Outcome.LOST]
    assert lost and "another process" in lost[0].message
    assert all(r.outcome.measured for r in result.records if r.outcome not in (Outcome.LOST, Outcome.DUPLICATE))


def test_a_device_that_stays_disturbed_ends_the_study_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(StudyFailed, match="trials in a row were lost, the last one because 1 other process on the GPU"):
        study(tmp_path, "sim:shared", trials=20)


def test_a_device_that_cannot_be_opened_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(SessionRefused, match="no device sim:missing"):
        study(tmp_path, "sim:missing")
    with pytest.raises(StudyFailed, match="cannot be opened"):
        study(tmp_path, "sim:dead")
    assert not list(tmp_path.iterdir())


# --- Signals ---


def start_driver(folder: Path, trials: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.tuner_tests.driver", "sim:slow", str(trials), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], done: int) -> int:
    """Reads progress until `done` trials are finished."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("done ") and int(line.split()[1]) >= done:
            return int(line.split()[1])
    raise AssertionError(process.stderr.read() if process.stderr else "no progress")


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.05)


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=30)
    return out


def test_a_killed_driver_loses_no_finished_trial(tmp_path: Path) -> None:
    process = start_driver(tmp_path, 1000)
    done = wait_for(process, 16)
    children = children_of(process.pid)
    process.kill()
    finish(process)
    wait_until_dead(children)
    result = study(tmp_path, "sim:slow", trials=done + 8)
    assert children and done <= result.resumed <= done + 8
    assert result.scored >= done + 8


def test_ctrl_c_stores_what_is_finished(tmp_path: Path) -> None:
    process = start_driver(tmp_path, 1000)
    done = wait_for(process, 8)
    children = children_of(process.pid)
    os.kill(process.pid, signal.SIGINT)
    out = finish(process)
    assert process.returncode == 130 and "interrupted" in out
    wait_until_dead(children)
    assert study(tmp_path, "sim:slow", trials=done).resumed >= done


def test_a_resumed_study_learns_no_score_of_another_plan(tmp_path: Path) -> None:
    """Seeds that no point says exactly are stored without a point; every stored point decodes to its own plan."""
    spec = SessionSpec("attention_pre", {}, "sim:b300")  # more ops than stream labels, and not a chain
    result = run_study(spec, trials=12, storage=f"journal:{tmp_path}/s.journal")
    space = CmpSpace(graph_of(spec), load("b300").gpu)
    pairs = TrialStore(parse_location(result.storage, result.study), result.study).load()
    assert len(pairs) >= 12
    assert any(not point for point, _ in pairs)
    for point, record in pairs:
        if point and record.plan_key:
            assert screen(space, space.decode(point)).plan_key == record.plan_key

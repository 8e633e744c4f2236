"""The command line: bad input is one line and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.tuner_tests.fakes import FACTORY
from tuner import cli
from tuner.executors.inline import InlineExecutor

BAD = [
    ("tune nothing", "unknown workload 'nothing'"),
    ("tune attention_pre --ops A0,Z9", "unknown op 'Z9'"),
    ("tune attention_pre --ops B0", "the selection must contain A0 too"),
    ("tune attention_pre --kv 0", "kv=0 is out of range"),
    ("tune attention_pre --kv 131073", "kv=131073 is out of range"),
    ("tune attention_pre --tokens 9", "tokens=9 is out of range"),
    ("tune attention_pre --requests 0", "requests=0 is out of range"),
    ("tune attention_pre --tp 3", "tp=3 is out of range"),
    ("tune attention_pre --model glm9", "unknown model 'glm9'"),
    ("tune attention_pre --layers 3", "unknown parameter 'layers'"),
    ("tune pdl_chain --n 1000", "n=1000 is out of range"),
    ("tune attention_pre --device gpu0", "unknown device 'gpu0'"),
    ("tune attention_pre --device cuda:99", "device"),
    ("tune attention_pre --device sim:nothing", "nothing"),
    ("tune attention_pre --storage mysql://x/y", "unknown storage 'mysql://x/y'"),
    ("tune attention_pre --storage journal:", "unknown storage 'journal:'"),
    ("tune attention_pre --sampler grid", "unknown sampler 'grid'"),
    ("tune attention_pre --backend opencl", "unknown backend 'opencl'"),
    ("tune attention_pre --trials 0", "trials=0 is out of range"),
    ("tune attention_pre --trials many", "invalid int value: 'many'"),
    ("tune attention_pre --seed -5", "seed=-5 is out of range"),
    ("tune attention_pre --seed 99999999999999999999", "use 0 to 2147483647"),
    ("tune attention_pre --timeout -1", "timeout=-1 is out of range"),
    ("tune attention_pre --timeout nan", "timeout=nan is out of range"),
    ("tune attention_pre --speed 9", "unrecognized arguments: --speed 9"),
    ("space attention_pre --device sim:nothing", "nothing"),
    ("show attention_pre --tokens 0", "tokens=0 is out of range"),
    ("dance", "invalid choice: 'dance'"),
    ("", "COMMAND"),
]


@pytest.mark.parametrize(("command", "text"), BAD)
def test_bad_input_is_one_line(
    command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in command or not command.startswith(("tune", "show")) else ["--device", "sim:b300"]
    assert cli.main([*command.split(), *device]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("spantune: ") and text in lines[0]
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


def test_show_prints_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "attention_pre", "--device", "sim:b300"]) == 0
    out = capsys.readouterr().out
    assert "B0: gemm_fp8_partial(" in out and "11 ops" in out


def test_help_needs_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spantune", "tune", "--help"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--storage" in done.stdout and done.stderr == ""


@pytest.fixture
def fake_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake session behind every device, an empty working directory, winners published to nowhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.study.InlineExecutor", partial(InlineExecutor, factory=FACTORY))
    monkeypatch.setattr(cli, "publish", lambda result, directory: directory / "published.json")
    return tmp_path


@pytest.mark.parametrize(("trials", "code", "text"), [(40, 0, "us, predicted: "), (2, 3, "no significant gain")])
def test_tune_reports_what_won(
    fake_device: Path, trials: int, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "pdl_chain", "--layers", "4", "--n", "1024", "--device", "sim:fake", "--trials", str(trials)]
    assert cli.main([*command, "--results", "out"]) == code
    captured = capsys.readouterr()
    assert text in captured.out and "published   out/published.json" in captured.out
    assert "default" in captured.out and "serial" in captured.out and "floor       20.000" in captured.out
    assert len(captured.err.splitlines()) <= 4
    assert [path.suffix for path in (fake_device / ".spantune" / "studies").glob("*.journal")] == [".journal"]
    assert cli.main(command) == code
    assert f"({trials} resumed)" in capsys.readouterr().out


def test_a_broken_storage_is_bad_input(fake_device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "pdl_chain", "--layers", "4", "--device", "sim:fake", "--storage", "sqlite:////nowhere/x.db"]
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and "cannot be opened" in captured.err
    assert not list(fake_device.iterdir())


def test_a_failing_device_is_exit_code_one(fake_device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "pdl_chain", "--layers", "4", "--device", "sim:dead"]) == 1
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and "cannot be opened" in captured.err


def test_ctrl_c_is_exit_code_130(
    fake_device: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_study", interrupted)
    assert cli.main(["tune", "pdl_chain", "--device", "sim:fake"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_best_prints_what_tune_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.study.InlineExecutor", partial(InlineExecutor, factory=FACTORY))
    workload = ["pdl_chain", "--layers", "4", "--n", "1024", "--device", "sim:fake", "--results", "out"]
    assert cli.main(["tune", *workload, "--trials", "40"]) == 0
    assert "published   out/sim-fake/pdl_chain.json" in capsys.readouterr().out
    assert cli.main(["best", *workload]) == 0
    out = capsys.readouterr().out
    assert "cmp, L2 cold: " in out and "predicted" in out and "programmatic: " in out and "(option)" in out
    assert cli.main(["compare", "pdl_chain", *workload[5:]]) == 0
    assert "pdl_chain l4n1024 on sim-fake" in capsys.readouterr().out
    assert cli.main(["compare", *workload, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["simulated"]
    assert cli.main(["best", *workload, "--layers", "5"]) == 2
    assert "run spantune tune first" in capsys.readouterr().err
    # A worse study leaves the better entry where it is, and says so.
    command = ["tune", *workload, "--trials", "2", "--storage", "journal:other"]
    assert cli.main(command) == 3
    assert "kept        out/sim-fake/pdl_chain.json" in capsys.readouterr().out


def test_a_results_folder_that_is_none_is_refused_before_the_study(
    fake_device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake_device / "file").touch()
    assert cli.main(["tune", "pdl_chain", "--device", "sim:fake", "--results", "file"]) == 2
    assert "not a folder" in capsys.readouterr().err
    assert not (fake_device / ".spantune").exists()


@pytest.mark.parametrize(("text", "reason"), [("{bad", "corrupted"), ('{"schema": 99}', "newer spantune")])
def test_a_best_file_that_cannot_be_extended_is_refused_before_the_study(
    text: str, reason: str, fake_device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = fake_device / "out" / "sim-fake" / "pdl_chain.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(text)
    assert cli.main(["tune", "pdl_chain", "--device", "sim:fake", "--results", "out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and reason in captured.err
    assert stored.read_text() == text and not (fake_device / ".spantune").exists()


def test_a_missing_best_config_says_so_without_any_results_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("results.paths.search_path", lambda *_: ())
    assert cli.main(["best", "pdl_chain", "--device", "sim:b300"]) == 2
    assert "in any folder: run spantune tune first" in capsys.readouterr().err

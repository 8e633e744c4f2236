"""The command line: bad input is one line and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuner import cli

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

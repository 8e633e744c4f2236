"""The whole product on a simulated device: tune, publish, read back, resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from results import best
from search_spaces.config import CmpConfig, from_json
from tuner import cli


def test_tune_on_a_simulated_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    workload = ["attention_pre", "--device", "sim:b300", "--results", "out"]
    code = cli.main(["tune", *workload, "--trials", "40", "--seed", "1"])
    captured = capsys.readouterr()
    assert code in (0, 3), captured.err
    assert "us, predicted" in captured.out and "published   out/sim-b300/attention_pre.json" in captured.out
    (entry,) = best.load(Path("out/sim-b300/attention_pre.json"))
    assert entry.simulated and isinstance(from_json(entry.config), CmpConfig)
    assert entry.floor_us < entry.span_us <= entry.default_us
    assert entry.serial_us is not None and entry.span_us < entry.serial_us
    assert cli.main(["tune", *workload, "--trials", "44", "--seed", "1"]) in (0, 3)
    assert "(40 resumed)" in capsys.readouterr().out
    assert cli.main(["best", *workload]) == 0
    assert entry.study in capsys.readouterr().out


def test_space_shows_dimensions_and_residency(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["space", "attention_pre", "--device", "sim:b300"]) == 0
    out = capsys.readouterr().out
    assert "B0.split_k" in out and "A0 > B0: fits" in out and "seeds: serial; default;" in out

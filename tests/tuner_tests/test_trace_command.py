"""`spantune trace` on the simulated device: the table, the file, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.cli import main

TRACE = ["trace", "attention_pre", "--device", "sim:h200"]


def test_the_table_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRACE) == 0
    text = capsys.readouterr().out
    assert all(f"  {op} " in text for op in ("A0", "B0f", "D0", "E1"))
    assert "of 132 multiprocessors hold a CTA" in text
    assert "predicted by a model" in text


def test_the_file_loads_as_trace_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert main([*TRACE, "--replays", "3", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["replays"] == 3
    assert {w["kernel"] for w in document["windows"]} >= {"A0", "E1"}
    assert all(w["entry_us"] <= w["ready_us"] <= w["done_us"] for w in document["windows"])
    events = json.loads(out.read_text())["traceEvents"]
    ctas = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and not e["name"].endswith("waiting")]
    assert len(ctas) == sum(w["ctas"] for w in document["windows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replays", "0"], "replays=0 is out of range: use 1 to 1000"),
        (["--out", "/no/such/place/t.json"], "is no folder"),
        (["--config", "/no/such/config.json"], "cannot be read"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRACE, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

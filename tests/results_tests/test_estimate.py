"""The estimate of a decode step: the published table, what fusion saves, simulated GPUs, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.simulator import calibration
from results.estimate import Estimate, estimate, machine, render, steps
from tuner import cli

# As published for an H100 at 85 % of 3.35 TB/s and 5 us per CPU launch.
PUBLISHED = {
    "Qwen3-0.6B batch 1 context 1024": ("283 461 us 1415 us 602 us (24%) 744 us (38%) 1027 us (55%) 1310 us (65%)"),
    "Qwen3-8B batch 1 context 1024": ("363 5371 us 5552 us 5552 us (3%) 5734 us (6%) 6097 us (12%) 6460 us (17%)"),
    "Qwen3-0.6B batch 64 context 4096": (
        "283 11023 us 11164 us 11164 us (1%) 11306 us (3%) 11589 us (5%) 11872 us (7%)"
    ),
}
BAD = [
    ("--model Qwen9", "unknown model 'Qwen9': use one of Qwen3-0.6B, Qwen3-8B"),
    ("--model Qwen3-8B --layers 0", "layers=0 is out of range"),
    ("--batch -1", "batch=-1 is out of range"),
    ("--context 0", "context=0 is out of range"),
    ("--bytes 0", "element_bytes=0 is out of range"),
    ("--kernels-per-layer 11", "kernels_per_layer=11 is out of range: use 1 to 10"),
    ("--model Qwen3-8B --kv-heads 5", "heads=32 is no multiple of kv_heads=5"),
    ("--hidden 64 --layers 2", "missing dimensions intermediate, heads, kv_heads, head_dim, vocab"),
    ("--batch many", "invalid int value: 'many'"),
    ("--device sim:nothing", "unknown device 'sim:nothing': use one of sim:"),
    ("--device cuda:0", "no constants of device 'cuda:0'"),
]


def table(**settings: int) -> Estimate:
    return estimate(steps(None, {}, settings))


def test_the_published_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if "MB" in line]
    assert len(rows) == len(PUBLISHED)
    for row, (title, numbers) in zip(rows, PUBLISHED.items(), strict=True):
        assert row.startswith(title)
        words = row.removeprefix(title).split()
        assert " ".join([words[0], *words[3:]]) == numbers  # the bytes moved stand between
    assert any("142 of 283 kernels move data for less than 1 us, 1.63 us each on average" in line for line in lines)


def test_fusion_saves_gaps_and_keeps_the_data_time() -> None:
    before, after = table().steps[0], table(kernels_per_layer=6).steps[0]
    assert (before.num_kernels, after.num_kernels) == (283, 171)
    assert after.data_us == before.data_us and after.moved_bytes == before.moved_bytes
    assert after.graph[2].gap.gap_us == 2.0
    assert (round(before.graph[2].step_us), round(after.graph[2].step_us)) == (1027, 803)
    assert "803 us (43%)" in render(table(kernels_per_layer=6))


def test_shares_and_sums_agree() -> None:
    for row in table().steps:
        assert row.moved_bytes == sum(k.moved_bytes for k in row.layer * row.step.model.layers + row.tail)
        for time in row.graph:
            assert time.step_us * (1 - time.gap_share) == pytest.approx(row.data_us)
            assert time.step_us - row.data_us == pytest.approx(row.num_kernels * time.gap.gap_us)


@pytest.mark.parametrize("name", calibration.names())
def test_a_simulated_gpu_brings_bandwidth_and_hand_offs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    constants = calibration.load(name)
    result = estimate(steps("Qwen3-0.6B", {}, {}), machine(f"sim:{name}"))
    (row,) = result.steps
    ordinary, programmatic = row.graph[-2:]
    assert (ordinary.gap.gap_us, programmatic.gap.gap_us) == (constants.ordinary_us, constants.early_us)
    assert row.data_us * result.machine.bytes_per_us == pytest.approx(row.moved_bytes)
    assert row.data_us != table().steps[0].data_us
    assert len(row.graph) == len(table().steps[0].graph) + 2
    assert cli.main(["estimate", "--model", "Qwen3-0.6B", "--device", f"sim:{name}"]) == 0
    out = capsys.readouterr().out
    assert f"ordinary {constants.ordinary_us:g} us" in out and f"programmatic {constants.early_us:g} us" in out


def test_any_dimensions() -> None:
    given = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 1000}
    (row,) = estimate(steps(None, given, {"batch": 3})).steps
    assert row.num_kernels == 23 and row.step.batch == 3 and row.step.context == 1024
    (changed,) = steps("Qwen3-8B", {"layers": 1}, {})
    assert changed.model.name == "Qwen3-8B changed" and changed.model.hidden == 4096 and changed.model.layers == 1


def test_a_batch_goes_to_every_model() -> None:
    assert [(s.model.name, s.batch) for s in steps(None, {}, {"batch": 4})] == [("Qwen3-0.6B", 4), ("Qwen3-8B", 4)]


def test_json_has_the_numbers_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "--json", "--bytes", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(json.dumps(table(element_bytes=1).to_json()))
    assert document["steps"][0]["step"]["element_bytes"] == 1
    assert document["steps"][0]["graph"][0]["gap"] == {"name": "assumed", "gap_us": 0.5}


@pytest.mark.parametrize(("options", "text"), BAD)
def test_bad_input_is_one_line(
    options: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["estimate", *options.split()]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("spantune: ") and text in lines[0]
    assert captured.out == "" and not list(tmp_path.iterdir())

"""Publishing and reading best files: round trips, merging, refusals, what stays when a writer dies."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import best
from results.best import BestEntry, BestKeptWarning, GpuIdentity
from results.errors import BestFileError
from tests.results_tests.entries import entry, provenance, simulated

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
TIMES = st.floats(1e-3, 1e6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CONFIGS = st.dictionaries(NAMES, JSON, max_size=3)


@st.composite
def entries(draw: st.DrawFn) -> BestEntry:
    """Any entry of one workload and device; few shapes, so that identities repeat."""
    low, high = sorted((draw(TIMES), draw(TIMES)))
    backend = draw(st.sampled_from(("cmp", "megakernel")))
    return BestEntry(
        workload="attention_pre",
        shape_params=draw(st.dictionaries(NAMES, st.integers() | NAMES, max_size=3)),
        shape_key=draw(st.sampled_from(("r1", "r2"))),
        graph_digest=draw(st.sampled_from(("aa", "bb"))),
        backend=backend,
        device="Test GPU",
        gpu=GpuIdentity(draw(NAMES), draw(st.integers(0, 200)), "sm_90a"),
        config={**draw(CONFIGS), "backend": backend},
        span_us=draw(TIMES),
        interval_us=(low, high),
        serial_us=draw(st.none() | TIMES),
        default_us=draw(TIMES),
        floor_us=draw(TIMES),
        numerics_key=draw(NAMES),
        provenance=provenance(protocol={"l2": draw(st.sampled_from(("cold", "warm"))), "more": draw(JSON)}),
        study=draw(NAMES),
        trials=draw(st.dictionaries(NAMES, st.integers(0, 10**6), max_size=3)),
    )


@given(published=st.lists(entries(), min_size=1, max_size=6))
def test_what_is_published_is_read_back(tmp_path_factory: pytest.TempPathFactory, published: list[BestEntry]) -> None:
    folder = tmp_path_factory.mktemp("best")
    expected: dict[best.Identity, BestEntry] = {}
    for new in published:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BestKeptWarning)
            path = best.publish(folder, new)
        old = expected.get(new.identity)
        expected[new.identity] = old if old is not None and best.keeps(old, new) else new
    assert path == folder / "test-gpu" / "attention_pre.json"
    stored = best.load(path)
    assert {e.identity: e for e in stored} == expected
    assert [e.identity for e in stored] == sorted(expected)
    assert os.listdir(path.parent) == ["attention_pre.json"], "no lock and no temporary file stays"


@given(published=st.lists(entries(), min_size=1, max_size=5, unique_by=lambda e: e.identity), data=st.data())
def test_the_file_does_not_depend_on_the_order_of_writers(
    tmp_path_factory: pytest.TempPathFactory, published: list[BestEntry], data: st.DataObject
) -> None:
    texts = []
    for order in (published, data.draw(st.permutations(published))):
        folder = tmp_path_factory.mktemp("best")
        texts.append([best.publish(folder, new) for new in order][-1].read_text())
    assert texts[0] == texts[1]


def test_a_diff_shows_only_what_changed(tmp_path: Path) -> None:
    path = best.publish(tmp_path, entry(span_us=40.0))
    best.publish(tmp_path, entry(span_us=41.0, kv=4096))
    before = path.read_text().splitlines()
    best.publish(tmp_path, entry(span_us=39.0))
    changed = [new for old, new in zip(before, path.read_text().splitlines(), strict=True) if old != new]
    assert [line.strip() for line in changed] == ["38.61,", "39.39", '"span_us": 39.0,']


def test_a_slower_winner_of_the_same_conditions_does_not_replace(tmp_path: Path) -> None:
    fast, slow = entry(span_us=40.0), entry(span_us=45.0)
    path = best.publish(tmp_path, fast)
    with pytest.warns(BestKeptWarning, match="kept the config of .* 40.000 us, over 45.000 us"):
        best.publish(tmp_path, slow)
    assert best.load(path) == [fast]


@pytest.mark.parametrize(
    "change",
    [{"source_hash": "f" * 16}, {"versions": {"driver_cuda": "13.1"}}, {"uuid": "another"}],
    ids=lambda change: next(iter(change)),
)
def test_a_slower_winner_of_other_conditions_replaces(tmp_path: Path, change: dict[str, Any]) -> None:
    slow = replace(entry(span_us=45.0), provenance=provenance(**change))
    best.publish(tmp_path, entry(span_us=40.0))
    assert best.load(best.publish(tmp_path, slow)) == [slow]


def test_a_slower_winner_within_the_noise_replaces(tmp_path: Path) -> None:
    best.publish(tmp_path, entry(span_us=40.0))
    assert best.load(best.publish(tmp_path, entry(span_us=40.5)))[0].span_us == 40.5


def test_cold_and_warm_stand_side_by_side(tmp_path: Path) -> None:
    best.publish(tmp_path, entry())
    warm = replace(entry(span_us=30.0), provenance=provenance(protocol={"l2": "warm"}))
    assert [e.l2 for e in best.load(best.publish(tmp_path, warm))] == ["cold", "warm"]


# --- Predictions and measurements ---


def test_predictions_have_folders_of_their_own(tmp_path: Path) -> None:
    path = best.publish(tmp_path, simulated(entry()))
    assert path == tmp_path / "sim-test" / "attention_pre.json" and best.load(path)[0].simulated


@pytest.mark.parametrize(
    "mixed",
    [replace(entry(), device="sim:b300"), replace(simulated(entry()), device="NVIDIA H200")],
    ids=["measured into simulated", "simulated into measured"],
)
def test_predictions_and_measurements_never_mix(tmp_path: Path, mixed: BestEntry) -> None:
    with pytest.raises(BestFileError, match="not written, device .* but the numbers are"):
        best.publish(tmp_path, mixed)
    assert list(tmp_path.iterdir()) == []


def test_a_file_copied_to_another_device_is_refused(tmp_path: Path) -> None:
    source = best.publish(tmp_path, entry())
    target = tmp_path / "nvidia-h200" / source.name
    target.parent.mkdir()
    target.write_bytes(source.read_bytes())
    with pytest.raises(BestFileError, match="belongs into test-gpu/attention_pre.json"):
        best.load(target)


# --- Files that must not be read or overwritten ---


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def edited(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return edited


REFUSED = {
    "empty": (lambda text: "", "corrupted"),
    "cut": (lambda text: text[: len(text) // 2], "corrupted"),
    "merge conflict": (lambda text: "<<<<<<< HEAD\n" + text, "corrupted, not a JSON document"),
    "not a number": (lambda text: text.replace("40.0", "NaN"), "NaN is not a number"),
    "deep": (lambda text: "[" * 100_000, "corrupted"),
    "a list": (lambda text: "[]", "the document is not an object"),
    "no schema": (_edit(lambda d: d.pop("schema")), "schema is missing"),
    "a flag as schema": (_edit(lambda d: d.update(schema=True)), "schema is missing or not a positive number"),
    "newer": (
        _edit(lambda d: d.update(schema=3, entries={"another": "form"})),
        r"written by a newer spantune \(schema 3, this one reads up to 1\): upgrade",
    ),
    "no entries": (_edit(lambda d: d.pop("entries")), "entries is missing"),
    "an entry of another kind": (_edit(lambda d: d.update(entries=[7])), "entry 0: an object is needed, not 7"),
    "a missing field": (_edit(lambda d: d["entries"][0].pop("floor_us")), "entry 0: floor_us is missing"),
    "an unknown field": (_edit(lambda d: d["entries"][0].update(extra=1)), "entry 0: extra is not a known field"),
    "a missing GPU field": (_edit(lambda d: d["entries"][0]["gpu"].pop("arch")), "entry 0: gpu: arch is missing"),
    "a text as time": (
        _edit(lambda d: d["entries"][0].update(span_us="fast")),
        "entry 0: span_us: a time in microseconds is needed, not 'fast'",
    ),
    "a huge time": (_edit(lambda d: d["entries"][0].update(span_us=10**400)), "a time in microseconds is needed"),
    "a reversed interval": (_edit(lambda d: d["entries"][0].update(interval_us=[2, 1])), "low 2 is above high 1"),
    "a config of another backend": (
        _edit(lambda d: d["entries"][0].update(backend="megakernel")),
        "backend is megakernel, but the config's is 'cmp'",
    ),
    "a repeated entry": (_edit(lambda d: d["entries"].append(d["entries"][0])), "entry 1: repeats r2t8kv8192tp1-glm5"),
    "a path as workload": (_edit(lambda d: d["entries"][0].update(workload="../x")), "cannot be a file name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_best_file_is_refused_and_kept(tmp_path: Path, case: str) -> None:
    spoil, message = REFUSED[case]
    path = best.publish(tmp_path, entry(span_us=40.0))
    path.write_text(spoil(path.read_text()))
    spoilt = path.read_text()
    for attempt in (lambda: best.load(path), lambda: best.publish(tmp_path, entry(span_us=30.0))):
        with pytest.raises(BestFileError, match=message) as raised:
            attempt()
        assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)
    assert path.read_text() == spoilt and os.listdir(path.parent) == [path.name]


@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_still_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any run of bytes replaced by any others: a list of entries or a BestFileError, never anything else."""
    path = best.publish(tmp_path_factory.mktemp("best"), entry("pdl_chain", layers=1, n=1024))
    content = path.read_bytes()
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, min(len(content), begin + 20)))
    path.write_bytes(content[:begin] + data.draw(st.binary(max_size=8)) + content[end:])
    try:
        best.load(path)
    except BestFileError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BestFileError, match="no such file"):
        best.load(tmp_path / "none.json")
    with pytest.raises(BestFileError, match="cannot be read: Is a directory"):
        best.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span_us": float("nan")}, "not written"),
        ({"config": {"backend": "cmp", "what": object()}}, "not written"),
        ({"workload": "../outside"}, "cannot be a file name"),
        ({"trials": 7}, "trials: an object is needed"),
        ({"device": "!!!"}, "cannot be a file name"),
    ],
)
def test_a_malformed_entry_is_not_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BestFileError, match=message):
        best.publish(tmp_path / "best", replace(entry(), **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "best").touch()
    with pytest.raises(BestFileError, match="not written, Not a directory"):
        best.publish(tmp_path / "best", entry())


# --- Writers that die, writers that meet ---


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"]
)
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    path = best.publish(tmp_path, entry(span_us=40.0))
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(BestFileError if isinstance(failure, OSError) else KeyboardInterrupt):
        best.publish(tmp_path, entry(span_us=30.0))
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def _die_at(step: str, folder: Path) -> None:
    setattr(os, step, lambda *arguments: os._exit(9))
    best.publish(folder, entry(span_us=30.0))


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_killed_writer_leaves_the_old_file_and_blocks_nobody(tmp_path: Path, step: str) -> None:
    path = best.publish(tmp_path, entry(span_us=40.0))
    before = path.read_bytes()
    writer = get_context("spawn").Process(target=_die_at, args=(step, tmp_path))
    writer.start()
    writer.join(60)
    assert writer.exitcode == 9 and path.read_bytes() == before
    assert best.load(best.publish(tmp_path, entry(span_us=35.0)))[0].span_us == 35.0
    assert os.listdir(path.parent) == [path.name], "what the killed writer left is swept"


def _publish_shapes(folder: Path, first: int, number: int) -> None:
    for place in range(number):
        best.publish(folder, replace(entry("pdl_chain", layers=1, n=1024), shape_key=f"writer{first}-{place}"))


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = get_context("spawn")
    writers = [context.Process(target=_publish_shapes, args=(tmp_path, first, 20)) for first in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(90)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    path = best.best_path(tmp_path, "Test GPU", "pdl_chain")
    assert len(best.load(path)) == 60 and os.listdir(path.parent) == [path.name]

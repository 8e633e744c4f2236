"""The comparison: ratios and intervals, what stands side by side, and what the text must say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from results.best import BestEntry
from results.compare import compare, render
from tests.results_tests.entries import entry, provenance, simulated


def megakernel(span_us: float, **changes: Any) -> BestEntry:
    """A stand-in of the other backend: only its numbers matter here."""
    return replace(entry(span_us=span_us), backend="megakernel", **changes)


def test_ratios_are_within_one_study() -> None:
    ((way,),) = (group.ways for group in compare([entry(span_us=40.0)]).groups)
    assert (way.over_serial, way.over_default, way.over_floor) == (40 / 60, 40 / 50, 40 / 20)
    assert way.over_default_interval == pytest.approx((39.6 / 50, 40.4 / 50))
    assert way.gain and way.num_trials == 200


def test_a_gain_needs_the_whole_interval() -> None:
    assert not compare([entry(span_us=49.8)]).groups[0].ways[0].gain
    assert "no gain over the default beyond the interval" in render(compare([entry(span_us=49.8)]))


def test_a_serial_config_that_was_not_measured() -> None:
    table = compare([replace(entry(), serial_us=None)])
    assert table.groups[0].ways[0].over_serial is None and "unknown" in render(table)


def test_backends_stand_side_by_side_the_fastest_first() -> None:
    (group,) = compare([entry(span_us=44.0), megakernel(41.0)]).groups
    assert [way.backend for way in group.ways] == ["megakernel", "cmp"] and group.decided and group.same_bits
    text = render(compare([entry(span_us=44.0), megakernel(41.0)]))
    assert "megakernel is faster than cmp" in text
    assert text.count("numerics sm_90a") == 1


def test_overlapping_intervals_are_no_victory() -> None:
    (group,) = compare([entry(span_us=44.0), megakernel(43.8)]).groups
    assert not group.decided
    assert "megakernel and cmp: intervals overlap" in render(compare([entry(span_us=44.0), megakernel(43.8)]))


def test_other_bits_and_other_sources_are_said() -> None:
    other = megakernel(41.0, numerics_key="sm_90a|B0:other", provenance=provenance(source_hash="f" * 16))
    text = render(compare([entry(span_us=44.0), other]))
    assert "numerics of megakernel sm_90a|B0:other" in text and "numerics of cmp sm_90a" in text
    assert "the studies measured different device sources" in text


def test_what_is_not_comparable_is_apart() -> None:
    warm = replace(entry(), provenance=provenance(protocol={"l2": "warm"}))
    table = compare([entry(), warm, entry(kv=4096), simulated(entry()), entry("pdl_chain", layers=2)])
    assert len(table.groups) == 5
    assert [g.l2 for g in table.groups].count("warm") == 1
    keys = [(g.workload, g.shape_key, g.device) for g in table.groups]
    assert keys == sorted(keys)


def test_of_two_entries_the_first_of_the_search_path_stands() -> None:
    assert compare([entry(span_us=45.0), entry(span_us=40.0)]).groups[0].ways[0].span_us == 45.0


def test_the_text_marks_predictions_and_aligns_columns() -> None:
    text = render(compare([simulated(entry(span_us=44.0)), simulated(megakernel(41.0))]))
    title, headings, *rows = text.splitlines()
    assert "simulated: spans are predicted" in title and "on sim-test, Test GPU (sm_90a, 132" in title
    assert {len(headings), len(rows[0]), len(rows[1])} == {len(headings)}
    assert "simulated" not in render(compare([entry()]))
    assert render(compare([])) == "nothing is published yet"


def test_the_json_has_every_number() -> None:
    document = json.loads(json.dumps(compare([entry(), simulated(entry())]).to_json()))
    assert document["schema"] == 1 and [g["simulated"] for g in document["groups"]] == [True, False]
    assert document["groups"][1]["ways"][0]["interval_us"] == [39.6, 40.4]
    assert document["groups"][1]["gpu"] == {"name": "Test GPU", "sm_count": 132, "arch": "sm_90a"}

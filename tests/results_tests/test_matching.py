"""Which config is found: exact, nearest or default, with the reason, the entry and the warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.plan.launches import lower
from results import best, matching
from results.best import BestEntry
from results.errors import BestFileError, NoConfigError, ResultsPathError
from results.matching import How, Match, MatchWarning, Target
from search_spaces.cmp import CmpSpace, default, serial
from search_spaces.config import CmpConfig, Config, MegakernelConfig, from_json, numerics_key
from tests.results_tests.entries import DRIVER, GPU, SOURCES, entry, provenance, simulated
from workloads import registry
from workloads.errors import WorkloadError
from workloads.graph import OpGraph
from workloads.ops.base import Tiling

SHAPE = {"requests": 2, "tokens": 8, "kv": 8192}
SHAPES = st.fixed_dictionaries(
    {"requests": st.integers(1, 16), "tokens": st.sampled_from((1, 4, 8)), "kv": st.sampled_from((64, 4096, 8192))}
)
Find = Callable[..., Match]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """`find` in a folder of its own, with this module's sources, and warnings as the test wants them."""
    monkeypatch.setattr("results.paths.SHIPPED", tmp_path / "none")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").mkdir()

    def found(*entries: BestEntry, workload: str = "attention_pre", device: Any = GPU, **arguments: Any) -> Match:
        for item in entries:
            best.publish(tmp_path / "best", item)
        shape = arguments.pop("shape", SHAPE)
        return matching.find(
            workload, shape, device=device, **{"results": tmp_path / "best", "source_hash": SOURCES, **arguments}
        )

    return found


def quiet(call: Callable[[], Match]) -> tuple[Match, list[str]]:
    """A match and the warnings that it came with."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        match = call()
    assert all(item.category is MatchWarning for item in caught)
    return match, [str(item.message) for item in caught]


def graph_of(workload: str, **params: int | str) -> OpGraph:
    known = registry.get(workload)
    return known.graph(known.shape(params))


def serial_config(**params: int | str) -> Config:
    return serial(CmpSpace(graph_of("attention_pre", **params), GPU))


def with_entry(match: Match) -> BestEntry:
    assert match.entry is not None and match.path is not None and match.place is not None
    return match.entry


# --- Exact ---


def test_exact_comes_without_a_warning(find: Find, tmp_path: Path) -> None:
    config = serial_config(**SHAPE)
    match = find(entry(config=config, **SHAPE), entry(kv=4096))
    assert (match.how, match.reason.code) == (How.EXACT, "same")
    assert match.config == config and with_entry(match).shape_key == "r2t8kv8192tp1-glm5"
    assert match.path == tmp_path / "best" / "test-gpu" / "attention_pre.json"
    assert match.place is not None and match.place.origin == "option"
    assert match.numerics_key == numerics_key(graph_of("attention_pre", **SHAPE), config, GPU.arch)


def test_shape_parameters_left_out_take_their_default(find: Find) -> None:
    assert find(entry(), shape={"requests": 2}).how is How.EXACT


def test_a_device_name_is_enough_for_an_exact_match(find: Find) -> None:
    assert find(entry(), device="Test GPU").how is How.EXACT
    assert find(entry(), device="test-gpu").how is How.EXACT
    assert find(simulated(entry()), device="sim:test").how is How.EXACT


def test_predictions_do_not_depend_on_sources_and_never_serve_a_gpu(find: Find) -> None:
    assert find(simulated(entry()), device="sim:test", source_hash="f" * 16).how is How.EXACT
    assert quiet(lambda: find(simulated(entry())))[0].reason.code == "no_entry"


def test_the_fastest_backend_is_taken_unless_one_is_named(find: Find) -> None:
    graph = graph_of("pdl_chain", layers=2)
    tilings = {name: tiling.tiling for name, tiling in default(CmpSpace(graph, GPU)).ops.items()}
    mega = MegakernelConfig(tilings, tuple(graph.ops))
    entries = (entry("pdl_chain", layers=2, span_us=40.0), entry("pdl_chain", mega, span_us=30.0, layers=2))
    shape = {"layers": 2}
    assert find(*entries, workload="pdl_chain", shape=shape).config == mega
    assert with_entry(find(workload="pdl_chain", shape=shape, backend="cmp")).span_us == 40.0


def test_warm_entries_are_not_for_inference(find: Find) -> None:
    warm = replace(entry(), provenance=provenance(protocol={"l2": "warm"}))
    assert quiet(lambda: find(warm))[0].reason.code == "no_entry"


def test_another_driver_is_flagged(find: Find) -> None:
    assert find(entry(), device=Target(GPU.name, GPU, DRIVER)).reason.code == "same"
    match, texts = quiet(lambda: find(device=Target(GPU.name, GPU, "13.9")))
    assert (match.how, match.reason.code) == (How.EXACT, "other_driver")
    assert texts == [f"attention_pre r2t8kv8192tp1-glm5 on Test GPU: {match.reason.text}"]
    assert "measured under driver 13.0, this is 13.9" in texts[0]


def test_the_warning_is_shown_once(find: Find) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            find()
    assert len(caught) == 1


def test_exact_in_a_later_folder_beats_nearest_in_an_earlier_one(find: Find, tmp_path: Path) -> None:
    best.publish(tmp_path / "results" / "best", entry())
    match = find(entry(kv=4096))
    assert match.how is How.EXACT and match.place is not None and match.place.origin == "checkout"


# --- Stale sources ---


def test_other_sources_are_no_exact_match(find: Find) -> None:
    match, texts = quiet(lambda: find(entry(), source_hash="f" * 16))
    assert (match.how, match.reason.code) == (How.NEAREST, "stale_sources")
    assert "measured on other device sources: tune again" in texts[0]


def test_the_same_sources_beat_faster_stale_ones(find: Find, tmp_path: Path) -> None:
    stale = replace(entry(span_us=30.0), provenance=provenance(source_hash="f" * 16))
    best.publish(tmp_path / "results" / "best", stale)
    assert with_entry(find(entry(span_us=40.0))).span_us == 40.0


def test_a_stale_config_that_is_no_longer_legal_is_passed_over(find: Find) -> None:
    bad = entry()
    ops = {**bad.config["ops"], "B0": {**bad.config["ops"]["B0"], "tiling": Tiling(rows=63).__dict__}}
    match, texts = quiet(lambda: find(replace(bad, config={**bad.config, "ops": ops})))
    assert (match.how, match.reason.code) == (How.DEFAULT, "no_legal_entry") and len(texts) == 1


@pytest.mark.parametrize(
    "change",
    [{"trigger": "someday"}, {"unknown": 1}, {"tiling": 7}, {"tiling": {"block_m": 0}}, {"tiling": {"block_m": "8"}}],
)
def test_a_config_that_this_version_does_not_know_is_passed_over(find: Find, change: dict[str, Any]) -> None:
    for odd in (entry(), entry(kv=4096)):
        ops = {**odd.config["ops"], "B0": {**odd.config["ops"]["B0"], **change}}
        stored = replace(odd, config={**odd.config, "ops": ops})
        assert quiet(lambda stored=stored: find(stored))[0].how is How.DEFAULT  # type: ignore[misc]


# --- Nearest ---


@pytest.mark.parametrize(
    ("stored", "nearest"),
    [
        ([{"kv": 4096}, {"kv": 65536}], "r2t8kv4096tp1-glm5"),
        # Token rows before cached positions.
        ([{"kv": 1024}, {"kv": 8192, "requests": 4}], "r2t8kv1024tp1-glm5"),
        # By ratio, not by difference: 8 and 32 rows are equally far from 16, 40 is farther than 8.
        ([{"requests": 1}, {"requests": 5}], "r1t8kv8192tp1-glm5"),
        # The same rows in another cut.
        ([{"requests": 4, "tokens": 4}, {"requests": 16, "tokens": 1}], "r4t4kv8192tp1-glm5"),
        # Other models and other shares of the heads do not count.
        ([{"model": "dsv32"}, {"tp": 2}, {"requests": 8}], "r8t8kv8192tp1-glm5"),
    ],
)
def test_the_nearest_shape(find: Find, stored: list[dict[str, Any]], nearest: str) -> None:
    match, texts = quiet(lambda: find(*(entry(**{**SHAPE, **params}) for params in stored)))
    assert (match.how, match.reason.code) == (How.NEAREST, "other_shape")
    assert with_entry(match).shape_key == nearest and nearest in texts[0]


def test_block_m_follows_the_token_rows_and_changes_no_bits(find: Find) -> None:
    match, _ = quiet(lambda: find(entry(**{**SHAPE, "requests": 8})))
    stored = from_json(with_entry(match).config)
    assert isinstance(stored, CmpConfig) and isinstance(match.config, CmpConfig)
    assert (stored.ops["B0"].tiling.block_m, match.config.ops["B0"].tiling.block_m) == (64, 16)
    assert replace(stored.ops["B0"].tiling, block_m=16) == match.config.ops["B0"].tiling
    assert match.numerics_key == with_entry(match).numerics_key
    assert (match.config.order, match.config.streams, match.config.programmatic) == (
        stored.order,
        stored.streams,
        stored.programmatic,
    )


def test_the_nearest_legal_shape(find: Find) -> None:
    """An illegal tiling sends the search on to the next entry."""
    near = entry(**{**SHAPE, "kv": 4096})
    ops = {**near.config["ops"], "B0": {**near.config["ops"]["B0"], "tiling": Tiling(split_k=47).__dict__}}
    match, _ = quiet(lambda: find(replace(near, config={**near.config, "ops": ops}), entry(**{**SHAPE, "kv": 1024})))
    assert with_entry(match).shape_key == "r2t8kv1024tp1-glm5"
    assert match.config == from_json(with_entry(match).config)


def test_a_chain_of_another_length_has_other_ops(find: Find) -> None:
    stored = (entry("pdl_chain", layers=3, n=1024), entry("pdl_chain", layers=2, n=4096))
    match, _ = quiet(lambda: find(*stored, workload="pdl_chain", shape={"layers": 2, "n": 1024}))
    assert with_entry(match).shape_key == "l2n4096"


def test_parts_of_a_graph_do_not_count(find: Find) -> None:
    part = replace(entry(kv=4096), graph_digest=graph_of("attention_pre", kv=4096).subgraph(("A0", "B0")).digest())
    assert quiet(lambda: find(part))[0].reason.code == "no_legal_entry"


def test_shapes_that_this_version_does_not_know_do_not_count(find: Find) -> None:
    odd = [
        replace(entry(kv=4096), shape_params=params, shape_key=f"odd{place}")
        for place, params in enumerate(({"speed": 1}, {"kv": "many"}, {"kv": 0}))
    ]
    assert quiet(lambda: find(*odd))[0].how is How.DEFAULT


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), stored=st.lists(SHAPES, min_size=1, max_size=4), wanted=SHAPES)
def test_whatever_is_stored_what_is_found_can_run(
    tmp_path_factory: pytest.TempPathFactory, seed: int, stored: list[dict[str, int]], wanted: dict[str, int]
) -> None:
    """Random points of the space at random shapes, many of them illegal: what comes out lowers and fits the GPU."""
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("best")
    for params in stored:
        space = CmpSpace(graph_of("attention_pre", **params), GPU)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", best.BestKeptWarning)
            best.publish(folder, entry(config=space.decode(space.sample(rng)), **params))
    match, _ = quiet(lambda: matching.find("attention_pre", wanted, device=GPU, results=folder, source_hash=SOURCES))
    graph = graph_of("attention_pre", **wanted)
    assert isinstance(match.config, CmpConfig)
    CmpSpace(graph, GPU).check(match.config)
    lower(graph, match.config, GPU.arch)
    assert match.how is not How.EXACT or wanted in stored


# --- Default ---


def test_the_default_says_why(find: Find) -> None:
    match, texts = quiet(find)
    assert (match.how, match.reason.code, match.entry, match.path, match.place) == (
        How.DEFAULT,
        "no_entry",
        None,
        None,
        None,
    )
    assert match.config == default(CmpSpace(graph_of("attention_pre", **SHAPE), GPU))
    assert "nothing is stored for Test GPU, so the untuned config is used" in texts[0]


def test_a_gpu_of_the_same_name_with_other_limits_is_another_gpu(find: Find) -> None:
    match, texts = quiet(lambda: find(entry(), device=replace(GPU, sm_count=66)))
    assert match.reason.code == "other_gpu" and "is of Test GPU (sm_90a, 132 multiprocessors)" in texts[0]


def test_a_default_needs_a_record_and_a_backend_that_has_one(find: Find) -> None:
    with pytest.raises(NoConfigError, match="needs the GPU's record"):
        find(device="NVIDIA H200")
    with pytest.raises(NoConfigError, match="no stored megakernel config fits, and the default is a cmp one"):
        find(backend="megakernel")


# --- Refusals ---


def test_a_corrupted_file_is_never_passed_over(find: Find, tmp_path: Path) -> None:
    best.publish(tmp_path / "best", entry()).write_text("{")
    with pytest.raises(BestFileError, match="corrupted"):
        find()


def test_bad_arguments_are_refused(find: Find, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="unknown workload 'nothing'"):
        find(workload="nothing")
    with pytest.raises(WorkloadError, match="kv=0 is out of range"):
        find(shape={"kv": 0})
    with pytest.raises(ResultsPathError, match="no such folder"):
        find(results=tmp_path / "nowhere")


def test_sources_are_this_installation_s_unless_given(find: Find) -> None:
    from backends.cuda.jit import source_hash

    own = replace(entry(), provenance=provenance(source_hash=source_hash()))
    assert find(own, source_hash=None).reason.code == "same"

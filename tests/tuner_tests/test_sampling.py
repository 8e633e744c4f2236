"""Samplers, seeds, and the way from a config to a point and back."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.cmp import Choice, CmpSpace, default, serial
from search_spaces.config import CmpConfig
from tests.tuner_tests.fakes import GPU
from tuner.errors import OptionError
from tuner.legal import Repair
from tuner.sampling import BAD_VALUE, MAX_VIEW, Point, Proposal, TpeSampler, distributions, make_sampler
from tuner.screen import screen
from tuner.seeds import chains, critical_order, encode, seeds
from workloads import registry


def space_of(workload: str = "attention_pre", **params: int | str) -> CmpSpace:
    found = registry.get(workload)
    return CmpSpace(found.graph(found.shape(params)), GPU)


SPACE = space_of()
REPAIR = Repair(SPACE, 0)
SMALL = space_of("pdl_chain", layers=4, n=1024)


def in_space(space: CmpSpace, point: Point) -> bool:
    return point.keys() == {d.name for d in space.dimensions} and all(
        point[d.name] in d.values if isinstance(d, Choice) else 0 <= float(point[d.name]) <= 1 for d in space.dimensions
    )


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_proposals_are_points_that_decode(name: str) -> None:
    sampler, rng = make_sampler(name, SPACE, 0), random.Random(0)
    for _ in range(40):
        proposal = sampler.propose()
        assert in_space(SPACE, proposal.point)
        assert isinstance(SPACE.decode(proposal.point), CmpConfig)
        sampler.tell(proposal, rng.random(), rng.random() < 0.8)


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_a_seed_repeats_its_draws(name: str) -> None:
    def draws(seed: int) -> list[Point]:
        sampler, found = make_sampler(name, SMALL, seed), []
        for i in range(25):
            proposal = sampler.propose()
            found.append(proposal.point)
            sampler.tell(proposal, float(i), True)
        return found

    assert draws(3) == draws(3) != draws(4)


def test_tpe_finds_what_random_does_not() -> None:
    def best(name: str) -> float:
        sampler, values = make_sampler(name, SMALL, 0), []
        for _ in range(150):
            proposal = sampler.propose()
            values.append(
                sum(proposal.point[f"L{i}.trigger"] != "inputs_read" for i in range(3))
                + sum(proposal.point[f"L{i}.priority"] != 2 for i in range(4))
                + sum(proposal.point[f"L{i}.stream"] != 0 for i in range(4))
            )
            sampler.tell(proposal, values[-1], True)
        return min(values)

    assert best("tpe") < best("random")


def test_the_view_is_bounded_and_pending_points_survive_it() -> None:
    sampler = TpeSampler(SMALL, 0)
    pending = [sampler.propose() for _ in range(8)]
    rng = random.Random(0)
    for _ in range(2 * MAX_VIEW + 20):
        sampler.tell(Proposal(SMALL.sample(rng)), rng.random(), True)
    assert len(sampler._told) < 2 * MAX_VIEW
    for proposal in pending:
        sampler.tell(proposal, BAD_VALUE, False)
    sampler.forget(sampler.propose())
    started = time.monotonic()
    for _ in range(8):
        sampler.forget(sampler.propose())
    assert time.monotonic() - started < 8  # a second each on the slowest machine; some 10 ms where measured


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(OptionError, match="use tpe or random"):
        make_sampler("grid", SMALL, 0)


@given(st.integers(0, 10_000))
def test_points_survive_the_way_to_a_config_and_back(seed: int) -> None:
    config = SPACE.decode(SPACE.sample(random.Random(seed)))
    point = encode(SPACE, config)
    assert in_space(SPACE, point)
    assert screen(SPACE, SPACE.decode(point)) == screen(SPACE, config)


def test_seeds_are_legal_distinct_and_start_with_the_references() -> None:
    found = seeds(SPACE)
    assert [s.config for s in found[:2]] == [serial(SPACE), default(SPACE)]
    for seed in found:
        assert screen(SPACE, seed.config).reason == ""
        assert in_space(SPACE, encode(SPACE, seed.config))
    assert len({screen(SPACE, s.config).plan_key for s in found}) >= 7


def test_chains_follow_producers_on_few_streams() -> None:
    order = tuple(SPACE.graph.ops)
    streams = dict(zip(order, chains(SPACE, order), strict=True))
    assert streams["A0"] == streams["B0"] == 0 and streams["C0"] != streams["B1"]
    assert max(streams.values()) < 4


def test_the_critical_path_goes_first() -> None:
    order = critical_order(SPACE)
    assert order[:2] == ("A0", "B0")
    assert order.index("B0f") < order.index("C0")


def test_optuna_sees_every_dimension() -> None:
    assert distributions(SPACE).keys() == {d.name for d in SPACE.dimensions}


@given(st.integers(0, 10_000))
def test_repair_makes_points_legal_and_leaves_legal_ones(seed: int) -> None:
    point = SPACE.sample(random.Random(seed))
    fixed = REPAIR(point)
    assert in_space(SPACE, fixed)
    assert screen(SPACE, SPACE.decode(fixed)).reason == ""
    assert REPAIR(fixed) == fixed
    if screen(SPACE, SPACE.decode(point)).reason == "":
        assert fixed == point
    changed = {name.rpartition(".")[2] for name in point if point[name] != fixed[name]}
    assert changed <= {"core", "block_m", "rows", "split_k", "stages", "ctas_per_sm"}

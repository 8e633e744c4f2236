"""Queue plans: lowering, encoding, and the progress proof with planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.plan.queues import SIGNAL_WORD, WAIT_WORD, WORDS, QueuePlan, lower_queues, round_robin, verify_queues
from search_spaces.cmp import CmpSpace, default
from search_spaces.config import MegakernelConfig, tiling_of
from search_spaces.errors import ConfigError, IllegalConfig
from search_spaces.gpu import GpuRecord
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape

H200 = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
GRAPH = build_graph(AttentionPreShape())
BASE = default(CmpSpace(GRAPH, H200))
CONFIG = MegakernelConfig({name: tiling_of(BASE, name) for name in BASE.order}, BASE.order)


def plan(workers: int = 0) -> QueuePlan:
    return lower_queues(GRAPH, replace(CONFIG, workers=workers), "sm_90a", H200.sm_count)


def test_every_tile_is_queued_once_and_events_count_all_tiles() -> None:
    made = plan()
    assert sorted(n for queue in made.queues for n in queue) == list(range(len(made.tasks.tasks)))
    for event in made.tasks.events:
        signals = sum(event.number in task.signals for task in made.tasks.tasks)
        assert signals == event.threshold


@given(st.integers(1, 132))
def test_round_robin_is_deadlock_free_for_any_number_of_workers(workers: int) -> None:
    assert verify_queues(GRAPH, plan(workers)).passed


def test_a_reversed_queue_is_a_deadlock_with_a_witness() -> None:
    made = plan(1)
    verdict = verify_queues(GRAPH, replace(made, queues=(made.queues[0][::-1],)))
    assert not verdict.passed
    assert "worker 0 stops at E1" in verdict.message


def test_a_lost_signal_and_a_missing_wait_are_caught() -> None:
    made = plan()
    silent = replace(made.tasks.tasks[0], signals=())
    tasks = replace(made.tasks, tasks=(silent, *made.tasks.tasks[1:]))
    assert not verify_queues(GRAPH, replace(made, tasks=tasks)).passed
    last = replace(made.tasks.tasks[-1], waits=())
    tasks = replace(made.tasks, tasks=(*made.tasks.tasks[:-1], last))
    assert "does not wait" in verify_queues(GRAPH, replace(made, tasks=tasks)).message


def test_instructions_carry_the_tile_and_the_lists() -> None:
    made = plan()
    words = made.instructions()
    assert len(words) == made.workers * made.max_queue * WORDS
    for worker, queue in enumerate(made.queues):
        for place, number in enumerate(queue):
            task = made.tasks.tasks[number]
            line = words[(worker * made.max_queue + place) * WORDS :][:WORDS]
            assert tuple(line[4:9]) == (task.tile.m, task.tile.n, task.tile.k_begin, task.tile.k_end, task.tile.split)
            assert made.distinct_specs()[line[0] - 1] == made.specs[line[3]]
            assert made.ops[line[3]] == task.op
            waits = [tuple(line[WAIT_WORD + 2 * i :][:2]) for i in range(line[1])]
            assert waits == [(e, made.tasks.events[e].threshold) for e in task.waits]
            assert [line[SIGNAL_WORD + 2 * i] for i in range(line[2])] == list(task.signals)


def test_round_robin_deals_in_order() -> None:
    assert round_robin(5, 2) == ((0, 2, 4), (1, 3))
    assert round_robin(1, 3) == ((0,),)


def test_bad_configs_are_refused() -> None:
    with pytest.raises(IllegalConfig, match="workers=200"):
        plan(200)
    with pytest.raises(ConfigError, match="unknown queue policy 'lifo'"):
        lower_queues(GRAPH, replace(CONFIG, policy="lifo"), "sm_90a", 132)

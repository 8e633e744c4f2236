"""Finalisers that run as the tiles of their producer arrive: groups, plans, parameter words, and planted faults."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from backends.cuda.lint import slots_of
from backends.plan.arrivals import counters_of
from backends.plan.encode import GRID_HEADER_BYTES, MAP_BYTES, OPERAND_SLOTS, arrival_args, map_specs
from backends.plan.launches import KernelPart, LaunchPlan, lower
from backends.plan.verify import verify
from backends.simulator.calibration import load
from backends.simulator.model import predict
from search_spaces.cmp import CmpSpace, hosts_of
from search_spaces.config import numerics_key
from search_spaces.errors import IllegalConfig
from search_spaces.gpu import GpuRecord
from workloads.attention_pre.graph import build_graph
from workloads.attention_pre.shapes import AttentionPreShape
from workloads.graph import OpGraph
from workloads.ops import KINDS

H200 = GpuRecord("NVIDIA H200", "sm_90a", 132, 60 << 20, 233472, 232448)
GRAPH = build_graph(AttentionPreShape())
SPACE = CmpSpace(GRAPH, H200)
PAIRS = {"B0f": "B0", "B1f": "B1", "D1f": "D1"}
ALL = {f"{name}.host": host for name, host in PAIRS.items()}


def parts_of(plan: LaunchPlan, name: str) -> tuple[KernelPart, KernelPart]:
    """The producer's part and the finaliser's."""
    node = plan.node(name)
    return next(p for p in node.parts if p.op == PAIRS[name]), next(p for p in node.parts if p.op == name)


def with_arrival(plan: LaunchPlan, name: str, **changes: Any) -> LaunchPlan:
    """The plan with fields of a finaliser's arrival changed."""
    _, part = parts_of(plan, name)
    assert part.arrival is not None
    changed = replace(part, arrival=replace(part.arrival, **changes))
    nodes = tuple(replace(n, parts=tuple(changed if p is part else p for p in n.parts)) for n in plan.nodes)
    return replace(plan, nodes=nodes)


def test_finalisers_may_run_behind_their_own_producers_only() -> None:
    assert {name: hosts_of(GRAPH, name) for name in PAIRS} == {name: (host,) for name, host in PAIRS.items()}
    with pytest.raises(IllegalConfig, match="B1f: cannot share the launch of B0"):
        base = SPACE.decode({})
        SPACE.check(replace(base, ops={**base.ops, "B1f": replace(base.ops["B1f"], host="B0")}))


@pytest.mark.parametrize("name", PAIRS)
def test_a_finaliser_behind_its_producer_adds_no_ctas_and_no_edge(name: str) -> None:
    chosen = SPACE.decode({f"{name}.host": PAIRS[name]})
    SPACE.check(chosen)
    own, plan = lower(GRAPH, SPACE.decode({}), "sm_90a"), lower(GRAPH, chosen, "sm_90a")
    node, producer = plan.node(name), own.node(PAIRS[name])
    assert node.op == f"{PAIRS[name]}+{name}"
    assert (node.grid, node.threads, node.ctas_per_sm) == (producer.grid, producer.threads, producer.ctas_per_sm)
    assert len(plan.nodes) == len(own.nodes) - 1
    names = {node.op: name, PAIRS[name]: name}
    merged = {(names.get(e.producer, e.producer), names.get(e.consumer, e.consumer)) for e in own.edges}
    found = {(names.get(e.producer, e.producer), names.get(e.consumer, e.consumer)) for e in plan.edges}
    assert found <= {edge for edge in merged if edge[0] != edge[1]}
    assert verify(GRAPH, plan).passed
    assert plan.key() != own.key()
    assert numerics_key(GRAPH, chosen, "sm_90a") == numerics_key(GRAPH, SPACE.decode({}), "sm_90a")


def test_all_finalisers_run_in_shared_launches_too() -> None:
    shared = {**ALL, "C0.host": "B0", "B1.host": "B0", "D1.host": "D0"}
    assert SPACE.decode(shared).ops["B1f"].host == ""  # two CTAs of several ops leave it no registers
    chosen = SPACE.decode({**shared, **{f"{host}.ctas_per_sm": 1 for host in PAIRS.values()}})
    SPACE.check(chosen)
    plan = lower(GRAPH, chosen, "sm_90a")
    assert [node.op for node in plan.nodes] == ["A0", "B0+B0f+B1+B1f+C0", "D0+D1+D1f", "D2", "E1"]
    assert verify(GRAPH, plan).passed
    assert plan.node("C0").ctas == sum(p.ctas for p in plan.node("C0").parts if p.op in ("B0", "C0", "B1"))


SHAPES = [
    (shape, {"block_m": block_m, "rows": rows, "split_k": split})
    for shape, block_ms in (
        (AttentionPreShape(requests=1, tokens=1), (8, 16)),
        (AttentionPreShape(), (16,)),
        (AttentionPreShape(requests=7, tokens=4), (16, 32)),
        (AttentionPreShape(requests=5), (32, 64)),
    )
    for block_m, rows, split in product(block_ms, (64, 128), (1, 3))
]


def run_groups(producer: KernelPart, part: KernelPart, seed: int) -> tuple[dict[Any, set[Any]], list[int]]:
    """What the shell does with the encoded words: tiles that had arrived when each tile of the finaliser ran."""
    addresses = dict.fromkeys((o.tensor for o in part.operands if not isinstance(o, int)), 0)
    body = arrival_args(part, producer, {**addresses, counters_of(part.op): 7})
    words = struct.unpack_from("<2Q12i64h", body, OPERAND_SLOTS * 8)
    assert words[:2] == (7, 0)
    high, m_tiles, splits, run_m, own_m, groups_n, sharers = words[2:9]
    starts, own_starts = words[14:46], words[46:]
    n_tiles = starts[-1]
    assert part.arrival is not None
    counters, ran, arrived = [0] * part.arrival.num_groups, dict[Any, set[Any]](), set[Any]()
    shares: dict[tuple[int, int], list[int]] = {}
    tiles = list(product(range(n_tiles), range(splits), range(m_tiles)))
    random.Random(seed).shuffle(tiles)
    for n, split, m in tiles:
        arrived.add((n, split, m))
        at_n, at_m = 0, m // high
        while n >= starts[at_n + 1]:
            at_n += 1
        end = (starts[at_n + 1] - starts[at_n]) * min(high, m_tiles - at_m * high) * splits - 1
        before = counters[at_m * groups_n + at_n]
        counters[at_m * groups_n + at_n] = 0 if before >= end else before + 1
        most = min(sharers, end + 1)
        if before >= end + 1 - most:
            shares.setdefault((at_n, at_m), []).append(before - (end + 1 - most))
        if before != end:
            continue
        rows, columns = min(run_m, own_m - at_m * run_m), own_starts[at_n + 1] - own_starts[at_n]
        for share in shares.pop((at_n, at_m)):  # those that waited, and the last
            for i in range(share, rows * columns, most):
                own = (own_starts[at_n] + i % columns, at_m * run_m + i // columns)
                assert own not in ran
                ran[own] = set(arrived)
    assert not shares
    return ran, counters


@pytest.mark.parametrize("sharers", [1, 4, 16])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("shape", "tiling"), SHAPES)
def test_each_tile_runs_once_when_all_that_it_reads_has_arrived(
    name: str, shape: AttentionPreShape, tiling: dict[str, int], sharers: int
) -> None:
    graph = build_graph(shape)
    point: dict[str, Any] = {f"{PAIRS[name]}.{field}": value for field, value in tiling.items()}
    space = CmpSpace(graph, H200)
    try:
        point |= {f"{name}.sharers": sharers, f"{PAIRS[name]}.ctas_per_sm": 1}
        chosen = space.decode({f"{name}.host": PAIRS[name], **point})
        space.check(chosen)
    except IllegalConfig:
        pytest.skip("not a tiling of this shape")
    plan = lower(graph, chosen, "sm_90a")
    assert verify(graph, plan, 1 << 20).passed
    producer, part = parts_of(plan, name)
    kind, op = KINDS[graph.ops[name].kind], graph.ops[name]
    source = graph.ops[producer.op]
    writes = {
        (tile.n, tile.split, tile.m): KINDS[source.kind].writes(source, graph, producer.tiling, tile)
        for tile in KINDS[source.kind].domain(source, graph, producer.tiling)
    }
    splits = {t: producer.splits for t in op.reads.values()}
    for seed in range(2):
        ran, counters = run_groups(producer, part, seed)
        assert not any(counters)  # a replay finds what the first launch found
        for tile in kind.domain(op, graph, part.tiling):
            read = [r for r in kind.reads(op, graph, part.tiling, tile, splits) if r.tensor in source.writes.values()]
            needed = {p for p, regions in writes.items() if any(a.overlaps(b) for a in read for b in regions)}
            assert needed and needed <= ran.pop((tile.n, tile.m))
        assert not ran


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("B1f", {"n_starts": (0, 1)}, "2 groups along n start 1"),
    ("B1f", {"n_starts": (1,)}, "do not cover"),
    (
        "B0f",
        {"n_starts": (0, 31, 40)},
        "tile m=0 n=0 of B0f reads tile m=0 n=31 split=0 of B0, which is not of its group",
    ),
    ("B0f", {"n_starts": (0, 33, 40)}, "n=0 of B0f waits for tile m=0 n=32 split=0 of B0, which it does not read"),
    ("D1f", {"groups_m": 3}, "planned are 3"),
    ("D1f", {"run_m": 8}, "1 groups along m start 2"),
    ("B0f", {"n_starts": (0,), "own_starts": (0,)}, "which it does not read"),
    ("B1f", {"producer": "B0"}, "not of B0"),
    ("B1f", {"sharers": 32}, "32 share a group"),
    ("B0f", {"sharers": 0}, "0 share a group"),
]


@pytest.mark.parametrize(("name", "fault", "words"), FAULTS)
def test_the_verifier_refuses_groups_that_are_not_what_tiles_read(name: str, fault: dict[str, Any], words: str) -> None:
    plan = lower(GRAPH, SPACE.decode(ALL), "sm_90a")
    assert verify(GRAPH, plan).passed
    verdict = verify(GRAPH, with_arrival(plan, name, **fault), H200.sm_count)
    assert not verdict.passed
    assert any(word in verdict.message for word in words.split("|")), verdict.message


def test_other_inputs_of_a_finaliser_must_be_ordered_before_the_launch() -> None:
    plan = lower(GRAPH, SPACE.decode(ALL), "sm_90a")
    edges = tuple(e for e in plan.edges if (e.producer, e.consumer) != ("C0", "D1+D1f"))
    assert len(edges) == len(plan.edges) - 1
    assert "D1f reads c0_partial, but no path orders it after C0" in verify(GRAPH, replace(plan, edges=edges)).message


def test_a_finaliser_orders_only_what_its_tiles_read_of_the_producer() -> None:
    """Writing what the producer's other tiles still read is a hazard, though the finaliser runs behind them."""
    graph = build_graph(AttentionPreShape())
    graph.ops["B1f"] = replace(graph.ops["B1f"], writes={"cache": "h_sf"})
    one_stream = {f"{op}.stream": 0 for op in GRAPH.ops}
    plan = lower(GRAPH, SPACE.decode({"B1f.host": "B1", **one_stream}), "sm_90a")
    message = verify(graph, plan).message
    assert "B1 and B1f touch the same part of h_sf" in message


def test_a_finaliser_without_arrival_in_the_launch_of_its_producer_is_refused() -> None:
    plan = lower(GRAPH, SPACE.decode(ALL), "sm_90a")
    node = plan.node("B1f")
    beside = replace(node, parts=(node.parts[0], replace(node.parts[1], arrival=None)))
    cut = replace(plan, nodes=tuple(beside if n is node else n for n in plan.nodes))
    assert "no path orders it after B1" in verify(GRAPH, cut).message


def test_parameter_blocks_stand_where_the_lint_and_the_shell_look() -> None:
    plan = lower(GRAPH, SPACE.decode(ALL), "sm_90a")
    producer, part = parts_of(plan, "B0f")
    addresses = {name: 0x1000 * (i + 1) for i, name in enumerate(GRAPH.tensors)} | {counters_of("B0f"): 0xABC0}
    body = arrival_args(part, producer, addresses)
    assert len(body) == GRID_HEADER_BYTES + MAP_BYTES
    assert struct.unpack_from("<Q", body)[0] == addresses["b0_partial"]
    words = struct.unpack_from("<2Q12i64h", body, OPERAND_SLOTS * 8)
    assert words[:9] == (0xABC0, 0, 1, 1, producer.splits, 16, 16, 3, 1)
    assert words[14:46] == (0, 32, 40, *[41] * 29)
    assert words[46:] == (0, 1, 2, *[3] * 29)
    rows = slots_of([(KINDS[GRAPH.ops[p.op].kind], p.operands) for p in (producer, part)], GRAPH).rows
    assert rows == (0, GRID_HEADER_BYTES + MAP_BYTES * len(map_specs(producer.operands)))
    with pytest.raises(ValueError, match="B0 does not run behind"):
        arrival_args(producer, producer, addresses)


def test_a_producer_that_leaves_no_registers_keeps_its_finaliser_outside() -> None:
    full = SPACE.decode({"B1f.host": "B1", "B1.ctas_per_sm": 3})
    assert full.ops["B1f"].host == ""
    forced = replace(full, ops={**full.ops, "B1f": replace(full.ops["B1f"], host="B1")})
    with pytest.raises(IllegalConfig, match="B1f: 3 CTAs of B1 a multiprocessor leave it no registers"):
        SPACE.check(forced)


def test_tiles_that_form_no_groups_are_refused() -> None:
    """A tile of the producer that spans two groups would have to arrive twice."""
    graph: OpGraph = build_graph(AttentionPreShape())
    graph.ops["B0f"] = replace(graph.ops["B0f"], params={**graph.ops["B0f"].params, "q_size": 1984})
    chosen = SPACE.decode({"B0f.host": "B0", "B0.rows": 128})
    with pytest.raises(IllegalConfig, match="B0f: cannot run as tiles of B0 arrive"):
        lower(graph, chosen, "sm_90a")


def test_the_simulator_runs_a_finaliser_in_the_tail_of_its_producer() -> None:
    calibration = load("h200")
    own = predict(GRAPH, lower(GRAPH, SPACE.decode({}), "sm_90a"), calibration)
    behind = predict(GRAPH, lower(GRAPH, SPACE.decode({"B1f.host": "B1"}), "sm_90a"), calibration)
    assert set(own.ops) == set(behind.ops)
    assert behind.ops["B1f"].end_us == behind.ops["B1"].end_us > own.ops["B1"].end_us


def test_sharers_wait_only_where_what_they_wait_for_must_find_room() -> None:
    shared = {**ALL, **{f"{name}.sharers": 16 for name in PAIRS}}
    plan = lower(GRAPH, SPACE.decode(shared), "sm_90a")
    arrivals = {name: parts_of(plan, name)[1].arrival for name in PAIRS}
    assert {name: a.sharers for name, a in arrivals.items() if a} == {"B0f": 16, "B1f": 16, "D1f": 16}
    assert plan.waiting() == 3 * 15 + 15 + 4 * 15
    assert verify(GRAPH, plan, plan.waiting() + 1).passed
    assert "120 CTAs may wait" in verify(GRAPH, plan, plan.waiting()).message
    assert not verify(GRAPH, plan).passed


def test_a_cta_that_takes_several_tiles_shares_nothing() -> None:
    plan = lower(GRAPH, SPACE.decode({**ALL, "B0f.sharers": 16, "B0.grid_cap": 66}), "sm_90a")
    producer, part = parts_of(plan, "B0f")
    assert producer.ctas_x < producer.tiles[0]
    assert part.arrival is not None and part.arrival.sharers == 1
    message = verify(GRAPH, with_arrival(plan, "B0f", sharers=16), H200.sm_count).message
    assert "would wait for a tile that it takes later" in message

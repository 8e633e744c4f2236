"""The FP8 GEMMs of the layer against `torch._scaled_mm` (cuBLASLt), on the same memory, cold, in the same rounds.

Both use 1x128 activation and 128x128 weight scales where the installed library offers them, else the peer scales per
tensor. The peer writes bf16; a split GEMM here leaves fp32 partials that its finaliser adds up, so the pair with the
finaliser is read too.
"""

from __future__ import annotations

from typing import Any

from backends.base import SessionSpec
from backends.sessions import open_session
from search_spaces.cmp import CmpSpace
from tuner.ablation import Bench, fastest
from tuner.alone import tune_alone

STAGES = (("A0",), ("B0",), ("B0f",), ("C0",), ("B1",), ("B1f",), ("D0",), ("D1",), ("D1f",), ("D2",), ("E1",))
GEMMS = {"B0": ("B0", "B0f"), "B1": ("B1", "B1f"), "D0": ("D0",), "D1": ("D1", "D1f")}


def compare(device: str, params: dict[str, int | str], rounds: int, seed: int) -> dict[str, Any]:
    """Every GEMM of a shape: its fastest tiling alone, the pair with its finaliser, and the peer."""
    session: Any = open_session(SessionSpec("attention_pre", params, device, seed=seed))
    try:
        space = CmpSpace(session.graph, session.info.record)
        config, races = tune_alone(session, space, order=STAGES, only=tuple(GEMMS))
        found: dict[str, Any] = {}
        with Bench(session, session.graph, session.info.record.arch) as bench:
            whole = bench.verified(config)
            for name, pair in GEMMS.items():
                graphs, scales = _peer_graphs(session, name)
                runs = [bench.part(whole, config, (name,)), bench.part(whole, config, pair)]
                runs.append(bench.kept(session.captured([graph.raw_cuda_graph() for graph, _ in graphs])))
                ours, with_finaliser, peer, *floors = bench.read(
                    [*runs, *bench.streams(_weight_bytes(session, name))], rounds, lambda: None
                )
                ratio, low, high = ours.over(peer)
                found[name] = {
                    "us": ours.span_us,
                    "with_finaliser_us": with_finaliser.span_us,
                    "peer_us": peer.span_us,
                    "peer_scales": scales,
                    "floor_us": fastest(floors).span_us,
                    "over_peer": ratio,
                    "over_peer_interval": (low, high),
                    "tiling": dict(vars(config.ops[name].tiling)),
                    "entrants": next(race.entrants for race in races if race.stage == (name,)),
                }
        return found
    finally:
        session.close()


def _weight_bytes(session: Any, name: str) -> int:
    op = session.graph.ops[name]
    return int(session.graph.tensors[op.tensor("weight")].bytes)


def _peer_graphs(session: Any, name: str) -> tuple[list[tuple[Any, Any]], str]:
    """One captured call per set (with what it keeps alive), and how the peer scales."""
    op = session.graph.ops[name]
    made = []
    scales = ""
    for index in range(session.num_sets):
        views = session.views(index)
        x, weight = views[op.tensor("x")], views[op.tensor("weight")]
        x_scale, weight_scale = views[op.tensor("x_scale")], views[op.tensor("weight_scale")]
        try:
            blocks = x_scale[:, : x.shape[0]].t()
            made.append(_capture(x, weight.t(), blocks, weight_scale.t()))
            scales = "1x128 and 128x128"
        except (RuntimeError, ValueError) as error:
            import torch

            one = torch.ones((), device=x.device)
            made.append(_capture(x, weight.t(), one, one))
            scales = f"per tensor, since {str(error).splitlines()[0]}"
    return made, scales


def _capture(x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> tuple[Any, Any]:
    import torch

    def call() -> Any:
        return torch._scaled_mm(x, weight, x_scale, weight_scale, out_dtype=torch.bfloat16)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = call()
    return graph, (out, x_scale, weight_scale)

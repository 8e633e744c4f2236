"""Attention output projection, then residual add and RMSNorm of the MoE block: two ops, one dependent edge.

The consumer has one row of norm weights to fetch ahead and nothing else, so the edge shows what an early launch is
worth where there is little to do before the wait.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from workloads.errors import WorkloadError
from workloads.graph import OpGraph, Role
from workloads.ops.add_rmsnorm_quant import add_rmsnorm_quant
from workloads.ops.base import K_BLOCK
from workloads.ops.gemm_fp8 import gemm_fp8_partial

HIDDEN = 6144  # GLM-5
HEADS, VALUE_DIM = 64, 256
EPS = 1e-5


@dataclass(frozen=True)
class OutputNormShape:
    """`tokens` token rows of one rank; `tp` divides the attention heads."""

    tokens: int = 16
    tp: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or not 1 <= self.tokens <= 256:
            raise WorkloadError(f"tokens={self.tokens} is out of range: use 1 to 256")
        if self.tp not in (1, 2, 4, 8):
            raise WorkloadError(f"tp={self.tp} is out of range: use 1, 2, 4 or 8")

    @property
    def k(self) -> int:
        """Values of a token's attention output on this rank."""
        return HEADS * VALUE_DIM // self.tp

    @property
    def m_aligned(self) -> int:
        """Stride in floats of one k-block of activation scales."""
        return (self.tokens + 3) // 4 * 4

    def key(self) -> str:
        return f"m{self.tokens}tp{self.tp}"

    def params(self) -> dict[str, int | str]:
        return asdict(self)


def build_graph(shape: OutputNormShape) -> OpGraph:
    """Captures the two ops. With `tp` over 1 the all-reduce between them is left out."""
    graph = OpGraph("output_norm")
    m, k, blocks = shape.tokens, shape.k, HIDDEN // K_BLOCK
    graph.tensor("attn_fp8", (m, k), "e4m3", Role.INPUT)
    graph.tensor("attn_sf", (k // K_BLOCK, shape.m_aligned), "f32", Role.INPUT)
    graph.tensor("residual", (m, HIDDEN), "bf16", Role.INPUT)
    graph.tensor("w_o", (HIDDEN, k), "e4m3", Role.WEIGHT)
    graph.tensor("w_o_sf", (blocks, k // K_BLOCK), "f32", Role.WEIGHT)
    graph.tensor("ln_w", (HIDDEN,), "bf16", Role.WEIGHT)
    for name, tensor_shape, dtype in (
        ("residual_out", (m, HIDDEN), "bf16"),
        ("norm_out", (m, HIDDEN), "bf16"),
        ("h_fp8", (m, HIDDEN), "e4m3"),
        ("h_sf", (blocks, shape.m_aligned), "f32"),
    ):
        graph.tensor(name, tensor_shape, dtype, Role.OUTPUT)
    gemm_fp8_partial(graph, "O", x="attn_fp8", x_scale="attn_sf", weight="w_o", weight_scale="w_o_sf", out="o_partial")
    add_rmsnorm_quant(
        graph,
        "N",
        hidden="o_partial",
        residual="residual",
        weight="ln_w",
        eps=EPS,
        residual_out="residual_out",
        norm_out="norm_out",
        quantised="h_fp8",
        scale="h_sf",
    )
    return graph

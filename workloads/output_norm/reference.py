"""The output projection and the norm behind it in torch, rounded where the attention-pre layer rounds.

The projection's sum is rounded to bf16, the residual sum to bf16, the norm to bf16, and that to FP8 per 128 values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from workloads.attention_pre.comparison import Judge, usable_tensors
from workloads.attention_pre.numerics import Quantised, Tensors, dequantise_weight, quantise, rms_norm
from workloads.mismatch import Mismatch
from workloads.output_norm.graph import EPS, OutputNormShape

OUTPUTS = ("residual_out", "norm_out", "h_fp8", "h_sf")


def reference(shape: OutputNormShape, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Everything that a run writes, on the inputs' device, by the op graph's names."""
    x = Quantised(tensors["attn_fp8"], tensors["attn_sf"][:, : shape.tokens].T).dequantise(torch.float32)
    out = x @ dequantise_weight(tensors["w_o"], tensors["w_o_sf"], torch.float32).T
    total = (out.bfloat16().float() + tensors["residual"].float()).bfloat16()
    norm = rms_norm(total.float(), tensors["ln_w"], EPS).bfloat16()
    quantised = quantise(norm)
    scale = quantised.scale.new_zeros(quantised.scale.shape[1], shape.m_aligned)
    scale[:, : shape.tokens] = quantised.scale.T
    return {"residual_out": total, "norm_out": norm, "h_fp8": quantised.values, "h_sf": scale}


def compare(
    shape: OutputNormShape, got: Tensors, want: Tensors, *, names: Iterable[str] | None = None, core: str = "mma_sync"
) -> list[Mismatch]:
    """Mismatches between a run's tensors and the reference's, by the limits of the attention-pre layer.

    Args:
        shape: of the step.
        got: what the run wrote, by name.
        want: the result of `reference`.
        names: tensors to check; all outputs, which must be there, if None.
        core: the MMA core of the projection.
    """
    chosen = set(OUTPUTS if names is None else names)
    found, usable = usable_tensors(OUTPUTS, chosen, got, want)
    judge = _OutputJudge(shape.tokens, usable, want, core)
    judge.run()
    return found + [mismatch for mismatch in judge.found if mismatch.tensor in chosen]


class _OutputJudge(Judge):
    def run(self) -> None:
        self._close("residual_out", self.settled)
        self._close("norm_out", self.settled)
        self._activations("h_fp8", "h_sf", self._rows_equal("norm_out"))

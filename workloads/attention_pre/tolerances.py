"""How far a run of the attention-pre layer may be from its reference. Pure Python.

Two bands. A row is *settled* when the FP8 bytes that it is computed from equal the reference's; then only the order of
sums differs and the strict limits hold. It is *unsettled* when a byte upstream fell to the other side of a rounding tie
(or was not given): one flipped byte of a token's h_fp8 moves all 2,752 values projected from it, which flips 1 to 10 %
of the bytes behind them, each by one e4m3 step (6 %). The flips of every tensor are capped among its settled rows, so a
systematic error cannot hide in the wide band.
"""

from __future__ import annotations

from typing import NamedTuple


class Band(NamedTuple):
    """A limit for settled and one for unsettled rows."""

    settled: float
    unsettled: float


BF16_ATOL = Band(0.02, 0.1)
BF16_RTOL = Band(0.02, 0.1)
BF16_REL_L2 = Band(0.01, 0.05)  # per token row

# Share of elements whose dequantised values differ, by MMA core. What an error flips: a relative error e moves a value
# over a rounding boundary with probability |e| / spacing, and the spacing of e4m3 under a 128-group's scale gives every
# binary octave of a normal value the same share, some 90 e in all. mma.sync sums in fp32 (e = 1e-7 to 1e-5); the FP8
# accumulators of wgmma align to fewer bits: e = 1.3e-4 against float64 on an H200, hence 0.7 to 1.5 % of a row.
FP8_FLIPS = {"mma_sync": Band(0.005, 0.5), "wgmma": Band(0.02, 0.5)}
# Behind a Hadamard transform, which spreads one flipped bf16 rounding of a value over the 128 values of its head: an
# error e flips a bf16 rounding (spacing u = 2^-8 of the value) with probability e / u and then is u, so its root mean
# square grows to sqrt(e u) per rounding point; three points and e = 1.3e-4 give 7e-4, and 90 times that 6 %.
FP8_MIXED_FLIPS = {"mma_sync": Band(0.005, 0.5), "wgmma": Band(0.1, 0.5)}
FP8_FREE_FLIPS = 8  # elements that may differ however small the tensor is
FP8_REL_L2 = Band(0.03, 0.1)  # per token row, dequantised
FP8_STEP = 0.14  # one e4m3 step relative to the value (1 / 8), and slack
FP8_SMALL = Band(0.01, 0.1)  # absolute slack relative to the row's root mean square
SCALE_FLIPS = Band(0.005, 0.1)  # share of power-of-two scales off by one power
LATENT_SCALE_RTOL = Band(2.0**-6, 0.1)  # two bf16 units in the last place of the group's amax: it is rounded twice

GATE_TOLERANCE = Band(1e-3, 1e-2)  # relative to |value| + the row's root mean square; bf16 sums would break it
LOGITS_DIFF = Band(5e-6, 4e-3)  # |x - y|^2 / (|x|^2 + |y|^2) of one token's row; DeepGEMM's figure is 1e-3 of a tensor
LOGITS_TOLERANCE = Band(5e-3, 0.3)  # relative to |value| + the row's root mean square
LOGITS_TILE = 256  # columns; the rest of the tile that holds a context's end may hold anything

REQUIRED = ("residual_out", "q_for_sparse_mla", "mla_cache", "indexer_cache", "logits")
OPTIONAL = ("norm_out", "h_fp8", "h_sf", "q_fp8", "q_sf", "q_nope", "indexer_q_fp8", "head_weights", "gate_raw")

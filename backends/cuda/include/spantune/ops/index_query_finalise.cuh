// Finaliser of the indexer query projection, one warp per (token, head), 8 heads a tile: sums the splits, rounds to
// bf16, rotates the first 64 values, Hadamard, FP8 with a power-of-two scale; head weight = (gate * scale) * constant,
// the gate summed over its own splits in index order.
// Template parameters: heads, whether the Hadamard transform is applied, whether pairs are (i, i + 32).
#pragma once

#include "row.cuh"

namespace spantune {

struct IndexQueryFinaliseSlots {
  enum : int { kPartial, kGatePartial, kPositions, kCosSin, kQuantised, kHeadWeights, kSplits, kGateSplits, kM, kFactor };
};

template <int kHeads, bool kHadamard, bool kNeox>
struct IndexQueryFinalise {
  using Slots = IndexQueryFinaliseSlots;
  static constexpr bool kHasLoaders = false;
  static constexpr int kPages = 0, kBarriers = 0;
  static constexpr int kWidth = 128;
  static constexpr int kInFlight = 8;  // splits whose loads are under way at once
  static_assert(kHeads % kMathWarps == 0, "whole tiles of heads");
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int lane = shell.lane(), m = tile.m, m_total = shell.scalar(Slots::kM);
    const int head = tile.n * kMathWarps + shell.math_warp();
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    const int position = shell.template pointer<int>(Slots::kPositions)[m];
    const int gate_splits = shell.scalar(Slots::kGateSplits);
    const float* gates = shell.template pointer<float>(Slots::kGatePartial) + m * kHeads + head;
    const int gate_stride = m_total * kHeads;
    const float low = lane < gate_splits ? gates[lane * gate_stride] : 0.0f;
    const float high = lane + 32 < gate_splits ? gates[(lane + 32) * gate_stride] : 0.0f;
    const int64_t item = static_cast<int64_t>(m) * kHeads + head;
    row::SplitSum<float4, 1, kInFlight> partial(
        shell.template pointer<float>(Slots::kPartial) + item * kWidth + lane * 4, m_total * kHeads * kWidth,
        shell.scalar(Slots::kSplits));
    row::Rotation<kNeox> rotation;
    rotation.load(shell.template pointer<float>(Slots::kCosSin), position, lane);
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    const float gate = sum_gate(low, high, gate_splits);  // while the table's row is on its way
    float4 sum[1];
    partial.add(sum);
    float4 v = row::round_to_bf16(rotation.turn(row::round_to_bf16(sum[0]), lane));
    if constexpr (kHadamard) v = row::hadamard(v, lane);
    const float scale = numerics::pow2_scale(numerics::warp_max(row::largest(v)));
    *reinterpret_cast<uint32_t*>(shell.template pointer<uint8_t>(Slots::kQuantised) + item * kWidth + lane * 4) =
        row::quantise(v, scale);
    if (lane == 0)
      shell.template pointer<float>(Slots::kHeadWeights)[item] =
          __fmul_rn(__fmul_rn(gate, scale), __uint_as_float(shell.scalar(Slots::kFactor)));
    shell.stored();
  }

 private:
  // Lane i holds split i in `low` and split i + 32 in `high`, zero where there is none.
  static SPANTUNE_DEVICE float sum_gate(float low, float high, int splits) {
    float sum = 0.0f;
#pragma unroll 1
    for (int base = 0; base < splits; base += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, __shfl_sync(~0u, base < 32 ? low : high, (base + i) & 31));
    }
    return sum;
  }
};

}  // namespace spantune

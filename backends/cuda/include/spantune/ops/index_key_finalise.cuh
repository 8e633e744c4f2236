// Finaliser of the indexer key projection: sums the splits, rounds to bf16, LayerNorm, rotation of the first 64 values,
// Hadamard, FP8 with one power-of-two scale, into the page-blocked cache. One warp a token, 8 tokens a tile.
// Template parameters: whether the Hadamard transform is applied, whether pairs are (i, i + 32).
#pragma once

#include "row.cuh"

namespace spantune {

struct IndexKeyFinaliseSlots {
  enum : int { kPartial, kWeight, kBias, kPositions, kSlots, kCosSin, kCache, kSplits, kM, kEps };
};

template <bool kHadamard, bool kNeox>
struct IndexKeyFinalise {
  using Slots = IndexKeyFinaliseSlots;
  static constexpr bool kHasLoaders = false;
  static constexpr int kPages = 0, kBarriers = 0;
  static constexpr int kWidth = 128, kRope = 64, kPageTokens = 64, kPageBytesOfCache = kPageTokens * (kWidth + 4);
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int lane = shell.lane(), m_total = shell.scalar(Slots::kM), m = tile.m * kMathWarps + shell.math_warp();
    const float4 weight = __ldg(reinterpret_cast<const float4*>(shell.template pointer<float>(Slots::kWeight)) + lane);
    const float4 bias = __ldg(reinterpret_cast<const float4*>(shell.template pointer<float>(Slots::kBias)) + lane);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    if (m < m_total) finalise(shell, m, m_total, lane, weight, bias);
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) {
      shell.announce(Point::kInputsRead);
      shell.announce(Point::kStored);
    }
  }

 private:
  template <class Shell>
  static SPANTUNE_DEVICE void finalise(const Shell& shell, int m, int m_total, int lane, float4 weight, float4 bias) {
    const int64_t slot = shell.template pointer<int64_t>(Slots::kSlots)[m];
    const int position = shell.template pointer<int>(Slots::kPositions)[m];
    const float* first = shell.template pointer<float>(Slots::kPartial) + static_cast<int64_t>(m) * kWidth + lane * 4;
    float4 v = row::sum_splits<12>(first, static_cast<int64_t>(m_total) * kWidth, shell.scalar(Slots::kSplits));
    v = normalise(shell, row::round_to_bf16(v), weight, bias);
    const float* table = shell.template pointer<float>(Slots::kCosSin) + static_cast<int64_t>(position) * kRope;
    v = row::round_to_bf16(row::rotate_head<kNeox>(v, table, lane));
    if constexpr (kHadamard) v = row::hadamard(v, lane);
    const float scale = numerics::pow2_scale(numerics::warp_max(row::largest(v)));
    if (slot < 0) return;
    const int64_t page = slot / kPageTokens, place = slot % kPageTokens;
    uint8_t* base = shell.template pointer<uint8_t>(Slots::kCache) + page * kPageBytesOfCache;
    *reinterpret_cast<uint32_t*>(base + place * kWidth + lane * 4) = row::quantise(v, scale);
    if (lane == 0) *reinterpret_cast<float*>(base + kPageTokens * kWidth + place * 4) = scale;
  }

  // Two passes over the 128 values: mean, then variance about it.
  template <class Shell>
  static SPANTUNE_DEVICE float4 normalise(const Shell& shell, float4 v, float4 weight, float4 bias) {
    const float sum = __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w));
    const float mean = __fmul_rn(numerics::warp_sum(sum), 1.0f / kWidth);
    const float4 d = make_float4(__fsub_rn(v.x, mean), __fsub_rn(v.y, mean), __fsub_rn(v.z, mean), __fsub_rn(v.w, mean));
    const float squares = __fmaf_rn(d.w, d.w, __fmaf_rn(d.z, d.z, __fmaf_rn(d.y, d.y, __fmul_rn(d.x, d.x))));
    const float variance = __fmul_rn(numerics::warp_sum(squares), 1.0f / kWidth);
    const float factor = __frsqrt_rn(__fadd_rn(variance, __uint_as_float(shell.scalar(Slots::kEps))));
    const auto one = [&](float x, float w, float b) { return __fmaf_rn(__fmul_rn(x, factor), w, b); };
    return row::round_to_bf16(make_float4(one(d.x, weight.x, bias.x), one(d.y, weight.y, bias.y),
                                          one(d.z, weight.z, bias.z), one(d.w, weight.w, bias.w)));
  }
};

}  // namespace spantune

// Finaliser of the indexer key projection: sums the splits, rounds to bf16, LayerNorm, rotation of the first 64 values,
// Hadamard, FP8 with one power-of-two scale, into the page-blocked cache. Two tokens a tile: each thread sums one
// element, so that the loads of many splits are under way at once, then one warp holds a token.
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
  static constexpr int kWidth = 128, kPageTokens = 64, kPageBytesOfCache = kPageTokens * (kWidth + 4);
  static constexpr int kTokens = kMathThreads / kWidth;  // of a tile
  static constexpr int kInFlight = 24;                   // splits whose loads are under way at once
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int warp = shell.math_warp(), lane = shell.lane(), m_total = shell.scalar(Slots::kM);
    const int m = tile.m * kTokens + warp;  // of the token that this warp finishes
    const bool finishes = warp < kTokens && m < m_total;
    float4 weight{}, bias{};
    if (finishes) {
      weight = __ldg(reinterpret_cast<const float4*>(shell.template pointer<float>(Slots::kWeight)) + lane);
      bias = __ldg(reinterpret_cast<const float4*>(shell.template pointer<float>(Slots::kBias)) + lane);
    }
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    int64_t slot = 0;
    int position = 0;
    if (finishes) {
      slot = shell.template pointer<int64_t>(Slots::kSlots)[m];
      position = shell.template pointer<int>(Slots::kPositions)[m];
    }
    row::Rotation<kNeox> rotation{};
    sum_element(shell, tile, m_total, [&] {
      if (finishes) rotation.load(shell.template pointer<float>(Slots::kCosSin), position, lane);
    });
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    if (finishes) finish(shell, warp, lane, slot, weight, bias, rotation);
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kStored);
  }

 private:
  // Leaves the sum of this thread's element in scratch memory, [token, 128].
  template <class Shell, class Meanwhile>
  static SPANTUNE_DEVICE void sum_element(const Shell& shell, const Tile& tile, int m_total,
                                          const Meanwhile& meanwhile) {
    const int element = shell.math_thread(), m = tile.m * kTokens + element / kWidth;
    if (m >= m_total) return;
    const float* first =
        shell.template pointer<float>(Slots::kPartial) + static_cast<int64_t>(m) * kWidth + element % kWidth;
    const int64_t stride = static_cast<int64_t>(m_total) * kWidth;
    float sum[1];
    row::sum_splits<kInFlight>(sum, first, stride, shell.scalar(Slots::kSplits), meanwhile);
    access::store_shared(shell.scratch() + element * 4, sum[0]);
  }

  template <class Shell>
  static SPANTUNE_DEVICE void finish(const Shell& shell, int token, int lane, int64_t slot, float4 weight, float4 bias,
                                     const row::Rotation<kNeox>& rotation) {
    const uint4 bits = access::load_shared_16(shell.scratch() + (token * kWidth + lane * 4) * 4);
    float4 v = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                           __uint_as_float(bits.w));
    v = normalise(shell, row::round_to_bf16(v), weight, bias);
    v = row::round_to_bf16(rotation.turn(v, lane));
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

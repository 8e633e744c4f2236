// Finaliser of the indexer key projection: sums the splits, rounds to bf16, LayerNorm, rotation of the first 64 values,
// Hadamard, FP8 with one power-of-two scale, into the page-blocked cache. One token a tile: four warps sum
// one element a thread, so that the loads of many splits are under way at once; a fifth fetches the rest meanwhile (it
// waits twice for memory, for the position and for the position's row of the table) and then holds the token.
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
  static constexpr int kInFlight = 24;  // splits whose loads are under way at once
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int thread = shell.math_thread(), lane = shell.lane(), m = tile.m;
    const bool sums = thread < kWidth, finishes = shell.math_warp() == kWidth / kWarpLanes;
    float4 weight{}, bias{};
    if (finishes) {
      access::load_constant(weight, shell.template pointer<float>(Slots::kWeight) + lane * 4);
      access::load_constant(bias, shell.template pointer<float>(Slots::kBias) + lane * 4);
    }
    if (thread == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    int64_t slot = -1;
    row::Rotation<kNeox> rotation{};
    if (sums) {
      const float* first = shell.template pointer<float>(Slots::kPartial) + static_cast<int64_t>(m) * kWidth + thread;
      float sum[1];
      row::SplitSum<float, 1, kInFlight>(first, shell.scalar(Slots::kM) * kWidth, shell.scalar(Slots::kSplits)).add(sum);
      access::store_shared(shell.scratch() + thread * 4, sum[0]);
    } else if (finishes) {
      const int position = shell.template pointer<int>(Slots::kPositions)[m];
      slot = shell.template pointer<int64_t>(Slots::kSlots)[m];
      rotation.load(shell.template pointer<float>(Slots::kCosSin), position, lane);
    }
    shell.sync_math();
    if (thread == 0) shell.announce(Point::kInputsRead);
    if (finishes) finish(shell, lane, slot, weight, bias, rotation);
    shell.stored();
  }

 private:
  template <class Shell>
  static SPANTUNE_DEVICE void finish(const Shell& shell, int lane, int64_t slot, float4 weight, float4 bias,
                                     const row::Rotation<kNeox>& rotation) {
    const uint4 bits = access::load_shared_16(shell.scratch() + lane * 16);
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

// Finaliser of the fused q_a | kv_a | k_pe projection, per token: sums the splits, rounds to bf16, then
//   tile n = 0: RMSNorm of the q part, FP8 per 128 values with power-of-two scales, MN-major;
//   tile n = 1: RMSNorm of the latent, FP8 per 128 values with fp32 scales, and rotation of k_pe, into the cache.
// Template parameter: values of the q part.
#pragma once

#include "row.cuh"

namespace spantune {

struct QkvFinaliseSlots {
  enum : int { kPartial, kQWeight, kKvWeight, kPositions, kSlots, kCosSin, kQ, kQScale, kCache, kSplits, kM, kScaleStride, kEps };
};

template <int kQ>
struct QkvFinalise {
  using Slots = QkvFinaliseSlots;
  static constexpr bool kHasLoaders = false;
  static constexpr int kPages = 0, kBarriers = 0;
  static constexpr int kLatent = 512, kRope = 64, kColumns = kQ + kLatent + kRope, kCacheBytes = 656;
  static constexpr int kQInFlight = 4, kLatentInFlight = 8;  // splits whose loads are under way at once
  static_assert(kQ % 128 == 0 && kQ <= kMathThreads * 8, "8 values a thread");
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    if (tile.n == 0) {
      query(shell, tile.m);
    } else {
      latent(shell, tile.m);
    }
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kStored);
  }

 private:
  // Projected values `at` to `at` + 4 kPieces - 1 of a token.
  template <int kInFlight, int kPieces, class Shell, class Meanwhile>
  static SPANTUNE_DEVICE void columns(const Shell& shell, int m, int at, float4 (&v)[kPieces],
                                      const Meanwhile& meanwhile) {
    const int64_t stride = static_cast<int64_t>(shell.scalar(Slots::kM)) * kColumns;
    const float* first = shell.template pointer<float>(Slots::kPartial) + static_cast<int64_t>(m) * kColumns + at;
    row::sum_splits<kInFlight>(v, first, stride, shell.scalar(Slots::kSplits), meanwhile);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) v[j] = row::round_to_bf16(v[j]);
  }
  static SPANTUNE_DEVICE float add_squares(float sum, float4 v) {
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
  }
  static SPANTUNE_DEVICE float4 load_weight(const uint16_t* address) {
    const uint2 pairs = __ldg(reinterpret_cast<const uint2*>(address));
    return make_float4(numerics::low_bf16(pairs.x), numerics::high_bf16(pairs.x), numerics::low_bf16(pairs.y),
                       numerics::high_bf16(pairs.y));
  }
  static SPANTUNE_DEVICE float4 normalise(float4 v, float factor, float4 w) {
    const auto one = [&](float x, float weight) { return __fmul_rn(__fmul_rn(x, factor), weight); };
    return row::round_to_bf16(make_float4(one(v.x, w.x), one(v.y, w.y), one(v.z, w.z), one(v.w, w.w)));
  }
  template <class Shell>
  static SPANTUNE_DEVICE float factor_of(const Shell& shell, float squares, int values) {
    const float mean = __fdiv_rn(row::group_sum(shell, squares, 0), static_cast<float>(values));
    return __frsqrt_rn(__fadd_rn(mean, __uint_as_float(shell.scalar(Slots::kEps))));
  }

  template <class Shell>
  static SPANTUNE_DEVICE void query(const Shell& shell, int m) {
    const int at = shell.math_thread() * 8;
    const bool holds = at < kQ;
    float4 w0{}, w1{}, v[2]{};
    if (holds) {
      w0 = load_weight(shell.template pointer<uint16_t>(Slots::kQWeight) + at);
      w1 = load_weight(shell.template pointer<uint16_t>(Slots::kQWeight) + at + 4);
    }
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    if (holds) columns<kQInFlight>(shell, m, at, v, [] {});
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    const float factor = factor_of(shell, add_squares(add_squares(0.0f, v[0]), v[1]), kQ);
    if (!holds) return;
    v[0] = normalise(v[0], factor, w0);
    v[1] = normalise(v[1], factor, w1);
    float largest = fmaxf(row::largest(v[0]), row::largest(v[1]));
    const uint32_t half = 0xffffu << (shell.lane() & 16);  // 16 lanes hold one 128-group
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) largest = fmaxf(largest, __shfl_xor_sync(half, largest, offset));
    const float scale = numerics::pow2_scale(largest);
    const uint2 bytes = make_uint2(row::quantise(v[0], scale), row::quantise(v[1], scale));
    *reinterpret_cast<uint2*>(shell.template pointer<uint8_t>(Slots::kQ) + static_cast<int64_t>(m) * kQ + at) = bytes;
    if ((shell.lane() & 15) == 0)
      shell.template pointer<float>(Slots::kQScale)[static_cast<int64_t>(at / 128) * shell.scalar(Slots::kScaleStride) + m] = scale;
  }

  // Warps 0 to 3 hold one 128-group of the latent each, warp 4 the rotary key.
  template <class Shell>
  static SPANTUNE_DEVICE void latent(const Shell& shell, int m) {
    const int warp = shell.math_warp(), lane = shell.lane(), at = warp * 128 + lane * 4;
    const bool holds = warp < 4, rotates = warp == 4 && lane < 16;
    float4 w{}, v[1]{};
    row::Rotation<false> rotation{};
    if (holds) w = load_weight(shell.template pointer<uint16_t>(Slots::kKvWeight) + at);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    const int64_t slot = shell.template pointer<int64_t>(Slots::kSlots)[m];
    const int position = shell.template pointer<int>(Slots::kPositions)[m];
    if (holds || rotates) {
      columns<kLatentInFlight>(shell, m, kQ + at, v, [&] {
        if (rotates) rotation.load(shell.template pointer<float>(Slots::kCosSin), position, lane);
      });
    }
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    const float factor = factor_of(shell, holds ? add_squares(0.0f, v[0]) : 0.0f, kLatent);
    uint8_t* token = shell.template pointer<uint8_t>(Slots::kCache) + slot * kCacheBytes;
    if (holds) {
      const float4 n = normalise(v[0], factor, w);
      const float scale = fmaxf(__fdiv_rn(numerics::warp_max(row::largest(n)), 448.0f), 1.17549435e-38f);
      const uint32_t bytes = numerics::floats_to_e4m3x4(__fdiv_rn(n.x, scale), __fdiv_rn(n.y, scale),
                                                        __fdiv_rn(n.z, scale), __fdiv_rn(n.w, scale));
      if (slot >= 0) {
        *reinterpret_cast<uint32_t*>(token + at) = bytes;
        if (lane == 0) *reinterpret_cast<float*>(token + kLatent + warp * 4) = scale;
      }
    } else if (rotates && slot >= 0) {
      const float4 turned = rotation.turn(v[0], lane);
      *reinterpret_cast<uint2*>(token + kLatent + 16 + lane * 8) =
          make_uint2(numerics::floats_to_bf16x2(turned.x, turned.y), numerics::floats_to_bf16x2(turned.z, turned.w));
    }
  }
};

}  // namespace spantune

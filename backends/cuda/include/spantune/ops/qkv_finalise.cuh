// Finaliser of the fused q_a | kv_a | k_pe projection, per token: sums the splits, rounds to bf16, then
//   tile n = 0: RMSNorm of the q part, FP8 per 128 values with power-of-two scales, MN-major;
//   tile n = 1: RMSNorm of the latent, FP8 per 128 values with fp32 scales, into the cache;
//   tile n = 2: rotation of k_pe, into the cache. It waits twice for memory, for the position and for the position's
//               row of the table, and a barrier of the latent would wait with it.
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
  static_assert(kQ % 128 == 0 && kQ <= kMathThreads * 8, "8 values a thread");
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    if (tile.n == 0) {
      query(shell, tile.m);
    } else if (tile.n == 1) {
      latent(shell, tile.m);
    } else {
      rotary_key(shell, tile.m);
    }
    shell.stored();
  }

 private:
  // Projected values `at` to `at` + 4 kPieces - 1 of a token, on their way.
  template <int kPieces, class Shell>
  static SPANTUNE_DEVICE row::SplitSum<float4, kPieces, Shell::kSplitsInFlight> columns(const Shell& shell, int m, int at) {
    return {shell.template pointer<float>(Slots::kPartial) + static_cast<int64_t>(m) * kColumns + at,
            shell.scalar(Slots::kM) * kColumns, shell.scalar(Slots::kSplits)};
  }
  static SPANTUNE_DEVICE float add_squares(float sum, float4 v) {
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
  }
  static SPANTUNE_DEVICE float4 normalise(float4 v, float factor, uint32_t low, uint32_t high) {
    const float4 w = row::unpack_bf16(low, high);
    const auto one = [&](float x, float weight) { return __fmul_rn(__fmul_rn(x, factor), weight); };
    return row::round_to_bf16(make_float4(one(v.x, w.x), one(v.y, w.y), one(v.z, w.z), one(v.w, w.w)));
  }
  template <int kValues, class Shell>
  static SPANTUNE_DEVICE float factor_of(const Shell& shell, float squares) {
    const float mean = row::mean_of<kValues>(row::group_sum(shell, squares, 0));
    return __frsqrt_rn(__fadd_rn(mean, __uint_as_float(shell.scalar(Slots::kEps))));
  }

  template <class Shell>
  static SPANTUNE_DEVICE void query(const Shell& shell, int m) {
    const int at = shell.math_thread() * 8;
    const bool holds = at < kQ;
    uint32_t w[4]{};
    float4 v[2]{};
    if (holds) access::load_constant(w, shell.template pointer<uint16_t>(Slots::kQWeight) + at);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    if (holds) {
      columns<2>(shell, m, at).add(v);
      v[0] = row::round_to_bf16(v[0]);
      v[1] = row::round_to_bf16(v[1]);
    }
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    const float factor = factor_of<kQ>(shell, add_squares(add_squares(0.0f, v[0]), v[1]));
    v[0] = normalise(v[0], factor, w[0], w[1]);
    v[1] = normalise(v[1], factor, w[2], w[3]);
    // 16 lanes hold one 128-group.
    const float scale = numerics::pow2_scale(row::half_warp_max(fmaxf(row::largest(v[0]), row::largest(v[1]))));
    if (!holds) return;
    const uint2 bytes = make_uint2(row::quantise(v[0], scale), row::quantise(v[1], scale));
    *reinterpret_cast<uint2*>(shell.template pointer<uint8_t>(Slots::kQ) + static_cast<int64_t>(m) * kQ + at) = bytes;
    if ((shell.lane() & 15) == 0)
      shell.template pointer<float>(Slots::kQScale)[static_cast<int64_t>(at / 128) * shell.scalar(Slots::kScaleStride) + m] = scale;
  }

  // Warps 0 to 3 hold one 128-group each.
  template <class Shell>
  static SPANTUNE_DEVICE void latent(const Shell& shell, int m) {
    const int warp = shell.math_warp(), lane = shell.lane(), at = shell.math_thread() * 4;
    const bool holds = at < kLatent;
    uint32_t w[2]{};
    float4 v[1]{};
    int64_t slot = -1;
    if (holds) access::load_constant(w, shell.template pointer<uint16_t>(Slots::kKvWeight) + at);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    if (holds) {
      slot = shell.template pointer<int64_t>(Slots::kSlots)[m];
      columns<1>(shell, m, kQ + at).add(v);
      v[0] = row::round_to_bf16(v[0]);
    }
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    const float factor = factor_of<kLatent>(shell, holds ? add_squares(0.0f, v[0]) : 0.0f);
    if (!holds) return;
    v[0] = normalise(v[0], factor, w[0], w[1]);
    const float scale = fmaxf(__fdiv_rn(numerics::warp_max(row::largest(v[0])), 448.0f), 1.17549435e-38f);
    const uint32_t bytes = divided(v[0], scale);
    if (slot < 0) return;
    uint8_t* token = shell.template pointer<uint8_t>(Slots::kCache) + slot * kCacheBytes;
    *reinterpret_cast<uint32_t*>(token + at) = bytes;
    if (lane == 0) *reinterpret_cast<float*>(token + kLatent + warp * 4) = scale;
  }
  // FP8 of four values under a scale that is no power of two.
  static SPANTUNE_DEVICE uint32_t divided(float4 v, float scale) {
    const numerics::Divisor divisor(scale);
    if (divisor.serves())
      return numerics::floats_to_e4m3x4(divisor.quotient(v.x), divisor.quotient(v.y), divisor.quotient(v.z),
                                        divisor.quotient(v.w));
    return numerics::floats_to_e4m3x4(__fdiv_rn(v.x, scale), __fdiv_rn(v.y, scale), __fdiv_rn(v.z, scale),
                                      __fdiv_rn(v.w, scale));
  }

  // One half-warp holds the key; its warp runs whole.
  template <class Shell>
  static SPANTUNE_DEVICE void rotary_key(const Shell& shell, int m) {
    const int lane = shell.lane();
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    if (shell.math_warp() == 0) {
      const int position = shell.template pointer<int>(Slots::kPositions)[m];
      const int64_t slot = shell.template pointer<int64_t>(Slots::kSlots)[m];
      auto partial = columns<1>(shell, m, kQ + kLatent + (lane & 15) * 4);
      row::Rotation<false> rotation;
      rotation.load(shell.template pointer<float>(Slots::kCosSin), position, lane);
      if (lane == 0) shell.announce(Point::kInputsRead);
      float4 v[1];
      partial.add(v);
      const float4 turned = rotation.turn(row::round_to_bf16(v[0]), lane);
      if (lane < 16 && slot >= 0)
        *reinterpret_cast<uint2*>(shell.template pointer<uint8_t>(Slots::kCache) + slot * kCacheBytes + kLatent + 16 + lane * 8) =
            make_uint2(numerics::floats_to_bf16x2(turned.x, turned.y), numerics::floats_to_bf16x2(turned.z, turned.w));
    }
  }
};

}  // namespace spantune

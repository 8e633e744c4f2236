// out = max(x, 0) * w + b, one fused operation an element. Template parameter: elements of a tile, 256 or 1024.
#pragma once

#include "../access.cuh"
#include "../ptx.cuh"

namespace spantune {

struct ScaleBiasReluSlots {
  enum : int { kX, kWeight, kBias, kOut };
};

template <int kElements>
struct ScaleBiasRelu {
  using Slots = ScaleBiasReluSlots;
  static constexpr bool kHasLoaders = false;
  static constexpr int kPages = 0, kBarriers = 0;
  static constexpr int kWidth = kElements / kMathThreads;
  static_assert(kWidth == 1 || kWidth == 4, "one value or one 16-byte piece a thread");
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int at = tile.n * kElements + shell.math_thread() * kWidth;
    float w[kWidth], b[kWidth], x[kWidth];
    load<kWidth>(w, shell.template pointer<float>(Slots::kWeight) + at);
    load<kWidth>(b, shell.template pointer<float>(Slots::kBias) + at);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    load<kWidth>(x, shell.template pointer<float>(Slots::kX) + at);
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    float* out = shell.template pointer<float>(Slots::kOut) + at;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = __fmaf_rn(fmaxf(x[i], 0.0f), w[i], b[i]);
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(out) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *out = x[0];
    }
    shell.stored();
  }

 private:
  // Volatile, so that each load stays on its side of the acquire.
  template <int kCount>
  static SPANTUNE_DEVICE void load(float (&v)[kCount], const float* address) {
    if constexpr (kCount == 4) {
      const float4 piece = access::load_mutable_float4(address);
      v[0] = piece.x;
      v[1] = piece.y;
      v[2] = piece.z;
      v[3] = piece.w;
    } else {
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(v[0]) : "l"(address) : "memory");
    }
  }
};

}  // namespace spantune

// r = bf16(hidden + residual); n = bf16(r * rsqrt(mean(r^2) + eps) * w); FP8 of n per 128 values with a power-of-two
// scale, MN-major. One token a tile. Template parameter: values of a row.
#pragma once

#include "row.cuh"

namespace spantune {

struct AddRmsnormQuantSlots {
  enum : int { kHidden, kResidual, kWeight, kResidualOut, kNormOut, kQuantised, kScale, kScaleStride, kEps };
};

template <int kHiddenSize>
struct AddRmsnormQuant {
  using Slots = AddRmsnormQuantSlots;
  static constexpr bool kHasLoaders = false;
  static constexpr int kPages = 0, kBarriers = 0;
  static constexpr int kStep = kMathThreads * 8;  // 8 neighbouring values a thread and step
  static constexpr int kSteps = (kHiddenSize + kStep - 1) / kStep;
  static_assert(kHiddenSize % 128 == 0, "whole scale groups");
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int first = shell.math_thread() * 8;
    const int64_t row = static_cast<int64_t>(tile.m) * kHiddenSize;
    uint32_t w[kSteps][4], a[kSteps][4], b[kSteps][4];
    each_step(first, [&](int i, int at) { access::load_constant(w[i], shell.template pointer<uint16_t>(Slots::kWeight) + at); });
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    each_step(first, [&](int i, int at) {
      access::load_mutable(a[i], shell.template pointer<uint16_t>(Slots::kHidden) + row + at);
      access::load_mutable(b[i], shell.template pointer<uint16_t>(Slots::kResidual) + row + at);
    });
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);

    float squares = 0.0f;
    each_step(first, [&](int i, int at) {
      uint4 out;
      uint32_t* words = &out.x;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = numerics::floats_to_bf16x2(__fadd_rn(numerics::low_bf16(a[i][j]), numerics::low_bf16(b[i][j])),
                                              __fadd_rn(numerics::high_bf16(a[i][j]), numerics::high_bf16(b[i][j])));
        a[i][j] = words[j];
        const float low = numerics::low_bf16(words[j]), high = numerics::high_bf16(words[j]);
        squares = __fmaf_rn(high, high, __fmaf_rn(low, low, squares));
      }
      *reinterpret_cast<uint4*>(shell.template pointer<uint16_t>(Slots::kResidualOut) + row + at) = out;
    });
    const float mean = __fdiv_rn(row::group_sum(shell, squares, 0), static_cast<float>(kHiddenSize));
    const float factor = __frsqrt_rn(__fadd_rn(mean, __uint_as_float(shell.scalar(Slots::kEps))));
    each_step(first, [&](int i, int at) { normalise(shell, tile.m, row, at, a[i], w[i], factor); });
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kStored);
  }

 private:
  // Calls f(step, first value) for the steps that lie in the row. A 128-group is 16 neighbouring lanes of one step, and
  // a row ends at a group's end, so whole half-warps take part or do not.
  template <class Function>
  static SPANTUNE_DEVICE void each_step(int first, const Function& f) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (kHiddenSize % kStep == 0 || first + i * kStep < kHiddenSize) f(i, first + i * kStep);
  }

  template <class Shell>
  static SPANTUNE_DEVICE void normalise(const Shell& shell, int m, int64_t row, int at, const uint32_t (&r)[4],
                                        const uint32_t (&w)[4], float factor) {
    float n[8];
    uint4 out;
    uint32_t* words = &out.x;
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = __fmul_rn(__fmul_rn(numerics::low_bf16(r[j]), factor), numerics::low_bf16(w[j]));
      const float high = __fmul_rn(__fmul_rn(numerics::high_bf16(r[j]), factor), numerics::high_bf16(w[j]));
      words[j] = numerics::floats_to_bf16x2(low, high);
      n[2 * j] = numerics::low_bf16(words[j]);
      n[2 * j + 1] = numerics::high_bf16(words[j]);
      largest = fmaxf(largest, fmaxf(fabsf(n[2 * j]), fabsf(n[2 * j + 1])));
    }
    *reinterpret_cast<uint4*>(shell.template pointer<uint16_t>(Slots::kNormOut) + row + at) = out;
    const uint32_t half = 0xffffu << (shell.lane() & 16);
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) largest = fmaxf(largest, __shfl_xor_sync(half, largest, offset));
    const float scale = numerics::pow2_scale(largest);
    const uint2 bytes = make_uint2(row::quantise(make_float4(n[0], n[1], n[2], n[3]), scale),
                                   row::quantise(make_float4(n[4], n[5], n[6], n[7]), scale));
    *reinterpret_cast<uint2*>(shell.template pointer<uint8_t>(Slots::kQuantised) + row + at) = bytes;
    if ((shell.lane() & 15) == 0)
      shell.template pointer<float>(Slots::kScale)[static_cast<int64_t>(at / 128) * shell.scalar(Slots::kScaleStride) + m] = scale;
  }
};

}  // namespace spantune

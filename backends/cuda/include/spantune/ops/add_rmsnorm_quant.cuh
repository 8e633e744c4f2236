// r = bf16(hidden + residual); n = bf16(r * rsqrt(mean(r^2) + eps) * w); FP8 of n per 128 values with a power-of-two
// scale, MN-major. A tile is 2048 values of a token: it reads the whole row for the mean and writes its own part, for
// reading twice is faster than one CTA's way through the arithmetic and stores of a row.
// Template parameters: values of a row; whether `hidden` is split-K partials, whose sum over splits, in index order, is
// rounded to bf16 first.
#pragma once

#include "row.cuh"

namespace spantune {

struct AddRmsnormQuantSlots {
  enum : int { kHidden, kResidual, kWeight, kResidualOut, kNormOut, kQuantised, kScale, kScaleStride, kEps, kSplits, kM };
};

template <int kHiddenSize, bool kPartials>
struct AddRmsnormQuant {
  using Slots = AddRmsnormQuantSlots;
  static constexpr bool kHasLoaders = false;
  static constexpr int kPages = 0, kBarriers = 0;
  static constexpr int kStep = kMathThreads * 8;  // 8 neighbouring values a thread and step; a tile's width
  static constexpr int kSteps = (kHiddenSize + kStep - 1) / kStep;
  static_assert(kHiddenSize % 128 == 0, "whole scale groups");
  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int first = shell.math_thread() * 8, own = tile.n * kStep + first;
    const bool holds = own < kHiddenSize;
    const int64_t row = static_cast<int64_t>(tile.m) * kHiddenSize;
    uint32_t w[4]{}, a[kSteps][4], b[kSteps][4], mine[4]{};
    if (holds) access::load_constant(w, shell.template pointer<uint16_t>(Slots::kWeight) + own);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();
    const uint16_t* residual = shell.template pointer<uint16_t>(Slots::kResidual) + row + first;
    each_step(first, [&](int i) { access::load_mutable(b[i], residual + i * kStep); });
    if constexpr (kPartials) {
      const float* partial = shell.template pointer<float>(Slots::kHidden) + row + first;
      each_step(first, [&](int i) { sum_splits(a[i], shell, partial + i * kStep); });
    } else {
      const uint16_t* hidden = shell.template pointer<uint16_t>(Slots::kHidden) + row + first;
      each_step(first, [&](int i) { access::load_mutable(a[i], hidden + i * kStep); });
    }
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);

    float squares = 0.0f;
    each_step(first, [&](int i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t sum =
            numerics::floats_to_bf16x2(__fadd_rn(numerics::low_bf16(a[i][j]), numerics::low_bf16(b[i][j])),
                                       __fadd_rn(numerics::high_bf16(a[i][j]), numerics::high_bf16(b[i][j])));
        const float low = numerics::low_bf16(sum), high = numerics::high_bf16(sum);
        squares = __fmaf_rn(high, high, __fmaf_rn(low, low, squares));
        if (i == tile.n) mine[j] = sum;
      }
    });
    if (holds) store(shell.template pointer<uint16_t>(Slots::kResidualOut) + row + own, mine);
    const float mean = row::mean_of<kHiddenSize>(row::group_sum(shell, squares, 0));
    const float factor = __frsqrt_rn(__fadd_rn(mean, __uint_as_float(shell.scalar(Slots::kEps))));
    normalise(shell, tile.m, row, own, holds, mine, w, factor);
    shell.stored();
  }

 private:
  // Calls f(step) for the steps whose values of this thread lie in the row. A 128-group is 16 neighbouring lanes of one
  // step, and a row ends at a group's end.
  template <class Function>
  static SPANTUNE_DEVICE void each_step(int first, const Function& f) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (kHiddenSize % kStep == 0 || first + i * kStep < kHiddenSize) f(i);
  }

  // Eight neighbouring values from their partials.
  template <class Shell>
  static SPANTUNE_DEVICE void sum_splits(uint32_t (&v)[4], const Shell& shell, const float* first) {
    float4 sum[2];
    const row::SplitSum<float4, 2, 4> partials(first, shell.scalar(Slots::kM) * kHiddenSize, shell.scalar(Slots::kSplits));
    partials.add(sum);
    v[0] = numerics::floats_to_bf16x2(sum[0].x, sum[0].y);
    v[1] = numerics::floats_to_bf16x2(sum[0].z, sum[0].w);
    v[2] = numerics::floats_to_bf16x2(sum[1].x, sum[1].y);
    v[3] = numerics::floats_to_bf16x2(sum[1].z, sum[1].w);
  }

  static SPANTUNE_DEVICE void store(uint16_t* address, const uint32_t (&v)[4]) {
    *reinterpret_cast<uint4*>(address) = make_uint4(v[0], v[1], v[2], v[3]);
  }

  // Values `at` to `at` + 7 of the row; a thread past its end holds zeros and stores nothing.
  template <class Shell>
  static SPANTUNE_DEVICE void normalise(const Shell& shell, int m, int64_t row, int at, bool holds,
                                        const uint32_t (&r)[4], const uint32_t (&w)[4], float factor) {
    float n[8];
    uint32_t words[4];
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
    const float scale = numerics::pow2_scale(row::half_warp_max(largest));
    if (!holds) return;
    store(shell.template pointer<uint16_t>(Slots::kNormOut) + row + at, words);
    const uint2 bytes = make_uint2(row::quantise(make_float4(n[0], n[1], n[2], n[3]), scale),
                                   row::quantise(make_float4(n[4], n[5], n[6], n[7]), scale));
    *reinterpret_cast<uint2*>(shell.template pointer<uint8_t>(Slots::kQuantised) + row + at) = bytes;
    if ((shell.lane() & 15) == 0)
      shell.template pointer<float>(Slots::kScale)[static_cast<int64_t>(at / 128) * shell.scalar(Slots::kScaleStride) + m] = scale;
  }
};

}  // namespace spantune

// What the row ops share: sums of split-K partials, rotation and Hadamard of a 128-value head that one warp holds.
#pragma once

#include "../access.cuh"
#include "../numerics.cuh"
#include "../ptx.cuh"

namespace spantune::row {

// Four neighbouring elements of a partial tensor, summed over splits in index order by this thread. `stride` is the
// distance of splits in elements. Up to kInFlight loads are issued before the first addition.
template <int kInFlight>
SPANTUNE_DEVICE float4 sum_splits(const float* first, int64_t stride, int splits) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int base = 0; base < splits; base += kInFlight) {
    float4 part[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + i < splits) part[i] = access::load_mutable_float4(first + (base + i) * stride);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i >= splits) break;
      if (base + i == 0) {
        sum = part[0];
      } else {
        sum = make_float4(__fadd_rn(sum.x, part[i].x), __fadd_rn(sum.y, part[i].y), __fadd_rn(sum.z, part[i].z),
                          __fadd_rn(sum.w, part[i].w));
      }
    }
  }
  return sum;
}

SPANTUNE_DEVICE float4 round_to_bf16(float4 v) {
  using numerics::round_to_bf16;
  return make_float4(round_to_bf16(v.x), round_to_bf16(v.y), round_to_bf16(v.z), round_to_bf16(v.w));
}

// Sum over the math group, warps in ascending order; `scratch` holds kMathWarps floats at `offset`. Every thread calls.
template <class Shell>
SPANTUNE_DEVICE float group_sum(const Shell& shell, float value, int offset) {
  const float mine = numerics::warp_sum(value);
  if (shell.lane() == 0) access::store_shared(shell.scratch() + offset + shell.math_warp() * 4, mine);
  shell.sync_math();
  float sum = access::load_shared(shell.scratch() + offset);
#pragma unroll
  for (int i = 1; i < kMathWarps; ++i) sum = __fadd_rn(sum, access::load_shared(shell.scratch() + offset + i * 4));
  return sum;
}

// Rotates values 0..63 of a 128-value head in fp32; lane l holds values 4 l to 4 l + 3. Pairs are neighbours, or with
// kNeox value i and i + 32. `table` is the position's row of 32 cosines and 32 sines.
template <bool kNeox>
SPANTUNE_DEVICE float4 rotate_head(float4 v, const float* table, int lane) {
  if constexpr (kNeox) {
    const float4 other = make_float4(__shfl_xor_sync(~0u, v.x, 8), __shfl_xor_sync(~0u, v.y, 8),
                                     __shfl_xor_sync(~0u, v.z, 8), __shfl_xor_sync(~0u, v.w, 8));
    if (lane >= 16) return v;
    const int pair = (lane & 7) * 4;
    const float4 c = *reinterpret_cast<const float4*>(table + pair), s = *reinterpret_cast<const float4*>(table + 32 + pair);
    const bool odd = lane & 8;
    const auto turn = [&](float mine, float theirs, float cosine, float sine) {
      const auto r = numerics::rotate(odd ? theirs : mine, odd ? mine : theirs, cosine, sine);
      return odd ? r.odd : r.even;
    };
    return make_float4(turn(v.x, other.x, c.x, s.x), turn(v.y, other.y, c.y, s.y), turn(v.z, other.z, c.z, s.z),
                       turn(v.w, other.w, c.w, s.w));
  } else {
    if (lane >= 16) return v;
    const float2 c = *reinterpret_cast<const float2*>(table + lane * 2), s = *reinterpret_cast<const float2*>(table + 32 + lane * 2);
    const auto a = numerics::rotate(v.x, v.y, c.x, s.x), b = numerics::rotate(v.z, v.w, c.y, s.y);
    return make_float4(a.even, a.odd, b.even, b.odd);
  }
}

// Hadamard-128 in Sylvester order, times 128^-0.5; lane l holds values 4 l to 4 l + 3. XOR butterflies, low bits first.
SPANTUNE_DEVICE float4 hadamard(float4 v, int lane) {
  v = make_float4(__fadd_rn(v.x, v.y), __fsub_rn(v.x, v.y), __fadd_rn(v.z, v.w), __fsub_rn(v.z, v.w));
  v = make_float4(__fadd_rn(v.x, v.z), __fadd_rn(v.y, v.w), __fsub_rn(v.x, v.z), __fsub_rn(v.y, v.w));
#pragma unroll
  for (int bit = 1; bit < 32; bit <<= 1) {
    const bool high = lane & bit;
    const auto step = [&](float mine) {
      const float other = __shfl_xor_sync(~0u, mine, bit);
      return high ? __fsub_rn(other, mine) : __fadd_rn(mine, other);
    };
    v = make_float4(step(v.x), step(v.y), step(v.z), step(v.w));
  }
  constexpr float kScale = 0.08838834764831845f;
  return make_float4(__fmul_rn(v.x, kScale), __fmul_rn(v.y, kScale), __fmul_rn(v.z, kScale), __fmul_rn(v.w, kScale));
}

SPANTUNE_DEVICE float largest(float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// FP8 of four values under a power-of-two scale.
SPANTUNE_DEVICE uint32_t quantise(float4 v, float scale) {
  const float r = numerics::pow2_reciprocal(scale);
  return numerics::floats_to_e4m3x4(__fmul_rn(v.x, r), __fmul_rn(v.y, r), __fmul_rn(v.z, r), __fmul_rn(v.w, r));
}

}  // namespace spantune::row

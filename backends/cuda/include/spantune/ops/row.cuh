// What the row ops share: sums of split-K partials, rotation and Hadamard of a 128-value head that one warp holds.
#pragma once

#include "../access.cuh"
#include "../numerics.cuh"
#include "../ptx.cuh"

namespace spantune::row {

SPANTUNE_DEVICE float4 sum_of(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

SPANTUNE_DEVICE float sum_of(float a, float b) { return __fadd_rn(a, b); }

// Volatile, so that a load is issued where it stands and not where its value is first used.
SPANTUNE_DEVICE void load(float& v, const float* address) {
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
}
SPANTUNE_DEVICE void load(float4& v, const float* address) { v = access::load_mutable_float4(address); }

// Sums over splits of kPieces neighbouring pieces (float or float4) of a partial tensor, in index order by this thread.
// `stride` is the distance of splits in elements. All pieces of up to kInFlight splits are loaded before the first
// addition, and `meanwhile` is called once those loads are under way: the place for loads that wait for an address of
// their own, so that their way to memory overlaps instead of following.
template <int kInFlight, class Piece, int kPieces, class Meanwhile>
SPANTUNE_DEVICE void sum_splits(Piece (&sum)[kPieces], const float* first, int64_t stride, int splits,
                                const Meanwhile& meanwhile) {
  constexpr int kWidth = sizeof(Piece) / sizeof(float);
#pragma unroll 1
  for (int base = 0; base < splits; base += kInFlight) {
    Piece part[kInFlight][kPieces];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i >= splits) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) load(part[i][j], first + j * kWidth);
      first += stride;
    }
    if (base == 0) meanwhile();
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i >= splits) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) sum[j] = base + i == 0 ? part[i][j] : sum_of(sum[j], part[i][j]);
    }
  }
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

// 8 bytes of a table; volatile, so that it is issued where it stands.
SPANTUNE_DEVICE float2 load_pair(const float* address) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address) : "memory");
  return v;
}

// Rotation in fp32 of values 0..63 of a 128-value head; lane l holds values 4 l to 4 l + 3, so lanes from 16 on keep
// theirs. Pairs are neighbours, or with kNeox value i and i + 32.
template <bool kNeox>
struct Rotation {
  static constexpr int kRope = 64;
  float4 cosine, sine;  // with neighbours as pairs, only x and y

  // `table` is [positions, 64]: 32 cosines, then 32 sines. Loads are issued here and first needed by `turn`.
  SPANTUNE_DEVICE void load(const float* table, int position, int lane) {
    if (lane >= 16) return;
    const float* row = table + static_cast<int64_t>(position) * kRope;
    if constexpr (kNeox) {
      cosine = access::load_mutable_float4(row + (lane & 7) * 4);
      sine = access::load_mutable_float4(row + 32 + (lane & 7) * 4);
    } else {
      const float2 c = load_pair(row + lane * 2), s = load_pair(row + 32 + lane * 2);
      cosine = make_float4(c.x, c.y, 0.0f, 0.0f);
      sine = make_float4(s.x, s.y, 0.0f, 0.0f);
    }
  }

  // With kNeox every lane of the warp calls.
  SPANTUNE_DEVICE float4 turn(float4 v, int lane) const {
    if constexpr (kNeox) {
      const float4 other = make_float4(__shfl_xor_sync(~0u, v.x, 8), __shfl_xor_sync(~0u, v.y, 8),
                                       __shfl_xor_sync(~0u, v.z, 8), __shfl_xor_sync(~0u, v.w, 8));
      if (lane >= 16) return v;
      const bool odd = lane & 8;
      const auto one = [&](float mine, float theirs, float c, float s) {
        const auto r = numerics::rotate(odd ? theirs : mine, odd ? mine : theirs, c, s);
        return odd ? r.odd : r.even;
      };
      return make_float4(one(v.x, other.x, cosine.x, sine.x), one(v.y, other.y, cosine.y, sine.y),
                         one(v.z, other.z, cosine.z, sine.z), one(v.w, other.w, cosine.w, sine.w));
    } else {
      if (lane >= 16) return v;
      const auto a = numerics::rotate(v.x, v.y, cosine.x, sine.x), b = numerics::rotate(v.z, v.w, cosine.y, sine.y);
      return make_float4(a.even, a.odd, b.even, b.odd);
    }
  }
};

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

// What the row ops share: sums of split-K partials, rotation and Hadamard of a 128-value head that one warp holds.
#pragma once

#include "../access.cuh"
#include "../numerics.cuh"
#include "../ptx.cuh"

namespace spantune::row {

SPANTUNE_DEVICE float sum_of(float a, float b) { return __fadd_rn(a, b); }
SPANTUNE_DEVICE float4 sum_of(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Sum over splits of kPieces neighbouring pieces (float or float4) of a partial tensor, in index order by this thread.
// The constructor issues the loads of the first kInFlight splits and `add` waits for them, so that an op can put other
// loads under way in between. Every kRest splits past them cost another way to memory.
template <class Piece, int kPieces, int kInFlight>
class SplitSum {
 public:
  // `stride` is the distance of splits in elements.
  SPANTUNE_DEVICE SplitSum(const float* first, int stride, int splits)
      : first_(first), stride_(stride), splits_(splits) {
    load(part_, 0);
  }

  SPANTUNE_DEVICE void add(Piece (&sum)[kPieces]) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) sum[j] = part_[0][j];
    add_from<1>(sum, part_, 0);
#pragma unroll 1
    for (int base = kInFlight; base < splits_; base += kRest) {
      Piece part[kRest][kPieces];
      load(part, base);
      add_from<0>(sum, part, base);
    }
  }

 private:
  static constexpr int kWidth = sizeof(Piece) / sizeof(float), kRest = kInFlight < 4 ? kInFlight : 4;

  template <int kCount>
  SPANTUNE_DEVICE void load(Piece (&part)[kCount][kPieces], int base) const {
    const float* first = first_ + static_cast<int64_t>(base) * stride_;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        access::load_mutable_below(part[i][j], first + static_cast<int64_t>(i) * stride_ + j * kWidth, base + i, splits_);
  }
  template <int kFrom, int kCount>
  SPANTUNE_DEVICE void add_from(Piece (&sum)[kPieces], const Piece (&part)[kCount][kPieces], int base) const {
#pragma unroll
    for (int i = kFrom; i < kCount; ++i)
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        if (base + i < splits_) sum[j] = sum_of(sum[j], part[i][j]);
  }

  const float* const first_;
  const int stride_, splits_;
  Piece part_[kInFlight][kPieces];
};

SPANTUNE_DEVICE float4 unpack_bf16(uint32_t low, uint32_t high) {
  return make_float4(numerics::low_bf16(low), numerics::high_bf16(low), numerics::low_bf16(high), numerics::high_bf16(high));
}

// In pairs: one conversion of two values is as dear as one of one, and runs on a faster unit.
SPANTUNE_DEVICE float4 round_to_bf16(float4 v) {
  return unpack_bf16(numerics::floats_to_bf16x2(v.x, v.y), numerics::floats_to_bf16x2(v.z, v.w));
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

// sum / kCount, rounded to nearest; by the reciprocal where that is exact.
template <int kCount>
SPANTUNE_DEVICE float mean_of(float sum) {
  if constexpr ((kCount & (kCount - 1)) == 0) {
    return __fmul_rn(sum, 1.0f / kCount);
  } else {
    return __fdiv_rn(sum, static_cast<float>(kCount));
  }
}

// Largest over each 16 neighbouring lanes. Every lane of the warp calls: a mask of half a warp would be looked up.
SPANTUNE_DEVICE float half_warp_max(float value) {
#pragma unroll
  for (int offset = 8; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// Cosines (or sines) of the pairs that a lane holds values of: four if it holds halves of them, else two.
template <bool kNeox>
struct PairsOf {
  using Type = float2;
};
template <>
struct PairsOf<true> {
  using Type = float4;
};

// Rotation in fp32 of values 0..63 of a 128-value head; lane l holds values 4 l to 4 l + 3, so lanes from 16 on keep
// theirs. Pairs are neighbours, or with kNeox value i and i + 32.
template <bool kNeox>
class Rotation {
 public:
  // `table` is [positions, 64]: 32 cosines, then 32 sines. The loads are issued here, and `turn` is the first to need
  // them. Lanes from 16 on load what the lower ones do, so that nothing branches.
  SPANTUNE_DEVICE void load(const float* table, int position, int lane) {
    const float* row = table + static_cast<int64_t>(position) * kRope + (kNeox ? (lane & 7) * 4 : (lane & 15) * 2);
    access::load_constant(cosine_, row);
    access::load_constant(sine_, row + kRope / 2);
  }

  // Every lane of the warp calls.
  SPANTUNE_DEVICE float4 turn(float4 v, int lane) const {
    float4 turned;
    if constexpr (kNeox) {
      const float4 other = make_float4(__shfl_xor_sync(~0u, v.x, 8), __shfl_xor_sync(~0u, v.y, 8),
                                       __shfl_xor_sync(~0u, v.z, 8), __shfl_xor_sync(~0u, v.w, 8));
      const bool odd = lane & 8;
      const auto one = [&](float mine, float theirs, float cosine, float sine) {
        const auto r = numerics::rotate(odd ? theirs : mine, odd ? mine : theirs, cosine, sine);
        return odd ? r.odd : r.even;
      };
      turned = make_float4(one(v.x, other.x, cosine_.x, sine_.x), one(v.y, other.y, cosine_.y, sine_.y),
                           one(v.z, other.z, cosine_.z, sine_.z), one(v.w, other.w, cosine_.w, sine_.w));
    } else {
      const auto low = numerics::rotate(v.x, v.y, cosine_.x, sine_.x), high = numerics::rotate(v.z, v.w, cosine_.y, sine_.y);
      turned = make_float4(low.even, low.odd, high.even, high.odd);
    }
    return lane < 16 ? turned : v;
  }

 private:
  static constexpr int kRope = 64;
  typename PairsOf<kNeox>::Type cosine_, sine_;
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

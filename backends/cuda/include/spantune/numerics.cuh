// Rounding, quantisation and rotation, each written once and with explicit rounding: built with -fmad=false, a fused
// operation is where __fmaf_rn stands and nowhere else. Formulas: docs/attention_pre.md, section "Numerics".
#pragma once

#include "base.cuh"

namespace spantune::numerics {

SPANTUNE_DEVICE float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

SPANTUNE_DEVICE uint16_t float_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// Two bf16 in one word; `low` is the element at the lower address.
SPANTUNE_DEVICE uint32_t floats_to_bf16x2(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
SPANTUNE_DEVICE float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
SPANTUNE_DEVICE float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
SPANTUNE_DEVICE float round_to_bf16(float value) { return bf16_to_float(float_to_bf16(value)); }

// Two saturating e4m3 in the low 16 bits; `low` is the element at the lower address.
SPANTUNE_DEVICE uint16_t floats_to_e4m3x2(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
SPANTUNE_DEVICE uint32_t floats_to_e4m3x4(float a, float b, float c, float d) {
  return floats_to_e4m3x2(a, b) | (static_cast<uint32_t>(floats_to_e4m3x2(c, d)) << 16);
}

// Power-of-two activation scale of a 128-group: 2^ceil(log2(max(amax, 1e-4) / 448)), infinite if amax is. 448 is 1.75
// times 2^8, so the exponent is that of amax less 8, and one more where the significand exceeds 1.75: the bits of the
// rounded quotient's, without a division.
SPANTUNE_DEVICE float pow2_scale(float amax) {
  const uint32_t bits = __float_as_uint(fmaxf(amax, 1e-4f));
  const uint32_t scale = ((bits + 0x1fffffu) & 0x7f800000u) - (8u << 23);
  return __uint_as_float(bits < 0x7f800000u ? scale : bits);
}
// Exact reciprocal of a normal power of two.
SPANTUNE_DEVICE float pow2_reciprocal(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

// Quotients by one positive divisor, as e4m3 keeps them: rounded to nearest like __fdiv_rn from 2^-10 on, and below it,
// where e4m3 knows zeros alone, with the right sign. One reciprocal serves all of them, and no quotient branches.
class Divisor {
 public:
  explicit SPANTUNE_DEVICE Divisor(float divisor) : divisor_(divisor) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(divisor));
    reciprocal_ = __fmaf_rn(estimate, __fmaf_rn(-divisor, estimate, 1.0f), estimate);
  }
  // Whether remainders and the reciprocal stay normal.
  SPANTUNE_DEVICE bool serves() const { return divisor_ > 0x1p-80f && divisor_ < 0x1p120f; }
  SPANTUNE_DEVICE float quotient(float value) const {
    const float estimate = __fmul_rn(value, reciprocal_);
    return __fmaf_rn(-__fmaf_rn(estimate, divisor_, -value), reciprocal_, estimate);
  }

 private:
  float divisor_, reciprocal_;
};

struct Pair {
  float even, odd;
};
// Rotary embedding of one pair: (x_e c - x_o s, x_o c + x_e s), one fused operation each.
SPANTUNE_DEVICE Pair rotate(float even, float odd, float cosine, float sine) {
  return {__fmaf_rn(even, cosine, -__fmul_rn(odd, sine)), __fmaf_rn(odd, cosine, __fmul_rn(even, sine))};
}

SPANTUNE_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = __fadd_rn(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}
SPANTUNE_DEVICE float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

}  // namespace spantune::numerics

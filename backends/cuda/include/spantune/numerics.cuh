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

// Power-of-two activation scale of a 128-group: 2^ceil(log2(max(amax, 1e-4) / 448)), from the exponent bits.
SPANTUNE_DEVICE float pow2_scale(float amax) {
  const uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(amax, 1e-4f), 448.0f));
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
  return __uint_as_float(exponent << 23);
}
// Exact reciprocal of a normal power of two.
SPANTUNE_DEVICE float pow2_reciprocal(float scale) { return __uint_as_float((254u << 23) - __float_as_uint(scale)); }

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

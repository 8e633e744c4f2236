// From accumulator fragments to rows of tokens, in memory or in shared memory.
#pragma once

#include "access.cuh"
#include "numerics.cuh"

namespace spantune::fragments {

// Transposes an 8 x 8 tile of 16-bit values over a warp: lane 4 r + c holds values 2 c and 2 c + 1 of row r.
SPANTUNE_DEVICE uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Stores 16 weight rows x 8 tokens as bf16. Value 2 h + i of a lane is row lane / 4 + 8 h of token 2 (lane % 4) + i.
// `out` is where row 0 of token 0 goes; tokens lie `stride` values apart, and `tokens` of them exist. The warp calls.
SPANTUNE_DEVICE void store_tokens(uint16_t* out, int stride, const float* v, int lane, int tokens) {
  const int token = lane >> 2, row = (lane & 3) * 2;
  const uint32_t low = transpose(numerics::floats_to_bf16x2(v[0], v[1]));
  const uint32_t high = transpose(numerics::floats_to_bf16x2(v[2], v[3]));
  if (token < tokens) {
    uint16_t* own = out + static_cast<int64_t>(token) * stride + row;
    access::store_global(own, low);
    access::store_global(own + 8, high);
  }
}

// The same values, transposed into shared memory: 16 rows of a token are 32 bytes there. `address` is, in lanes 0 to 7,
// the place of row 0 of token `lane`, in lanes 8 to 15 that of row 8 of token `lane` - 8; multiples of 16. The warp
// calls.
SPANTUNE_DEVICE void stage_tokens(uint32_t address, const float* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(numerics::floats_to_bf16x2(v[0], v[1])), "r"(numerics::floats_to_bf16x2(v[2], v[3]))
               : "memory");
}

}  // namespace spantune::fragments

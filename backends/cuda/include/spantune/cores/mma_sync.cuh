// The portable core: warp-level mma.sync on fp8 (e4m3) tiles, weights on the M side. Targets without a native FP8
// mma.sync (sm_90a, sm_100a, sm_103a) get an unpack to fp16 from the assembler; streaming hides it at small M.
#pragma once

#include "../ptx.cuh"

namespace spantune {

// Accumulator layout of both cores, per thread and per 8 tokens: {row g, token 2q}, {row g, token 2q + 1},
// {row g + 8, token 2q}, {row g + 8, token 2q + 1} with g = lane / 4, q = lane % 4, rows counted from the warp's 16.
struct MmaSyncCore {
  static constexpr bool kGenericReads = true;  // operands are read by ldmatrix, through the generic proxy

  // acc = W[16 rows, 128] . X[kTokens, 128]^T. `rows` is the swizzled tile that holds the warp's rows from `first_row`.
  template <int kTokens>
  static SPANTUNE_DEVICE void k_block(float (&acc)[kTokens / 2], uint32_t w_tile, int first_row, uint32_t x_tile, int lane) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;
    const int row = lane & 7, quarter = lane >> 3;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t w[4];
      ptx::load_matrix_x4(w, ptx::swizzled(w_tile, first_row + row + (quarter & 1) * 8, k * 2 + (quarter >> 1)));
      if constexpr (kTokens == 8) {
        uint32_t x[2];
        ptx::load_matrix_x2(x, ptx::swizzled(x_tile, row, k * 2 + (quarter & 1)));
        multiply(&acc[0], w, x[0], x[1]);
      } else {
#pragma unroll
        for (int t = 0; t < kTokens / 16; ++t) {
          uint32_t x[4];
          ptx::load_matrix_x4(x, ptx::swizzled(x_tile, t * 16 + row + (quarter >> 1) * 8, k * 2 + (quarter & 1)));
          multiply(&acc[t * 8], w, x[0], x[1]);
          multiply(&acc[t * 8 + 4], w, x[2], x[3]);
        }
      }
    }
    __syncwarp();
  }

 private:
  static SPANTUNE_DEVICE void multiply(float* acc, const uint32_t (&w)[4], uint32_t x0, uint32_t x1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1));
  }
};

}  // namespace spantune

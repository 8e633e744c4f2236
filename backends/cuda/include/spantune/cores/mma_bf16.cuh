// Warp-level bf16 MMA with fp32 accumulators, native on every target.
#pragma once

#include "../base.cuh"

namespace spantune {

// One m16n8k16 step; with g = lane / 4 and q = lane % 4 a thread holds
//   a[0] row g, k 2q and 2q + 1;  a[1] row g + 8, same k;  a[2], a[3] the same rows, k + 8
//   b0 column g, k 2q and 2q + 1;  b1 the same column, k + 8
//   acc {row g, column 2q}, {row g, column 2q + 1}, {row g + 8, column 2q}, {row g + 8, column 2q + 1}
struct MmaBf16 {
  static SPANTUNE_DEVICE void multiply(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

}  // namespace spantune

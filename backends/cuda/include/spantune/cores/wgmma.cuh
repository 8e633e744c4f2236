// The Hopper core: wgmma on fp8 (e4m3) tiles in shared memory, weights on the M side (swap-AB), sm_90a only.
#pragma once

#include "../ptx.cuh"

namespace spantune {

// Same accumulator layout as MmaSyncCore: a warpgroup owns 64 rows, warp w of it rows 16 w to 16 w + 15.
struct WgmmaCore {
  static constexpr bool kGenericReads = false;  // wgmma reads its operands through the async proxy

  // acc = W[64 rows, 128] . X[kTokens, 128]^T for the caller's warpgroup; `first_row` is the warp's first row in the
  // tile, so the warpgroup's rows start at first_row rounded down to 64.
  template <int kTokens>
  static SPANTUNE_DEVICE void k_block(float (&acc)[kTokens / 2], uint32_t w_tile, int first_row, uint32_t x_tile, int) {
    start<kTokens>(acc, w_tile + (first_row & ~63) * 128, x_tile);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }

  // The same for the 64 rows at `w_rows`, without waiting: `acc` is not to be touched before `finish`.
  template <int kTokens>
  static SPANTUNE_DEVICE void start(float (&acc)[kTokens / 2], uint32_t w_rows, uint32_t x_tile) {
    const uint64_t w = descriptor(w_rows), x = descriptor(x_tile);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(acc, w + k * 2, x + k * 2, k > 0);  // 32 bytes of K are 2 in a descriptor
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // Waits for all but the last kLeft that were started, and so for `acc`.
  template <int kLeft, int kCount>
  static SPANTUNE_DEVICE void finish(float (&acc)[kCount]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");  // no use moves up
  }

 private:
  // K-major tile of 128-byte rows, 128-byte swizzle: stride offset 1024 bytes (8 rows), leading offset unused.
  static SPANTUNE_DEVICE uint64_t descriptor(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
  }
  static SPANTUNE_DEVICE void multiply(float (&d)[4], uint64_t w, uint64_t x, int accumulate) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %6, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3"
        "}, %4, %5, p, 1, 1;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(w), "l"(x), "r"(accumulate));
  }

  static SPANTUNE_DEVICE void multiply(float (&d)[8], uint64_t w, uint64_t x, int accumulate) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %10, 0;"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, p, 1, 1;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(w), "l"(x), "r"(accumulate));
  }

  static SPANTUNE_DEVICE void multiply(float (&d)[16], uint64_t w, uint64_t x, int accumulate) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %18, 0;"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(w), "l"(x), "r"(accumulate));
  }

  static SPANTUNE_DEVICE void multiply(float (&d)[32], uint64_t w, uint64_t x, int accumulate) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(w), "l"(x), "r"(accumulate));
  }

  static SPANTUNE_DEVICE void multiply(float (&d)[64], uint64_t w, uint64_t x, int accumulate) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(w), "l"(x), "r"(accumulate));
  }
};

}  // namespace spantune

// gate[M, heads] = X[M, K] . W[heads, K]^T in bf16 with fp32 accumulation, as fp32 partials out[split][m][head]. One
// tile is kTokens tokens x all heads x a range of k-blocks.
//
// Both operands go from global memory straight into MMA fragments. A lane reads 8 neighbouring K values (16 bytes) of
// its rows, and these serve as the four K slots it owns in each of two k16 steps: that permutes K within 32 values, the
// same way on both sides, so the products are those of the plain order.
//
// Chunks of 32 K values go to the warps in turn, counted from the start of the range; the warps' sums are added in warp
// order, one thread an element.
#pragma once

#include "../access.cuh"
#include "../cores/mma_bf16.cuh"
#include "../ptx.cuh"

namespace spantune {

// Operand slots, in the order of workloads/ops/head_gate.py.
struct HeadGateSlots {
  enum : int { kWeight, kX, kOut, kM, kK };
};

template <int kHeads, int kTokens>
struct HeadGate {
  static constexpr bool kHasLoaders = false;
  static constexpr int kAtoms = kHeads / 16, kGroups = kTokens / 8;  // MMA tiles: 16 heads x 8 tokens
  static constexpr int kChunk = 32, kChunksPerBlock = 128 / kChunk;
  static constexpr int kHeld = kHeads > 32 ? 1 : 2;  // chunks of W that a warp holds in registers
  static constexpr int kElements = kHeads * kTokens;
  static constexpr int kSumsPerPage = kPageBytes / (kElements * 4);  // sums of that many warps
  static constexpr int kPages = (kMathWarps + kSumsPerPage - 1) / kSumsPerPage;
  static constexpr int kBarriers = 0;
  static_assert(kHeads % 16 == 0 && kTokens % 8 == 0 && kSumsPerPage > 0, "tile shape");

  static SPANTUNE_DEVICE int arrivals(int) { return 0; }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int k = shell.scalar(HeadGateSlots::kK), m_total = shell.scalar(HeadGateSlots::kM);
    const int row = shell.lane() >> 2, column = (shell.lane() & 3) * 8;
    const int first = tile.k_begin * kChunksPerBlock + shell.math_warp(), end = tile.k_end * kChunksPerBlock;
    const uint16_t* weight = shell.template pointer<uint16_t>(HeadGateSlots::kWeight) + row * k + column;
    uint32_t w[kHeld][kAtoms][2][4];
    load_weights(w, weight, k, first, end);
    for (int chunk = first + kHeld * kMathWarps; chunk < end; chunk += kMathWarps) prefetch_weights(weight, k, chunk);
    if (shell.math_thread() == 0) shell.announce(Point::kWeightsIssued);
    shell.template acquire<Group::kMath>();

    const int m = tile.m * kTokens + row;
    const uint16_t* x = shell.template pointer<uint16_t>(HeadGateSlots::kX) + static_cast<int64_t>(m) * k + column;
    float sum[kAtoms][kGroups][4];
#pragma unroll
    for (int i = 0; i < kAtoms * kGroups * 4; ++i) (&sum[0][0][0])[i] = 0.0f;
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += kHeld * kMathWarps) {
      if (chunk != first) load_weights(w, weight, k, chunk, end);
      uint32_t tokens[kHeld][kGroups][4];
      load_tokens(tokens, x, k, m_total - m, chunk, end);
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (chunk + i * kMathWarps < end) multiply(sum, w[i], tokens[i]);
    }
    if (shell.math_thread() == 0) shell.announce(Point::kInputsRead);
    add_warps(shell, sum);
    store(shell, tile, m_total);
  }

 private:
  // Chunks chunk, chunk + 8, ...: those of one warp.
  static SPANTUNE_DEVICE void load_weights(uint32_t (&w)[kHeld][kAtoms][2][4], const uint16_t* weight, int k, int chunk,
                                           int end) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = chunk + i * kMathWarps;
      if (at < end) {
        const uint16_t* row = weight + at * kChunk;
#pragma unroll
        for (int half = 0; half < 2 * kAtoms; ++half, row += 8 * k)
          access::load_constant(w[i][half / 2][half % 2], row);
      }
    }
  }

  // Brings a later chunk into L2, so that its latency too passes before the acquire.
  static SPANTUNE_DEVICE void prefetch_weights(const uint16_t* weight, int k, int chunk) {
    const uint16_t* row = weight + chunk * kChunk;
#pragma unroll
    for (int half = 0; half < 2 * kAtoms; ++half, row += 8 * k) access::prefetch_l2(row);
  }

  // `rows` is how many rows from the lane's own are left in x; rows past them read as zero.
  static SPANTUNE_DEVICE void load_tokens(uint32_t (&tokens)[kHeld][kGroups][4], const uint16_t* x, int k, int rows,
                                          int chunk, int end) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = chunk + i * kMathWarps;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        uint32_t(&v)[4] = tokens[i][group];
        v[0] = v[1] = v[2] = v[3] = 0;
        if (at < end && group * 8 < rows) access::load_mutable(v, x + group * 8 * k + at * kChunk);
      }
    }
  }

  static SPANTUNE_DEVICE void multiply(float (&sum)[kAtoms][kGroups][4], const uint32_t (&w)[kAtoms][2][4],
                                       const uint32_t (&tokens)[kGroups][4]) {
#pragma unroll
    for (int step = 0; step < 4; step += 2)
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom)
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          MmaBf16::multiply(sum[atom][group], w[atom][0][step], w[atom][1][step], w[atom][0][step + 1],
                            w[atom][1][step + 1], tokens[group][step], tokens[group][step + 1]);
  }

  // Where a warp's sums lie: in accumulator order, one word a lane.
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t sums_of(const Shell& shell, int warp) {
    return shell.page(warp / kSumsPerPage) + warp % kSumsPerPage * (kElements * 4);
  }

  template <class Shell>
  static SPANTUNE_DEVICE void add_warps(const Shell& shell, const float (&sum)[kAtoms][kGroups][4]) {
    const uint32_t mine = sums_of(shell, shell.math_warp()) + shell.lane() * 4;
#pragma unroll
    for (int i = 0; i < kAtoms * kGroups * 4; ++i)
      access::store_shared(mine + i * kWarpLanes * 4, sum[i / (kGroups * 4)][i / 4 % kGroups][i % 4]);
    shell.sync_math();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void store(const Shell& shell, const Tile& tile, int m_total) {
    float* out =
        shell.template pointer<float>(HeadGateSlots::kOut) + static_cast<int64_t>(tile.split) * m_total * kHeads;
    for (int element = shell.math_thread(); element < kElements; element += kMathThreads) {
      float total = access::load_shared(sums_of(shell, 0) + element * 4);
#pragma unroll
      for (int warp = 1; warp < kMathWarps; ++warp)
        total = __fadd_rn(total, access::load_shared(sums_of(shell, warp) + element * 4));
      const int lane = element % kWarpLanes, i = element / kWarpLanes;
      const int head = i / (kGroups * 4) * 16 + (lane >> 2) + (i & 2) * 4;
      const int m = tile.m * kTokens + i / 4 % kGroups * 8 + (lane & 3) * 2 + (i & 1);
      if (m < m_total) out[m * kHeads + head] = total;
    }
    shell.stored();
  }
};

}  // namespace spantune

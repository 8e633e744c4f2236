// Y[M, N] = X[M, K] . W[N, K]^T in FP8 with 1x128 scales of X and 128x128 scales of W, weights on the M side of the MMA
// (swap-AB), W in the checkpoint's layout. One tile is kRows weight rows x kTokens tokens x a range of k-blocks.
//
// W and X tiles travel by TMA through one ring of kStages stages; a stage is full when both loaders' bytes have landed.
// After each k-block the MMA result is promoted to fp32 registers with both scales (DeepGEMM's rule for Hopper's short
// FP8 accumulators). With 64 rows the two warpgroups take alternate k-blocks and their sums are added in index order.
#pragma once

#include "../cores/mma_sync.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "../cores/wgmma.cuh"
#endif
#include "../numerics.cuh"

namespace spantune {

// Operand slots, in the order of workloads/ops/gemm_fp8.py.
struct GemmSlots {
  enum : int { kWeightMap, kInputMap, kWeightScale, kInputScale, kM, kN, kScaleStride, kWeightBlocks, kOut0, kOut1, kPositions, kCosSin, kHeadRows, kNope };
};

template <int kRows, int kTokens, int kStages, class Core, class Epilogue>
struct GemmFp8 {
  static constexpr bool kHasLoaders = true;
  static constexpr int kGroups = 128 / kRows;                  // warpgroups that share one K range
  static constexpr int kWarpsPerGroup = kMathWarps / kGroups;  // 16 rows each
  static constexpr int kWBytes = kRows * 128, kXBytes = kTokens * 128, kScaleBytes = kTokens * 4;
  static constexpr int kWPerPage = kPageBytes / kWBytes, kXPerPage = kPageBytes / kXBytes;
  static constexpr int kWPages = (kStages + kWPerPage - 1) / kWPerPage;
  static constexpr int kPages = kWPages + (kStages + kXPerPage - 1) / kXPerPage;
  static constexpr int kBarriers = 2 * kStages;
  static constexpr int kAccumulators = kTokens / 2;
  // NOTE: twice the stages. A warp's read of the scales may still be in flight when it releases the stage, and was seen
  // to return what the refill had written; a slot that is refilled a whole ring later cannot be overtaken.
  static constexpr int kScaleSlots = 2 * kStages;
  // A group that skipped a phase of a stage would pass its parity wait early.
  static_assert(kStages % kGroups == 0, "stages must be a multiple of the math groups that share the ring");
  static_assert(kRows == 64 || kRows == 128, "weight-tile rows");
  static_assert(kScaleSlots * kScaleBytes <= kScratchBytes && kBarriers <= kMaxBarriers, "ring too deep");
  static_assert(Epilogue::template staging_bytes<kRows, kTokens>() <= kPageBytes, "staging must fit one page");

  static SPANTUNE_DEVICE int arrivals(int barrier) { return barrier < kStages ? 2 : kWarpsPerGroup; }

  template <class Shell>
  static SPANTUNE_DEVICE uint32_t w_tile(const Shell& shell, int stage) {
    return shell.page(stage / kWPerPage) + (stage % kWPerPage) * kWBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t x_tile(const Shell& shell, int stage) {
    return shell.page(kWPages + stage / kXPerPage) + (stage % kXPerPage) * kXBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t full(const Shell& shell, int stage) { return shell.barrier(stage); }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t empty(const Shell& shell, int stage) { return shell.barrier(kStages + stage); }

  // One elected lane issues; the others only take part in the acquire.
  template <class Shell>
  static SPANTUNE_DEVICE void weights(const Shell& shell, const Tile& tile) {
    const TensorMap* map = shell.map(GemmSlots::kWeightMap);
    const int blocks = tile.k_end - tile.k_begin, ahead = min(shell.w_ahead(), blocks);
    const bool leads = shell.lane() == 0;
    if (leads) {
      ptx::prefetch_map(map);
      for (int i = 0; i < min(ahead, kStages); ++i) issue_weights(shell, map, tile, i);
    }
    __syncwarp();
    if (ahead < min(blocks, kStages)) {
      shell.template acquire<Group::kWeights>();
      if (leads)
        for (int i = ahead; i < min(blocks, kStages); ++i) issue_weights(shell, map, tile, i);
    }
    if (leads) {
      for (int i = kStages; i < blocks; ++i) {
        ptx::barrier_wait(empty(shell, i % kStages), ((i / kStages) & 1) ^ 1);
        issue_weights(shell, map, tile, i);
      }
      shell.announce(Point::kWeightsIssued);
    }
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void inputs(const Shell& shell, const Tile& tile) {
    const TensorMap* map = shell.map(GemmSlots::kInputMap);
    if (shell.lane() == 0) ptx::prefetch_map(map);
    shell.template acquire<Group::kInputs>();
    if (shell.lane() == 0) {
      const float* scales = shell.template pointer<float>(GemmSlots::kInputScale) + tile.m * kTokens;
      const int stride = shell.scalar(GemmSlots::kScaleStride);
      for (int i = 0; i < tile.k_end - tile.k_begin; ++i) {
        const int stage = i % kStages, k = tile.k_begin + i;
        if (i >= kStages) ptx::barrier_wait(empty(shell, stage), ((i / kStages) & 1) ^ 1);
        ptx::barrier_arrive_expect(full(shell, stage), kXBytes + kScaleBytes);
        ptx::copy_tile_2d(x_tile(shell, stage), map, k * 128, tile.m * kTokens, full(shell, stage), ptx::kEvictLast);
        ptx::copy_bulk(shell.scratch() + i % kScaleSlots * kScaleBytes, scales + static_cast<int64_t>(k) * stride, kScaleBytes,
                       full(shell, stage));
      }
      shell.announce(Point::kInputsRead);
    }
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int lane = shell.lane(), group = shell.math_warp() / kWarpsPerGroup, warp = shell.math_warp() % kWarpsPerGroup;
    const int blocks = tile.k_end - tile.k_begin;
    const WeightScales weight_scales(shell, tile, lane);
    Epilogue epilogue;
    shell.template acquire<Group::kMath>();
    epilogue.template prepare<kRows, kTokens>(shell, tile);

    float sum[kAccumulators];
#pragma unroll
    for (int j = 0; j < kAccumulators; ++j) sum[j] = 0.0f;
#pragma unroll 1
    for (int i = group; i < blocks; i += kGroups) {
      const int stage = i % kStages;
      ptx::barrier_wait(full(shell, stage), (i / kStages) & 1);
      float acc[kAccumulators], scale[kTokens / 4];
      read_scales(shell.scratch() + i % kScaleSlots * kScaleBytes, lane, scale);
      Core::template k_block<kTokens>(acc, w_tile(shell, stage), warp * 16, x_tile(shell, stage), lane);
      if constexpr (Core::kGenericReads) ptx::fence_proxy_async();  // those reads come before the copies that refill
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(empty(shell, stage));
      promote(sum, acc, scale, weight_scales.at(i));
    }
    if constexpr (kGroups == 2) add_groups(shell, group, warp, lane, sum);
    epilogue.template store<kRows, kTokens>(shell, tile, group == 0, warp, lane, sum);
  }

 private:
  // The tile's scales of W, one k-block a lane: a tile lies within one 128-row block. At most 64 k-blocks a split.
  struct WeightScales {
    float low, high;
    template <class Shell>
    SPANTUNE_DEVICE WeightScales(const Shell& shell, const Tile& tile, int lane) {
      const float* row = shell.template pointer<float>(GemmSlots::kWeightScale) +
                         static_cast<int64_t>(tile.n * kRows / 128) * shell.scalar(GemmSlots::kWeightBlocks) + tile.k_begin;
      const int blocks = tile.k_end - tile.k_begin;
      low = lane < blocks ? __ldg(row + lane) : 0.0f;
      high = lane + 32 < blocks ? __ldg(row + lane + 32) : 0.0f;
    }
    SPANTUNE_DEVICE float at(int i) const { return __shfl_sync(~0u, i < 32 ? low : high, i & 31); }
  };

  template <class Shell>
  static SPANTUNE_DEVICE void issue_weights(const Shell& shell, const TensorMap* map, const Tile& tile, int i) {
    const int stage = i % kStages;
    ptx::barrier_arrive_expect(full(shell, stage), kWBytes);  // rows past N count too: the box is zero-filled
    ptx::copy_tile_2d(w_tile(shell, stage), map, (tile.k_begin + i) * 128, tile.n * kRows, full(shell, stage),
                      ptx::kEvictFirst);
  }

  static SPANTUNE_DEVICE void read_scales(uint32_t address, int lane, float (&scale)[kTokens / 4]) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(scale[2 * j]), "=f"(scale[2 * j + 1])
                   : "r"(address + (j * 8 + (lane & 3) * 2) * 4)
                   : "memory");
  }

  static SPANTUNE_DEVICE void promote(float (&sum)[kAccumulators], const float (&acc)[kAccumulators],
                                      const float (&scale)[kTokens / 4], float weight_scale) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      const float s0 = __fmul_rn(scale[2 * j], weight_scale), s1 = __fmul_rn(scale[2 * j + 1], weight_scale);
      sum[4 * j] = __fmaf_rn(acc[4 * j], s0, sum[4 * j]);
      sum[4 * j + 1] = __fmaf_rn(acc[4 * j + 1], s1, sum[4 * j + 1]);
      sum[4 * j + 2] = __fmaf_rn(acc[4 * j + 2], s0, sum[4 * j + 2]);
      sum[4 * j + 3] = __fmaf_rn(acc[4 * j + 3], s1, sum[4 * j + 3]);
    }
  }

  // Group 0 ends with sum_0 + sum_1. Page 0 is free: every load into it has been waited for.
  template <class Shell>
  static SPANTUNE_DEVICE void add_groups(const Shell& shell, int group, int warp, int lane, float (&sum)[kAccumulators]) {
    shell.sync_math();
    const uint32_t mine = shell.page(0) + (warp * kAccumulators * kWarpLanes + lane) * 4;
    if (group == 1) {
#pragma unroll
      for (int j = 0; j < kAccumulators; ++j)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine + j * kWarpLanes * 4), "f"(sum[j]) : "memory");
    }
    shell.sync_math();
    if (group == 0) {
#pragma unroll
      for (int j = 0; j < kAccumulators; ++j) {
        float other;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(mine + j * kWarpLanes * 4) : "memory");
        sum[j] = __fadd_rn(sum[j], other);
      }
    }
  }
};

// fp32 partials of one split: out[split][m][n]. A finaliser sums the splits in index order.
struct PartialEpilogue {
  template <int kRows, int kTokens>
  static constexpr int staging_bytes() { return 0; }
  template <int kRows, int kTokens, class Shell>
  SPANTUNE_DEVICE void prepare(const Shell&, const Tile&) {}

  template <int kRows, int kTokens, class Shell>
  SPANTUNE_DEVICE void store(const Shell& shell, const Tile& tile, bool holds, int warp, int lane,
                             const float (&sum)[kTokens / 2]) const {
    const int m_total = shell.scalar(GemmSlots::kM), n_total = shell.scalar(GemmSlots::kN);
    float* out = shell.template pointer<float>(GemmSlots::kOut0) + static_cast<int64_t>(tile.split) * m_total * n_total;
    if (holds) {
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) {
        const int m = tile.m * kTokens + (j / 4) * 8 + (lane & 3) * 2 + (j & 1);
        const int n = tile.n * kRows + warp * 16 + (lane >> 2) + (j & 2) * 4;
        if (m < m_total && n < n_total) out[static_cast<int64_t>(m) * n_total + n] = sum[j];
      }
    }
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kStored);
  }
};

// Rows of a head: `nope` plain ones to q_nope[M, heads, nope], then 64 rotated ones to the last 64 columns of
// q_for_sparse_mla[M, heads, 576]. Works on atoms of 16 rows, so the tile needs only to divide the head.
struct QueryRopeEpilogue {
  static constexpr int kRope = 64;
  template <int kRows, int kTokens>
  static constexpr int staging_bytes() { return kTokens * (kRows + 8) * 2; }

  template <int kRows, int kTokens, class Shell>
  SPANTUNE_DEVICE void prepare(const Shell& shell, const Tile& tile) {
    // Pull this tile's table rows near: the epilogue reads them when the last k-block is done.
    const int m = tile.m * kTokens + shell.math_thread();
    if (shell.math_thread() < kTokens && m < shell.scalar(GemmSlots::kM)) {
      const float* row = table_row(shell, m);
      asm volatile("prefetch.global.L1 [%0];" ::"l"(row));
      asm volatile("prefetch.global.L1 [%0];" ::"l"(row + 32));
    }
  }

  template <int kRows, int kTokens, class Shell>
  SPANTUNE_DEVICE void store(const Shell& shell, const Tile& tile, bool holds, int warp, int lane,
                             float (&sum)[kTokens / 2]) const {
    const int m_total = shell.scalar(GemmSlots::kM), n_total = shell.scalar(GemmSlots::kN);
    const int head_rows = shell.scalar(GemmSlots::kHeadRows), nope = shell.scalar(GemmSlots::kNope);
    const int atom = (tile.n * kRows + warp * 16) % head_rows;  // place of the warp's rows in their head
    if (holds && atom >= nope) rotate<kTokens>(shell, tile, atom - nope, lane, sum);

    constexpr int kStride = kRows + 8;  // in bf16: rows of 16-byte pieces, off the bank period
    shell.sync_math();                  // the staging page was the ring's
    if (holds) {
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) {
        const int t = (j / 4) * 8 + (lane & 3) * 2 + (j & 1), r = warp * 16 + (lane >> 2) + (j & 2) * 4;
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(shell.page(0) + (t * kStride + r) * 2),
                     "h"(numerics::float_to_bf16(sum[j]))
                     : "memory");
      }
    }
    shell.sync_math();
    const int heads = n_total / head_rows;
    for (int piece = shell.math_thread(); piece < kTokens * kRows / 8; piece += kMathThreads) {
      const int t = piece / (kRows / 8), r = piece % (kRows / 8) * 8, m = tile.m * kTokens + t, n = tile.n * kRows + r;
      if (m >= m_total || n >= n_total) continue;
      const int head = n / head_rows, row = n % head_rows;
      uint16_t* out = row < nope ? shell.template pointer<uint16_t>(GemmSlots::kOut0) +
                                       (static_cast<int64_t>(m) * heads + head) * nope + row
                                 : shell.template pointer<uint16_t>(GemmSlots::kOut1) +
                                       (static_cast<int64_t>(m) * heads + head) * 576 + 512 + row - nope;
      uint4 value;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "r"(shell.page(0) + (t * kStride + r) * 2)
                   : "memory");
      *reinterpret_cast<uint4*>(out) = value;
    }
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kStored);
  }

 private:
  template <class Shell>
  static SPANTUNE_DEVICE const float* table_row(const Shell& shell, int m) {
    const int position = shell.template pointer<int>(GemmSlots::kPositions)[m];
    return shell.template pointer<float>(GemmSlots::kCosSin) + static_cast<int64_t>(position) * kRope;
  }

  // Pairs are neighbouring rows, held by lanes that differ in bit 2.
  template <int kTokens, class Shell>
  static SPANTUNE_DEVICE void rotate(const Shell& shell, const Tile& tile, int first, int lane, float (&sum)[kTokens / 2]) {
    const int m_total = shell.scalar(GemmSlots::kM);
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) {
      const int m = tile.m * kTokens + (j / 4) * 8 + (lane & 3) * 2 + (j & 1);
      const int pair = (first + (lane >> 2) + (j & 2) * 4) / 2;
      const float* row = table_row(shell, min(m, m_total - 1));
      const float other = __shfl_xor_sync(~0u, sum[j], 4);
      const bool odd = lane & 4;
      const auto rotated = numerics::rotate(odd ? other : sum[j], odd ? sum[j] : other, row[pair], row[32 + pair]);
      sum[j] = odd ? rotated.odd : rotated.even;
    }
  }
};

}  // namespace spantune

// Y[M, N] = X[M, K] . W[N, K]^T in FP8 with 1x128 scales of X and 128x128 scales of W, weights on the M side of the MMA
// (swap-AB), W in the checkpoint's layout. One tile is kRows weight rows x kTokens tokens x a range of k-blocks.
//
// W and X tiles travel by TMA through one ring of kStages stages; a stage is full when both loaders' bytes have landed.
// After each k-block the MMA result is promoted to fp32 registers with both scales (DeepGEMM's rule for Hopper's short
// FP8 accumulators). With fewer than 128 rows, groups of warps take k-blocks in turn (64 rows: two warpgroups) and their
// sums are added in index order.
#pragma once

#include "../cores/mma_sync.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "../cores/wgmma.cuh"
#endif
#include "../access.cuh"
#include "../fragments.cuh"
#include "../numerics.cuh"

namespace spantune {

// Operand slots, in the order of workloads/ops/gemm_fp8.py.
struct GemmSlots {
  enum : int { kWeightMap, kInputMap, kWeightScale, kInputScale, kM, kN, kScaleStride, kWeightBlocks, kOut0, kOut1, kPositions, kCosSin, kHeadRows, kNope };
};

template <int kRows, int kTokens, int kStages, class Core, template <int, int> class EpilogueOf>
struct GemmFp8 {
  using Epilogue = EpilogueOf<kRows, kTokens>;
  static constexpr bool kHasLoaders = true;
  static constexpr int kGroups = 128 / kRows;                  // groups of warps that share one K range
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
  // Whether a warp reads them before its multiplication. Many would cost registers, and the slots are safe to read until
  // the warp has released the stage once more.
  static constexpr bool kScalesAhead = kTokens <= 64;
  // A group that skipped a phase of a stage would pass its parity wait early.
  static_assert(kStages % kGroups == 0, "stages must be a multiple of the math groups that share the ring");
  static_assert(kRows == 16 || kRows == 32 || kRows == 64 || kRows == 128, "weight-tile rows");
  static_assert(Core::kGenericReads || kWarpsPerGroup % 4 == 0, "wgmma takes whole warpgroups");
  static_assert(kScaleSlots * kScaleBytes <= kScratchBytes && kBarriers <= kMaxBarriers, "ring too deep");
  static constexpr int kGroupSums = kAccumulators * kWarpsPerGroup * kWarpLanes * 4;  // bytes of a group's sums
  static_assert((kGroups - 1) * kGroupSums <= kPages * kPageBytes, "the groups' sums pass through the pages");

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

  template <class Shell>
  static SPANTUNE_DEVICE const TensorMap* weight_map(const Shell& shell) { return shell.map(GemmSlots::kWeightMap); }

  // One elected lane issues; the others only take part in the acquire.
  template <class Shell>
  static SPANTUNE_DEVICE void weights(const Shell& shell, const Tile& tile) {
    const TensorMap* map = weight_map(shell);
    const int blocks = tile.k_end - tile.k_begin, ahead = min(shell.w_ahead(), blocks);
    const bool leads = shell.lane() == 0;
    if (leads) {
#pragma unroll 1  // short code reaches the first copy sooner than unrolled code: its lines come from far away
      for (int i = 0; i < min(ahead, kStages); ++i) issue_weights(shell, map, tile, i);
    }
    __syncwarp();
    if (ahead < min(blocks, kStages)) {
      shell.template acquire<Group::kWeights>();
      if (leads) {
#pragma unroll 1
        for (int i = ahead; i < min(blocks, kStages); ++i) issue_weights(shell, map, tile, i);
      }
    }
    if (leads) {
#pragma unroll 1
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
#pragma unroll 1
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
    epilogue.prepare(shell, tile, group == 0, warp, lane);

    float sum[kAccumulators];
#pragma unroll
    for (int j = 0; j < kAccumulators; ++j) sum[j] = 0.0f;
#pragma unroll 1
    for (int i = group; i < blocks; i += kGroups) {
      const int stage = i % kStages;
      ptx::barrier_wait(full(shell, stage), (i / kStages) & 1);
      const uint32_t scales = shell.scratch() + i % kScaleSlots * kScaleBytes + (lane & 3) * 8;
      float acc[kAccumulators];
      float2 scale[kScalesAhead ? kTokens / 8 : 1];
      if constexpr (kScalesAhead) {
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) scale[j] = access::load_shared_pair(scales + j * 32);
      }
      Core::template k_block<kTokens>(acc, w_tile(shell, stage), warp * 16, x_tile(shell, stage), lane);
      if constexpr (Core::kGenericReads) ptx::fence_proxy_async();  // those reads come before the copies that refill
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(empty(shell, stage));
      const float weight_scale = weight_scales.at(i);
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j)
        promote(&sum[4 * j], &acc[4 * j], kScalesAhead ? scale[kScalesAhead ? j : 0] : access::load_shared_pair(scales + j * 32),
                weight_scale);
    }
    if constexpr (kGroups > 1) add_groups(shell, group, warp, lane, sum);
    epilogue.store(shell, tile, group == 0, warp, lane, sum);
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
      low = lane < blocks ? access::load_early(row + lane) : 0.0f;
      high = lane + 32 < blocks ? access::load_early(row + lane + 32) : 0.0f;
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

  // Eight tokens' products of a k-block.
  static SPANTUNE_DEVICE void promote(float* sum, const float* acc, float2 scale, float weight_scale) {
    const float s0 = __fmul_rn(scale.x, weight_scale), s1 = __fmul_rn(scale.y, weight_scale);
    sum[0] = __fmaf_rn(acc[0], s0, sum[0]);
    sum[1] = __fmaf_rn(acc[1], s1, sum[1]);
    sum[2] = __fmaf_rn(acc[2], s0, sum[2]);
    sum[3] = __fmaf_rn(acc[3], s1, sum[3]);
  }

  // Group 0 ends with sum_0 + sum_1 + ... The pages are free: every load into them has been waited for.
  template <class Shell>
  static SPANTUNE_DEVICE void add_groups(const Shell& shell, int group, int warp, int lane, float (&sum)[kAccumulators]) {
    shell.sync_math();
    const uint32_t mine = shell.page(0) + (warp * kAccumulators * kWarpLanes + lane) * 4;
    if (group > 0) {
#pragma unroll
      for (int j = 0; j < kAccumulators; ++j)
        access::store_shared(mine + (group - 1) * kGroupSums + j * kWarpLanes * 4, sum[j]);
    }
    shell.sync_math();
    if (group == 0) {
#pragma unroll
      for (int other = 1; other < kGroups; ++other)
#pragma unroll
        for (int j = 0; j < kAccumulators; ++j)
          sum[j] = __fadd_rn(sum[j], access::load_shared(mine + (other - 1) * kGroupSums + j * kWarpLanes * 4));
    }
  }
};

// An epilogue gets a warp's 16 rows for all tokens of the tile: value 4 g + 2 h + i of a lane is row lane / 4 + 8 h of
// token 8 g + 2 (lane % 4) + i. `holds` tells whether the warp's group has the sums.

// fp32 partials of one split: out[split][m][n]. A finaliser sums the splits in index order.
template <int kRows, int kTokens>
class PartialEpilogue {
 public:
  // Before the k-blocks: where the lane's values go. Pinned there, or the arithmetic would be part of the tail.
  template <class Shell>
  SPANTUNE_DEVICE void prepare(const Shell& shell, const Tile& tile, bool, int warp, int lane) {
    const int m_total = shell.scalar(GemmSlots::kM), m = tile.m * kTokens + (lane & 3) * 2;
    n_total_ = shell.scalar(GemmSlots::kN);
    const int n = tile.n * kRows + warp * 16 + (lane >> 2);
    m_left_ = m_total - m;
    n_left_ = n_total_ - n;
    out_ = shell.template pointer<float>(GemmSlots::kOut0) +
           (static_cast<int64_t>(tile.split) * m_total + m) * n_total_ + n;
    asm volatile("" : "+l"(out_), "+r"(n_total_), "+r"(m_left_), "+r"(n_left_));
  }

  template <class Shell>
  SPANTUNE_DEVICE void store(const Shell& shell, const Tile&, bool holds, int, int, const float (&sum)[kTokens / 2]) const {
    if (holds) {
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) {
        const int m = (j / 4) * 8 + (j & 1), n = (j & 2) * 4;
        if (m < m_left_ && n < n_left_) access::store_global(out_ + static_cast<int64_t>(m) * n_total_ + n, sum[j]);
      }
    }
    shell.stored();
  }

 private:
  float* out_;
  int n_total_, m_left_, n_left_;
};

// Rows of a head: `nope` plain ones to q_nope[M, heads, nope], then 64 rotated ones to the last 64 columns of
// q_for_sparse_mla[M, heads, 576]. A warp's 16 rows are all plain or all rotated, so the tile needs only to divide the
// head. Values go to memory from registers: a way through shared memory would cost the tail two barriers.
template <int kRows, int kTokens>
class QueryRopeEpilogue {
 public:
  // Before the k-blocks: where the warp's rows go, and the table values that rotate them, on their way while W streams.
  template <class Shell>
  SPANTUNE_DEVICE void prepare(const Shell& shell, const Tile& tile, bool holds, int warp, int lane) {
    locate(shell, tile, warp, lane);
    if (!holds || !rotated_) return;
    if constexpr (kKeepsTable) {
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) {
        const float* row = table_row(shell, tile, lane, j);
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(cosine_[j]) : "l"(row) : "memory");
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(sine_[j]) : "l"(row + kRope / 2) : "memory");
      }
    } else {
      for (int token = lane; token < kTokens; token += kWarpLanes) {
        const float* row = table_of(shell, tile.m * kTokens + token);
        asm volatile("prefetch.global.L1 [%0];" ::"l"(row));
        asm volatile("prefetch.global.L1 [%0];" ::"l"(row + kRope / 2));
      }
    }
  }

  template <class Shell>
  SPANTUNE_DEVICE void store(const Shell& shell, const Tile& tile, bool holds, int warp, int lane,
                             float (&sum)[kTokens / 2]) {
    if (holds) {
      if constexpr (!kKeepsTable) locate(shell, tile, warp, lane);  // again: not held in registers meanwhile
      if (rotated_) rotate(shell, tile, lane, sum);
      const int first = tile.m * kTokens, left = shell.scalar(GemmSlots::kM) - first;
#pragma unroll
      for (int j = 0; j < kTokens; j += 8)
        fragments::store_tokens(out_ + static_cast<int64_t>(first + j) * stride_, stride_, &sum[j / 2], lane, left - j);
    }
    shell.stored();
  }

 private:
  static constexpr int kRope = 64, kLatent = 512, kQueryColumns = kLatent + kRope;
  static constexpr bool kKeepsTable = kTokens <= 16;  // more would cost a CTA its place on the multiprocessor

  // Where the warp's rows lie in their head, and where they go.
  template <class Shell>
  SPANTUNE_DEVICE void locate(const Shell& shell, const Tile& tile, int warp, int lane) {
    const int head_rows = shell.scalar(GemmSlots::kHeadRows), nope = shell.scalar(GemmSlots::kNope);
    const int row = tile.n * kRows + warp * 16, head = row / head_rows, atom = row - head * head_rows;
    const int heads = shell.scalar(GemmSlots::kN) / head_rows;
    rotated_ = atom >= nope;
    stride_ = heads * (rotated_ ? kQueryColumns : nope);
    out_ = rotated_ ? shell.template pointer<uint16_t>(GemmSlots::kOut1) + head * kQueryColumns + kLatent + atom - nope
                    : shell.template pointer<uint16_t>(GemmSlots::kOut0) + head * nope + atom;
    pair_ = (atom - nope + (lane >> 2)) / 2;
    if constexpr (kKeepsTable) asm volatile("" : "+l"(out_), "+r"(stride_));  // not in the tail
  }

  template <class Shell>
  static SPANTUNE_DEVICE const float* table_of(const Shell& shell, int m) {
    const int last = shell.scalar(GemmSlots::kM) - 1;
    const int position = shell.template pointer<int>(GemmSlots::kPositions)[min(m, last)];
    return shell.template pointer<float>(GemmSlots::kCosSin) + static_cast<int64_t>(position) * kRope;
  }
  // The cosine of value j of this lane; its sine is half a row further.
  template <class Shell>
  SPANTUNE_DEVICE const float* table_row(const Shell& shell, const Tile& tile, int lane, int j) const {
    return table_of(shell, tile.m * kTokens + (j / 4) * 8 + (lane & 3) * 2 + (j & 1)) + pair_ + (j & 2) * 2;
  }

  // Pairs are neighbouring rows, held by lanes that differ in bit 2.
  template <class Shell>
  SPANTUNE_DEVICE void rotate(const Shell& shell, const Tile& tile, int lane, float (&sum)[kTokens / 2]) const {
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) {
      float cosine, sine;
      if constexpr (kKeepsTable) {
        cosine = cosine_[j], sine = sine_[j];
      } else {
        if (j % 8 == 0) asm volatile("" ::: "memory");  // not all table values at once: they would not fit
        const float* row = table_row(shell, tile, lane, j);
        cosine = row[0], sine = row[kRope / 2];
      }
      const float other = __shfl_xor_sync(~0u, sum[j], 4);
      const bool odd = lane & 4;
      const auto turned = numerics::rotate(odd ? other : sum[j], odd ? sum[j] : other, cosine, sine);
      sum[j] = odd ? turned.odd : turned.even;
    }
  }

  uint16_t* out_;
  int stride_, pair_;
  bool rotated_;
  float cosine_[kKeepsTable ? kTokens / 2 : 1], sine_[kKeepsTable ? kTokens / 2 : 1];
};

}  // namespace spantune

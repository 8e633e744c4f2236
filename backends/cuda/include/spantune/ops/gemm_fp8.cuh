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
  enum : int { kWeightMap, kInputMap, kWeightScale, kInputScale, kM, kN, kScaleStride, kWeightBlocks, kOut0, kOut1, kPositions, kCosSin, kHeadRows, kNope, kHeads };
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
  static constexpr int kXPages = (kStages + kXPerPage - 1) / kXPerPage;
  static constexpr int kBarriers = 2 * kStages;
  static constexpr int kAccumulators = kTokens / 2;
  // NOTE: twice the stages. A warp's read of the scales may still be in flight when it releases the stage, and was seen
  // to return what the refill had written; a slot that is refilled a whole ring later cannot be overtaken.
  static constexpr int kScaleSlots = 2 * kStages;
  static constexpr bool kScalesInPage = kScaleSlots * kScaleBytes > kScratchBytes;
  static constexpr int kPages = kWPages + kXPages + kScalesInPage;
  // Whether a warp reads them before its multiplication. Many would cost registers, and the slots are safe to read until
  // the warp has released the stage once more.
  static constexpr bool kScalesAhead = kTokens <= 64;
  // A group that skipped a phase of a stage would pass its parity wait early.
  static_assert(kStages % kGroups == 0, "stages must be a multiple of the math groups that share the ring");
  static_assert(kRows == 16 || kRows == 32 || kRows == 64 || kRows == 128, "weight-tile rows");
  static_assert(Core::kGenericReads || kWarpsPerGroup % 4 == 0, "wgmma takes whole warpgroups");
  static_assert(kScaleSlots * kScaleBytes <= kPageBytes && kBarriers <= kMaxBarriers, "ring too deep");
  static constexpr int kGroupSums = kAccumulators * kWarpsPerGroup * kWarpLanes * 4;  // bytes of a group's sums
  static_assert((kGroups - 1) * kGroupSums <= kPages * kPageBytes, "the groups' sums pass through the pages");
  static_assert(Epilogue::kStagedBytes <= kPages * kPageBytes, "the results pass through the pages");

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
  static SPANTUNE_DEVICE uint32_t scales_of(const Shell& shell, int i) {
    return (kScalesInPage ? shell.page(kWPages + kXPages) : shell.scratch()) + i % kScaleSlots * kScaleBytes;
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
      // What lies behind the scales of the last token may be no memory of ours.
      const int scale_bytes = min(kTokens, stride - tile.m * kTokens) * 4;
#pragma unroll 1
      for (int i = 0; i < tile.k_end - tile.k_begin; ++i) {
        const int stage = i % kStages, k = tile.k_begin + i;
        if (i >= kStages) ptx::barrier_wait(empty(shell, stage), ((i / kStages) & 1) ^ 1);
        ptx::barrier_arrive_expect(full(shell, stage), kXBytes + scale_bytes);
        ptx::copy_tile_2d(x_tile(shell, stage), map, k * 128, tile.m * kTokens, full(shell, stage), ptx::kEvictLast);
        ptx::copy_bulk(scales_of(shell, i), scales + static_cast<int64_t>(k) * stride, scale_bytes, full(shell, stage));
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
      const uint32_t scales = scales_of(shell, i) + (lane & 3) * 8;
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
                      weight_policy(shell));
  }
  // W is read once, unless there are more tokens than a tile has: then again a wave later, from L2 if it is still there.
  template <class Shell>
  static SPANTUNE_DEVICE uint64_t weight_policy(const Shell& shell) {
    if (kTokens < 32) return ptx::kEvictFirst;
    return shell.scalar(GemmSlots::kM) <= kTokens ? ptx::kEvictFirst : ptx::kEvictNormal;
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
  static constexpr int kStagedBytes = 0;

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
// head. Values of few tokens go to memory from registers: a way through shared memory would cost the tail two barriers.
// Those of many tokens take that way, for each store from registers reaches eight tokens with 16 bytes each.
template <int kRows, int kTokens>
class QueryRopeEpilogue {
 public:
  // Before the k-blocks: where the warp's rows go, and the table values that rotate them, on their way while W streams.
  template <class Shell>
  SPANTUNE_DEVICE void prepare(const Shell& shell, const Tile& tile, bool holds, int warp, int lane) {
    if constexpr (kFromRegisters) {
      locate(shell, tile, warp, lane);
      if (!holds || !rotated_) return;
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) {
        const float* row = table_of(shell, tile, (j / 4) * 8 + (lane & 3) * 2 + (j & 1)) + pair_ + (j & 2) * 2;
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(cosine_[j]) : "l"(row) : "memory");
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(sine_[j]) : "l"(row + kRope / 2) : "memory");
      }
    } else {
      head_ = tile.n * kRows / shell.scalar(GemmSlots::kHeadRows);
      if (first_row(shell, tile) + kRows > shell.scalar(GemmSlots::kNope) && shell.math_thread() < kTokens) {
        const float* row = table_of(shell, tile, shell.math_thread());
        access::prefetch_l2(row);
        access::prefetch_l2(row + kRope / 2);
      }
    }
  }

  template <class Shell>
  SPANTUNE_DEVICE void store(const Shell& shell, const Tile& tile, bool holds, int warp, int lane,
                             float (&sum)[kTokens / 2]) {
    if constexpr (kFromRegisters) {
      if (holds) store_from_registers(shell, tile, lane, sum);
    } else {
      const int thread = static_cast<int>(opaque(shell.math_thread()));
      shell.sync_math();  // the pages were the ring's, or held the groups' sums
      const int nope = shell.scalar(GemmSlots::kNope), row = first_row(shell, tile), first = row + warp * 16 - nope;
      if (row + kRows > nope) {
        copy_table(shell, tile, thread);
        shell.sync_math();
      }
      if (holds) {
        if (first >= 0) rotate_by_copy(shell, first, lane, sum);
        stage(shell, warp, lane, sum);
      }
      shell.sync_math();
      store_staged(shell, tile, thread);
    }
    shell.stored();
  }

 private:
  static constexpr int kRope = 64, kLatent = 512, kQueryColumns = kLatent + kRope;
  static constexpr bool kFromRegisters = kTokens <= 16;  // table values of more would cost a CTA its place
  // Bytes of a token's table row and of its results in shared memory: 16 more than there are, off the banks' period.
  static constexpr int kTableStride = kRope * 4 + 16, kStride = kRows * 2 + 16;

 public:
  static constexpr int kStagedBytes = kFromRegisters ? 0 : kTokens * (kTableStride + kStride);

 private:

  // Where the tile's rows begin in their head.
  template <class Shell>
  SPANTUNE_DEVICE int first_row(const Shell& shell, const Tile& tile) const {
    return tile.n * kRows - head_ * shell.scalar(GemmSlots::kHeadRows);
  }
  // The cosines of a token of the tile; its sines are half a row further.
  template <class Shell>
  static SPANTUNE_DEVICE const float* table_of(const Shell& shell, const Tile& tile, int token) {
    const int last = shell.scalar(GemmSlots::kM) - 1;
    const int position = shell.template pointer<int>(GemmSlots::kPositions)[min(tile.m * kTokens + token, last)];
    return shell.template pointer<float>(GemmSlots::kCosSin) + static_cast<int64_t>(position) * kRope;
  }
  // A lane's value of a pair; pairs are neighbouring rows, held by lanes that differ in bit 2.
  static SPANTUNE_DEVICE void rotate(float& value, int lane, float cosine, float sine) {
    const float other = __shfl_xor_sync(~0u, value, 4);
    const bool odd = lane & 4;
    const auto turned = numerics::rotate(odd ? other : value, odd ? value : other, cosine, sine);
    value = odd ? turned.odd : turned.even;
  }

  // Where the warp's rows lie in their head, and where they go.
  template <class Shell>
  SPANTUNE_DEVICE void locate(const Shell& shell, const Tile& tile, int warp, int lane) {
    const int head_rows = shell.scalar(GemmSlots::kHeadRows), nope = shell.scalar(GemmSlots::kNope);
    const int row = tile.n * kRows + warp * 16, head = row / head_rows, atom = row - head * head_rows;
    const int heads = shell.scalar(GemmSlots::kHeads);
    rotated_ = atom >= nope;
    stride_ = heads * (rotated_ ? kQueryColumns : nope);
    out_ = rotated_ ? shell.template pointer<uint16_t>(GemmSlots::kOut1) + head * kQueryColumns + kLatent + atom - nope
                    : shell.template pointer<uint16_t>(GemmSlots::kOut0) + head * nope + atom;
    pair_ = (atom - nope + (lane >> 2)) / 2;
    asm volatile("" : "+l"(out_), "+r"(stride_));  // not in the tail
  }
  template <class Shell>
  SPANTUNE_DEVICE void store_from_registers(const Shell& shell, const Tile& tile, int lane,
                                            float (&sum)[kTokens / 2]) const {
    if (rotated_) {
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) rotate(sum[j], lane, cosine_[j], sine_[j]);
    }
    const int first = tile.m * kTokens, left = shell.scalar(GemmSlots::kM) - first;
#pragma unroll
    for (int j = 0; j < kTokens; j += 8)
      fragments::store_tokens(out_ + static_cast<int64_t>(first + j) * stride_, stride_, &sum[j / 2], lane, left - j);
  }

  // Table rows of the tile's tokens into shared memory, each sine behind its cosine.
  template <class Shell>
  static SPANTUNE_DEVICE void copy_table(const Shell& shell, const Tile& tile, int thread) {
    constexpr int kPieces = kRope / 8;  // of a row: four pairs
#pragma unroll
    for (int i = 0; i < kTokens * kPieces / kMathThreads; ++i) {
      const int index = i * kMathThreads + thread, token = index / kPieces, piece = index % kPieces;
      const float* row = table_of(shell, tile, token) + piece * 4;
      const float4 cosine = *reinterpret_cast<const float4*>(row);
      const float4 sine = *reinterpret_cast<const float4*>(row + kRope / 2);
      const uint32_t own = shell.page(0) + token * kTableStride + piece * 32;
      access::store_shared(own, make_float4(cosine.x, sine.x, cosine.y, sine.y));
      access::store_shared(own + 16, make_float4(cosine.z, sine.z, cosine.w, sine.w));
    }
  }
  // `first`: the warp's first row among the rotated ones.
  template <class Shell>
  static SPANTUNE_DEVICE void rotate_by_copy(const Shell& shell, int first, int lane, float (&sum)[kTokens / 2]) {
    const uint32_t own = shell.page(0) + (lane & 3) * 2 * kTableStride + (first + (lane >> 2)) / 2 * 8;
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) {
      const float2 turn = access::load_shared_pair(own + ((j / 4) * 8 + (j & 1)) * kTableStride + (j & 2) * 16);
      rotate(sum[j], lane, turn.x, turn.y);
    }
  }

  template <class Shell>
  static SPANTUNE_DEVICE uint32_t staged(const Shell& shell, int token) {
    return shell.page(0) + kTokens * kTableStride + token * kStride;
  }
  // The warp's rows, one behind the other for each token.
  template <class Shell>
  static SPANTUNE_DEVICE void stage(const Shell& shell, int warp, int lane, const float (&sum)[kTokens / 2]) {
    const uint32_t own = staged(shell, lane & 7) + warp * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int j = 0; j < kTokens; j += 8) fragments::stage_tokens(own + j * kStride, &sum[j / 2]);
  }
  template <class Shell>
  SPANTUNE_DEVICE void store_staged(const Shell& shell, const Tile& tile, int thread) const {
    constexpr int kPieces = kRows / 8;  // of a token; a thread's pieces are of the same rows
    const int nope = shell.scalar(GemmSlots::kNope), left = shell.scalar(GemmSlots::kM) - tile.m * kTokens;
    const int piece = thread % kPieces, row = first_row(shell, tile) + piece * 8;
    const int stride = shell.scalar(GemmSlots::kHeads) * (row < nope ? nope : kQueryColumns);
    uint16_t* out = row < nope
                        ? shell.template pointer<uint16_t>(GemmSlots::kOut0) + head_ * nope + row
                        : shell.template pointer<uint16_t>(GemmSlots::kOut1) + head_ * kQueryColumns + kLatent + row - nope;
    out += static_cast<int64_t>(tile.m * kTokens) * stride;
#pragma unroll 4
    for (int token = thread / kPieces; token < min(kTokens, left); token += kMathThreads / kPieces)
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * stride) =
          access::load_shared_16(staged(shell, token) + piece * 16);
  }

  // From registers: where the warp's rows go, and their table values.
  uint16_t* out_;
  int stride_, pair_;
  bool rotated_;
  float cosine_[kFromRegisters ? kTokens / 2 : 1], sine_[kFromRegisters ? kTokens / 2 : 1];
  int head_;  // staged: the tile's
};

}  // namespace spantune

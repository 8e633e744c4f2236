// logits[t, s] = key_scale[s] * sum over heads of head_weight[t, h] * relu(<q[t, h], key[s]>), FP8 keys in pages of 64
// tokens, positions from the request's block table. One tile is one request x up to kTokens of its tokens x kRows
// positions; keys are on the M side of the MMA, (token, head) pairs on the N side.
//
// A page of the cache is 64 keys of 128 bytes, then 64 fp32 scales. The two warpgroups take alternate pages. Nothing
// here is constant: keys of this step, queries and head weights come from other ops, so every load follows the acquire.
//
// Order of the head sum, the same for all cores and tile shapes: each thread adds its heads (8 b + 2 q, 8 b + 2 q + 1,
// b ascending, q = lane % 4) with one fused operation each; then a quad adds lanes 0 + 1 and 2 + 3, then both sums.
#pragma once

#include "../access.cuh"
#include "../cores/mma_sync.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "../cores/wgmma.cuh"
#endif
#include "../ptx.cuh"

namespace spantune {

// Operand slots, in the order of workloads/ops/paged_score.py.
struct ScoreSlots {
  enum : int { kQueryMap, kKeyMap, kCache, kHeadWeights, kBlockTable, kContextLens, kLogits, kTokens, kPages, kStride };
};

// Columns of one multiplication at most. The portable core needs the registers for unpacked operands.
template <class Core>
inline constexpr int kScoreColumns = 128;
template <>
inline constexpr int kScoreColumns<MmaSyncCore> = 32;

template <int kHeads, int kTokens, int kRows, class Core>
struct PagedScore {
  static constexpr bool kHasLoaders = true;
  static constexpr int kPageTokens = 64, kKeyBytes = kPageTokens * 128, kScaleBytes = kPageTokens * 4;
  static constexpr int kCachePageBytes = kKeyBytes + kScaleBytes;
  static constexpr int kCachePages = kRows / kPageTokens;  // of one tile
  static constexpr int kQueries = kTokens * kHeads, kBoxQueries = kQueries < 128 ? kQueries : 128;
  static constexpr int kColumns = kQueries < kScoreColumns<Core> ? kQueries : kScoreColumns<Core>;
  static constexpr int kColumnBytes = kColumns * 128;
  // A pass is one token or several, in one multiplication; or one token in several.
  static constexpr int kPassTokens = kColumns < kHeads ? 1 : kColumns / kHeads;
  static constexpr int kBlockHeads = kColumns / kPassTokens, kHeadBlocks = kHeads / kBlockHeads;
  static constexpr int kKeyPages = kCachePages * kKeyBytes / kPageBytes;
  static constexpr int kPages = kKeyPages + (kQueries * 128 + kPageBytes - 1) / kPageBytes;
  static constexpr int kBarriers = 1 + kCachePages;  // queries and head weights, then one a cache page
  static_assert(kRows % 128 == 0 && kHeads % kBlockHeads == 0 && kQueries % kBoxQueries == 0, "tile shape");
  static_assert(kCachePages * kScaleBytes + kTokens * kHeads * 4 <= kScratchBytes, "scratch");
  static_assert(kBarriers <= kMaxBarriers, "barriers");

  static SPANTUNE_DEVICE int arrivals(int) { return 1; }

  template <class Shell>
  static SPANTUNE_DEVICE uint32_t key_tile(const Shell& shell, int page) {
    return shell.page(page / 2) + page % 2 * kKeyBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t query_tile(const Shell& shell, int block) {
    constexpr int kPerPage = kPageBytes / kColumnBytes;
    return shell.page(kKeyPages + block / kPerPage) + block % kPerPage * kColumnBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t key_scales(const Shell& shell, int page) {
    return shell.scratch() + page * kScaleBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t head_weights(const Shell& shell, int token) {
    return shell.scratch() + kCachePages * kScaleBytes + token * kHeads * 4;
  }

  // Nothing may be read before the acquire.
  template <class Shell>
  static SPANTUNE_DEVICE void weights(const Shell& shell, const Tile&) {
    if (shell.lane() == 0) shell.announce(Point::kWeightsIssued);
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void inputs(const Shell& shell, const Tile& tile) {
    const TensorMap *queries = shell.map(ScoreSlots::kQueryMap), *keys = shell.map(ScoreSlots::kKeyMap);
    const int lane = shell.lane();
    if (lane == 0) {
      ptx::prefetch_map(queries);
      ptx::prefetch_map(keys);
    }
    shell.template acquire<Group::kInputs>();
    // Lane i looks after page i; its table entry and the context lengths travel together.
    const QueryBlock block(shell, tile);
    const int pages = shell.scalar(ScoreSlots::kPages), page = tile.n * kCachePages + lane;
    const bool in_table = lane < kCachePages && page < pages;
    const int* table = shell.template pointer<int>(ScoreSlots::kBlockTable) + block.request * pages;
    const int64_t place = in_table ? table[page] : 0;
    if (lane == 0 && tile.n * kRows < block.limit) issue_queries(shell, queries, block);
    __syncwarp();
    if (in_table && page * kPageTokens < block.limit) {
      const uint32_t landed = shell.barrier(1 + lane);
      ptx::barrier_arrive_expect(landed, kKeyBytes + kScaleBytes);
      ptx::copy_tile_3d(key_tile(shell, lane), keys, 0, 0, static_cast<int>(place), landed, ptx::kEvictNormal);
      ptx::copy_bulk(key_scales(shell, lane),
                     shell.template pointer<uint8_t>(ScoreSlots::kCache) + place * kCachePageBytes + kKeyBytes,
                     kScaleBytes, landed);
    }
    __syncwarp();
    if (lane == 0) shell.announce(Point::kInputsRead);
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    shell.template acquire<Group::kMath>();
    const QueryBlock block(shell, tile);
    const int group = shell.math_warp() / 4;
    // Pages past the context were not loaded; later pages lie further still.
    for (int page = group; page < kCachePages && tile.n * kRows + page * kPageTokens < block.limit; page += 2) {
      if (page == group) ptx::barrier_wait(shell.barrier(0), 0);
      ptx::barrier_wait(shell.barrier(1 + page), 0);
      score_page(shell, tile, block, page);
    }
    shell.release();
    shell.sync_math();
    if (shell.math_thread() == 0) shell.announce(Point::kStored);
  }

 private:
  // The tokens of a tile. Lane i holds the context length of the block's token i, 0 past its last.
  struct QueryBlock {
    int request, first, tokens, context, limit;  // `limit` is the longest context

    template <class Shell>
    SPANTUNE_DEVICE QueryBlock(const Shell& shell, const Tile& tile) {
      const int per_request = shell.scalar(ScoreSlots::kTokens), blocks = (per_request + kTokens - 1) / kTokens;
      request = tile.m / blocks;
      const int begin = tile.m % blocks * kTokens;
      first = request * per_request + begin;
      tokens = min(kTokens, per_request - begin);
      const int* lens = shell.template pointer<int>(ScoreSlots::kContextLens) + first;
      const int lane = shell.lane();
      context = lane < tokens ? min(lens[lane], shell.scalar(ScoreSlots::kPages) * kPageTokens) : 0;
      limit = __reduce_max_sync(~0u, context);
    }
  };

  template <class Shell>
  static SPANTUNE_DEVICE void issue_queries(const Shell& shell, const TensorMap* map, const QueryBlock& block) {
    const uint32_t landed = shell.barrier(0);
    const int weight_bytes = block.tokens * kHeads * 4, boxes = (block.tokens * kHeads + kBoxQueries - 1) / kBoxQueries;
    // What the last box holds past the block's tokens are other tokens' queries or zeros; their scores are not stored.
    ptx::barrier_arrive_expect(landed, boxes * kBoxQueries * 128 + weight_bytes);
    for (int box = 0; box < boxes; ++box)  // a box fills a page when there are several
      ptx::copy_tile_2d(shell.page(kKeyPages + box), map, 0, block.first * kHeads + box * kBoxQueries, landed,
                        ptx::kEvictLast);
    ptx::copy_bulk(head_weights(shell, 0),
                   shell.template pointer<float>(ScoreSlots::kHeadWeights) + static_cast<int64_t>(block.first) * kHeads,
                   weight_bytes, landed);
  }

  template <class Shell>
  static SPANTUNE_DEVICE void score_page(const Shell& shell, const Tile& tile, const QueryBlock& queries, int page) {
    const int lane = shell.lane(), first_row = shell.math_warp() % 4 * 16;
#pragma unroll 1
    for (int pass = 0; pass * kPassTokens < queries.tokens; ++pass) {
      float part[kPassTokens][2], score[kLaneTokens];
#pragma unroll
      for (int token = 0; token < kPassTokens; ++token) part[token][0] = part[token][1] = 0.0f;
#pragma unroll 1
      for (int block = 0; block < kHeadBlocks; ++block) {
        float dot[kColumns / 2];
        Core::template k_block<kColumns>(dot, key_tile(shell, page), first_row,
                                         query_tile(shell, pass * kHeadBlocks + block), lane);
        add_heads(part, dot, head_weights(shell, pass * kPassTokens) + block * kBlockHeads * 4, lane);
      }
      add_quad(score, part, lane);
      // The lane now holds row g (even lanes) or g + 8 (odd lanes) of its warp's 16.
      const int row = first_row + (lane >> 2) + (lane & 1) * 8, position = tile.n * kRows + page * kPageTokens + row;
      const float key_scale = access::load_shared(key_scales(shell, page) + row * 4);
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        const int token = pass * kPassTokens + (kPassTokens > 1 ? ((lane >> 1) & 1) * kLaneTokens + i : 0);
        const int context = __shfl_sync(~0u, queries.context, token);
        float* logits = shell.template pointer<float>(ScoreSlots::kLogits) +
                        static_cast<int64_t>(queries.first + token) * shell.scalar(ScoreSlots::kStride);
        // With one token a pass, both halves of the quad hold it.
        const bool mine = kPassTokens > 1 || (lane & 2) == 0;
        if (mine && position < context) logits[position] = __fmul_rn(key_scale, score[i]);
      }
    }
  }

  static constexpr int kLaneTokens = kPassTokens > 1 ? kPassTokens / 2 : 1;  // that a lane stores in a pass

  // Adds a block's heads of this thread, for rows g and g + 8.
  static SPANTUNE_DEVICE void add_heads(float (&part)[kPassTokens][2], const float (&dot)[kColumns / 2],
                                        uint32_t weights, int lane) {
#pragma unroll
    for (int token = 0; token < kPassTokens; ++token) {
#pragma unroll
      for (int b = 0; b < kBlockHeads / 8; ++b) {
        const float2 w = access::load_shared_pair(weights + (token * kHeads + b * 8 + (lane & 3) * 2) * 4);
        const float* d = dot + (token * kBlockHeads / 8 + b) * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          part[token][half] = __fmaf_rn(w.x, fmaxf(d[half * 2], 0.0f), part[token][half]);
          part[token][half] = __fmaf_rn(w.y, fmaxf(d[half * 2 + 1], 0.0f), part[token][half]);
        }
      }
    }
  }

  // (lane 0 + lane 1) + (lane 2 + lane 3) of each quad, spread: a lane gives away the sums that its neighbour will
  // store. Neighbours split the rows, the halves of the quad split the tokens.
  static SPANTUNE_DEVICE void add_quad(float (&score)[kLaneTokens], const float (&part)[kPassTokens][2], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    float pair[kPassTokens];
#pragma unroll
    for (int t = 0; t < kPassTokens; ++t)
      pair[t] = add_neighbour(odd ? part[t][1] : part[t][0], odd ? part[t][0] : part[t][1], 1);
    if constexpr (kPassTokens == 1) {
      score[0] = add_neighbour(pair[0], pair[0], 2);
    } else {
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        const float low = pair[i], high = pair[kLaneTokens + i];
        score[i] = add_neighbour(upper ? high : low, upper ? low : high, 2);
      }
    }
  }
  static SPANTUNE_DEVICE float add_neighbour(float kept, float given, int mask) {
    return __fadd_rn(kept, __shfl_xor_sync(~0u, given, mask));
  }
};

}  // namespace spantune

// logits[t, s] = key_scale[s] * sum over heads of head_weight[t, h] * relu(<q[t, h], key[s]>), FP8 keys in pages of 64
// tokens, positions from the request's block table. One tile is one request x up to kTokens of its tokens x kRows
// positions; keys are on the M side of the MMA, (token, head) pairs on the N side.
//
// A page of the cache is 64 keys of 128 bytes, then 64 fp32 scales. The two warpgroups take alternate pages; of a single
// page each takes half of the tokens.
//
// What may be read early, by the contract of workloads/ops/paged_score.py: block table and context lengths, which the
// caller wrote, and old pages, which this run leaves alone. The W loader brings old pages as other ops bring weights;
// the A loader brings queries, head weights and the pages that may hold keys of this step, after its acquire.
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
  enum : int { kQueryMap, kKeyMap, kScaleMap, kHeadWeights, kBlockTable, kContextLens, kLogits, kTokens, kPages, kStride };
};

// Whether a core's multiplications run beside the sums of the one before; and the columns of one at most. The portable
// core needs the registers for unpacked operands, wgmma for the second multiplication.
template <class Core>
inline constexpr bool kOverlaps = !Core::kGenericReads;
template <class Core>
inline constexpr int kScoreColumns = kOverlaps<Core> ? 64 : 32;

template <int kHeads, int kTokens, int kRows, class Core>
struct PagedScore {
  static constexpr bool kHasLoaders = true;
  static constexpr int kPageTokens = 64, kKeyBytes = kPageTokens * 128, kScaleBytes = kPageTokens * 4;
  static constexpr int kCachePages = kRows / kPageTokens;  // of one tile
  static constexpr int kQueries = kTokens * kHeads, kBoxQueries = kQueries < 128 ? kQueries : 128;
  static constexpr int kBoxes = kQueries / kBoxQueries;
  static constexpr int kSharers = kCachePages == 1 && kTokens > 1 ? 2 : 1;  // warpgroups that share a page
  static constexpr int kGroupTokens = kTokens / kSharers, kGroupQueries = kGroupTokens * kHeads;
  static constexpr int kColumns = kGroupQueries < kScoreColumns<Core> ? kGroupQueries : kScoreColumns<Core>;
  // A pass is one token or several, in one multiplication; or one token in several.
  static constexpr int kPassTokens = kColumns < kHeads ? 1 : kColumns / kHeads, kPasses = kGroupTokens / kPassTokens;
  static constexpr int kLaneTokens = kPassTokens > 1 ? kPassTokens / 2 : 1;  // that a lane stores in a pass
  static constexpr int kBlockHeads = kColumns / kPassTokens, kHeadBlocks = kHeads / kBlockHeads;
  static constexpr int kKeyPages = (kCachePages * kKeyBytes + kPageBytes - 1) / kPageBytes;
  static constexpr int kPages = kKeyPages + (kQueries * 128 + kPageBytes - 1) / kPageBytes;
  static constexpr int kBarriers = kBoxes + kCachePages;  // one a box of queries (the first: head weights too), one a page
  static_assert(kRows % kPageTokens == 0 && kHeads % kBlockHeads == 0 && kQueries % kBoxQueries == 0, "tile shape");
  static_assert(kCachePages * kScaleBytes + kTokens * kHeads * 4 <= kScratchBytes, "scratch");
  static_assert(kBarriers <= kMaxBarriers && kCachePages <= kWarpLanes && kTokens < kWarpLanes, "one a lane");

  static SPANTUNE_DEVICE int arrivals(int) { return 1; }

  template <class Shell>
  static SPANTUNE_DEVICE uint32_t key_tile(const Shell& shell, int page) {
    return shell.page(page / 2) + page % 2 * kKeyBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t query_tile(const Shell& shell, int query) {
    return shell.page(kKeyPages + query / 128) + query % 128 * 128;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t key_scales(const Shell& shell, int page) {
    return shell.scratch() + page * kScaleBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t head_weights(const Shell& shell, int token) {
    return shell.scratch() + kCachePages * kScaleBytes + token * kHeads * 4;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t queries_landed(const Shell& shell, int box) { return shell.barrier(box); }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t keys_landed(const Shell& shell, int page) { return shell.barrier(kBoxes + page); }

  template <class Shell>
  static SPANTUNE_DEVICE const TensorMap* weight_map(const Shell& shell) { return shell.map(ScoreSlots::kKeyMap); }

  // Old pages, one a lane.
  template <class Shell>
  static SPANTUNE_DEVICE void weights(const Shell& shell, const Tile& tile) {
    const int lane = shell.lane(), ahead = shell.w_ahead();
    const QueryBlock block(shell, tile);
    const KeyPage page(shell, tile, block);
    if (lane == 0) ptx::prefetch_map(shell.map(ScoreSlots::kScaleMap));
    const bool mine = page.old(block.first_context());
    if (mine && lane < ahead) issue_keys(shell, page.place);
    __syncwarp();
    if (ahead < kCachePages) {
      shell.template acquire<Group::kWeights>();
      if (mine && lane >= ahead) issue_keys(shell, page.place);
      __syncwarp();
    }
    if (lane == 0) shell.announce(Point::kWeightsIssued);
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void inputs(const Shell& shell, const Tile& tile) {
    const int lane = shell.lane();
    const QueryBlock block(shell, tile);
    const KeyPage page(shell, tile, block);
    if (lane == 0) ptx::prefetch_map(shell.map(ScoreSlots::kQueryMap));
    shell.template acquire<Group::kInputs>();
    const int limit = block.limit(shell), first_context = block.first_context();  // the whole warp takes part in both
    if (lane == 0 && tile.n * kRows < limit) issue_queries(shell, block);
    __syncwarp();
    if (page.needed(limit) && !page.old(first_context)) issue_keys(shell, page.place);
    __syncwarp();
    if (lane == 0) shell.announce(Point::kInputsRead);
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const QueryBlock block(shell, tile);
    shell.template acquire<Group::kMath>();
    const int group = shell.math_warp() / 4, context = block.context(shell), limit = __reduce_max_sync(~0u, context);
    const int first_page = kSharers == 1 ? group : 0, first_token = kSharers == 1 ? 0 : group * kGroupTokens;
    if (!kOverlaps<Core> && tile.n * kRows < limit)  // queries land before most keys do
      for (int box = 0; box < kBoxes; ++box) ptx::barrier_wait(queries_landed(shell, box), 0);
    // Pages past the context were not loaded; later pages lie further still.
#pragma unroll 1
    for (int page = first_page; page < kCachePages && tile.n * kRows + page * kPageTokens < limit; page += 2) {
      ptx::barrier_wait(keys_landed(shell, page), 0);
      if constexpr (kOverlaps<Core>) {
        score_ahead(shell, tile, block, context, page, first_token);
      } else {
        score_in_turn(shell, tile, block, context, page, first_token);
      }
    }
    shell.stored();
  }

 private:
  // The tokens of a tile. Lane i holds the context length of the block's token i, and lanes past its last that of the
  // request's first token. The load is issued at once and used late, so that it travels beside others.
  struct QueryBlock {
    int request, first, tokens, length;

    template <class Shell>
    SPANTUNE_DEVICE QueryBlock(const Shell& shell, const Tile& tile) {
      const int per_request = shell.scalar(ScoreSlots::kTokens), blocks = (per_request + kTokens - 1) / kTokens;
      request = blocks == 1 ? tile.m : tile.m / blocks;  // a division is slow, and every load waits for it
      const int begin = (tile.m - request * blocks) * kTokens, lane = shell.lane();
      first = request * per_request + begin;
      tokens = min(kTokens, per_request - begin);
      length = access::load_entry(shell.template pointer<int>(ScoreSlots::kContextLens) + first +
                                         (lane < tokens ? lane : -begin));
    }
    // Positions that the lane's token sees, 0 past the last token.
    template <class Shell>
    SPANTUNE_DEVICE int context(const Shell& shell) const {
      return shell.lane() < tokens ? min(length, shell.scalar(ScoreSlots::kPages) * kPageTokens) : 0;
    }
    // The longest context.
    template <class Shell>
    SPANTUNE_DEVICE int limit(const Shell& shell) const {
      return __reduce_max_sync(~0u, context(shell));
    }
    SPANTUNE_DEVICE int first_context() const { return __shfl_sync(~0u, length, kWarpLanes - 1); }
  };

  // The lane's page of the tile: its number in the request and its place in the cache.
  struct KeyPage {
    int page, place;
    bool exists;

    template <class Shell>
    SPANTUNE_DEVICE KeyPage(const Shell& shell, const Tile& tile, const QueryBlock& block) : place(0) {
      const int pages = shell.scalar(ScoreSlots::kPages);
      page = tile.n * kCachePages + shell.lane();
      exists = shell.lane() < kCachePages && page < pages;
      if (exists)
        place = access::load_entry(shell.template pointer<int>(ScoreSlots::kBlockTable) + block.request * pages + page);
    }
    // Whether it holds keys that a token sees.
    SPANTUNE_DEVICE bool needed(int limit) const { return exists && page * kPageTokens < limit; }
    // Whether all of it lies before the first key that this run writes, at position first_context - 1. Then every token
    // sees it, since their contexts ascend.
    SPANTUNE_DEVICE bool old(int first_context) const { return exists && (page + 1) * kPageTokens < first_context; }
  };

  // The lane's page.
  template <class Shell>
  static SPANTUNE_DEVICE void issue_keys(const Shell& shell, int place) {
    const int lane = shell.lane();
    const uint32_t landed = keys_landed(shell, lane);
    ptx::barrier_arrive_expect(landed, kKeyBytes + kScaleBytes);
    ptx::copy_tile_3d(key_tile(shell, lane), shell.map(ScoreSlots::kKeyMap), 0, 0, place, landed, ptx::kEvictNormal);
    ptx::copy_tile_2d(key_scales(shell, lane), shell.map(ScoreSlots::kScaleMap), 0, place, landed, ptx::kEvictNormal);
  }

  template <class Shell>
  static SPANTUNE_DEVICE void issue_queries(const Shell& shell, const QueryBlock& block) {
    const TensorMap* map = shell.map(ScoreSlots::kQueryMap);
    const int weight_bytes = block.tokens * kHeads * 4;
    // Rows past the block's tokens are other tokens' queries or zeros; their scores are not stored.
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32_t landed = queries_landed(shell, box);
      ptx::barrier_arrive_expect(landed, kBoxQueries * 128 + (box == 0 ? weight_bytes : 0));
      ptx::copy_tile_2d(query_tile(shell, box * kBoxQueries), map, 0, block.first * kHeads + box * kBoxQueries, landed,
                        ptx::kEvictLast);
      if (box == 0)
        ptx::copy_bulk(head_weights(shell, 0),
                       shell.template pointer<float>(ScoreSlots::kHeadWeights) + static_cast<int64_t>(block.first) * kHeads,
                       weight_bytes, landed);
    }
  }

  // One page against the group's tokens, pass after pass.
  template <class Shell>
  static SPANTUNE_DEVICE void score_in_turn(const Shell& shell, const Tile& tile, const QueryBlock& queries, int context,
                                            int page, int first_token) {
    const int lane = shell.lane();
#pragma unroll 1
    for (int pass = 0; pass < kPasses && first_token + pass * kPassTokens < queries.tokens; ++pass) {
      const int token = first_token + pass * kPassTokens;
      float part[kPassTokens][2], score[kLaneTokens];
      clear(part);
#pragma unroll 1
      for (int block = 0; block < kHeadBlocks; ++block) {
        float dot[kColumns / 2];
        Core::template k_block<kColumns>(dot, key_tile(shell, page), shell.math_warp() % 4 * 16,
                                         query_tile(shell, token * kHeads + block * kColumns), lane);
        add_heads(part, dot, head_weights(shell, token) + block * kBlockHeads * 4, lane);
      }
      add_quad(score, part, lane);
      store(shell, tile, queries, context, page, token, score);
    }
  }

  // The same with waits for the queries, and with the next pass under way while one is added up. Passes past the block's
  // tokens are computed, not stored, and stores come last: branches between would keep the assembler from overlapping.
  template <class Shell>
  static SPANTUNE_DEVICE void score_ahead(const Shell& shell, const Tile& tile, const QueryBlock& queries, int context,
                                          int page, int first_token) {
    static_assert(kHeadBlocks == 1, "a pass is one multiplication");
    const auto start = [&](float(&dot)[kColumns / 2], int pass) {
      const int query = first_token * kHeads + pass * kColumns;
      if (pass == 0) ptx::barrier_wait(queries_landed(shell, 0), 0);  // the head weights land there
      if (pass * kColumns % kBoxQueries == 0) ptx::barrier_wait(queries_landed(shell, query / kBoxQueries), 0);
      Core::template start<kColumns>(dot, key_tile(shell, page), query_tile(shell, query));
    };
    float dot[2][kColumns / 2], score[kPasses][kLaneTokens];
    start(dot[0], 0);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass + 1 < kPasses) {
        start(dot[(pass + 1) % 2], pass + 1);
        Core::template finish<1>(dot[pass % 2]);
      } else {
        Core::template finish<0>(dot[pass % 2]);
      }
      float part[kPassTokens][2];
      clear(part);
      add_heads(part, dot[pass % 2], head_weights(shell, first_token + pass * kPassTokens), shell.lane());
      add_quad(score[pass], part, shell.lane());
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      store(shell, tile, queries, context, page, first_token + pass * kPassTokens, score[pass]);
  }

  static SPANTUNE_DEVICE void clear(float (&part)[kPassTokens][2]) {
#pragma unroll
    for (int i = 0; i < kPassTokens; ++i) part[i][0] = part[i][1] = 0.0f;
  }

  // Stores the tokens of a pass, from block token `first_token` on.
  template <class Shell>
  static SPANTUNE_DEVICE void store(const Shell& shell, const Tile& tile, const QueryBlock& queries, int own_context,
                                    int page, int first_token, const float (&score)[kLaneTokens]) {
    // The lane holds row g (even lanes) or g + 8 (odd lanes) of its warp's 16.
    const int lane = shell.lane(), row = shell.math_warp() % 4 * 16 + (lane >> 2) + (lane & 1) * 8;
    const int position = tile.n * kRows + page * kPageTokens + row;
    const float key_scale = access::load_shared(key_scales(shell, page) + row * 4);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const int token = first_token + (kPassTokens > 1 ? ((lane >> 1) & 1) * kLaneTokens + i : 0);
      const int context = __shfl_sync(~0u, own_context, token);
      float* logits = shell.template pointer<float>(ScoreSlots::kLogits) +
                      static_cast<int64_t>(queries.first + token) * shell.scalar(ScoreSlots::kStride);
      // With one token a pass, both halves of the quad hold it.
      const bool mine = kPassTokens > 1 || (lane & 2) == 0;
      if (mine && position < context) logits[position] = __fmul_rn(key_scale, score[i]);
    }
  }

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

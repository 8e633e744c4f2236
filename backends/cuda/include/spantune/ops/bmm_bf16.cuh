// out[m, head, 0..511] = X[m, head, :] . W[head, :, 512] per head, in bf16 with fp32 accumulation and one rounding;
// weights on the M side of the MMA. One tile is one head x kRows of the 512 columns x kTokens tokens, with all of K.
//
// K is short (`nope`, two or three chunks of 64), so nothing is reused: every chunk of W and X has its own place and
// its own barrier, and the math starts when the first has landed. W is N-contiguous in the checkpoint, so its fragments
// are read transposed. Each warp accumulates over all of K in ascending order, whatever the tile's shape.
#pragma once

#include "../access.cuh"
#include "../cores/mma_bf16.cuh"
#include "../fragments.cuh"
#include "../ptx.cuh"

namespace spantune {

// Operand slots, in the order of workloads/ops/bmm_bf16.py.
struct BmmSlots {
  enum : int { kWeightMap, kInputMap, kM, kHeads, kOut };
};

template <int kNope, int kRows, int kTokens>
struct BmmBf16 {
  static constexpr bool kHasLoaders = true;
  static constexpr int kLatent = 512, kOutStride = 576;  // columns of a head: the product, then the rotated ones
  static constexpr int kChunk = 64, kChunks = kNope / kChunk;
  static constexpr int kBoxRows = 64, kBoxes = kRows / kBoxRows;  // TMA boxes of one chunk of W: 64 columns x 64 k
  static constexpr int kBoxBytes = kBoxRows * kChunk * 2, kBoxesPerPage = kPageBytes / kBoxBytes;
  static constexpr int kXBytes = kTokens * kChunk * 2, kXPerPage = kPageBytes / kXBytes;
  static constexpr int kWPages = (kChunks * kBoxes + kBoxesPerPage - 1) / kBoxesPerPage;
  static constexpr int kPages = kWPages + (kChunks + kXPerPage - 1) / kXPerPage;
  static constexpr int kBarriers = kChunks;
  // 16 rows a warp, or several times 16; warps left over by 64 rows share out the tokens.
  static constexpr int kAtoms = kRows <= 128 ? 1 : kRows / 128;
  static constexpr int kRowWarps = kRows / (16 * kAtoms), kTokenGroups = kMathWarps / kRowWarps;
  static constexpr int kWarpTokens = kTokens / kTokenGroups;
  static_assert(kNope % kChunk == 0 && kLatent % kRows == 0 && kRows % kBoxRows == 0, "tile shape");
  static_assert(kWarpTokens % 8 == 0 && kTokens <= 64, "tokens of a tile");

  static SPANTUNE_DEVICE int arrivals(int) { return 2; }

  template <class Shell>
  static SPANTUNE_DEVICE uint32_t w_box(const Shell& shell, int chunk, int box) {
    const int i = chunk * kBoxes + box;
    return shell.page(i / kBoxesPerPage) + i % kBoxesPerPage * kBoxBytes;
  }
  template <class Shell>
  static SPANTUNE_DEVICE uint32_t x_tile(const Shell& shell, int chunk) {
    return shell.page(kWPages + chunk / kXPerPage) + chunk % kXPerPage * kXBytes;
  }
  static SPANTUNE_DEVICE int head_of(const Tile& tile) { return tile.n / (kLatent / kRows); }
  static SPANTUNE_DEVICE int column_of(const Tile& tile) { return tile.n % (kLatent / kRows) * kRows; }

  template <class Shell>
  static SPANTUNE_DEVICE const TensorMap* weight_map(const Shell& shell) { return shell.map(BmmSlots::kWeightMap); }

  // One elected lane issues; the others only take part in the acquire.
  template <class Shell>
  static SPANTUNE_DEVICE void weights(const Shell& shell, const Tile& tile) {
    const TensorMap* map = weight_map(shell);
    const int ahead = min(shell.w_ahead(), kChunks);
    const bool leads = shell.lane() == 0;
    if (leads) {
#pragma unroll 1  // short code reaches the first copy sooner than unrolled code: its lines come from far away
      for (int i = 0; i < ahead; ++i) issue_weights(shell, map, tile, i);
    }
    __syncwarp();
    if (ahead < kChunks) {
      shell.template acquire<Group::kWeights>();
      if (leads) {
#pragma unroll 1
        for (int i = ahead; i < kChunks; ++i) issue_weights(shell, map, tile, i);
      }
    }
    if (leads) shell.announce(Point::kWeightsIssued);
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void inputs(const Shell& shell, const Tile& tile) {
    const TensorMap* map = shell.map(BmmSlots::kInputMap);
    if (shell.lane() == 0) ptx::prefetch_map(map);
    shell.template acquire<Group::kInputs>();
    if (shell.lane() == 0) {
      for (int i = 0; i < kChunks; ++i) {
        ptx::barrier_arrive_expect(shell.barrier(i), kXBytes);  // tokens past M count too: the box is zero-filled
        ptx::copy_tile_2d(x_tile(shell, i), map, head_of(tile) * kNope + i * kChunk, tile.m * kTokens, shell.barrier(i),
                          ptx::kEvictLast);
      }
      shell.announce(Point::kInputsRead);
    }
    __syncwarp();
  }

  template <class Shell>
  static SPANTUNE_DEVICE void math(const Shell& shell, const Tile& tile) {
    const int first_row = shell.math_warp() % kRowWarps * (16 * kAtoms);
    const int first_token = shell.math_warp() / kRowWarps * kWarpTokens;
    float sum[kAtoms][kWarpTokens / 8][4];
#pragma unroll
    for (int i = 0; i < kAtoms * kWarpTokens / 2; ++i) (&sum[0][0][0])[i] = 0.0f;
    const int stride = shell.scalar(BmmSlots::kHeads) * kOutStride, first = tile.m * kTokens + first_token;
    uint16_t* out = shell.template pointer<uint16_t>(BmmSlots::kOut) + static_cast<int64_t>(first) * stride +
                    head_of(tile) * kOutStride + column_of(tile) + first_row;
    asm volatile("" : "+l"(out));  // not in the tail
    shell.template acquire<Group::kMath>();
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      ptx::barrier_wait(shell.barrier(i), 0);
      multiply(sum, shell, i, first_row, first_token);
    }
    const int left = shell.scalar(BmmSlots::kM) - first;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom)
#pragma unroll
      for (int t = 0; t < kWarpTokens; t += 8)
        fragments::store_tokens(out + static_cast<int64_t>(t) * stride + atom * 16, stride, sum[atom][t / 8], shell.lane(),
                                left - t);
    shell.stored();
  }

 private:
  template <class Shell>
  static SPANTUNE_DEVICE void issue_weights(const Shell& shell, const TensorMap* map, const Tile& tile, int i) {
    ptx::barrier_arrive_expect(shell.barrier(i), kBoxes * kBoxBytes);
    for (int box = 0; box < kBoxes; ++box)
      ptx::copy_tile_2d(w_box(shell, i, box), map, column_of(tile) + box * kBoxRows, head_of(tile) * kNope + i * kChunk,
                        shell.barrier(i), ptx::kEvictFirst);
  }

  // One chunk. Shared rows of W are k, their 16-byte pieces 8 columns of the output: matrices (columns + 0, k + 0),
  // (columns + 8, k + 0), (columns + 0, k + 8), (columns + 8, k + 8), each transposed, are the A fragment. Shared rows
  // of X are tokens, their pieces 8 values of k: matrices (k + 0), (k + 8) of 8 tokens are the B fragment.
  template <class Shell>
  static SPANTUNE_DEVICE void multiply(float (&sum)[kAtoms][kWarpTokens / 8][4], const Shell& shell, int chunk,
                                       int first_row, int first_token) {
    const int row = shell.lane() & 7, low = (shell.lane() >> 3) & 1, high = shell.lane() >> 4;
    const uint32_t x_base = x_tile(shell, chunk);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      uint32_t w[kAtoms][4];
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        const int column = first_row + atom * 16;
        const uint32_t box = w_box(shell, chunk, column / kBoxRows);
        ptx::load_matrix_x4_trans(
            w[atom], ptx::swizzled(box, step * 16 + row + high * 8, column % kBoxRows / 8 + low));
      }
      if constexpr (kWarpTokens == 8) {
        uint32_t x[2];
        ptx::load_matrix_x2(x, ptx::swizzled(x_base, first_token + row, step * 2 + low));
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom) add(sum[atom][0], w[atom], x[0], x[1]);
      } else {
#pragma unroll
        for (int t = 0; t < kWarpTokens / 16; ++t) {
          uint32_t x[4];
          ptx::load_matrix_x4(x, ptx::swizzled(x_base, first_token + t * 16 + row + high * 8, step * 2 + low));
#pragma unroll
          for (int atom = 0; atom < kAtoms; ++atom) {
            add(sum[atom][2 * t], w[atom], x[0], x[1]);
            add(sum[atom][2 * t + 1], w[atom], x[2], x[3]);
          }
        }
      }
    }
  }
  static SPANTUNE_DEVICE void add(float (&sum)[4], const uint32_t (&w)[4], uint32_t x0, uint32_t x1) {
    MmaBf16::multiply(sum, w[0], w[1], w[2], w[3], x0, x1);
  }
};

}  // namespace spantune

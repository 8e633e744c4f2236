// The grid shell: one op is one kernel, one tile is one CTA. It gives the op's announcements the meaning that CMP needs
// (programmatic dependent launch), owns the barriers and pages, and is the only place that names blockIdx or
// griddepcontrol.
//
// An op is a struct of static role functions and constants:
//   kHasLoaders        whether the W loader and A loader warps exist (a row op uses the math group only)
//   kPages, kBarriers  what it uses; arrivals(i) gives the arrival count of barrier i
//   weights(shell, tile), inputs(shell, tile), math(shell, tile)
#pragma once

#include "../ptx.cuh"

namespace spantune {

constexpr int kMaxMaps = 4;

// Parameters of every grid kernel. Layout mirrored by backends/plan/encode.py.
template <int kMaps>
struct alignas(64) GridArgs {
  uint64_t operands[kOperandSlots];
  int32_t k_blocks_per_split;  // quotient and remainder of the op's k-blocks by its splits: no division here
  int32_t k_blocks_left;
  int32_t trigger;  // a Point
  int32_t wait;     // a Point: kEntry, kSetUp, or kNone for the acquires alone
  int32_t w_ahead;  // W stages that may be issued before the W loader waits
  int32_t delay_us;  // fault injection: time between the trigger and everything after it, 0 in every timed plan
  int32_t reserved[10];
  TensorMap maps[kMaps > 0 ? kMaps : 1];
};

template <class Op, int kMaps>
class GridShell {
 public:
  SPANTUNE_DEVICE GridShell(const GridArgs<kMaps>& args, uint32_t shared) : args_(args), shared_(shared) {}

  template <class T>
  SPANTUNE_DEVICE T* pointer(int slot) const {
    return reinterpret_cast<T*>(args_.operands[slot]);
  }
  SPANTUNE_DEVICE int scalar(int slot) const { return static_cast<int>(args_.operands[slot]); }
  SPANTUNE_DEVICE const TensorMap* map(int slot) const { return &args_.maps[args_.operands[slot]]; }

  SPANTUNE_DEVICE uint32_t page(int i) const { return shared_ + i * kPageBytes; }
  SPANTUNE_DEVICE uint32_t scratch() const { return shared_ + Op::kPages * kPageBytes; }
  SPANTUNE_DEVICE uint32_t barrier(int i) const { return scratch() + kScratchBytes + i * 8; }

  SPANTUNE_DEVICE int lane() const { return threadIdx.x % kWarpLanes; }
  SPANTUNE_DEVICE int math_thread() const { return threadIdx.x; }
  SPANTUNE_DEVICE int math_warp() const { return threadIdx.x / kWarpLanes; }
  SPANTUNE_DEVICE int w_ahead() const { return args_.w_ahead; }

  // Called by every thread of the group.
  template <Group kGroup>
  SPANTUNE_DEVICE void acquire() const {
    ptx::grid_dependency_wait();
  }
  // The end of the kernel publishes the stores.
  SPANTUNE_DEVICE void release() const {}

  // Called by one thread, once a point, in program order.
  SPANTUNE_DEVICE void announce(Point point) const {
    if (args_.trigger == static_cast<int>(point)) {
      ptx::launch_dependents();
      if (args_.delay_us > 0) {
        const uint64_t start = ptx::global_timer();
        while (ptx::global_timer() - start < static_cast<uint64_t>(args_.delay_us) * 1000u) {
        }
      }
    }
  }
  SPANTUNE_DEVICE void sync_math() const { ptx::named_sync<1, kMathThreads>(); }

 private:
  const GridArgs<kMaps>& args_;
  const uint32_t shared_;
};

template <class Op>
inline constexpr int kGridThreads = kMathThreads + (Op::kHasLoaders ? 2 * kWarpLanes : 0);

// First k-block of split i: the first `left` splits hold one more; the same formula as workloads/ops/base.py.
SPANTUNE_DEVICE int split_bound(int per_split, int left, int i) { return per_split * i + min(i, left); }

template <class Op, int kMaps>
SPANTUNE_DEVICE void run_grid(const GridArgs<kMaps>& args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Shell = GridShell<Op, kMaps>;
  const Shell shell(args, ptx::shared_address(shared_memory));
  const int split = blockIdx.y;
  const Tile tile{static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.x), split_bound(args.k_blocks_per_split, args.k_blocks_left, split),
                  split_bound(args.k_blocks_per_split, args.k_blocks_left, split + 1), split};
  const int warp = threadIdx.x / kWarpLanes;

  if (threadIdx.x == 0) shell.announce(Point::kEntry);
  if (args.wait == static_cast<int>(Point::kEntry)) ptx::grid_dependency_wait();

  if constexpr (Op::kHasLoaders) {
    constexpr int kThreads = kGridThreads<Op>;
    if (warp == kMathWarps) {
      // The W loader makes the barriers itself: its first loads wait for no other warp.
      for (int i = shell.lane(); i < Op::kBarriers; i += kWarpLanes) ptx::barrier_init(shell.barrier(i), Op::arrivals(i));
      ptx::barrier_init_fence();
      __syncwarp();
      ptx::named_arrive<2, kThreads>();
      if (shell.lane() == 0) shell.announce(Point::kSetUp);
      if (args.wait == static_cast<int>(Point::kSetUp)) ptx::grid_dependency_wait();
      Op::weights(shell, tile);
    } else {
      ptx::named_sync<2, kThreads>();
      if (args.wait == static_cast<int>(Point::kSetUp)) ptx::grid_dependency_wait();
      if (warp == kMathWarps + 1) {
        Op::inputs(shell, tile);
      } else {
        Op::math(shell, tile);
      }
    }
  } else {
    if (threadIdx.x == 0) shell.announce(Point::kSetUp);
    if (args.wait == static_cast<int>(Point::kSetUp)) ptx::grid_dependency_wait();
    Op::math(shell, tile);
  }
}

}  // namespace spantune

// Defines the kernel of one op; a translation unit holds one.
#define SPANTUNE_GRID_KERNEL(name, maps, ctas_per_sm, ...)                                                          \
  extern "C" __global__ void __launch_bounds__(spantune::kGridThreads<__VA_ARGS__>, ctas_per_sm)                \
      name(const __grid_constant__ spantune::GridArgs<maps> args) {                                                 \
    spantune::run_grid<__VA_ARGS__, maps>(args);                                                                    \
  }

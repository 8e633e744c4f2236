// The grid shell: one op is one kernel, one tile is one CTA. It gives the op's announcements the meaning that CMP needs
// (programmatic dependent launch), owns the barriers and pages, and is the only place that names blockIdx or
// griddepcontrol.
//
// An op is a struct of static role functions and constants:
//   kHasLoaders        whether the W loader and A loader warps exist (a row op uses the math group only)
//   kPages, kBarriers  what it uses; arrivals(i) gives the arrival count of barrier i
//   weights(shell, tile), inputs(shell, tile), math(shell, tile)
//   weight_map(shell)  tensor map of the first loads (ops with loaders)
#pragma once

#include "../ptx.cuh"

namespace spantune {

constexpr int kMaxMaps = 4;

// Parameters of one op in a grid kernel. Layout mirrored by backends/plan/encode.py.
template <int kMaps>
struct alignas(64) GridArgs {
  uint64_t operands[kOperandSlots];
  uint64_t prefetch_from;      // weights of a later op
  uint64_t trace;              // stamps, read in trace builds only
  int32_t k_blocks_per_split;  // quotient and remainder of the op's k-blocks by its splits: no division here
  int32_t k_blocks_left;
  int32_t trigger;   // a Point
  int32_t wait;      // a Point: kEntry, kSetUp, or kNone for the acquires alone
  int32_t w_ahead;   // W stages that may be issued before the W loader waits
  int32_t delay_us;  // time between the trigger and everything after it, read in delaying builds only
  int32_t n_tiles;   // of the op
  int32_t ctas_x;    // CTAs along n: CTA x takes n tiles x, x + ctas_x, ... (a row op one tile)
  int32_t splits;
  int32_t first_cta;       // CTAs of the ops before this one in a shared launch
  int32_t prefetch_bytes;  // a CTA, a multiple of 16
  int32_t prefetch_at;     // a Point, kNone for no prefetch
  TensorMap maps[kMaps > 0 ? kMaps : 1];
};

// Parameters of a finaliser whose tiles run as those of its producer arrive, behind the producer's. As large as
// GridArgs<0>. Groups of the producer's tiles, with all splits, start groups of the finaliser's.
struct alignas(64) ArrivalArgs {
  static constexpr int kStarts = 32;
  uint64_t operands[kOperandSlots];
  uint64_t counters;  // one uint32 a group, zero between launches
  uint64_t trace;
  int32_t gathered_m, m_tiles, splits;  // of the producer: tiles of a group along m, of the op
  int32_t run_m, own_m_tiles;           // the same of the finaliser
  int32_t groups_n;
  int32_t sharers;  // CTAs that share a group's tiles, the last to arrive; no more than arrive
  int32_t unused[5];
  short n_starts[kStarts], own_starts[kStarts];  // first tile along n of each group, then the end
};
static_assert(sizeof(ArrivalArgs) == sizeof(GridArgs<0>), "blocks of ops without tensor maps are alike");

// Place of a CTA in its op's grid.
struct Cta {
  int x, split, m;
};

// One op of a launch. What few schedules ask for is compiled in for those alone: a kernel of a few microseconds feels
// every line of instructions that it fetches.
//   kMaps        tensor maps of its operand row
//   kLoops       whether a CTA takes several tiles in turn (ops with loaders)
//   kPrefetches  whether it brings weights of a later op into L2
//   kDelays      fault injection: whether a triggering thread sleeps before it goes on
//   kWaits       false only where a time without the dependency is wanted; what such a kernel writes means nothing
//   kTraces      whether a CTA writes down when it entered, had its main input, and was done
template <class OpType, int kMapCount, bool kLoopsOverTiles, bool kPrefetchesWeights, bool kDelaysAfterTrigger,
          bool kWaitsForProducers, bool kTracesCtas>
struct GridPart {
  using Op = OpType;
  using Args = GridArgs<kMapCount>;
  static constexpr int kMaps = kMapCount;
  static constexpr bool kLoops = kLoopsOverTiles, kPrefetches = kPrefetchesWeights, kDelays = kDelaysAfterTrigger;
  static constexpr bool kWaits = kWaitsForProducers, kTraces = kTracesCtas;
  static constexpr int kThreads = kMathThreads + (Op::kHasLoaders ? 2 * kWarpLanes : 0);
  static_assert(Op::kHasLoaders || !kLoops, "a row op has one CTA a tile");

  // Called by the math group when a tile has stored.
  template <class Shell>
  static SPANTUNE_DEVICE void stored(const Shell&, const Tile&) {}
};

template <class Part>
class GridShell {
 public:
  using Op = typename Part::Op;
  static constexpr int kSplitsInFlight = 6;  // partials that a row op loads at once: registers are plenty here
  SPANTUNE_DEVICE GridShell(const typename Part::Args& args, const Cta& cta, uint32_t shared)
      : args_(args), cta_(cta), shared_(shared), trigger_(args.trigger) {}

  SPANTUNE_DEVICE const typename Part::Args& args() const { return args_; }

  // Which of its tiles the CTA is about to run. A trigger before the inputs are read counts in the CTA's first tile, a
  // later one in its last.
  SPANTUNE_DEVICE void begin(bool first, bool last) {
    first_ = first;
    const bool counts = args_.trigger < static_cast<int>(Point::kInputsRead) ? first : last;
    trigger_ = counts ? args_.trigger : static_cast<int>(Point::kNone);
  }

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
    if constexpr (Part::kWaits) ptx::grid_dependency_wait();
    if (kGroup == Group::kMath && first_) stamp(TraceWord::kReady);
  }
  // Writes the time into the CTA's record of a tracing build. One thread's work.
  SPANTUNE_DEVICE void stamp(TraceWord word) const {
    if constexpr (Part::kTraces) {
      if (threadIdx.x == 0) record()[static_cast<int>(word)] = ptx::global_timer();
    }
  }
  SPANTUNE_DEVICE void stamp_place() const {
    if constexpr (Part::kTraces) {
      if (threadIdx.x == 0) record()[static_cast<int>(TraceWord::kSm)] = ptx::sm_id();
    }
  }
  // The wait that a schedule asks for at a point.
  SPANTUNE_DEVICE void wait_at(Point point) const {
    if constexpr (Part::kWaits) {
      if (args_.wait == static_cast<int>(point)) ptx::grid_dependency_wait();
    }
  }
  // Called by the math group after its last store. The end of the kernel publishes the stores, so that the group need not
  // come together where nothing happens at this point.
  SPANTUNE_DEVICE void stored() const {
    constexpr int kPoint = static_cast<int>(Point::kStored);
    if (Part::kTraces || args_.trigger == kPoint || (Part::kPrefetches && args_.prefetch_at == kPoint)) {
      sync_math();
      if (math_thread() == 0) announce(Point::kStored);
    }
  }

  // Called by one thread, once a point and tile, in program order.
  SPANTUNE_DEVICE void announce(Point point) const {
    if constexpr (Part::kPrefetches) {
      if (args_.prefetch_at == static_cast<int>(point)) prefetch();
    }
    if ((Part::kLoops ? trigger_ : args_.trigger) == static_cast<int>(point)) {
      ptx::launch_dependents();
      if constexpr (Part::kDelays) {
        const uint64_t start = ptx::global_timer();
        while (ptx::global_timer() - start < static_cast<uint64_t>(args_.delay_us) * 1000u) {
        }
      }
    }
  }
  SPANTUNE_DEVICE void sync_math() const { ptx::named_sync<1, kMathThreads>(); }

 private:
  // Number of the CTA in its op.
  SPANTUNE_DEVICE int64_t index() const {
    return (static_cast<int64_t>(cta_.m) * args_.splits + cta_.split) * args_.ctas_x + cta_.x;
  }
  SPANTUNE_DEVICE uint64_t* record() const {
    return reinterpret_cast<uint64_t*>(args_.trace) + index() * static_cast<int>(TraceWord::kCount);
  }
  // This CTA's share of the weights that a later op will stream.
  SPANTUNE_DEVICE void prefetch() const {
    constexpr int kPiece = 16384;
    const uint64_t from = args_.prefetch_from + index() * args_.prefetch_bytes;
#pragma unroll 1
    for (int at = 0; at < args_.prefetch_bytes; at += kPiece)
      ptx::prefetch_bulk(from + at, min(kPiece, args_.prefetch_bytes - at));
  }

  const typename Part::Args& args_;
  const Cta cta_;
  const uint32_t shared_;
  int trigger_;
  bool first_ = true;
};

// What a finaliser sees of the shell when it runs in its producer's math group. The producer has waited for what both of
// them need of other kernels, the arrival has ordered the rest, and points are the producer's to announce.
class ArrivalShell {
 public:
  static constexpr int kSplitsInFlight = 2;  // the producer's registers are taken
  SPANTUNE_DEVICE ArrivalShell(const ArrivalArgs& args, uint32_t scratch)
      : args_(args), scratch_(opaque(scratch)), thread_(static_cast<int>(opaque(threadIdx.x))) {}

  template <class T>
  SPANTUNE_DEVICE T* pointer(int slot) const {
    return reinterpret_cast<T*>(args_.operands[slot]);
  }
  SPANTUNE_DEVICE int scalar(int slot) const { return static_cast<int>(opaque(static_cast<uint32_t>(args_.operands[slot]))); }
  SPANTUNE_DEVICE uint32_t scratch() const { return scratch_; }
  SPANTUNE_DEVICE int lane() const { return thread_ % kWarpLanes; }
  SPANTUNE_DEVICE int math_thread() const { return thread_; }
  SPANTUNE_DEVICE int math_warp() const { return thread_ / kWarpLanes; }
  template <Group kGroup>
  SPANTUNE_DEVICE void acquire() const {}
  SPANTUNE_DEVICE void stored() const {}
  SPANTUNE_DEVICE void announce(Point) const {}
  SPANTUNE_DEVICE void sync_math() const { ptx::named_sync<1, kMathThreads>(); }

 private:
  const ArrivalArgs& args_;
  const uint32_t scratch_;
  const int thread_;
};

// Called by the math group when one of the `tiles` of a group has stored. Answers, to all threads, which share of the group's
// tiles this CTA runs: one of 0 to `sharers` - 1 for the last that arrive, when all have arrived; -1 for the others.
//
// Order: each thread's stores, the barrier, thread 0's fence, its increment (release, and cumulative over the barrier);
// the last increment, thread 0's fence, the barrier, each thread's loads (acquire). Increments of one counter form one
// chain, so the last one follows all; it leaves zero, which sharers that came before it wait for. Loads may be plain
// ld.global: the second fence empties the multiprocessor's L1 before any thread of the CTA passes the barrier, and what
// is filled later comes from L2, where the stores are. The stores are generic; bulk or tensor stores would have to be
// waited for and fenced to the generic proxy first.
SPANTUNE_DEVICE int arrive(uint32_t* counter, int tiles, int sharers) {
  ptx::named_sync<1, kMathThreads>();
  int share = -1;
  if (threadIdx.x == 0) {
    ptx::fence_acq_rel_gpu();
    const int before = static_cast<int>(ptx::increment_relaxed_gpu(counter, static_cast<uint32_t>(tiles - 1)));
    share = max(before - (tiles - sharers), -1);
    if (share >= 0) {
      if (share < sharers - 1)
        while (ptx::load_relaxed_gpu(counter) != 0) {
        }
      ptx::fence_acq_rel_gpu();
    }
  }
  // As many threads as the share says, less one: all of warp 0.
  const bool counts = threadIdx.x < kWarpLanes && static_cast<int>(threadIdx.x) <= __shfl_sync(~0u, share, 0);
  return ptx::named_count<1, kMathThreads>(counts) - 1;
}

// First k-block of split i: the first `left` splits hold one more; the same formula as workloads/ops/base.py.
SPANTUNE_DEVICE int split_bound(int per_split, int left, int i) { return per_split * i + min(i, left); }

// A part with a finaliser behind it, without CTAs of its own.
template <class Producer, class Finaliser>
struct ArrivalPart {
  using Op = typename Producer::Op;
  struct Args : Producer::Args {
    ArrivalArgs finaliser;
  };
  static constexpr int kMaps = Producer::kMaps, kThreads = Producer::kThreads;
  static constexpr bool kLoops = Producer::kLoops, kPrefetches = Producer::kPrefetches, kDelays = Producer::kDelays;
  static constexpr bool kWaits = Producer::kWaits, kTraces = Producer::kTraces;
  static_assert(Op::kHasLoaders && !Finaliser::kHasLoaders && Finaliser::kPages == 0 && Finaliser::kBarriers == 0,
                "a finaliser runs in the math group of an op with loaders, in its scratch");

  template <class Shell>
  static SPANTUNE_DEVICE void stored(const Shell& shell, const Tile& tile) {
    Producer::stored(shell, tile);
    const ArrivalArgs& args = shell.args().finaliser;
    int group_n = 0;
    while (tile.n >= args.n_starts[group_n + 1]) ++group_n;
    const int group_m = static_cast<unsigned>(tile.m) / static_cast<unsigned>(args.gathered_m);
    const int tiles = (args.n_starts[group_n + 1] - args.n_starts[group_n]) *
                      min(args.gathered_m, args.m_tiles - group_m * args.gathered_m) * args.splits;
    const int sharers = min(args.sharers, tiles);
    const int share = arrive(reinterpret_cast<uint32_t*>(args.counters) + group_m * args.groups_n + group_n, tiles, sharers);
    if (share < 0) return;
    const int first_n = args.own_starts[group_n], first_m = group_m * args.run_m;
    const unsigned wide = args.own_starts[group_n + 1] - first_n, high = min(args.run_m, args.own_m_tiles - first_m);
#pragma unroll 1
    for (unsigned i = share; i < wide * high; i += sharers) {
      const ArrivalShell own(args, shell.scratch());
      Finaliser::math(own, Tile{first_m + static_cast<int>(i / wide), first_n + static_cast<int>(i % wide), 0, 0, 0});
      own.sync_math();  // the next tile's scratch
    }
  }
};

// All roles of one tile of an op with loaders. Barriers are fresh for every tile.
template <class Part, class Shell>
SPANTUNE_DEVICE void run_tile(const Shell& shell, const Tile& tile, bool first) {
  using Op = typename Part::Op;
  const int warp = threadIdx.x / kWarpLanes;
  if (__builtin_expect(warp == kMathWarps, 1)) {  // its code comes first: all else waits for its copies
    // The W loader makes the barriers itself: its first loads wait for no other warp. Their tensor map is fetched meanwhile.
    if (shell.lane() == kWarpLanes - 1) ptx::prefetch_map(Op::weight_map(shell));
    // One lane makes all barriers: with a barrier a lane, the assembler makes one after the other in a loop over lanes.
    if (shell.lane() == 0) {
#pragma unroll
      for (int i = 0; i < Op::kBarriers; ++i) {
        if (Part::kLoops && !first) ptx::barrier_invalidate(shell.barrier(i));
        ptx::barrier_init(shell.barrier(i), Op::arrivals(i));
      }
    }
    ptx::barrier_init_fence();
    __syncwarp();
    ptx::named_arrive<2, Part::kThreads>();
    if (shell.lane() == 0) shell.announce(Point::kSetUp);
    shell.wait_at(Point::kSetUp);
    Op::weights(shell, tile);
  } else {
    ptx::named_sync<2, Part::kThreads>();
    shell.wait_at(Point::kSetUp);
    if (warp == kMathWarps + 1) {
      Op::inputs(shell, tile);
    } else {
      Op::math(shell, tile);
      Part::stored(shell, tile);
    }
  }
}

template <class Part>
SPANTUNE_DEVICE void run_part(const typename Part::Args& args, const Cta& cta) {
  using Op = typename Part::Op;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  GridShell<Part> shell(args, cta, ptx::shared_address(shared_memory));
  shell.stamp(TraceWord::kEntry);
  shell.stamp_place();
  Tile tile{cta.m, cta.x, split_bound(args.k_blocks_per_split, args.k_blocks_left, cta.split),
            split_bound(args.k_blocks_per_split, args.k_blocks_left, cta.split + 1), cta.split};
  if (threadIdx.x == 0) shell.announce(Point::kEntry);
  shell.wait_at(Point::kEntry);
  if constexpr (!Op::kHasLoaders) {
    if (threadIdx.x == 0) shell.announce(Point::kSetUp);
    shell.wait_at(Point::kSetUp);
    Op::math(shell, tile);
  } else if constexpr (!Part::kLoops) {
    run_tile<Part>(shell, tile, true);
  } else {
#pragma unroll 1
    for (bool first = true;; first = false) {
      const int next = tile.n + args.ctas_x;
      const bool last = next >= args.n_tiles;
      shell.begin(first, last);
      run_tile<Part>(shell, tile, first);
      if (last) break;
      ptx::fence_proxy_async();  // this tile's generic accesses of the pages come before the next tile's copies
      ptx::named_sync<3, Part::kThreads>();
      tile.n = next;
    }
  }
  shell.stamp(TraceWord::kDone);
}

// Parameter blocks of the ops that share a launch, one behind the other.
template <class First, class... Rest>
struct SharedArgs {
  typename First::Args first;
  SharedArgs<Rest...> rest;
};
template <class Last>
struct SharedArgs<Last> {
  typename Last::Args first;
};

template <class First, class... Rest>
SPANTUNE_DEVICE void run_shared(const SharedArgs<First, Rest...>& args) {
  const int index = static_cast<int>(blockIdx.x);
  if constexpr (sizeof...(Rest) > 0) {
    if (index >= args.rest.first.first_cta) return run_shared<Rest...>(args.rest);
  }
  if (threadIdx.x >= First::kThreads) return;  // threads for the loaders of another op of this launch
  const unsigned place = index - args.first.first_cta, row = place / static_cast<unsigned>(args.first.ctas_x);
  run_part<First>(args.first, Cta{static_cast<int>(place - row * args.first.ctas_x),
                                  static_cast<int>(row % static_cast<unsigned>(args.first.splits)),
                                  static_cast<int>(row / static_cast<unsigned>(args.first.splits))});
}

template <class... Parts>
struct SharedLaunch {
  static constexpr int kThreads = kMathThreads + ((Parts::Op::kHasLoaders || ...) ? 2 * kWarpLanes : 0);
};

}  // namespace spantune

// Defines the kernel of one op, a GridPart; a translation unit holds one kernel.
#define SPANTUNE_GRID_KERNEL(name, ctas_per_sm, ...)                                                          \
  extern "C" __global__ void __launch_bounds__((__VA_ARGS__::kThreads), ctas_per_sm)                            \
      name(const __grid_constant__ __VA_ARGS__::Args args) {                                                    \
    spantune::run_part<__VA_ARGS__>(args, spantune::Cta{static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), \
                                                        static_cast<int>(blockIdx.z)});                         \
  }

// Defines the kernel of several ops that run side by side, CTAs numbered through the parts in turn along x.
#define SPANTUNE_SHARED_KERNEL(name, ctas_per_sm, ...)                                             \
  extern "C" __global__ void __launch_bounds__((spantune::SharedLaunch<__VA_ARGS__>::kThreads), ctas_per_sm) \
      name(const __grid_constant__ spantune::SharedArgs<__VA_ARGS__> args) {                                   \
    spantune::run_shared(args);                                                                                \
  }

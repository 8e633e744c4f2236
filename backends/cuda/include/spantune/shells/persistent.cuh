// The persistent shell: one resident CTA per multiprocessor runs a queue of instructions, one tile each. It gives the
// op's announcements the meaning that the megakernel needs: acquire polls the counters of the instruction's wait list,
// release publishes its signal list. One instruction slot, identity page map.
//
// Caveats: all workers must be resident, or a worker may wait for one that never starts: the host checks occupancy. A
// watchdog traps a wait of more than `watchdog_us` and leaves a note of what it waited for.
#pragma once

#include "../ptx.cuh"

namespace spantune {

// Layout mirrored by backends/plan/queues.py.
struct Instruction {
  static constexpr int kWords = 32, kMaxWaits = 6, kWaitWord = 12, kSignalWord = 24;
  uint32_t words[kWords];
};

// Layout mirrored by backends/plan/encode.py.
struct PersistentArgs {
  const Instruction* instructions;  // [workers, max_queue]
  const uint64_t* operands;         // [ops, 16]; tensor-map slots hold addresses
  uint32_t* counters;               // [events], monotone over runs
  uint32_t* epochs;                 // [workers], runs that this worker has finished
  uint32_t* notes;                  // [4]: worker, instruction, event, value of the first watchdog trap
  int32_t max_queue;
  int32_t watchdog_us;
};

class PersistentShell {
 public:
  static constexpr int kSplitsInFlight = 2;  // partials that a row op loads at once: more, and the kernel spills
  static constexpr int kThreads = 384;          // controller, W loader, A loader, one idle warp, then the math group
  static constexpr int kFirstMathThread = 128;  // wgmma wants its warpgroups aligned
  static constexpr int kPages = 13;
  static constexpr int kInstructionBytes = sizeof(Instruction), kSlotBytes = kInstructionBytes + kOperandSlots * 8;
  static constexpr int kSharedBytes = kPages * kPageBytes + kScratchBytes + kMaxBarriers * 8 + kSlotBytes;

  SPANTUNE_DEVICE PersistentShell(const PersistentArgs& args, const Instruction& instruction, uint32_t shared, int epoch,
                                  int place)
      : args_(args), instruction_(instruction), shared_(opaque(shared)), epoch_(epoch), place_(place),
        thread_(static_cast<int>(opaque(threadIdx.x))) {}

  template <class T>
  SPANTUNE_DEVICE T* pointer(int slot) const {
    return reinterpret_cast<T*>(operand(slot));
  }
  SPANTUNE_DEVICE int scalar(int slot) const { return static_cast<int>(operand(slot)); }
  SPANTUNE_DEVICE const TensorMap* map(int slot) const { return pointer<const TensorMap>(slot); }

  SPANTUNE_DEVICE uint32_t page(int i) const { return shared_ + i * kPageBytes; }
  SPANTUNE_DEVICE uint32_t scratch() const { return shared_ + kPages * kPageBytes; }
  SPANTUNE_DEVICE uint32_t barrier(int i) const { return scratch() + kScratchBytes + i * 8; }

  SPANTUNE_DEVICE int lane() const { return thread_ % kWarpLanes; }
  SPANTUNE_DEVICE int math_thread() const { return thread_ - kFirstMathThread; }
  SPANTUNE_DEVICE int math_warp() const { return math_thread() / kWarpLanes; }
  SPANTUNE_DEVICE int w_ahead() const { return 1 << 20; }

  template <Group kGroup>
  SPANTUNE_DEVICE void acquire() const {
    if constexpr (kGroup == Group::kMath) {
      if (math_thread() == 0) poll();
      sync_math();
    } else {
      if (lane() == 0) poll();
      __syncwarp();
    }
    ptx::fence_proxy_async();  // stores of other CTAs were generic; copies by TMA are not
  }

  SPANTUNE_DEVICE void release() const {
    ptx::fence_proxy_async();
    sync_math();
    if (math_thread() == 0) {
      for (uint32_t i = 0; i < instruction_.words[2]; ++i) {
        const uint32_t* signal = instruction_.words + Instruction::kSignalWord + 2 * i;
        ptx::add_release_gpu(args_.counters + signal[0], signal[1]);
      }
    }
  }
  // Called by the whole math group after its last store.
  SPANTUNE_DEVICE void stored() const {
    release();
    sync_math();
  }
  SPANTUNE_DEVICE void announce(Point) const {}
  SPANTUNE_DEVICE void sync_math() const { ptx::named_sync<1, kMathThreads>(); }

 private:
  // Volatile: else the compiler hoists the rows of all ops above the dispatch, and spills.
  SPANTUNE_DEVICE uint64_t operand(int slot) const {
    uint64_t value;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(barrier(kMaxBarriers) + kInstructionBytes + slot * 8));
    return value;
  }

  // Relaxed polls, then one fence: acquire loads in a spin would pay the fence every time.
  SPANTUNE_DEVICE void poll() const {
    for (uint32_t i = 0; i < instruction_.words[1]; ++i) {
      const uint32_t* wait = instruction_.words + Instruction::kWaitWord + 2 * i;
      const uint32_t* counter = args_.counters + wait[0];
      const uint32_t target = wait[1] * static_cast<uint32_t>(epoch_ + 1);
      const uint64_t start = ptx::global_timer();
      uint32_t value = ptx::load_relaxed_gpu(counter);
      while (static_cast<int32_t>(value - target) < 0) {
        if (ptx::global_timer() - start > static_cast<uint64_t>(args_.watchdog_us) * 1000u) give_up(wait[0], value);
        value = ptx::load_relaxed_gpu(counter);
      }
    }
    ptx::fence_acq_rel_gpu();
  }
  SPANTUNE_DEVICE void give_up(uint32_t event, uint32_t value) const {
    args_.notes[0] = blockIdx.x;
    args_.notes[1] = place_;
    args_.notes[2] = event;
    args_.notes[3] = value;
    __threadfence_system();
    __trap();
  }

  const PersistentArgs& args_;
  const Instruction& instruction_;
  const uint32_t shared_;
  const int epoch_, place_, thread_;
};

// The ops that one kernel knows; opcode i + 1 is the i-th.
template <class First, class... Rest>
struct OpSet {
  template <class Function>
  static SPANTUNE_DEVICE void visit(uint32_t opcode, const Function& function) {
    if (opcode == 1) {
      function(First{});
    } else if constexpr (sizeof...(Rest) > 0) {
      if (opcode > 1) OpSet<Rest...>::visit(opcode - 1, function);
    }
  }
};

template <class Set>
SPANTUNE_DEVICE void run_persistent(const PersistentArgs& args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  constexpr int kBarrierOffset = PersistentShell::kPages * kPageBytes + kScratchBytes;
  auto& slot = *reinterpret_cast<Instruction*>(shared_memory + kBarrierOffset + kMaxBarriers * 8);
  auto* row = reinterpret_cast<uint64_t*>(&slot + 1);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes, epoch = args.epochs[blockIdx.x];
  for (int place = 0; place < args.max_queue; ++place) {
    if (warp == 0) {
      slot.words[lane] = args.instructions[blockIdx.x * args.max_queue + place].words[lane];
      __syncwarp();
      if (lane < kOperandSlots) row[lane] = args.operands[slot.words[3] * kOperandSlots + lane];
      Set::visit(slot.words[0], [&](auto op) {
        using Op = decltype(op);
        for (int i = lane; i < Op::kBarriers; i += kWarpLanes)
          ptx::barrier_init(shared + kBarrierOffset + i * 8, Op::arrivals(i));
      });
      ptx::barrier_init_fence();
    }
    __syncthreads();
    const PersistentShell shell(args, slot, shared, epoch, place);
    const Tile tile{static_cast<int>(slot.words[4]), static_cast<int>(slot.words[5]), static_cast<int>(slot.words[6]),
                    static_cast<int>(slot.words[7]), static_cast<int>(slot.words[8])};
    Set::visit(slot.words[0], [&](auto op) {
      using Op = decltype(op);
      if (warp >= PersistentShell::kFirstMathThread / kWarpLanes) {
        Op::math(shell, tile);
      } else if constexpr (Op::kHasLoaders) {
        if (warp == 1) Op::weights(shell, tile);
        if (warp == 2) Op::inputs(shell, tile);
      }
    });
    ptx::fence_proxy_async();  // this tile's generic accesses of the pages come before the next tile's copies
    __syncthreads();
    if (warp == 0) {
      Set::visit(slot.words[0], [&](auto op) {
        using Op = decltype(op);
        for (int i = lane; i < Op::kBarriers; i += kWarpLanes)
          ptx::barrier_invalidate(shared + kBarrierOffset + i * 8);
      });
      __syncwarp();
    }
  }
  if (threadIdx.x == 0) args.epochs[blockIdx.x] = epoch + 1;
}

}  // namespace spantune

#define SPANTUNE_PERSISTENT_KERNEL(name, ...)                                                                  \
  extern "C" __global__ void __launch_bounds__(spantune::PersistentShell::kThreads, 1)                         \
      name(const __grid_constant__ spantune::PersistentArgs args) {                                            \
    spantune::run_persistent<spantune::OpSet<__VA_ARGS__>>(args);                                              \
  }

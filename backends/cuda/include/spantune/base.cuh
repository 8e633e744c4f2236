// Types that every device source shares. Nothing here comes from a toolkit header: a JIT build needs no include path
// but this folder, and its hash covers every byte that it read.
#pragma once

#define SPANTUNE_DEVICE __device__ __forceinline__

namespace spantune {

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

// A value that the compiler cannot trace to the outside of a loop over tiles: else it computes the thread's offsets of all
// ops in it once, before the loop, and spills them.
SPANTUNE_DEVICE uint32_t opaque(uint32_t value) {
  uint32_t copy;
  asm volatile("mov.u32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}

// Opaque bytes of a CUtensorMap, encoded by the driver before the launch.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// One tile of an op. Units: m and n in tiles, k in k-blocks of 128 values; `split` is the index of [k_begin, k_end).
struct Tile {
  int m, n, k_begin, k_end, split;
};

constexpr int kWarpLanes = 32;
constexpr int kMathWarps = 8;  // two warpgroups, in both shells
constexpr int kMathThreads = kMathWarps * kWarpLanes;
constexpr int kPageBytes = 16384;
constexpr int kScratchBytes = 4096;
constexpr int kMaxBarriers = 32;
constexpr int kOperandSlots = 16;

// Program points that an op announces, in program order. The values are the ABI of the trigger parameter.
enum class Point : int { kNone = 0, kEntry = 1, kSetUp = 2, kWeightsIssued = 3, kInputsRead = 4, kStored = 5 };

// Words of a trace record, 64 bits each: times of %globaltimer in nanoseconds, and the multiprocessor. One record a CTA
// (grid shell) or a task (persistent shell). Mirrored by backends/measure/trace.py.
enum class TraceWord : int { kEntry = 0, kReady = 1, kDone = 2, kSm = 3, kCount = 4 };

// Role groups: the unit of acquire and of group synchronisation.
enum class Group : int { kMath = 0, kWeights = 1, kInputs = 2 };

}  // namespace spantune

// Kernels that belong to measuring, not to a workload: time stamps, the writer that warms the inputs, and streaming
// kernels that give the floor.
#pragma once

#include "ptx.cuh"

namespace spantune {

// One thread; the graph's edges order it.
extern "C" __global__ void spantune_stamp(uint64_t* where) { *where = ptx::global_timer(); }

// Rewrites up to two buffers (counts in 16-byte pieces), as their producer would, so that they sit in L2.
extern "C" __global__ void __launch_bounds__(256)
    spantune_refresh(const uint4* from0, uint4* to0, int count0, const uint4* from1, uint4* to1, int count1) {
  const int stride = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count0; i += stride) to0[i] = from0[i];
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count1; i += stride) to1[i] = from1[i];
}

// Streams `count` 16-byte pieces with plain loads, 8 in flight a thread. The result keeps the loads alive.
extern "C" __global__ void __launch_bounds__(512) spantune_stream_loads(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t mixed = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride * 8) {
    uint4 piece[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) piece[k] = i + k * stride < count ? __ldcs(from + i + k * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 8; ++k) mixed ^= piece[k].x ^ piece[k].y ^ piece[k].z ^ piece[k].w;
  }
  if (mixed == 0x12345678u) *sink = mixed;
}

// Streams `count` 16 KiB pieces by bulk copies through a ring of 6 stages; one warp a CTA.
extern "C" __global__ void __launch_bounds__(32) spantune_stream_bulk(const unsigned char* from, int64_t count) {
  constexpr int kStages = 6;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t base = ptx::shared_address(shared_memory), bars = base + kStages * kPageBytes;
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kStages; ++i) ptx::barrier_init(bars + i * 8, 1);
  ptx::barrier_init_fence();
  const auto issue = [&](int64_t piece, int stage) {
    ptx::barrier_arrive_expect(bars + stage * 8, kPageBytes);
    ptx::copy_bulk(base + stage * kPageBytes, from + piece * kPageBytes, kPageBytes, bars + stage * 8);
  };
  int64_t next = blockIdx.x;
  for (int i = 0; i < kStages && next < count; ++i, next += gridDim.x) issue(next, i);
  int used = 0;
  for (int64_t piece = blockIdx.x; piece < count; piece += gridDim.x, ++used) {
    ptx::barrier_wait(bars + used % kStages * 8, used / kStages & 1);
    if (next < count) {
      issue(next, used % kStages);
      next += gridDim.x;
    }
  }
}

}  // namespace spantune

// One-CTA kernels with set delays, to ask the GPU what graph edges, joins, carve-outs and priorities do.
#include "spantune/ptx.cuh"

namespace spantune {

SPANTUNE_DEVICE void spin(int us) {
  const uint64_t start = ptx::global_timer();
  while (ptx::global_timer() - start < static_cast<uint64_t>(us) * 1000u) {
  }
}

// stamps[4 * id + ...]: start, trigger, wait returned, end. Checks that both parents' data (or -1) have arrived.
extern "C" __global__ void spantune_node(uint64_t* stamps, volatile int* data, int* errors, int id, int waits, int before,
                                         int triggers, int after, int parent0, int parent1) {
  if (threadIdx.x != 0) return;
  stamps[id * 4] = ptx::global_timer();
  if (waits) ptx::grid_dependency_wait();
  stamps[id * 4 + 2] = ptx::global_timer();
  if (parent0 >= 0 && data[parent0] != 7) atomicAdd(errors, 1);
  if (parent1 >= 0 && data[parent1] != 7) atomicAdd(errors, 1);
  spin(before);
  if (triggers) ptx::launch_dependents();
  stamps[id * 4 + 1] = ptx::global_timer();
  spin(after);
  data[id] = 7;
  stamps[id * 4 + 3] = ptx::global_timer();
}

// Occupies one CTA per multiprocessor for a while.
extern "C" __global__ void spantune_occupy(uint64_t* stamps, int id, int us) {
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) stamps[id * 4] = ptx::global_timer();
    spin(us);
    if (blockIdx.x == 0) stamps[id * 4 + 3] = ptx::global_timer();
  }
}

}  // namespace spantune

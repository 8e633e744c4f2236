// One function per PTX instruction that the project uses. Semantics: PTX ISA 9.0, section named at each group.
#pragma once

#include "base.cuh"

namespace spantune::ptx {

SPANTUNE_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Programmatic dependent launch (griddepcontrol) ---

// NOTE: both carry a memory clobber; the compiler must move no access across either.
SPANTUNE_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SPANTUNE_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- mbarrier ---

SPANTUNE_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
SPANTUNE_DEVICE void barrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Makes initialised barriers visible to the async proxy.
SPANTUNE_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
SPANTUNE_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
SPANTUNE_DEVICE void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
SPANTUNE_DEVICE void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- Named barriers: `threads` must be a multiple of the warp size ---

template <int kId, int kThreads>
SPANTUNE_DEVICE void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
SPANTUNE_DEVICE void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Barrier that tells every thread how many of them passed true.
template <int kId, int kThreads>
SPANTUNE_DEVICE int named_count(bool mine) {
  int count;
  asm volatile(
      "{\n"
      ".reg .pred mine;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.popc.u32 %0, %2, %3, mine;\n"
      "}\n"
      : "=r"(count)
      : "r"(static_cast<uint32_t>(mine)), "n"(kId), "n"(kThreads)
      : "memory");
  return count;
}

// --- Proxy fences ---

SPANTUNE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
SPANTUNE_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// --- Counters in global memory ---

SPANTUNE_DEVICE uint32_t load_relaxed_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
SPANTUNE_DEVICE void add_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Adds one, or wraps to zero where the counter stands at `last`; returns what it was.
SPANTUNE_DEVICE uint32_t increment_relaxed_gpu(uint32_t* address, uint32_t last) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(last) : "memory");
  return before;
}

SPANTUNE_DEVICE uint32_t sm_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}
SPANTUNE_DEVICE uint64_t global_timer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// --- Bulk and tensor copies, global to shared, completing on an mbarrier ---

// L2 cache-policy words as the toolkit's createpolicy.fractional would make them for fraction 1.0.
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

SPANTUNE_DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Brings bytes into L2; hands no value to the kernel.
SPANTUNE_DEVICE void prefetch_bulk(uint64_t source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}
SPANTUNE_DEVICE void copy_bulk(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
SPANTUNE_DEVICE void copy_tile_2d(uint32_t destination, const TensorMap* map, int x, int y, uint32_t barrier,
                                  uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
SPANTUNE_DEVICE void copy_tile_3d(uint32_t destination, const TensorMap* map, int x, int y, int z, uint32_t barrier,
                                  uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// --- Shared-memory matrix loads ---

SPANTUNE_DEVICE void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
SPANTUNE_DEVICE void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
SPANTUNE_DEVICE void load_matrix_x2(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

// Byte address of 16-byte chunk `chunk` (0..7) of row `row` in a tile of 128-byte rows that TMA wrote with the
// 128-byte swizzle; `base` is 1 KiB aligned.
SPANTUNE_DEVICE uint32_t swizzled(uint32_t base, int row, int chunk) {
  return base + row * 128 + ((chunk ^ (row & 7)) << 4);
}

}  // namespace spantune::ptx

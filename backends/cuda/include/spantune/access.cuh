// Loads and stores whose state space, width and order against the acquires are spelled out.
#pragma once

#include "base.cuh"

namespace spantune::access {

// 8 or 16 bytes that no op writes (weights) through the read-only path. Volatile: a load that stands before an acquire is
// issued before it, which is the point of reading weights early.
SPANTUNE_DEVICE void load_constant(uint32_t (&v)[4], const void* address) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(address));
}
SPANTUNE_DEVICE void load_constant(uint32_t (&v)[2], const void* address) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(address));
}
SPANTUNE_DEVICE void load_constant(float2& v, const float* address) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
}
SPANTUNE_DEVICE void load_constant(float4& v, const float* address) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address));
}
SPANTUNE_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// An entry of a table that no op of the run writes. Not read-only: the assembler moves such loads behind an acquire.
SPANTUNE_DEVICE int load_entry(const int* address) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// A weight that is read before an acquire. Not through the read-only path: the assembler moves such a load behind the
// acquire if nothing needs it before.
SPANTUNE_DEVICE float load_early(const float* address) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}

// 16 bytes that another op wrote.
SPANTUNE_DEVICE void load_mutable(uint32_t (&v)[4], const void* address) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(address)
               : "memory");
}

SPANTUNE_DEVICE float4 load_mutable_float4(const float* address) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
// 4 or 16 bytes that another op wrote, if `index` is below `count`; else `v` holds nothing. Predicated: a branch around
// each of several loads would put its own latency between them.
SPANTUNE_DEVICE void load_mutable_below(float& v, const float* address, int index, int count) {
  asm volatile("{\n.reg .pred is_below;\nsetp.lt.s32 is_below, %2, %3;\n@is_below ld.global.f32 %0, [%1];\n}"
               : "=f"(v)
               : "l"(address), "r"(index), "r"(count)
               : "memory");
}
SPANTUNE_DEVICE void load_mutable_below(float4& v, const float* address, int index, int count) {
  asm volatile(
      "{\n.reg .pred is_below;\nsetp.lt.s32 is_below, %5, %6;\n@is_below ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(address), "r"(index), "r"(count)
      : "memory");
}

SPANTUNE_DEVICE float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
SPANTUNE_DEVICE float2 load_shared_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
SPANTUNE_DEVICE uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
SPANTUNE_DEVICE void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
SPANTUNE_DEVICE void store_shared(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Stores to an address whose origin the compiler has lost sight of: it would take a generic store.
SPANTUNE_DEVICE void store_global(float* address, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
SPANTUNE_DEVICE void store_global(uint16_t* address, uint32_t pair) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(pair) : "memory");
}

}  // namespace spantune::access

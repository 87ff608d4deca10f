// How a thread of a device accesses words that it shares with other devices and with hosts, and waits for
// them. Device code that one thread runs uses nothing else that only a device has. So tests compile the same
// code for the host (tests/support/fake_cuda), where a thread plays the device's.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __CUDACC__
#include "fake_cuda/ordered_by_host.h"
#else

#define EPD_DEVICE __device__
#define EPD_NO_INLINE __noinline__
#define EPD_NO_UNROLL _Pragma("unroll 1")

namespace epd::ordered {

// 16 bytes, accessed at once.
using Words = uint4;

EPD_DEVICE inline std::uint64_t load_acquire_system(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline std::uint32_t load_acquire_system(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline void store_release_system(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
EPD_DEVICE inline void store_release_system(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
EPD_DEVICE inline std::uint32_t load_relaxed_system(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline std::uint64_t load_relaxed_system(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline void store_relaxed_system(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
EPD_DEVICE inline void store_relaxed_system(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// For memory that only this device accesses meanwhile.
EPD_DEVICE inline std::uint64_t load_relaxed(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
EPD_DEVICE inline std::uint64_t load_acquire(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
EPD_DEVICE inline void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
EPD_DEVICE inline void store_release(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// For words that this device wrote before, or that nobody writes meanwhile: past L1.
EPD_DEVICE inline std::uint32_t load_here(const std::uint32_t* at) {
  return __ldcg(at);
}
EPD_DEVICE inline Words load_here(const Words* at) {
  return __ldcg(at);
}
// Parts of memory that nobody else accesses meanwhile: past L1.
template <typename Word>
EPD_DEVICE inline Word load_alone(const Word* at) {
  return __ldcg(at);
}
template <typename Word>
EPD_DEVICE inline void store_alone(Word* at, Word value) {
  *at = value;
}
// For words that a host wrote before: past all caches.
EPD_DEVICE inline Words load_of_host(const Words* at) {
  return __ldcv(at);
}
// Reads a word of a kernel's parameters, so that its line is at hand.
EPD_DEVICE inline void read_early(const std::uint64_t& parameter) {
  asm volatile("" ::"l"(parameter));
}

EPD_DEVICE inline void fence_device() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
EPD_DEVICE inline void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
EPD_DEVICE inline void fence_sequential_system() {
  __threadfence_system();
}

// Counts to `last` and then wraps to 0; returns the number before.
EPD_DEVICE inline std::uint32_t count_up(std::uint32_t* at, std::uint32_t last) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(last)
               : "memory");
  return before;
}
// Adds `count`, acquires and releases; returns the number before.
EPD_DEVICE inline std::uint32_t count_in(std::uint32_t* at, std::uint32_t count) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(count)
               : "memory");
  return before;
}
// Relaxed; what was there before.
EPD_DEVICE inline std::uint32_t add(std::uint32_t* at, std::uint32_t value) {
  return atomicAdd(at, value);
}
EPD_DEVICE inline void add_system(std::uint32_t* at, std::uint32_t value) {
  atomicAdd_system(at, value);
}
// Relaxed.
EPD_DEVICE inline void set_bits_system(std::uint32_t* at, std::uint32_t bits) {
  asm volatile("red.relaxed.sys.global.or.b32 [%0], %1;" ::"l"(at), "r"(bits) : "memory");
}
EPD_DEVICE inline std::uint64_t exchange(std::uint64_t* at, std::uint64_t value) {
  return atomicExch(reinterpret_cast<unsigned long long*>(at), value);
}
// Relaxed; returns the value before. For words whose halves a host writes.
EPD_DEVICE inline std::uint64_t exchange_system(std::uint64_t* at, std::uint64_t value) {
  return atomicExch_system(reinterpret_cast<unsigned long long*>(at), value);
}
EPD_DEVICE inline std::uint64_t fetch_or_system(std::uint64_t* at, std::uint64_t bits) {
  return atomicOr_system(reinterpret_cast<unsigned long long*>(at), bits);
}

EPD_DEVICE inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
// Each loop that waits calls one of these between two looks. The first look is number 0 or 1.
EPD_DEVICE inline void look_again(std::uint32_t) {}
EPD_DEVICE inline void look_after(std::uint32_t, std::uint32_t sleep_ns) {
  __nanosleep(sleep_ns);
}

// -1: no bit is set.
EPD_DEVICE inline std::int32_t lowest_bit(std::uint32_t set) {
  return static_cast<std::int32_t>(__ffs(static_cast<int>(set))) - 1;
}

}  // namespace epd::ordered

#endif

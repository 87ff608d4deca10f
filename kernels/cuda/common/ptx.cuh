// Instructions of warps and CTAs that C++ has no names for: bulk copies, mbarriers, loads past registers.
// proto/ordered.h has the ordered accesses of single threads. Before sm_90 there are no bulk copies: a warp
// copies by itself and at once, and the waits are empty.
#pragma once

#include "proto/ordered.h"

#include <cstdint>

namespace epd::kernels::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EPD_BULK 1
#else
#define EPD_BULK 0
#endif

using namespace ordered;

inline constexpr std::uint32_t kFull = 0xffffffffu;

// Prefetches a line into L2.
__device__ inline void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

__device__ inline std::uint32_t lane_of() {
  return threadIdx.x % 32;
}
__device__ inline std::uint32_t warp_of() {
  return threadIdx.x / 32;
}
__device__ inline std::uint32_t lanes_below() {
  return (1u << lane_of()) - 1;
}

// Loads two neighbouring words, each at once.
__device__ inline ulonglong2 load_relaxed_pair(const std::uint64_t* at) {
  ulonglong2 pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.x), "=l"(pair.y)
               : "l"(at)
               : "memory");
  return pair;
}

// Programmatic launch: the next kernel of the stream may begin, and the kernel before this one has ended.
// Before sm_90 kernels do not overlap.
__device__ inline void let_dependents_begin() {
#if EPD_BULK
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_kernel_before() {
#if EPD_BULK
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns the size of the dynamic shared memory that the CTA was launched with.
__device__ inline std::uint32_t dynamic_shared_bytes() {
  std::uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}
// Returns the 32-bit address of an object in shared memory.
__device__ inline std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}
// Returns the same object, with its address in a register. Otherwise the compiler computes the address of a
// shared variable again before each load: three instructions, tens of cycles. Where registers are full, this
// function makes code slower (a combine took 3 us longer), so only dispatch uses it.
template <typename Type>
__device__ inline Type& by_register(Type& object) {
  std::uint32_t at = shared_address(&object);
  asm volatile("mov.u32 %0, %0;" : "+r"(at));
  return *static_cast<Type*>(__cvta_shared_to_generic(at));
}
// Adds one to a word in shared memory and returns the value before. The instruction takes the 32-bit address;
// atomicAdd on a generic address takes tens of instructions.
__device__ inline std::uint32_t count_shared(std::uint32_t* at) {
  std::uint32_t before;
  asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(shared_address(at))
               : "memory");
  return before;
}
__device__ inline void or_shared(std::uint32_t* at, std::uint32_t bits) {
  asm volatile("red.relaxed.cta.shared.or.b32 [%0], %1;" ::"r"(shared_address(at)), "r"(bits) : "memory");
}

// ---- bulk copies ----

// Orders this thread's accesses before the fence with accesses of the async proxy after it, in all memory.
__device__ inline void fence_async() {
#if EPD_BULK
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// The same for the CTA's shared memory only.
__device__ inline void fence_async_shared() {
#if EPD_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void barrier_init(std::uint64_t* barrier) {
#if EPD_BULK
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}
__device__ inline void barrier_invalidate(std::uint64_t* barrier) {
#if EPD_BULK
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// Arrives, and lets the barrier's phase end when `bytes` have arrived.
__device__ inline void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
#if EPD_BULK
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
// Waits for copies that this CTA has issued. They end unless the device faults, so the loop checks no
// deadline.
__device__ inline void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
#if EPD_BULK
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#endif
}

#if !EPD_BULK
// Copies for each lane with `mine`; the warp does one lane's copy after the other.
__device__ inline void warp_copy(std::uint8_t* to, const std::uint8_t* from, std::uint32_t bytes, bool mine) {
  for (std::uint32_t lanes = __ballot_sync(kFull, mine); lanes != 0; lanes &= lanes - 1) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    auto* const d = reinterpret_cast<uint4*>(__shfl_sync(kFull, reinterpret_cast<std::uintptr_t>(to), lane));
    const auto* const s =
        reinterpret_cast<const uint4*>(__shfl_sync(kFull, reinterpret_cast<std::uintptr_t>(from), lane));
    const std::uint32_t count = __shfl_sync(kFull, bytes, lane) / 16;
    for (std::uint32_t i = lane_of(); i < count; i += 32) d[i] = s[i];
  }
}
#endif

// Copies from global to shared memory. Each lane with `mine` copies `bytes`, counted on the barrier. Both
// addresses and `bytes` are multiples of 16. All lanes call.
__device__ inline void warp_load(std::uint8_t* to, const void* from, std::uint32_t bytes, bool mine,
                                 std::uint64_t* barrier) {
#if EPD_BULK
  if (mine) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
  }
#else
  warp_copy(to, static_cast<const std::uint8_t*>(from), bytes, mine);
#endif
}

// Copies from shared to global memory. Each lane with `mine` copies `bytes`, as part of the lane's current
// group of stores. All lanes call.
__device__ inline void warp_store(void* to, std::uint8_t* from, std::uint32_t bytes, bool mine) {
#if EPD_BULK
  if (mine) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
  }
#else
  warp_copy(static_cast<std::uint8_t*>(to), from, bytes, mine);
#endif
}

// Copies `bytes`, a multiple of 8, to each lane's place with `mine`, by ordinary accesses of the warp: for
// rows that are no multiple of 16, which bulk copies can't have. All lanes call.
__device__ __noinline__ inline void warp_store_eights(void* to, const std::uint8_t* from, std::uint32_t bytes,
                                                      bool mine) {
#pragma unroll 1
  for (std::uint32_t lanes = __ballot_sync(kFull, mine); lanes != 0; lanes &= lanes - 1) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    auto* const d = reinterpret_cast<uint2*>(__shfl_sync(kFull, reinterpret_cast<std::uintptr_t>(to), lane));
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < bytes / 8; i += 32) d[i] = reinterpret_cast<const uint2*>(from)[i];
  }
}

// Ends the lane's current group of stores.
__device__ inline void stores_commit() {
#if EPD_BULK
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until all of this lane's groups have read their source.
__device__ inline void stores_wait_read() {
#if EPD_BULK
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// Waits until all of this lane's groups but the last `kLater` are performed.
template <std::uint32_t kLater>
__device__ inline void stores_wait_done_but() {
#if EPD_BULK
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}
// Waits until all of this lane's stores are performed. A release by this thread then publishes them.
__device__ inline void stores_wait_done() {
#if EPD_BULK
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// ---- copies of 16 bytes by one thread, which bypass registers and L1 ----
template <std::uint32_t kOffset>
__device__ inline void thread_load(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(to), "l"(from), "n"(kOffset)
               : "memory");
}
// Copies from global to shared memory. Each lane copies vectors of its own. `bytes` and both addresses are
// multiples of 16. All lanes call.
__device__ inline void lanes_load(std::uint8_t* to, const void* from, std::uint32_t bytes) {
  const std::uint32_t end = shared_address(to) + bytes;
  const auto* at = static_cast<const std::uint8_t*>(from) + lane_of() * 16;
  std::uint32_t i = end - bytes + lane_of() * 16;
#pragma unroll 1
  for (; i + 1536 < end; i += 2048, at += 2048) {
    thread_load<0>(i, at);
    thread_load<512>(i, at);
    thread_load<1024>(i, at);
    thread_load<1536>(i, at);
  }
#pragma unroll 1
  for (; i < end; i += 512, at += 512) thread_load<0>(i, at);
}
// The same with vectors of 8 bytes. The warp's copies are complete when the function returns.
__device__ __noinline__ inline void lanes_load_eights(std::uint8_t* to, const void* from,
                                                      std::uint32_t bytes) {
#pragma unroll 1
  for (std::uint32_t i = lane_of() * 8; i < bytes; i += 256)
    *reinterpret_cast<uint2*>(to + i) =
        *reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(from) + i);
  fence_async_shared();
  __syncwarp();
}
__device__ inline uint4 load_shared(std::uint32_t at) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(at)
               : "memory");
  return value;
}
// Loads the vector at `at` and the one 128 bytes after it. Both loads are issued before either is awaited.
__device__ inline void load_shared_two(std::uint32_t at, uint4& first, uint4& second) {
  asm volatile(
      "ld.shared.v4.u32 {%0, %1, %2, %3}, [%8];\n"
      "ld.shared.v4.u32 {%4, %5, %6, %7}, [%8 + 128];"
      : "=r"(first.x), "=r"(first.y), "=r"(first.z), "=r"(first.w), "=r"(second.x), "=r"(second.y),
        "=r"(second.z), "=r"(second.w)
      : "r"(at)
      : "memory");
}
__device__ inline void thread_loads_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all of the thread's groups of loads but the last `last` are complete. `last` is at most kMost.
template <std::uint32_t kMost>
__device__ inline void thread_loads_wait(std::uint32_t last) {
  if constexpr (kMost != 0) {
    if (last != kMost) return thread_loads_wait<kMost - 1>(last);
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(kMost) : "memory");
}

}  // namespace epd::kernels::cuda

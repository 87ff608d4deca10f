// Single-producer single-consumer ring of fixed-size slots in shared memory.
//
// Slot type S: trivially copyable, its first member `std::uint64_t sequence`. The slot at position
// p (p = 0, 1, 2, ...) lives at index p % Capacity and is published by storing p + 1 into its
// sequence with release order, after the rest of the slot. A consumer at position p therefore needs
// only the slot itself to see whether it is full; the producer needs the consumer's index to see
// whether it is free. Zeroed memory is a valid empty ring.
//
// Trust: either side may be hostile. The consumer copies a slot once and looks only at the copy;
// the producer treats an impossible consumer index (ahead of itself, or more than Capacity behind)
// as a full ring and reports it.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace epd::abi {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::endian::native == std::endian::little, "the ABI is little-endian");

struct alignas(64) IndexLine {
  std::atomic<std::uint64_t> value;
};
static_assert(sizeof(IndexLine) == 64);

template <typename S, std::size_t Capacity>
struct RingSlots {
  static_assert(std::has_single_bit(Capacity));
  static_assert(std::is_trivially_copyable_v<S> && sizeof(S) % 64 == 0 && offsetof(S, sequence) == 0);
  static constexpr std::size_t kCapacity = Capacity;
  alignas(64) S slots[Capacity];

  static std::atomic_ref<std::uint64_t> sequence_of(S& slot) {
    return std::atomic_ref<std::uint64_t>(slot.sequence);
  }
};

enum class PushResult { kPushed, kFull, kCorrupt };

// Producer's end. `tail` is the producer's own position (private or in its own segment),
// `head` the consumer's published index.
template <typename S, std::size_t Capacity>
PushResult ring_push(RingSlots<S, Capacity>& ring, std::uint64_t tail, const IndexLine& head, S slot) {
  const std::uint64_t consumed = head.value.load(std::memory_order_acquire);
  const std::uint64_t used = tail - consumed;
  if (used > Capacity) return PushResult::kCorrupt;
  if (used == Capacity) return PushResult::kFull;
  S& place = ring.slots[tail % Capacity];
  std::memcpy(reinterpret_cast<char*>(&place) + sizeof(std::uint64_t),
              reinterpret_cast<const char*>(&slot) + sizeof(std::uint64_t),
              sizeof(S) - sizeof(std::uint64_t));
  RingSlots<S, Capacity>::sequence_of(place).store(tail + 1, std::memory_order_release);
  return PushResult::kPushed;
}

// Consumer's end: true and a private copy if the slot at position `head` is full. The caller
// publishes head + 1 in its IndexLine when the slot may be reused.
template <typename S, std::size_t Capacity>
bool ring_peek(RingSlots<S, Capacity>& ring, std::uint64_t head, S& copy) {
  S& place = ring.slots[head % Capacity];
  if (RingSlots<S, Capacity>::sequence_of(place).load(std::memory_order_acquire) != head + 1) return false;
  std::memcpy(&copy, &place, sizeof(S));
  copy.sequence = head + 1;
  return true;
}

}  // namespace epd::abi

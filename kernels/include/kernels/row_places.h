// Rows of an operation that lie in mapped memory of their rank, in place of the regions of its slot. These
// functions are the same for kernels and hosts.
#pragma once

#include "kernels/host_device.h"
#include "kernels/operation.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels {

// The memories that ranks have mapped, as this device reaches them. The host changes an entry while kernels
// run: it clears the first word, writes the second one, then the first one.
struct MemoryTable {
  abi::MappedMemory of[kMaxRanks][abi::kMaxMapped];
};

// Loads an entry at once, past the caches of a kernel that has run for long.
EPD_HOST_DEVICE inline abi::MappedMemory load_mapped(const abi::MappedMemory* at) {
  abi::MappedMemory memory;
#ifdef __CUDA_ARCH__
  asm volatile(
      "{\n .reg .b128 whole;\n ld.relaxed.sys.global.b128 whole, [%2];\n mov.b128 {%0, %1}, whole;\n}"
      : "=l"(memory.word), "=l"(memory.bytes)
      : "l"(at)
      : "memory");
#else
  memory.word = __atomic_load_n(&at->word, __ATOMIC_ACQUIRE);
  memory.bytes = __atomic_load_n(&at->bytes, __ATOMIC_RELAXED);
#endif
  return memory;
}

EPD_HOST_DEVICE inline bool is_named(const abi::MappedMemory& memory, abi::RowPlace place) {
  return memory.generation() != 0 && memory.generation() == abi::generation_of_place(place);
}

// Returns whether the place names memory that is mapped. `of_rank`: [kMaxMapped], of the rank.
EPD_HOST_DEVICE inline bool is_mapped(const abi::MappedMemory* of_rank, abi::RowPlace place) {
  const std::uint32_t number = abi::memory_of_place(place);
  return of_rank != nullptr && number < abi::kMaxMapped && is_named(load_mapped(of_rank + number), place);
}

// Returns where `needed` bytes of rows lie that the rank has placed. Null: they lie in the slot's region, or
// not within the rank's memory.
EPD_HOST_DEVICE inline std::uint8_t* find_rows(const Operation& op, std::uint32_t rank, abi::RowPlace place,
                                               std::uint64_t needed) {
  const std::uint32_t number = abi::memory_of_place(place);
  if (op.memories == nullptr || number >= abi::kMaxMapped) return nullptr;
  const abi::MappedMemory memory = load_mapped(op.memories + std::size_t{rank} * abi::kMaxMapped + number);
  const std::uint64_t offset = place & abi::kMaxPlaceOffset;
  if (!is_named(memory, place) || offset % abi::kRowPlaceAlign != 0 || memory.bytes < needed ||
      offset > memory.bytes - needed)
    return nullptr;
  return reinterpret_cast<std::uint8_t*>(memory.address() + offset);
}
EPD_HOST_DEVICE inline std::uint64_t recv_x_bytes(const Shape& shape) {
  return shape.recv_rows * shape.format.row_bytes;
}
EPD_HOST_DEVICE inline std::uint64_t y_bytes(const Shape& shape) {
  return shape.recv_rows * shape.hidden * 2;
}

// Bytes of the rows of y that a combine's routing has. In blocks of experts they lie apart: then of all rows.
EPD_HOST_DEVICE inline std::uint64_t used_y_bytes(const Operation& op) {
  if (op.shape.per_expert || op.routing.record == nullptr) return y_bytes(op.shape);
#ifdef __CUDA_ARCH__
  const std::uint32_t rows = __ldcg(&op.routing.record->num_recv_rows);
#else
  const std::uint32_t rows = op.routing.record->num_recv_rows;
#endif
  return std::uint64_t{rows} * op.shape.hidden * 2;
}

// Takes the place that a rank has announced for its recv_x or y. The rank's own device knows the number of
// y's rows: it announces no place that is too small for them.
EPD_HOST_DEVICE inline void take_place(const Operation& op, std::uint32_t rank, abi::RowPlace place,
                                       Peer& peer) {
  if (place == 0) return;
  if (peer.target.recv_x != nullptr) {
    if (auto* const rows = find_rows(op, rank, place, recv_x_bytes(op.shape)); rows != nullptr)
      peer.target.recv_x = rows;
  } else if (peer.source.y != nullptr) {
    const std::uint64_t needed = op.shape.per_expert ? y_bytes(op.shape) : 0;
    if (auto* const rows = find_rows(op, rank, place, needed); rows != nullptr)
      peer.source.y = reinterpret_cast<const std::uint16_t*>(rows);
  }
}

// Takes the places of the rank's own rows. All else of the operation is composed.
EPD_HOST_DEVICE inline void take_own_places(cuda::Operation& op, const abi::RowPlaces& places) {
  const bool dispatch = op.x != nullptr;
  const std::uint64_t tokens = op.num_tokens;
  const std::uint64_t in_bytes = dispatch ? tokens * op.shape.format.x_bytes : used_y_bytes(op);
  const std::uint64_t out_bytes = dispatch ? recv_x_bytes(op.shape) : tokens * op.shape.hidden * 2;
  std::uint8_t* const in = find_rows(op, op.rank, places.in, in_bytes);
  std::uint8_t* const out = find_rows(op, op.rank, places.out, out_bytes);
  if (dispatch && in != nullptr) op.x = in;
  if (!dispatch && out != nullptr) op.out = reinterpret_cast<std::uint16_t*>(out);
  const abi::RowPlace shared = dispatch ? places.out : places.in;
  if ((dispatch ? out : in) == nullptr) return;
  op.announcement.place = shared;
  take_place(op, op.rank, shared, op.peers[op.rank]);
}

}  // namespace epd::kernels

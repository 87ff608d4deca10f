// Rows of an operation that lie in mapped memory of their rank, in place of the regions of its slot. These
// functions are the same for kernels and hosts.
#pragma once

#include "kernels/cuda_operation.h"
#include "kernels/host_device.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

// The memories that ranks have mapped, as this device reaches them. The host changes an entry while kernels
// run: it clears `bytes`, then writes the base, the generation, and `bytes` last.
struct MemoryTable {
  abi::MappedMemory of[kMaxRanks][abi::kMaxMapped];
};

// Returns whether the place names memory that is mapped. `of_rank`: [kMaxMapped], of the rank.
EPD_HOST_DEVICE inline bool is_mapped(const abi::MappedMemory* of_rank, abi::RowPlace place) {
  const std::uint32_t number = abi::memory_of_place(place);
  if (of_rank == nullptr || number >= abi::kMaxMapped) return false;
  const std::uint32_t generation = of_rank[number].generation;
  return generation != 0 && generation == abi::generation_of_place(place);
}

// Returns where `needed` bytes of rows lie that the rank has placed. Null: they lie in the slot's region, or
// not within the rank's memory.
EPD_HOST_DEVICE inline std::uint8_t* find_rows(const Operation& op, std::uint32_t rank, abi::RowPlace place,
                                               std::uint64_t needed) {
  const std::uint32_t number = abi::memory_of_place(place);
  if (op.memories == nullptr || number >= abi::kMaxMapped) return nullptr;
  const abi::MappedMemory memory = op.memories[std::size_t{rank} * abi::kMaxMapped + number];
  if (memory.generation == 0 || memory.generation != abi::generation_of_place(place)) return nullptr;
  const std::uint64_t offset = place & abi::kMaxPlaceOffset;
  if (offset % abi::kRowPlaceAlign != 0 || memory.bytes < needed || offset > memory.bytes - needed)
    return nullptr;
  return memory.base + offset;
}
EPD_HOST_DEVICE inline std::uint64_t recv_x_bytes(const Shape& shape) {
  return shape.recv_rows * shape.format.row_bytes;
}
EPD_HOST_DEVICE inline std::uint64_t y_bytes(const Shape& shape) {
  return shape.recv_rows * shape.hidden * 2;
}

// Takes the place that a rank has announced for its recv_x or y.
EPD_HOST_DEVICE inline void take_place(const Operation& op, std::uint32_t rank, abi::RowPlace place,
                                       Peer& peer) {
  if (place == 0) return;
  if (peer.target.recv_x != nullptr) {
    if (auto* const rows = find_rows(op, rank, place, recv_x_bytes(op.shape)); rows != nullptr)
      peer.target.recv_x = rows;
  } else if (peer.source.y != nullptr) {
    if (auto* const rows = find_rows(op, rank, place, y_bytes(op.shape)); rows != nullptr)
      peer.source.y = reinterpret_cast<const std::uint16_t*>(rows);
  }
}

// Takes the places of the rank's own rows. All else of the operation is composed.
EPD_HOST_DEVICE inline void take_own_places(Operation& op, const abi::RowPlaces& places) {
  const bool dispatch = op.x != nullptr;
  const std::uint64_t tokens = op.num_tokens;
  const std::uint64_t in_bytes = dispatch ? tokens * op.shape.format.x_bytes : y_bytes(op.shape);
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

}  // namespace epd::kernels::cuda

// The functions of far.h with a given path and kind of stores. Internal: far.h is the interface. Tests use
// this header to run every path.
#pragma once

#include "host/row_kernels.h"
#include "kernels/crc32c.h"
#include "kernels/far.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace epd::kernels::host {

void pack_rows_with(Choice choice, const FarPackArgs& args, std::uint32_t begin, std::uint32_t end,
                    std::byte* records);
FarFault forward_rows_with(Choice choice, const FarForwardArgs& args, const std::byte* records,
                           std::uint32_t begin, std::uint32_t end);
FarSummed sum_rows_for_with(Choice choice, const FarSumArgs& args, const std::byte* asks, std::uint32_t begin,
                            std::uint32_t end, std::byte* sums, std::uint32_t room);
FarMerged merge_sums_with(Choice choice, const FarMergeArgs& args, std::span<FarStream> streams,
                          std::uint32_t begin, std::uint32_t end);

// A record is written from its beginning to its end: no byte of it is left as it was.
class RecordWriter {
 public:
  RecordWriter(std::byte* record, std::size_t bytes, bool crc = false)
      : next_(record), end_(record + bytes), crc_(crc), covered_(record) {}
  ~RecordWriter() {
    std::memset(next_, 0, static_cast<std::size_t>(end_ - next_));
    if (!crc_) return;
    std::byte* const place = end_ - abi::kFarCrcBytes;
    const std::uint32_t crc = crc32c({covered_, place}, covered_crc_);
    std::memcpy(place, &crc, sizeof(crc));
  }
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Somebody else writes the next bytes there.
  std::byte* skip(std::size_t bytes) {
    std::byte* const place = next_;
    next_ += bytes;
    return place;
  }
  // Nothing has been written before.
  void put_row(const Choice& choice, const void* row, std::size_t bytes) {
    void* const place = skip(bytes);
    if (!crc_ || choice.kernels->copy_row_crc == nullptr)
      return choice.kernels->copy_row(row, bytes, {&place, 1}, choice.stores);
    covered_crc_ = choice.kernels->copy_row_crc(row, bytes, place);
    covered_ = next_;
  }
  void put_sum(const Choice& choice, const RowSum& sum, std::size_t hidden) {
    auto* const place = reinterpret_cast<std::uint16_t*>(skip(hidden * sizeof(std::uint16_t)));
    if (!crc_ || choice.kernels->sum_rows_crc == nullptr)
      return choice.kernels->sum_rows(sum, hidden, place, choice.stores);
    covered_crc_ = choice.kernels->sum_rows_crc(sum, hidden, place);
    covered_ = next_;
  }
  void put(const void* from, std::size_t bytes) { std::memcpy(skip(bytes), from, bytes); }
  template <typename T>
  void put(const T& value) {
    put(&value, sizeof(value));
  }

 private:
  std::byte* next_;
  std::byte* const end_;
  const bool crc_;
  const std::byte* covered_;  // up to here all bytes have this CRC
  std::uint32_t covered_crc_ = 0;
};

// Records lie at any alignment.
template <typename T>
T read_far(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline bool is_whole(const std::byte* record, std::size_t stride) {
  return read_far<std::uint32_t>(record + stride - abi::kFarCrcBytes) ==
         crc32c({record, stride - abi::kFarCrcBytes});
}

}  // namespace epd::kernels::host

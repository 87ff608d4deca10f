// The functions of far.h with a given path and kind of stores. Internal: far.h is the interface. Tests use
// this header to run every path.
#pragma once

#include "host/row_kernels.h"
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
  RecordWriter(std::byte* record, std::size_t bytes) : next_(record), end_(record + bytes) {}
  ~RecordWriter() { std::memset(next_, 0, static_cast<std::size_t>(end_ - next_)); }
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Somebody else writes the next bytes there.
  std::byte* skip(std::size_t bytes) {
    std::byte* const place = next_;
    next_ += bytes;
    return place;
  }
  void put(const void* from, std::size_t bytes) { std::memcpy(skip(bytes), from, bytes); }
  template <typename T>
  void put(const T& value) {
    put(&value, sizeof(value));
  }

 private:
  std::byte* next_;
  std::byte* const end_;
};

// Records lie at any alignment.
template <typename T>
T read_far(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace epd::kernels::host

// Anonymous zero-filled memory, shared with the processes forked after it was made.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

namespace epd::kit {

class SharedBytes {
 public:
  SharedBytes() = default;
  explicit SharedBytes(std::size_t bytes);  // throws ToolError; pages come when touched
  SharedBytes(SharedBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  SharedBytes& operator=(SharedBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedBytes();

  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// All-zero bytes must be a valid T.
template <typename T>
class SharedArray {
 public:
  static_assert(std::is_trivially_destructible_v<T>);
  SharedArray() = default;
  explicit SharedArray(std::size_t count) : bytes_(count * sizeof(T)), count_(count) {}

  T* data() const { return static_cast<T*>(bytes_.data()); }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) const { return data()[i]; }
  std::span<T> span() const { return {data(), count_}; }

 private:
  SharedBytes bytes_;
  std::size_t count_ = 0;
};

}  // namespace epd::kit

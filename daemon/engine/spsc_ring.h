// A bounded queue from one thread to another. Neither waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

namespace epd::engine {

template <typename T>
class SpscRing {
 public:
  explicit SpscRing(std::size_t slots) : slots_(slots) {}

  // The writer's. False: it is full, and `value` is as it was.
  bool push(T& value) {
    const std::size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) == slots_.size()) return false;
    slots_[tail % slots_.size()] = std::move(value);
    tail_.store(tail + 1, std::memory_order_release);
    return true;
  }
  // The reader's. False: it is empty.
  bool pop(T& value) {
    const std::size_t head = head_.load(std::memory_order_relaxed);
    if (tail_.load(std::memory_order_acquire) == head) return false;
    value = std::move(slots_[head % slots_.size()]);
    head_.store(head + 1, std::memory_order_release);
    return true;
  }
  bool full() const {
    return tail_.load(std::memory_order_acquire) - head_.load(std::memory_order_acquire) == slots_.size();
  }
  bool empty() const {
    return tail_.load(std::memory_order_acquire) == head_.load(std::memory_order_acquire);
  }

 private:
  std::vector<T> slots_;
  alignas(64) std::atomic<std::size_t> head_{0};
  alignas(64) std::atomic<std::size_t> tail_{0};
};

}  // namespace epd::engine

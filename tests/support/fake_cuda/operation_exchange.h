// An operation's exchange with its stream and its engine.
#pragma once

#include "cuda/common/ending.h"
#include "fake_cuda/kernel_protocol.h"

#include <atomic>
#include <cstdint>

namespace epd::fake_cuda {

template <typename T>
void store_release(T* word, T value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}
// atomic_ref wants what it may write.
template <typename T>
T load_acquire(const T* word) {
  return std::atomic_ref(*const_cast<T*>(word)).load(std::memory_order_acquire);
}

class OperationExchange {
 public:
  OperationExchange(const kernels::cuda::Operation& op, const KernelDevice& device);

  // The end of an operation that has failed.
  void leave() const;

 protected:
  using OpResult = kernels::OpResult;

  void publish(const OpResult& ending);
  std::uint64_t ran_ns() const { return ordered::nanoseconds() - start_ns_; }
  // Whether the operation must leave a wait before it is satisfied. The reason is published, as `ending` but
  // for the error.
  bool must_leave(OpResult ending);

  const kernels::cuda::Operation& op_;
  const KernelDevice& device_;

 private:
  const std::uint64_t start_ns_;
  bool failed_ = false;  // it has said so
};

}  // namespace epd::fake_cuda

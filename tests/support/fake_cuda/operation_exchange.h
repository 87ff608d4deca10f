// What an operation has to do with others: its stream, its engine, and the same operation of other ranks.
#pragma once

#include "cuda/ending.h"
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

  // Until the client's stream has got as far. False: it has failed.
  bool wait_ready();
  // The end of an operation that has failed.
  void leave() const;

 protected:
  using OpResult = kernels::cuda::OpResult;

  bool is_there(std::uint32_t rank) const { return op_.peers[rank].ready != nullptr; }
  const kernels::cuda::Peer& own() const { return op_.peers[op_.rank]; }
  template <typename Visit>
  void for_ranks_there(Visit visit) const {
    for (std::uint32_t rank = 0; rank < op_.shape.num_ranks; ++rank) {
      if (is_there(rank)) visit(rank);
    }
  }

  void publish(const OpResult& ending);
  // False: the operation has failed.
  bool wait_signals(const abi::SignalLine* lines);
  void announce() const;
  bool check_announcements();
  // Tells all ranks, and waits for them.
  bool arrive();

  const kernels::cuda::Operation& op_;
  std::uint32_t num_dropped_ = 0;  // as an ending says that was aborted

 private:
  // What ends a wait besides what is waited for. `culprit`: what the ending says then.
  bool must_leave(std::int32_t culprit);

  const KernelDevice& device_;
  const std::uint64_t start_ns_;
  bool failed_ = false;  // it has said so
};

}  // namespace epd::fake_cuda

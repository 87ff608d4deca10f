// A lane whose operations are launched one by one, on a stream of its own. It has operation slots, and the
// words by which the client's streams and the lane's stream wait for each other.
#pragma once

#include "cuda_lane.h"

#include <array>
#include <map>
#include <memory>

namespace epd::device {

class LaunchedLane final : public CudaLane {
 public:
  LaunchedLane(CudaDevice& device, const LaneShape& shape);
  ~LaunchedLane() override;

  std::unique_ptr<OperationInFlight> launch(const LaunchRequest& request) override;
  void release(const kernels::cuda::Signal& signal, std::uint64_t ticket) override;
  void follow_share() override;
  std::uint32_t in_flight() const override { return in_flight_; }

 private:
  friend class CudaOperationInFlight;
  using Signal = kernels::cuda::Signal;

  // The part of an operation slot that host and device both see. Those of dispatch and combine are followed
  // by the words of a placement (CountOutputs::host_words).
  struct HostOperationSlot {
    kernels::cuda::OpResult result;
    std::uint32_t sent;   // CountOutputs::mark
    std::uint32_t abort;  // in the host's memory: the host writes it without a stream
  };
  std::size_t own_device_bytes() const override;
  std::size_t own_host_bytes() const override;
  HostOperationSlot& host_slot(std::uint32_t op_slot) const;
  std::uint64_t* counts(std::uint32_t op_slot) const;
  // Operations as the host writes them, and the device's copies, by operation slot.
  Operation& given(std::uint32_t op_slot) const { return reinterpret_cast<Operation*>(own_host())[op_slot]; }
  CUdeviceptr device_op(std::uint32_t op_slot) const { return own_device() + op_slot * sizeof(Operation); }
  std::uint32_t num_op_slots() const { return shape_.limits.depth + kMaxNoops; }
  std::size_t op_slot_stride() const;
  std::size_t words_at() const;

  void prepare(const LaunchRequest& request, std::uint32_t op_slot);
  void describe_own(Kind kind, std::uint32_t sms, Operation& op) const;
  void start(Kind kind, std::uint32_t op_slot);
  void start_noop(const Operation& op, const Signal& signal, std::uint32_t op_slot);
  void await_word(const std::uint32_t* word, std::uint32_t value);
  // Makes the operation end soon, wherever it waits.
  void abort(std::uint32_t op_slot, const Signal& signal);
  std::uint32_t take_noop_slot();
  void operation_ended(std::uint32_t op_slot, const Signal& signal);

  // Writes a word of the client's streams. The control stream may be delayed. A later write of the same word
  // comes from the slot's next operation, or from the client once it knows of the end. It must not be
  // overtaken by this one: a stream that waits for a value never gets past a word that falls back. So client
  // words are counted, and the count is written after each. A later write waits for that count.
  void write_client_word(const void* word, std::uint32_t value);
  void write_owed(const void* word);
  std::uint32_t* client_words_written() const;  // in the host's memory
  bool has_written_client_words(std::uint32_t number) const;

  std::uint32_t in_flight_ = 0;
  std::uint32_t launches_ = 0;
  std::uint64_t noops_ = 0;
  std::array<bool, kMaxNoops> noop_slots_{};  // slots in use
  struct Word {
    std::uint32_t in_flight = 0;  // operations that will write it
    bool owed = false;            // `furthest` is still to be written
    std::uint64_t furthest = 0;   // ticket
  };
  std::map<const void*, Word> done_;
  std::uint32_t client_words_ = 0;  // that are written, or will be
};

}  // namespace epd::device

// A lane whose operations are launched one by one, on a stream of its own: places for them, and the words by
// which the client's streams and the lane's wait for each other.
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

  // What of a place the host and the device both see. Those of dispatch and combine are followed by the words
  // of a placement (CountOutputs::host_words).
  struct HostPlace {
    kernels::cuda::OpResult result;
    std::uint32_t sent;   // CountOutputs::mark
    std::uint32_t abort;  // in the host's memory, as no stream need have a turn then to write it
  };
  std::size_t own_device_bytes() const override;
  std::size_t own_host_bytes() const override;
  HostPlace& host_place(std::uint32_t place) const;
  std::uint64_t* counts(std::uint32_t place) const;
  // Operations as the host writes them, and the device's copies, by place.
  Operation& given(std::uint32_t place) const { return reinterpret_cast<Operation*>(own_host())[place]; }
  CUdeviceptr device_op(std::uint32_t place) const { return own_device() + place * sizeof(Operation); }
  std::uint32_t num_places() const { return shape_.limits.depth + kMaxNoops; }
  std::size_t place_stride() const;
  std::size_t words_at() const;

  void prepare(const LaunchRequest& request, std::uint32_t place);
  void describe_own(Kind kind, std::uint32_t sms, Operation& op) const;
  void start(Kind kind, std::uint32_t place);
  void start_noop(const Operation& op, const Signal& signal, std::uint32_t place);
  void await_word(const std::uint32_t* word, std::uint32_t value);
  // Makes it end soon, wherever it waits.
  void abort(std::uint32_t place, const Signal& signal);
  std::uint32_t take_noop_place();
  void operation_ended(std::uint32_t place, const Signal& signal);

  // A word of the client's streams. The control stream may be held up, and what writes the same word after it
  // (the slot's next operation, or the client when it has been told of the end) must not come before it: a
  // word that falls back is never reached by who waits there. So client words are counted, the count is
  // written behind each, and whatever may be followed by a later write waits for the count.
  void write_client_word(const void* word, std::uint32_t value);
  void write_owed(const void* word);
  std::uint32_t* client_words_written() const;  // of the host's memory
  bool has_written_client_words(std::uint32_t number) const;

  std::uint32_t in_flight_ = 0;
  std::uint32_t launches_ = 0;
  std::uint64_t noops_ = 0;
  std::array<bool, kMaxNoops> noop_places_{};  // taken
  struct Word {
    std::uint32_t in_flight = 0;  // that will write it
    bool owed = false;            // `furthest` is still to be written
    std::uint64_t furthest = 0;   // ticket
  };
  std::map<const void*, Word> done_;
  std::uint32_t client_words_ = 0;  // written, or to be
};

}  // namespace epd::device

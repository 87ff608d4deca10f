// What all lanes of a GPU have: places for operations, flights, and the client's words. How operations get to
// run is for launched_lane.h and resident_lane.h.
#pragma once

#include "cuda_device.h"
#include "signal_look.h"

#include <array>
#include <map>
#include <memory>

namespace epd {

class CudaLane : public Lane {
 public:
  ~CudaLane() override;

  std::unique_ptr<Flight> launch(const LaunchRequest& request) final;
  void release(const kernels::cuda::Signal& signal, std::uint64_t ticket) final;

  // Once, before anything else. UNSUPPORTED: the device can't hold a row.
  Status allocate();
  // The device's SMs, or their share for each lane, are not what they were. Also called whenever nothing is
  // in flight.
  virtual void follow_share() = 0;
  // Goes on with that; true while it is under way.
  virtual bool advance() { return false; }
  // SMs that nobody else can have, while nothing runs too.
  virtual std::uint32_t held_sms() const { return 0; }
  std::int32_t priority() const { return priority_; }
  std::uint32_t in_flight() const { return in_flight_; }  // operations
  // Where its stream is; null: it has had none.
  const Partition* partition() const { return partition_.get(); }
  void set_priority(std::int32_t priority) final;
  void look_at_signals() final { signals_.begin(); }
  const SignalCopy* signals() final { return signals_.seen(); }

 protected:
  using Kind = kernels::cuda::Kind;
  using Operation = kernels::cuda::Operation;
  using Signal = kernels::cuda::Signal;

  CudaLane(CudaDevice& device, const LaneShape& shape);

  virtual std::uint32_t num_sms() const = 0;  // that an operation may have now
  // Runs the operation, which lies in given(place), behind those started before.
  virtual void start(Kind kind, std::uint32_t place) = 0;
  // The word that the operation in a place looks at; as it is to begin; and: makes it end soon, wherever it
  // waits.
  virtual const std::uint32_t* abort_word(std::uint32_t place) const = 0;
  virtual void clear_abort(std::uint32_t place) = 0;
  virtual void abort(std::uint32_t place, const Signal& signal) = 0;
  // Zeroed, at extra_device() and extra_host().
  virtual std::size_t extra_device_bytes() const { return 0; }
  virtual std::size_t extra_host_bytes() const { return 0; }

  // What of a place the host and the device both see. Those of dispatch and combine are followed by a
  // placement.
  struct HostPlace {
    kernels::cuda::OpResult result;
    std::uint64_t counted;  // tag
    std::uint64_t sent;     // likewise
    std::uint32_t abort;    // of launched operations
  };
  HostPlace& host_place(std::uint32_t place) const;
  // Operations as the host writes them, and the device's copies, by place.
  Operation& given(std::uint32_t place) const { return reinterpret_cast<Operation*>(memory_.host)[place]; }
  CUdeviceptr device_op(std::uint32_t place) const { return memory_.device + place * sizeof(Operation); }
  std::uint32_t num_places() const { return shape_.limits.depth + kMaxNoops; }
  CUdeviceptr extra_device() const { return workspace_ + workspace_bytes_; }
  std::byte* extra_host() const { return memory_.host + host_places_ + places_bytes(); }
  // What of an operation is the lane's to fill in, and how it moves rows on `sms` of its SMs (0: on all).
  void describe_own(Kind kind, std::uint32_t sms, Operation& op) const;
  // While nothing runs: operations in flight that have not begun move rows on the lane's SMs of now.
  void fit_given();
  void take_stream();
  // Nothing is in flight, and the stream has come to its end.
  void let_stream_go();
  // Of a lane that is being destroyed: stream and memory are the device's, until the stream has come to its
  // end.
  void leave_running(std::uint32_t held_sms, std::uint64_t told_ns, const CommandPort::Layout& commands);
  CUstream control() const { return device_.partition()->control(); }
  void write_word(const void* word, std::uint32_t value) const;
  // A word of the client's streams. The control stream may be held up, and what writes the same word after it
  // (the slot's next operation, or the client when it has been told of the end) must not come before it: a
  // word that falls back is never reached by who waits there. So client words are counted, the count is
  // written behind each, and whatever may be followed by a later write waits for the count.
  void write_client_word(const void* word, std::uint32_t value);
  bool client_words_pending() const { return !has_written_client_words(client_words_); }
  std::uint32_t client_words() const { return client_words_; }
  std::uint32_t* client_words_written() const;  // of the host's memory
  void must(const char* what, CUresult result) const { cuda_must(driver_, what, result); }

  CudaDevice& device_;
  const CudaDriver& driver_;
  const LaneShape shape_;
  std::shared_ptr<Partition> partition_;
  CUstream stream_ = nullptr;

 private:
  friend class CudaFlight;

  std::int32_t* placement(std::uint32_t place) const;
  void prepare(const LaunchRequest& request, std::uint32_t place);
  std::size_t places_bytes() const;  // with what lies behind them: signals, and a word
  std::size_t signals_at() const;
  void leave(LeavingLane lane);
  std::uint32_t take_noop_place();
  void flight_ended(std::uint32_t place, const Signal& signal);
  void write_owed(const void* word);
  bool has_written_client_words(std::uint32_t number) const;

  std::int32_t priority_ = 0;
  int stream_priority_ = 0;
  LaneMemory memory_;  // of the device: operations, workspace, extra; of the host: operations, places
  std::size_t host_places_ = 0;
  std::size_t host_stride_ = 0;
  CUdeviceptr workspace_ = 0;
  std::size_t workspace_bytes_ = 0;
  struct Asked {
    Kind kind = Kind::kNoop;
    std::uint32_t sms = 0;
  };
  std::vector<Asked> asked_;  // [depth], by place; a noop's fits always
  std::uint32_t in_flight_ = 0;
  std::uint64_t noops_ = 0;
  std::array<bool, kMaxNoops> noop_places_{};  // taken
  struct Word {
    std::uint32_t flights = 0;   // that will write it
    bool owed = false;           // `furthest` is still to be written
    std::uint64_t furthest = 0;  // ticket
  };
  std::map<const void*, Word> done_;
  SignalLook signals_;
  std::uint32_t client_words_ = 0;  // written, or to be
};

}  // namespace epd

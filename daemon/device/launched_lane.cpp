#include "launched_lane.h"

#include "base/clock.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

namespace epd::device {

using kernels::cuda::Kind;
using kernels::cuda::OpError;
using kernels::cuda::OpResult;
using kernels::cuda::Signal;

namespace {

constexpr std::uint64_t kLookAtDeviceNs = 1'000'000;
constexpr std::uint64_t kSoonEndedNs = 20'000'000;           // most are; others are looked at while they run
constexpr std::uint64_t kNoopTags = std::uint64_t{1} << 63;  // no operation of a group has such a tag

}  // namespace

class CudaOperationInFlight final : public OperationInFlight {
 public:
  CudaOperationInFlight(LaunchedLane& lane, const LaunchRequest& request, std::uint32_t place)
      : lane_(lane),
        peers_(request.peers),
        place_(lane.host_place(place)),
        number_(place),
        signal_(request.op->signal),
        tag_(request.op->tag),
        mark_(request.op->counts.mark) {}

  ~CudaOperationInFlight() override {
    if (!left()) std::abort();  // the GPU would write into what is given to others now
    lane_.operation_ended(number_, signal_);
  }

  // Nothing of it is done here. It is looked at, if it takes long.
  bool advance() override {
    if (!is_noop() && lane_.device_.now_ns() >= launched_ns_ + kSoonEndedNs)
      lane_.signals_.begin_now_and_then();
    return false;
  }
  abi::OpStage stage() const override {
    const SignalCopy* const copy = signals();
    return copy != nullptr ? copy->stage(signalled()) : abi::OpStage::kPlanning;
  }
  // The result says whom one that has failed has waited for.
  std::uint32_t awaited(std::uint32_t from) const override {
    const SignalCopy* const copy = is_ours(place_.result.tag) ? nullptr : signals();
    return copy != nullptr ? copy->awaited(signalled(), from) : kNobody;
  }
  // Words come in any order.
  bool counted() override {
    const std::uint64_t* const words = lane_.counts(number_);
    while (counted_ < lane_.shape_.placement_words) {
      const std::uint64_t word =
          std::atomic_ref(const_cast<std::uint64_t&>(words[counted_])).load(std::memory_order_relaxed);
      if (word >> 32 != mark_) return false;
      ++counted_;
    }
    return true;
  }
  bool sent() override { return std::atomic_ref(place_.sent).load(std::memory_order_acquire) == mark_; }
  // Whoever is told of the end may use the client's words again, so what an abort writes there comes first.
  bool ended() override {
    if (!is_ours(place_.result.tag)) return look_at_device();
    return !aborted_ || lane_.has_written_client_words(words_of_abort_);
  }
  bool left() override {
    return ended() && (result().error == OpError::kNone || is_ours(place_.result.left) || look_at_device());
  }

  const kernels::Placement& counts() override {
    const kernels::cuda::Shape& s = lane_.shape_.shape;
    counts_.reset(s.num_ranks, s.num_experts, s.per_expert);
    std::transform(lane_.counts(number_), lane_.counts(number_) + counts_.words().size(),
                   counts_.words().begin(),
                   [](std::uint64_t word) { return static_cast<std::int32_t>(word); });
    counts_.count_rows(s.expert_blocks);
    return counts_;
  }
  const OpResult& result() const override { return place_.result; }
  // Read back in one go: 8 MiB at most.
  std::uint32_t count_selections(std::span<const std::uint8_t> ranks) const override {
    const kernels::cuda::Operation& op = lane_.given(number_);
    std::vector<std::int32_t> topk(std::size_t{op.num_tokens} * op.shape.topk);
    lane_.device_.read(topk.data(), op.routing.topk, topk.size() * sizeof(topk[0]));
    const std::uint32_t experts = op.shape.num_experts / op.shape.num_ranks;
    return static_cast<std::uint32_t>(std::count_if(topk.begin(), topk.end(), [&](std::int32_t choice) {
      return choice >= 0 && ranks[static_cast<std::uint32_t>(choice) / experts] != 0;
    }));
  }

  void abort() override {
    if (std::exchange(aborted_, true)) return;
    lane_.abort(number_, signal_);
    words_of_abort_ = lane_.client_words_;
  }

 private:
  bool is_noop() const { return peers_ == nullptr; }
  // Signals of an earlier look say nothing of it.
  const SignalCopy* signals() const {
    const SignalCopy* const copy = is_noop() ? nullptr : lane_.signals_.seen();
    return copy != nullptr && copy->begun_ns >= launched_ns_ ? copy : nullptr;
  }
  SignalledOperation signalled() const {
    return {lane_.given(number_).rank, tag_, number_, peers_->masked()};
  }
  bool is_ours(std::uint64_t& word) const {
    return std::atomic_ref(word).load(std::memory_order_acquire) == tag_;
  }
  // Of a GPU that has failed nothing comes any more: then the process ends here. Else false.
  bool look_at_device() {
    const std::uint64_t now = MonotonicClock().now_ns();
    if (now - looked_ns_ < kLookAtDeviceNs) return false;
    looked_ns_ = now;
    const CUresult state = lane_.driver_.cuStreamQuery(lane_.stream_);
    if (state != CUDA_ERROR_NOT_READY) lane_.must("cuStreamQuery", state);
    return false;
  }

  LaunchedLane& lane_;
  const OperationPeers* const peers_;  // null: a noop
  LaunchedLane::HostPlace& place_;
  const std::uint32_t number_;
  const Signal signal_;
  const std::uint64_t tag_;
  const std::uint32_t mark_;
  const std::uint64_t launched_ns_ = lane_.device_.now_ns();
  bool aborted_ = false;
  std::uint32_t words_of_abort_ = 0;  // LaunchedLane::client_words_ then
  std::uint32_t counted_ = 0;         // words of the placement that have come
  kernels::Placement counts_;
  std::uint64_t looked_ns_ = MonotonicClock().now_ns();
};

LaunchedLane::LaunchedLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape) {}

LaunchedLane::~LaunchedLane() {
  if (stream_ == nullptr) return;
  // What has ended may still be leaving.
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
  let_stream_go();
}

// ---- memory: operations, places, noops' places, a word

std::size_t LaunchedLane::own_device_bytes() const {
  return num_places() * sizeof(Operation);
}

std::size_t LaunchedLane::place_stride() const {
  return aligned(sizeof(HostPlace) + shape_.placement_words * sizeof(std::uint64_t));
}

std::size_t LaunchedLane::words_at() const {
  return num_places() * sizeof(Operation) +
         aligned(place_stride() * shape_.limits.depth + sizeof(HostPlace) * kMaxNoops);
}

std::size_t LaunchedLane::own_host_bytes() const {
  return words_at() + sizeof(std::uint32_t);
}

LaunchedLane::HostPlace& LaunchedLane::host_place(std::uint32_t place) const {
  const std::size_t noops = place_stride() * shape_.limits.depth;
  const std::size_t at = place < shape_.limits.depth
                             ? place * place_stride()
                             : noops + (place - shape_.limits.depth) * sizeof(HostPlace);
  return *reinterpret_cast<HostPlace*>(own_host() + num_places() * sizeof(Operation) + at);
}

std::uint64_t* LaunchedLane::counts(std::uint32_t place) const {
  return reinterpret_cast<std::uint64_t*>(&host_place(place) + 1);
}

std::uint32_t* LaunchedLane::client_words_written() const {
  return reinterpret_cast<std::uint32_t*>(own_host() + words_at());
}

std::uint32_t LaunchedLane::take_noop_place() {
  const auto free = std::find(noop_places_.begin(), noop_places_.end(), false);
  EPD_CHECK(free != noop_places_.end());
  *free = true;
  return shape_.limits.depth + static_cast<std::uint32_t>(free - noop_places_.begin());
}

// ---- launches

// A share is asked for with each operation; only another partition needs another stream.
void LaunchedLane::follow_share() {
  if (partition_ == device_.partition() || in_flight() != 0) return;
  if (stream_ != nullptr) {
    const CUresult state = driver_.cuStreamQuery(stream_);
    if (state == CUDA_ERROR_NOT_READY) return;
    must("cuStreamQuery", state);
    let_stream_go();
  }
  take_stream();
}

// What of an operation is the lane's to fill in, and how it moves rows on `sms` of its SMs (0: on all).
void LaunchedLane::describe_own(Kind kind, std::uint32_t sms, Operation& op) const {
  describe_workspace(op);
  if (kind == Kind::kNoop) {
    op.division.ctas = 1;
    return;
  }
  const std::uint32_t most = device_.lane_sms(*this);
  sms = sms == 0 ? most : std::min(sms, most);
  EPD_CHECK(kernels::cuda::configure(kind, device_.max_shared_bytes(), sms, op));
}

void LaunchedLane::prepare(const LaunchRequest& request, std::uint32_t place) {
  Operation& op = *request.op;
  HostPlace& host = host_place(place);
  op.abort = &host.abort;
  op.result = &host.result;
  op.counts.mark = ++launches_ != 0 ? launches_ : ++launches_;
  host = {};
  if (request.kind == Kind::kNoop) {
    op.tag = kNoopTags + ++noops_;
  } else if (request.kind == Kind::kDispatch) {
    op.counts.host_words = counts(place);
    op.counts.host_sent = &host.sent;
  }
  for (std::uint32_t rank = 0; request.kind != Kind::kNoop && rank < op.shape.num_ranks; ++rank) {
    if (request.peers->active(rank)) op.peers[rank] = request.peers->peer(rank);
  }
  describe_own(request.kind, request.sms, op);
  given(place) = op;
}

std::unique_ptr<OperationInFlight> LaunchedLane::launch(const LaunchRequest& request) {
  if (in_flight_ == 0) follow_share();
  const std::uint32_t place = request.kind == Kind::kNoop ? take_noop_place() : request.place;
  prepare(request, place);
  const Signal signal = request.op->signal;
  if (signal.done != nullptr) ++done_[signal.done].in_flight;
  ++in_flight_;
  start(request.kind, place);
  return std::make_unique<CudaOperationInFlight>(*this, request, place);
}

void LaunchedLane::await_word(const std::uint32_t* word, std::uint32_t value) {
  must("cuStreamWaitValue32", driver_.cuStreamWaitValue32(stream_, reinterpret_cast<CUdeviceptr>(word), value,
                                                          CU_STREAM_WAIT_VALUE_GEQ));
}

// The stream waits for the client and not the kernel: until then its SMs are for others.
void LaunchedLane::start(Kind kind, std::uint32_t place) {
  Operation& op = given(place);
  const Signal signal = op.signal;
  op.signal.ready = nullptr;
  if (!has_written_client_words(client_words_)) await_word(client_words_written(), client_words_);
  if (kind != Kind::kNoop) {
    must("cuMemcpyHtoDAsync", driver_.cuMemcpyHtoDAsync(device_op(place), &op, sizeof(Operation), stream_));
  }
  if (signal.ready != nullptr) await_word(signal.ready, signal.value);
  if (kind == Kind::kNoop) {
    start_noop(op, signal, place);
    return;
  }
  const kernels::cuda::WorkDivision& division = op.division;
  CUdeviceptr on_device = device_op(place);
  void* arguments[] = {&on_device};
  const CUkernel kernel = device_.kernel(kernels::cuda::kernel_name(kind, op));
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), division.ctas, 1, 1, division.threads, 1,
                              1, division.shared_bytes, stream_, arguments, nullptr));
}

void LaunchedLane::start_noop(const Operation& op, const Signal& signal, std::uint32_t place) {
  if (signal.done != nullptr) {
    must("cuStreamWriteValue32",
         driver_.cuStreamWriteValue32(stream_, reinterpret_cast<CUdeviceptr>(signal.done), signal.value, 0));
  }
  must("cuStreamWriteValue64",
       driver_.cuStreamWriteValue64(stream_, reinterpret_cast<CUdeviceptr>(&host_place(place).result.tag),
                                    op.tag, 0));
}

void LaunchedLane::abort(std::uint32_t place, const Signal& signal) {
  std::atomic_ref(host_place(place).abort).store(1);
  if (signal.ready != nullptr) write_client_word(signal.ready, signal.value);
}

void LaunchedLane::operation_ended(std::uint32_t place, const Signal& signal) {
  if (place >= shape_.limits.depth) noop_places_[place - shape_.limits.depth] = false;
  if (signal.done != nullptr && --done_[signal.done].in_flight == 0) write_owed(signal.done);
  if (--in_flight_ == 0) follow_share();
}

// ---- the client's words

void LaunchedLane::write_client_word(const void* word, std::uint32_t value) {
  write_word(word, value);
  write_word(client_words_written(), ++client_words_);
}

bool LaunchedLane::has_written_client_words(std::uint32_t number) const {
  const std::uint32_t written = std::atomic_ref(*client_words_written()).load(std::memory_order_acquire);
  return static_cast<std::int32_t>(written - number) >= 0;  // few are ever under way
}

void LaunchedLane::release(const Signal& signal, std::uint64_t ticket) {
  Word& word = done_[signal.done];
  if (ticket <= word.furthest) return;
  word.owed = true;
  word.furthest = ticket;
  if (word.in_flight == 0) write_owed(signal.done);
}

void LaunchedLane::write_owed(const void* word) {
  Word& state = done_[word];
  if (state.owed) write_client_word(word, static_cast<std::uint32_t>(state.furthest));
  state.owed = false;
}

}  // namespace epd::device

#include "cuda_lane.h"

#include "base/clock.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

namespace epd {

using kernels::cuda::Kind;
using kernels::cuda::OpError;
using kernels::cuda::OpResult;
using kernels::cuda::Signal;

namespace {

constexpr std::size_t kHostAlign = 256;
constexpr std::uint64_t kLookAtDeviceNs = 1'000'000;
constexpr std::uint64_t kSoonEndedNs = 20'000'000;           // most are; others are looked at while they run
constexpr std::uint64_t kNoopTags = std::uint64_t{1} << 63;  // no operation of a group has such a tag

constexpr std::size_t aligned(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

class CudaFlight final : public Flight {
 public:
  CudaFlight(CudaLane& lane, const LaunchRequest& request, std::uint32_t place)
      : lane_(lane),
        peers_(request.peers),
        place_(lane.host_place(place)),
        number_(place),
        signal_(request.op->signal),
        tag_(request.op->tag) {}

  ~CudaFlight() override {
    if (!left()) std::abort();  // the GPU would write into what is given to others now
    lane_.flight_ended(number_, signal_);
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
  bool counted() override { return is_ours(place_.counted); }
  bool sent() override { return is_ours(place_.sent); }
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
    std::copy_n(lane_.placement(number_), counts_.words().size(), counts_.words().begin());
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
    lane_.device_.advance();  // it may wait for the next kernel, and the loop for it
    const CUresult state = lane_.driver_.cuStreamQuery(lane_.stream_);
    if (state != CUDA_ERROR_NOT_READY) lane_.must("cuStreamQuery", state);
    return false;
  }

  CudaLane& lane_;
  const OperationPeers* const peers_;  // null: a noop
  CudaLane::HostPlace& place_;
  const std::uint32_t number_;
  const Signal signal_;
  const std::uint64_t tag_;
  const std::uint64_t launched_ns_ = lane_.device_.now_ns();
  bool aborted_ = false;
  std::uint32_t words_of_abort_ = 0;  // CudaLane::client_words_ then
  kernels::Placement counts_;
  std::uint64_t looked_ns_ = MonotonicClock().now_ns();
};

CudaLane::CudaLane(CudaDevice& device, const LaneShape& shape)
    : device_(device),
      driver_(device.driver()),
      shape_(shape),
      priority_(shape.priority),
      asked_(shape.limits.depth),
      signals_(device, shape_) {}

void CudaLane::set_priority(std::int32_t priority) {
  if (std::exchange(priority_, priority) != priority) device_.share_anew();
}

Status CudaLane::allocate() {
  Operation probe;
  probe.shape = shape_.shape;
  for (std::uint32_t i = 0; i < shape_.limits.num_biases; ++i)
    probe.bias[i] = reinterpret_cast<std::uint16_t*>(64);
  // One SM needs most shared memory for some shapes, all SMs for others.
  const auto fits = [&](Kind kind) {
    return kernels::cuda::configure(kind, device_.max_shared_bytes(), 1, probe) &&
           kernels::cuda::configure(kind, device_.max_shared_bytes(), device_.max_sms(), probe);
  };
  for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    if (fits(kind)) continue;
    return {StatusCode::kUnsupported,
            device_.name() + " can't hold rows of " + std::to_string(shape_.shape.format.row_bytes) +
                " bytes of " + std::to_string(shape_.shape.num_ranks) + " ranks in the " +
                std::to_string(device_.max_shared_bytes()) + " bytes of an SM's shared memory"};
  }
  host_stride_ = aligned(sizeof(HostPlace) + shape_.placement_words * sizeof(std::int32_t), kHostAlign);
  host_places_ = num_places() * sizeof(Operation);
  workspace_bytes_ = aligned(kernels::cuda::workspace_bytes(shape_.shape, device_.max_sms()),
                             alignof(kernels::cuda::ResidentState));
  const std::size_t before = num_places() * sizeof(Operation);
  const std::size_t device_bytes = before + workspace_bytes_ + extra_device_bytes();
  Result<LaneMemory> memory =
      device_.take_memory(device_bytes, host_places_ + places_bytes() + extra_host_bytes());
  if (!memory.ok()) return memory.status();
  memory_ = *memory;
  std::fill_n(memory_.host, memory_.host_bytes, std::byte{0});
  signals_.open(memory_.host + host_places_ + signals_at());
  workspace_ = memory_.device + before;
  device_.clear(reinterpret_cast<void*>(memory_.device), device_bytes);
  return {};
}

CudaLane::~CudaLane() {
  // Words that it writes lie in an arena that is unmapped next.
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(control()));
  if (memory_.device != 0 && signals_.under_way()) {
    leave({partition_, nullptr, 0, 0, 0, memory_, {}, {}});
  } else if (memory_.device != 0) {
    device_.give_back(memory_);
  }
  device_.lane_closed(this);
}

std::size_t CudaLane::places_bytes() const {
  return signals_at() + aligned(signals_.host_bytes(), kHostAlign) + kHostAlign;
}

std::size_t CudaLane::signals_at() const {
  return aligned(host_stride_ * shape_.limits.depth + sizeof(HostPlace) * kMaxNoops, kHostAlign);
}

CudaLane::HostPlace& CudaLane::host_place(std::uint32_t place) const {
  const std::size_t noops = host_stride_ * shape_.limits.depth;
  const std::size_t at = place < shape_.limits.depth
                             ? place * host_stride_
                             : noops + (place - shape_.limits.depth) * sizeof(HostPlace);
  return *reinterpret_cast<HostPlace*>(memory_.host + host_places_ + at);
}

std::int32_t* CudaLane::placement(std::uint32_t place) const {
  return reinterpret_cast<std::int32_t*>(&host_place(place) + 1);
}

void CudaLane::take_stream() {
  int least = 0;
  int greatest = 0;  // the smaller number
  must("cuCtxGetStreamPriorityRange", driver_.cuCtxGetStreamPriorityRange(&least, &greatest));
  partition_ = device_.partition();
  stream_priority_ = std::clamp(-shape_.priority, greatest, least);
  stream_ = partition_->take_stream(stream_priority_);
}

void CudaLane::let_stream_go() {
  partition_->give_back(stream_, stream_priority_);
  stream_ = nullptr;
}

void CudaLane::leave_running(std::uint32_t held_sms, std::uint64_t told_ns,
                             const CommandPort::Layout& commands) {
  leave({partition_, stream_, stream_priority_, held_sms, told_ns, memory_, commands, {}});
  stream_ = nullptr;
}

void CudaLane::leave(LeavingLane lane) {
  if (signals_.under_way()) lane.exchange = shape_.exchange;
  device_.let_go(std::move(lane));
  memory_ = {};
}

void CudaLane::write_word(const void* word, std::uint32_t value) const {
  must("cuStreamWriteValue32",
       driver_.cuStreamWriteValue32(control(), reinterpret_cast<CUdeviceptr>(word), value, 0));
}

void CudaLane::write_client_word(const void* word, std::uint32_t value) {
  write_word(word, value);
  write_word(client_words_written(), ++client_words_);
}

std::uint32_t* CudaLane::client_words_written() const {
  return reinterpret_cast<std::uint32_t*>(memory_.host + host_places_ + places_bytes() - kHostAlign);
}

bool CudaLane::has_written_client_words(std::uint32_t number) const {
  const std::uint32_t written = std::atomic_ref(*client_words_written()).load(std::memory_order_acquire);
  return static_cast<std::int32_t>(written - number) >= 0;  // few are ever under way
}

std::uint32_t CudaLane::take_noop_place() {
  const auto free = std::find(noop_places_.begin(), noop_places_.end(), false);
  EPD_CHECK(free != noop_places_.end());
  *free = true;
  return shape_.limits.depth + static_cast<std::uint32_t>(free - noop_places_.begin());
}

void CudaLane::describe_own(Kind kind, std::uint32_t sms, Operation& op) const {
  op.workspace = reinterpret_cast<void*>(workspace_);
  op.workspace_bytes = workspace_bytes_;
  if (kind == Kind::kNoop) {
    op.movers.ctas = 1;
    return;
  }
  sms = sms == 0 ? num_sms() : std::min(sms, num_sms());
  EPD_CHECK(kernels::cuda::configure(kind, device_.max_shared_bytes(), sms, op));
}

void CudaLane::fit_given() {
  for (std::uint32_t place = 0; place < shape_.limits.depth; ++place) {
    const Asked& asked = asked_[place];
    if (asked.kind != Kind::kNoop) describe_own(asked.kind, asked.sms, given(place));
  }
}

// The lane's own part of the operation.
void CudaLane::prepare(const LaunchRequest& request, std::uint32_t place) {
  Operation& op = *request.op;
  HostPlace& host = host_place(place);
  op.abort = abort_word(place);
  op.result = &host.result;
  host.result = {};
  host.counted = host.sent = 0;
  clear_abort(place);
  if (request.kind == Kind::kNoop) {
    op.tag = kNoopTags + ++noops_;
  } else if (request.kind == Kind::kDispatch) {
    op.counts.host_placement = placement(place);
    op.counts.host_ready = &host.counted;
    op.counts.host_sent = &host.sent;
  }
  for (std::uint32_t rank = 0; request.kind != Kind::kNoop && rank < op.shape.num_ranks; ++rank) {
    if (request.peers->active(rank)) op.peers[rank] = request.peers->peer(rank);
  }
  describe_own(request.kind, request.sms, op);
  if (request.kind != Kind::kNoop) asked_[place] = {request.kind, request.sms};
  given(place) = op;
}

std::unique_ptr<Flight> CudaLane::launch(const LaunchRequest& request) {
  if (in_flight_ == 0) follow_share();
  const std::uint32_t place = request.kind == Kind::kNoop ? take_noop_place() : request.place;
  prepare(request, place);
  const Signal signal = request.op->signal;
  if (signal.done != nullptr) ++done_[signal.done].flights;
  ++in_flight_;
  start(request.kind, place);
  return std::make_unique<CudaFlight>(*this, request, place);
}

void CudaLane::flight_ended(std::uint32_t place, const Signal& signal) {
  if (place >= shape_.limits.depth) noop_places_[place - shape_.limits.depth] = false;
  if (signal.done != nullptr && --done_[signal.done].flights == 0) write_owed(signal.done);
  if (--in_flight_ == 0) follow_share();
}

void CudaLane::release(const Signal& signal, std::uint64_t ticket) {
  Word& word = done_[signal.done];
  if (ticket <= word.furthest) return;
  word.owed = true;
  word.furthest = ticket;
  if (word.flights == 0) write_owed(signal.done);
}

void CudaLane::write_owed(const void* word) {
  Word& state = done_[word];
  if (state.owed) write_client_word(word, static_cast<std::uint32_t>(state.furthest));
  state.owed = false;
}

}  // namespace epd

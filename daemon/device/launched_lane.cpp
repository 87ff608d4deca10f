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
constexpr std::uint64_t kSoonEndedNs =
    20'000'000;  // most operations have ended by then; others are looked at while they run
constexpr std::uint64_t kNoopTags = std::uint64_t{1} << 63;  // no operation of a group has such a tag

}  // namespace

class CudaOperationInFlight final : public OperationInFlight {
 public:
  CudaOperationInFlight(LaunchedLane& lane, const LaunchRequest& request, std::uint32_t op_slot)
      : lane_(lane),
        peers_(request.peers),
        op_slot_(lane.host_slot(op_slot)),
        number_(op_slot),
        signal_(request.op->signal),
        tag_(request.op->tag),
        waits_(request.waits),
        mark_(request.op->counts.mark) {}

  ~CudaOperationInFlight() override {
    if (!left()) std::abort();  // the GPU would write into memory that is given to others now
    lane_.operation_ended(number_, signal_);
  }

  // The GPU does all of the work. The loop looks at signals if it takes long.
  bool advance() override {
    if (is_noop() || lane_.device_.now_ns() < launched_ns_ + kSoonEndedNs) return false;
    lane_.signals_.begin_now_and_then();
    if (const SignalCopy* const copy = is_ours(op_slot_.result.tag) ? nullptr : signals(); copy != nullptr)
      seen_waits_.look(*copy, signalled(), waits_);
    return false;
  }
  abi::OpStage stage() const override {
    const SignalCopy* const copy = signals();
    return copy != nullptr ? copy->stage(signalled()) : abi::OpStage::kPlanning;
  }
  // The result of a failed operation names the rank that it waited for.
  std::uint32_t awaited(std::uint32_t from) const override {
    const SignalCopy* const copy = is_ours(op_slot_.result.tag) ? nullptr : signals();
    return copy != nullptr ? copy->awaited(signalled(), from) : kNobody;
  }
  // The words come in any order.
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
  bool sent() override { return std::atomic_ref(op_slot_.sent).load(std::memory_order_acquire) == mark_; }
  // Whoever hears of the end may use the client's words again. So the words that an abort writes come first.
  bool ended() override {
    if (!is_ours(op_slot_.result.tag)) return look_at_device();
    return !aborted_ || lane_.has_written_client_words(words_of_abort_);
  }
  bool left() override {
    return ended() && (result().error == OpError::kNone || is_ours(op_slot_.result.left) || look_at_device());
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
  const OpResult& result() const override { return op_slot_.result; }
  // The choices are read back in one copy of at most 8 MiB.
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
  // Signals of an earlier look say nothing about this operation.
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
  // Ends the process if the GPU has failed, because nothing would come from it any more. Else returns false.
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
  LaunchedLane::HostOperationSlot& op_slot_;
  const std::uint32_t number_;
  const Signal signal_;
  const std::uint64_t tag_;
  const abi::RankWaits waits_;
  SeenWaits seen_waits_;
  const std::uint32_t mark_;
  const std::uint64_t launched_ns_ = lane_.device_.now_ns();
  bool aborted_ = false;
  std::uint32_t words_of_abort_ = 0;  // LaunchedLane::client_words_ at the abort
  std::uint32_t counted_ = 0;         // words of the placement that have come
  kernels::Placement counts_;
  std::uint64_t looked_ns_ = MonotonicClock().now_ns();
};

LaunchedLane::LaunchedLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape) {}

LaunchedLane::~LaunchedLane() {
  if (stream_ == nullptr) return;
  // An operation that has ended may still run its last instructions.
  must("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
  let_stream_go();
}

// ---- memory: operations, operation slots, those of noops, a word

std::size_t LaunchedLane::own_device_bytes() const {
  return num_op_slots() * sizeof(Operation);
}

std::size_t LaunchedLane::op_slot_stride() const {
  return aligned(sizeof(HostOperationSlot) + shape_.placement_words * sizeof(std::uint64_t));
}

std::size_t LaunchedLane::words_at() const {
  return num_op_slots() * sizeof(Operation) +
         aligned(op_slot_stride() * shape_.limits.depth + sizeof(HostOperationSlot) * kMaxNoops);
}

std::size_t LaunchedLane::own_host_bytes() const {
  return words_at() + sizeof(std::uint32_t);
}

LaunchedLane::HostOperationSlot& LaunchedLane::host_slot(std::uint32_t op_slot) const {
  const std::size_t noops = op_slot_stride() * shape_.limits.depth;
  const std::size_t at = op_slot < shape_.limits.depth
                             ? op_slot * op_slot_stride()
                             : noops + (op_slot - shape_.limits.depth) * sizeof(HostOperationSlot);
  return *reinterpret_cast<HostOperationSlot*>(own_host() + num_op_slots() * sizeof(Operation) + at);
}

std::uint64_t* LaunchedLane::counts(std::uint32_t op_slot) const {
  return reinterpret_cast<std::uint64_t*>(&host_slot(op_slot) + 1);
}

std::uint32_t* LaunchedLane::client_words_written() const {
  return reinterpret_cast<std::uint32_t*>(own_host() + words_at());
}

std::uint32_t LaunchedLane::take_noop_slot() {
  const auto free = std::find(noop_slots_.begin(), noop_slots_.end(), false);
  EPD_CHECK(free != noop_slots_.end());
  *free = true;
  return shape_.limits.depth + static_cast<std::uint32_t>(free - noop_slots_.begin());
}

// ---- launches

// Each operation asks for its share of SMs. Only a change of partition needs another stream.
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

// Fills in the lane's part of an operation, and how it divides its work among `sms` of the lane's SMs (0:
// all).
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

void LaunchedLane::prepare(const LaunchRequest& request, std::uint32_t op_slot) {
  Operation& op = *request.op;
  HostOperationSlot& host = host_slot(op_slot);
  op.abort = &host.abort;
  op.result = &host.result;
  op.counts.mark = ++launches_ != 0 ? launches_ : ++launches_;
  host = {};
  if (request.kind == Kind::kNoop) {
    op.tag = kNoopTags + ++noops_;
  } else if (request.kind == Kind::kDispatch) {
    op.counts.host_words = counts(op_slot);
    op.counts.host_sent = &host.sent;
  }
  for (std::uint32_t rank = 0; request.kind != Kind::kNoop && rank < op.shape.num_ranks; ++rank) {
    if (request.peers->active(rank)) op.peers[rank] = request.peers->peer(rank);
  }
  describe_own(request.kind, request.sms, op);
  given(op_slot) = op;
}

std::unique_ptr<OperationInFlight> LaunchedLane::launch(const LaunchRequest& request) {
  if (in_flight_ == 0) follow_share();
  const std::uint32_t op_slot = request.kind == Kind::kNoop ? take_noop_slot() : request.op_slot;
  prepare(request, op_slot);
  const Signal signal = request.op->signal;
  if (signal.done != nullptr) ++done_[signal.done].in_flight;
  ++in_flight_;
  start(request.kind, op_slot);
  return std::make_unique<CudaOperationInFlight>(*this, request, op_slot);
}

void LaunchedLane::await_word(const std::uint32_t* word, std::uint32_t value) {
  must("cuStreamWaitValue32", driver_.cuStreamWaitValue32(stream_, reinterpret_cast<CUdeviceptr>(word), value,
                                                          CU_STREAM_WAIT_VALUE_GEQ));
}

// The stream waits for the client, not the kernel. Until then its SMs are free for others.
void LaunchedLane::start(Kind kind, std::uint32_t op_slot) {
  Operation& op = given(op_slot);
  const Signal signal = op.signal;
  op.signal.ready = nullptr;
  if (!has_written_client_words(client_words_)) await_word(client_words_written(), client_words_);
  if (kind != Kind::kNoop) {
    must("cuMemcpyHtoDAsync", driver_.cuMemcpyHtoDAsync(device_op(op_slot), &op, sizeof(Operation), stream_));
  }
  if (signal.ready != nullptr) await_word(signal.ready, signal.value);
  if (kind == Kind::kNoop) {
    start_noop(op, signal, op_slot);
    return;
  }
  const kernels::cuda::WorkDivision& division = op.division;
  CUdeviceptr on_device = device_op(op_slot);
  void* arguments[] = {&on_device};
  const CUkernel kernel = device_.kernel(kernels::cuda::kernel_name(kind, op));
  must("cuLaunchKernel",
       driver_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), division.ctas, 1, 1, division.threads, 1,
                              1, division.shared_bytes, stream_, arguments, nullptr));
}

void LaunchedLane::start_noop(const Operation& op, const Signal& signal, std::uint32_t op_slot) {
  if (signal.done != nullptr) {
    must("cuStreamWriteValue32",
         driver_.cuStreamWriteValue32(stream_, reinterpret_cast<CUdeviceptr>(signal.done), signal.value, 0));
  }
  must("cuStreamWriteValue64",
       driver_.cuStreamWriteValue64(stream_, reinterpret_cast<CUdeviceptr>(&host_slot(op_slot).result.tag),
                                    op.tag, 0));
}

void LaunchedLane::abort(std::uint32_t op_slot, const Signal& signal) {
  std::atomic_ref(host_slot(op_slot).abort).store(1);
  if (signal.ready != nullptr) write_client_word(signal.ready, signal.value);
}

void LaunchedLane::operation_ended(std::uint32_t op_slot, const Signal& signal) {
  if (op_slot >= shape_.limits.depth) noop_slots_[op_slot - shape_.limits.depth] = false;
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
  return static_cast<std::int32_t>(written - number) >= 0;  // few words are ever under way
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

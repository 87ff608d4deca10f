// A rank of kernels_test whose operations are calls: what the engine, the client's stream and its host would
// do, by the host's copies. Calls lie in the streams' ring and in the host's in turn.
#pragma once

#include "gpu/image.h"
#include "kernels/calls.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace epd::gpu_test {

class CallLane {
 public:
  using Operation = kernels::cuda::Operation;
  using OpResult = kernels::OpResult;
  static constexpr std::uint64_t kEpoch = 3;
  static constexpr std::uint64_t kIndexBase = 1'000'000'000'000;  // of numbers that clients know

  // `control`: a stream of the device; it outlives the lane's calls. `shape`: of a group with kSlots.
  // `first`: which ring has the first call. `most_sms`: for one operation. `linger_us`: how long main kernels
  // linger for the next call.
  CallLane(int device, cudaStream_t control, const abi::GroupShape& shape, std::uint32_t first,
           std::uint32_t most_sms, std::uint32_t linger_us)
      : device_(device),
        control_(control),
        layout_(shape),
        placement_words_(abi::placement_words(shape)),
        linger_us_(linger_us),
        made_(first) {
    using namespace kernels;
    EPD_CUDA(cudaSetDevice(device));
    EPD_CUDA(cudaMalloc(&memory_, sizeof(Memory)));
    EPD_CUDA(cudaMemset(memory_, 0, sizeof(Memory)));
    EPD_CUDA(cudaHostAlloc(&host_, sizeof(CallHost), cudaHostAllocPortable | cudaHostAllocMapped));
    EPD_CUDA(cudaHostAlloc(&staging_, sizeof(Staging), cudaHostAllocPortable | cudaHostAllocMapped));
    EPD_CUDA(cudaHostAlloc(&results_, layout_.total_bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    std::memset(static_cast<void*>(host_), 0, sizeof(CallHost));
    std::memset(static_cast<void*>(results_), 0, layout_.total_bytes);
    write_word(&memory_->generation, kGeneration);
    write_word(&memory_->state.guaranteed_sms, kGuaranteedSms);
    write_word(&memory_->state.linger_us, linger_us);
    write_word(&memory_->credits.limit, most_sms - kGuaranteedSms);
    EPD_CUDA(cudaDeviceSynchronize());
  }
  ~CallLane() {
    cudaSetDevice(device_);
    cudaFree(memory_);
    cudaFreeHost(host_);
    cudaFreeHost(staging_);
    cudaFreeHost(results_);
  }
  CallLane(const CallLane&) = delete;
  CallLane& operator=(const CallLane&) = delete;

  // Slots are one and the same memory, and so are a routing record's halves, and the records.
  static constexpr std::uint32_t kSlots = 2;
  static constexpr std::uint32_t kMostCtas = 132;

  // `depth`: inboxes. No kernel of the lane runs.
  kernels::WorkerArguments arguments(const kernels::DeviceView& view, std::uint32_t max_tokens,
                                     std::uint32_t depth) {
    staging_->view = view;
    write(&memory_->view, &staging_->view, sizeof(view));
    kernels::WorkerArguments all;
    all.lane = &memory_->lane;
    all.credits = &memory_->credits;
    all.bells = &memory_->bells;
    all.generation = &memory_->generation;
    all.own_generation = kGeneration;
    all.ctas = kMostCtas;
    all.asked_sms = kMostCtas - kGuaranteedSms;
    kernels::CallArguments& own = all.calls;
    own.words = &memory_->words;
    own.state = &memory_->state;
    own.routes = memory_->routes;
    own.view = &memory_->view;
    own.division = memory_->division;
    own.most_ctas = kMostCtas;
    own.host = host_;
    own.results = results_;
    own.counts_stride = static_cast<std::uint32_t>(layout_.counts_stride);
    own.runs = memory_->runs;
    own.limits = {depth, max_tokens, kSlots, abi::kMaxBiases};
    own.per_expert = view.group.shape.per_expert;
    return all;
  }

  // Calls the operation, which is configured. `before_call`: between an enabled epoch that it needs and the
  // call.
  void start(kernels::Kind kind, const Operation& op, const std::function<void()>& before_call) {
    using namespace kernels;
    const std::uint64_t index = abi::index_of_tag(op.tag);
    if (!goes_on_ || index != next_index_) begin_enabled_epoch(index);
    call_ = call_of(kind, op);
    const std::uint32_t at = division_kind(call_.op, call_.flags) * kMostCtas + op.division.ctas - 1;
    staging_->division = op.division;
    write(memory_->division + at, &staging_->division, sizeof(WorkDivision));
    before_call();  // a main kernel may read the division before it knows its call
    staging_->call = abi::pack(call_);
    if (call_.flagged) write_word(&memory_->words.flags[abi::flag_of(call_.op, call_.slot)], 0);
    abi::PackedCall* const ring = ring_ == kByHost ? memory_->words.host_calls : memory_->words.calls;
    abi::PackedCall& to = ring[call_.number % abi::kCallSlots];
    write(to.words + 1, staging_->call.words + 1, sizeof(to) - sizeof(*to.words));
    write(to.words, staging_->call.words, sizeof(*to.words));
    if (linger_us_ != 0) write_word(&memory_->words.bell[ring_ == kByHost ? 1 : 0], 1);
    next_index_ = index + 1;
  }
  void abort(std::uint32_t value) { write_word(&memory_->state.abort, value); }

  // Until what was started last has ended, and the client can know. "" or what is wrong.
  std::string wait() {
    const kernels::JournalEntry& entry = host_->journal[journal_ % kernels::kJournalEntries];
    ++journal_;
    if (!comes([&] { return load(entry.number) == journal_; })) return "a call has not ended";
    op_result_ = entry.result;
    const bool good = op_result_.error == kernels::OpError::kNone;
    failed_ += good ? 0 : 1;
    goes_on_ = good;
    if (abi::unpack(entry.call).number != call_.number || entry.ring != ring_ ||
        entry.index != next_index_ - 1)
      return "the journal tells of another call";
    return read_end();
  }
  const OpResult& result() const { return op_result_; }
  // As the client is told it.
  const abi::CallEnd& end() const { return end_; }
  // The counts of the last call, a dispatch: a word for each. Empty: some are not this call's.
  std::vector<std::int32_t> counts() const {
    const auto* const from =
        reinterpret_cast<const std::uint64_t*>(reinterpret_cast<const std::uint8_t*>(results_) +
                                               layout_.counts + layout_.counts_stride * call_.slot);
    std::vector<std::int32_t> values;
    for (std::uint64_t i = 0; i < placement_words_; ++i) {
      const std::uint64_t word = load(from[i]);
      if (word >> 32 != call_.result + 1) return {};
      values.push_back(static_cast<std::int32_t>(word));
    }
    return values;
  }
  // Whether the inputs of the last call are known to have been read; of one that asked for it.
  bool sent() const { return load(results_->sent[call_.slot]) == call_.result + 1; }
  // Whether the client has been told of all ends.
  bool told() const {
    using namespace kernels;
    const auto words = copy_of(memory_->words);
    const bool flagged = ring_ == kByHost || words.flags[abi::flag_of(call_.op, call_.slot)] == 1;
    return words.done == numbers_[kByStreams] && load(results_->host_ended) == numbers_[kByHost] &&
           words.failed == failed_ && flagged;
  }
  // Whether the kernels have left: nobody is inside, and all SMs have been given back.
  bool left() const { return copy_of(memory_->lane).door[0] == 0 && copy_of(memory_->credits).held == 0; }

 private:
  static constexpr std::uint32_t kGeneration = 7;
  static constexpr std::uint32_t kGuaranteedSms = 1;

  struct Memory {
    abi::CallWords words;
    kernels::LaneState lane;
    kernels::CallState state;
    kernels::RouteState routes[kSlots];
    kernels::DeviceView view;
    kernels::WorkDivision division[kernels::kDivisionKinds * kMostCtas];
    kernels::ResultRuns runs[abi::kReplayedResults];
    kernels::Bells bells;
    kernels::SmCredits credits;
    std::uint32_t generation;
  };
  struct Staging {
    kernels::DeviceView view;
    kernels::WorkDivision division;
    kernels::RouteState routes[kSlots];
    abi::PackedCall call;
    std::uint32_t value;
  };

  // The next call's, and where its result goes: each kind of place has two in turn.
  void choose_ring_and_result(abi::Call& call) {
    ring_ = made_ % 2 != 0 ? kernels::kByHost : kernels::kByStreams;
    call.number = numbers_[ring_]++;
    const bool captured = made_ / 2 % 2 != 0;
    const std::uint32_t once = made_ % abi::kOnceResults;
    runs_ = captured ? captured_runs_[made_ % 2] + 1 : 1;
    if (captured) captured_runs_[made_ % 2] = runs_;
    call.result = captured ? abi::result_of(abi::kOnceResults + 77 + made_ % 2, 5)
                           : abi::result_of(once, made_ / abi::kOnceResults);
    ++made_;
  }

  std::string read_end() {
    const abi::CallResult& place = results_->places[abi::place_of(call_.result)];
    const bool there = comes([&] {
      std::uint64_t words[abi::CallResult::kWords];
      for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i) words[i] = load(place.words[i]);
      return abi::read_result(words, end_) && end_.result == call_.result && end_.runs == runs_;
    });
    if (!there) return "the client is not told of the call's end";
    const bool good = op_result_.error == kernels::OpError::kNone;
    if ((end_.ending == abi::CallEnding::kCarriedOut) != good) return "the client is told of another ending";
    if (end_.index != kIndexBase + next_index_ - 1) return "the client is told another number";
    if (!comes([&] { return told(); })) return "the client's words are wrong";
    return linger_us_ != 0 || comes([&] { return left(); }) ? "" : "the kernels do not leave";
  }

  template <typename T>
  static T load(const T& word) {
    return *static_cast<const volatile T*>(&word);
  }

  // The slot differs between operations on purpose: `announcement.op` of World::operation.
  abi::Call call_of(kernels::Kind kind, const Operation& op) {
    abi::Call call;
    const bool dispatch = kind == kernels::Kind::kDispatch;
    choose_ring_and_result(call);
    call.op = dispatch ? abi::Op::kDispatch : abi::Op::kCombine;
    call.slot = op.announcement.op % kSlots;
    const auto set = [&](bool on, std::uint32_t flag) { call.flags |= on ? flag : 0u; };
    set(op.topk_weights != nullptr, abi::kFlagWeights);
    set(dispatch && op.cached, abi::kFlagCached);
    set(op.mark_unused, abi::kFlagMarkUnused);
    set(op.zero_padding, abi::kFlagZeroPadding);
    set(op.counts.host_sent != nullptr, abi::kFlagDefer);
    set(op.out_weights != nullptr && !dispatch, abi::kFlagReturnWeights);
    set(op.sum_weights, abi::kFlagSumWeights);
    if (!dispatch)
      call.flags |= std::uint32_t{(op.bias[0] != nullptr) + (op.bias[1] != nullptr) + 0u} << abi::kBiasShift;
    const bool makes = abi::makes_routing(call.op, call.flags);
    if (makes) last_route_ = call.slot;
    call.route = last_route_;
    call.num_tokens = makes ? op.num_tokens : 0;
    call.flagged = ring_ == kernels::kByStreams;
    call.epoch = kEpoch;
    call.sms = op.division.ctas;
    call.timeout_ms = static_cast<std::uint32_t>(op.timeout_ns / 1'000'000);
    return call;
  }

  template <typename Condition>
  static bool comes(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
    }
    return true;
  }

  void begin_enabled_epoch(std::uint64_t index) {
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemcpyAsync(staging_->routes, memory_->routes, sizeof(staging_->routes), cudaMemcpyDefault,
                             control_));
    EPD_CUDA(cudaStreamSynchronize(control_));
    kernels::CallStart& start = host_->start;
    start.epoch = kEpoch;
    start.index = index;
    start.index_base = kIndexBase;
    start.num_routes = kSlots;
    start.routes = staging_->routes;
    abort(0);
    enabled_epoch_ += 2;
    write_word(&memory_->lane.door[1], enabled_epoch_);
  }

  template <typename T>
  T copy_of(const T& on_device) const {
    T copy;
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemcpyAsync(&copy, &on_device, sizeof(copy), cudaMemcpyDefault, control_));
    EPD_CUDA(cudaStreamSynchronize(control_));
    return copy;
  }

  void write_word(std::uint32_t* to, std::uint32_t value) {
    staging_->value = value;
    write(to, &staging_->value, sizeof(value));
  }
  void write(void* to, const void* from, std::size_t bytes) {
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, control_));
    EPD_CUDA(cudaStreamSynchronize(control_));
  }

  int device_;
  cudaStream_t control_;
  const abi::ResultsLayout layout_;
  const std::uint64_t placement_words_;
  Memory* memory_ = nullptr;
  kernels::CallHost* host_ = nullptr;
  Staging* staging_ = nullptr;
  abi::Results* results_ = nullptr;
  std::uint32_t linger_us_;
  std::uint32_t enabled_epoch_ = ~0u;  // odd ones
  std::uint32_t made_;                 // calls
  std::uint32_t numbers_[kernels::kCallRings] = {};
  std::uint32_t captured_runs_[2] = {};
  std::uint32_t journal_ = 0;  // entries read
  std::uint32_t failed_ = 0;   // calls
  // The last one.
  abi::Call call_;
  kernels::CallRing ring_ = kernels::kByStreams;
  std::uint32_t runs_ = 0;
  OpResult op_result_{};
  abi::CallEnd end_;
  std::uint32_t last_route_ = 0;  // record of the last dispatch that made a routing
  std::uint64_t next_index_ = 0;
  bool goes_on_ = false;  // calls are carried out
};

}  // namespace epd::gpu_test

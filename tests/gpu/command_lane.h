// A rank of kernels_test whose operations are calls: what the engine and the client's stream would do, by
// the host's copies.
#pragma once

#include "gpu/image.h"
#include "kernels/calls.h"

#include <chrono>
#include <cstdio>
#include <cstring>

namespace epd::gpu_test {

class CommandLane {
 public:
  using Operation = kernels::cuda::Operation;
  using OpResult = kernels::cuda::OpResult;
  static constexpr std::uint64_t kEpoch = 3;

  // `control`: a stream of the device; it outlives the lane's calls.
  CommandLane(int device, cudaStream_t control) : device_(device), control_(control) {
    using namespace kernels::cuda;
    EPD_CUDA(cudaSetDevice(device));
    EPD_CUDA(cudaMalloc(&memory_, sizeof(Memory)));
    EPD_CUDA(cudaMemset(memory_, 0, sizeof(Memory)));
    EPD_CUDA(cudaHostAlloc(&host_, sizeof(CommandHost), cudaHostAllocPortable | cudaHostAllocMapped));
    EPD_CUDA(cudaHostAlloc(&staging_, sizeof(Staging), cudaHostAllocPortable | cudaHostAllocMapped));
    std::memset(static_cast<void*>(host_), 0, sizeof(CommandHost));
    host_->start.sets = 1;
    EPD_CUDA(cudaDeviceSynchronize());
  }
  ~CommandLane() {
    cudaSetDevice(device_);
    cudaFree(memory_);
    cudaFreeHost(host_);
    cudaFreeHost(staging_);
  }
  CommandLane(const CommandLane&) = delete;
  CommandLane& operator=(const CommandLane&) = delete;

  // Slots are one and the same memory, and so are a routing record's halves, and the records.
  static constexpr std::uint32_t kSlots = 2;
  static constexpr std::uint32_t kMostCtas = 132;

  // `depth`: landings. The kernel does not run.
  kernels::cuda::CommandArguments arguments(const kernels::cuda::DeviceView& view, std::uint32_t max_tokens,
                                            std::uint32_t depth) {
    staging_->view = view;
    write(&memory_->view, &staging_->view, sizeof(view));
    kernels::cuda::CommandArguments own;
    own.words = &memory_->words;
    own.state = &memory_->state;
    own.routes = memory_->routes;
    own.view = &memory_->view;
    own.movers = memory_->movers;
    own.most_ctas = kMostCtas;
    own.host = host_;
    own.limits = {depth, max_tokens, kSlots, abi::kMaxBiases};
    own.per_expert = view.group.shape.per_expert;
    return own;
  }

  // The kernel stays. Asks for the operation, which is configured.
  void start(kernels::cuda::Kind kind, const Operation& op) {
    using namespace kernels::cuda;
    const std::uint64_t index = abi::index_of_tag(op.tag);
    if (!goes_on_ || index != next_index_) turn(index);
    const abi::Call call = call_of(kind, op);
    const std::uint32_t at = mover_kind(call.op, call.flags) * kMostCtas + op.movers.ctas - 1;
    staging_->movers = op.movers;
    write(memory_->movers + at, &staging_->movers, sizeof(Movers));
    staging_->call = abi::pack(call);
    abi::PackedCall& to = memory_->words.calls[commands_ % abi::kCommandSlots];
    write(to.words + 1, staging_->call.words + 1, sizeof(to) - sizeof(*to.words));
    write(to.words, staging_->call.words, sizeof(*to.words));
    flag_ = abi::flag_of(call.op, call.slot);
    ++commands_;
    next_index_ = index + 1;
  }
  void abort(std::uint32_t value) { write_word(&memory_->state.abort, value); }

  // Until what was started last has ended. False: not within ten seconds.
  bool wait() {
    const std::uint32_t last = commands_ - 1;
    const kernels::cuda::JournalEntry& entry = host_->journal[last % kernels::cuda::kJournalEntries];
    const auto* const number = reinterpret_cast<const volatile std::uint32_t*>(&entry.number);
    if (!comes([&] { return *number == commands_; })) return false;
    result_ = entry.result;
    failed_ += result_.error != kernels::cuda::OpError::kNone;
    goes_on_ = result_.error == kernels::cuda::OpError::kNone;
    return abi::unpack(entry.call).number == last && entry.index == next_index_ - 1;
  }
  const OpResult& result() const { return result_; }
  // Whether the client has been told of all ends.
  bool told() const {
    abi::CommandWords words;
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemcpy(&words, &memory_->words, sizeof(words), cudaMemcpyDefault));
    return words.done == commands_ && words.failed == failed_ && words.flags[flag_] == 1;
  }

 private:
  struct Memory {
    abi::CommandWords words;
    kernels::cuda::CommandState state;
    kernels::cuda::RouteState routes[kSlots];
    kernels::cuda::DeviceView view;
    kernels::cuda::Movers movers[kernels::cuda::kMoverKinds * kMostCtas];
  };
  struct Staging {
    kernels::cuda::DeviceView view;
    kernels::cuda::Movers movers;
    kernels::cuda::RouteState routes[kSlots];
    abi::PackedCall call;
    std::uint32_t value;
  };

  // What differs between operations on purpose is the slot: `announcement.op` of World::operation.
  abi::Call call_of(kernels::cuda::Kind kind, const Operation& op) {
    abi::Call call;
    const bool dispatch = kind == kernels::cuda::Kind::kDispatch;
    call.number = commands_;
    call.op = dispatch ? abi::Op::kDispatch : abi::Op::kCombine;
    call.slot = op.announcement.op % kSlots;
    const auto set = [&](bool on, std::uint32_t flag) { call.flags |= on ? flag : 0u; };
    set(op.topk_weights != nullptr, abi::kFlagWeights);
    set(dispatch && op.cached, abi::kFlagCached);
    set(op.mark_unused, abi::kFlagMarkUnused);
    set(op.zero_padding, abi::kFlagZeroPadding);
    set(op.out_weights != nullptr && !dispatch, abi::kFlagReturnWeights);
    if (!dispatch)
      call.flags |= std::uint32_t{(op.bias[0] != nullptr) + (op.bias[1] != nullptr) + 0u} << abi::kBiasShift;
    const bool makes = abi::makes_routing(call.op, call.flags);
    if (makes) last_route_ = call.slot;
    call.route = last_route_;
    call.num_tokens = makes ? op.num_tokens : 0;
    call.flagged = true;
    call.epoch = kEpoch;
    call.sms = op.movers.ctas;
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

  void turn(std::uint64_t index) {
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemcpyAsync(staging_->routes, memory_->routes, sizeof(staging_->routes), cudaMemcpyDefault,
                             control_));
    EPD_CUDA(cudaStreamSynchronize(control_));
    kernels::cuda::CommandStart& start = host_->start;
    start.epoch = kEpoch;
    start.index = index;
    start.num_routes = kSlots;
    start.routes = staging_->routes;
    abort(0);
    turn_ += 2;
    write_word(&memory_->state.turn, turn_);
    if (!comes([&] { return *reinterpret_cast<volatile std::uint32_t*>(&host_->turn) == turn_; }))
      std::printf("  the kernel takes no turn\n");
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
  Memory* memory_ = nullptr;
  kernels::cuda::CommandHost* host_ = nullptr;
  Staging* staging_ = nullptr;
  std::uint32_t turn_ = ~0u;  // odd ones
  std::uint32_t commands_ = 0;
  std::uint32_t failed_ = 0;
  std::uint32_t flag_ = 0;        // of the last one
  std::uint32_t last_route_ = 0;  // record of the last dispatch that made a routing
  std::uint64_t next_index_ = 0;
  bool goes_on_ = false;  // the kernel carries commands out
  OpResult result_{};
};

}  // namespace epd::gpu_test

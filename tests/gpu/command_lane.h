// A rank of kernels_test whose operations are commands: what the engine and the client's stream would do, by
// the host's copies.
#pragma once

#include "gpu/image.h"
#include "kernels/command_turn.h"

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

  kernels::cuda::CommandArguments arguments(std::uint32_t rank) const {
    kernels::cuda::CommandArguments own;
    own.words = &memory_->words;
    own.state = &memory_->state;
    own.routes = &memory_->route;
    own.programs = memory_->programs;
    own.host = host_;
    own.depth = 1;  // and the routing's halves are one
    own.rank = rank;
    return own;
  }

  // The kernel stays. Records the operation, which is configured, and asks for it.
  void start(kernels::cuda::Kind kind, const Operation& op) {
    using namespace kernels::cuda;
    const std::uint64_t index = abi::index_of_tag(op.tag);
    const bool makes = kind == Kind::kDispatch && !op.cached;
    const std::uint32_t number = commands_ % abi::kMaxPrograms;
    const std::uint32_t tokens = makes ? op.num_tokens : 0;
    if (!goes_on_ || index != next_index_) turn(index);
    Program& program = staging_->program;
    program = {};
    program.op = op;
    program.task = task_of(kind, op);
    program.makes_routing = makes;
    program.max_tokens = tokens;
    strip(program.op);
    write(memory_->programs + number, &program, sizeof(program));
    staging_->word = abi::pack({commands_, tokens, number, true, kEpoch});
    write(memory_->words.commands + commands_ % abi::kCommandSlots, &staging_->word, sizeof(staging_->word));
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
    return entry.command == last && entry.index == next_index_ - 1;
  }
  const OpResult& result() const { return result_; }
  // Whether the client has been told of all ends.
  bool told() const {
    abi::CommandWords words;
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemcpy(&words, &memory_->words, sizeof(words), cudaMemcpyDefault));
    return words.done == commands_ && words.failed == failed_ &&
           words.flags[(commands_ - 1) % abi::kMaxPrograms] == 1;
  }

 private:
  struct Memory {
    abi::CommandWords words;
    kernels::cuda::CommandState state;
    kernels::cuda::RouteState route;
    kernels::cuda::Program programs[abi::kMaxPrograms];
  };
  struct Staging {
    kernels::cuda::Program program;
    kernels::cuda::RouteState route;
    std::uint64_t word;
    std::uint32_t value;
  };

  // What follows only when the command runs must come from there.
  static void strip(Operation& op) {
    op.tag = ~std::uint64_t{0};
    op.num_tokens = ~0u;
    op.announcement.tag = op.announcement.routing = op.tag;
    op.announcement.num_tokens = ~0u;
    op.routing.handle = op.routing.epoch = op.tag;
    op.signal = {};
    op.abort = nullptr;
    op.result = nullptr;
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
    EPD_CUDA(cudaMemcpyAsync(&staging_->route, &memory_->route, sizeof(staging_->route), cudaMemcpyDefault,
                             control_));
    EPD_CUDA(cudaStreamSynchronize(control_));
    kernels::cuda::CommandStart& start = host_->start;
    start.epoch = kEpoch;
    start.index = index;
    start.num_routes = 1;
    start.routes = &staging_->route;
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
  std::uint64_t next_index_ = 0;
  bool goes_on_ = false;  // the kernel carries commands out
  OpResult result_{};
};

}  // namespace epd::gpu_test

// All ranks of a group in one process: memory, operations, launches. Ranks share devices if there are more of
// them. Everything ends the program on a CUDA error, with the call's text.
#pragma once

#include "gpu/call_lane.h"
#include "gpu/image.h"
#include "gpu/rank_regions.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::gpu_test {

using kernels::Kind;
using kernels::OpResult;
using kernels::cuda::Operation;

// Device memory of one rank, handed out in pieces; freed with the object.
class DeviceMemory {
 public:
  DeviceMemory(int device, std::size_t bytes) : device_(device), bytes_(bytes) {
    EPD_CUDA(cudaSetDevice(device));
    EPD_CUDA(cudaMalloc(&base_, bytes));
  }
  ~DeviceMemory() { cudaFree(base_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <typename T>
  T* take(std::size_t count) {
    T* const place = reinterpret_cast<T*>(static_cast<char*>(base_) + used_);
    used_ += (count * sizeof(T) + 4095) / 4096 * 4096 + 4096;
    if (used_ > bytes_) {
      std::fprintf(stderr, "test memory of %zu bytes is too small\n", bytes_);
      std::exit(1);
    }
    return place;
  }
  void fill(int byte) {
    EPD_CUDA(cudaSetDevice(device_));
    EPD_CUDA(cudaMemset(base_, byte, bytes_));
  }

 private:
  int device_;
  std::size_t bytes_;
  std::size_t used_ = 0;
  void* base_ = nullptr;
};

// Launches a configured operation. `on_device` is a copy of it.
using LaunchOperation = void (*)(Kind kind, const Operation& op, const Operation* on_device,
                                 cudaStream_t stream);

// Each operation is a call, with a gate and a main kernel after it, unless there is `launch`.
struct WorldShape {
  kernels::Shape shape;
  std::uint32_t max_tokens = 0;
  std::vector<bool> masked;
  bool inbox = false;
  std::uint32_t inboxes = 1;  // of each rank, at which operations take turns
  bool late_calls = false;    // some are made while a gate looks, and another pair follows
  LaunchOperation launch = nullptr;
};

// Where the parts of an inbox lie, and its size.
struct InboxPlan {
  kernels::Inbox at;
  std::size_t bytes = 0;

  explicit InboxPlan(const WorldShape& world) {
    if (!world.inbox) return;
    const abi::GroupShape shape = group_shape(world.shape, world.max_tokens, world.inboxes);
    at = kernels::inbox_of(shape);
    bytes = abi::InboxLayout(shape).bytes;
  }
};

inline int num_devices() {
  int count = 0;
  EPD_CUDA(cudaGetDeviceCount(&count));
  return count;
}

inline void enable_peers() {
  const int count = num_devices();
  for (int a = 0; a < count; ++a) {
    Image::get().prepare(a);
    for (int b = 0; b < count; ++b) {
      if (a == b) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(b, 0);
      if (error != cudaErrorPeerAccessAlreadyEnabled) EPD_CUDA(error);
      cudaGetLastError();
    }
  }
}

struct Rank : RankRegions {
  int device = 0;
  cudaStream_t stream = nullptr;
  std::unique_ptr<DeviceMemory> memory;
  Operation* operations = nullptr;
  Operation* uploads = nullptr;  // pinned, so that a copy doesn't wait for the stream
  // A world of calls has these.
  cudaStream_t control = nullptr;
  std::uint32_t made = 0;   // calls
  std::uint32_t pairs = 0;  // launched
  std::unique_ptr<CallLane> calls;
  bool called = false;  // and not awaited
};

class World {
 public:
  static constexpr std::uint32_t kMaxSms = 132;
  static constexpr std::uint32_t kLingerUs = 300;     // in every other world of calls
  static constexpr std::uint32_t kOperations = 1024;  // uploaded and not yet overwritten

  explicit World(const WorldShape& world) : shape_(world.shape), world_(with_slots(world)), inbox_(world_) {
    ranks_.resize(shape_.num_ranks);
    static std::uint32_t worlds = 0;
    ++worlds;
    for (std::uint32_t r = 0; r < shape_.num_ranks; ++r) {
      make(r);
      ranks_[r].made = worlds + r;  // so that worlds of few operations see all ways
      if (world.launch == nullptr)
        ranks_[r].calls = std::make_unique<CallLane>(ranks_[r].device, ranks_[r].control,
                                                     group_shape(shape_, world_.max_tokens, CallLane::kSlots),
                                                     worlds + r, share_of_sms(), worlds / 2 % 2 * kLingerUs);
    }
    if (world.launch == nullptr) tag_ = CallLane::kEpoch << abi::kTagIndexBits;
  }
  ~World() {
    for (Rank& rank : ranks_) {
      cudaSetDevice(rank.device);
      cudaDeviceSynchronize();
      if (rank.calls && !rank.calls->left()) {
        std::fprintf(stderr, "FAIL: a main kernel that lingered has not left\n");
        std::exit(1);
      }
      rank.calls.reset();
      cudaSetDevice(rank.device);
      cudaStreamDestroy(rank.stream);
      cudaStreamDestroy(rank.control);
      cudaFreeHost(rank.abort);
      cudaFreeHost(rank.uploads);
      cudaFreeHost(rank.counts.host_words);
      cudaFreeHost(rank.counts.host_sent);
    }
  }

  Rank& rank(std::uint32_t r) { return ranks_[r]; }
  std::uint32_t size() const { return shape_.num_ranks; }
  bool masked(std::uint32_t r) const { return !world_.masked.empty() && world_.masked[r]; }
  const kernels::Shape& shape() const { return shape_; }
  // Also waits for what was copied or set before: the ranks' streams don't.
  std::uint64_t next_tag() {
    for (const Rank& rank : ranks_) {
      EPD_CUDA(cudaSetDevice(rank.device));
      EPD_CUDA(cudaStreamSynchronize(nullptr));
    }
    return ++tag_;
  }

  // Common parts of an operation of rank r; the caller sets its options, then calls start().
  Operation operation(std::uint32_t r, std::uint64_t tag, std::uint32_t what) {
    Rank& own = ranks_[r];
    Operation op;
    op.shape = shape_;
    op.rank = r;
    op.tag = tag;
    op.announcement.tag = tag;
    op.announcement.op = what;
    op.announcement.num_tokens = own.num_tokens;
    op.inbox = inbox_.at;
    own.describe(op);
    op.counts.mark = static_cast<std::uint32_t>(tag);
    op.timeout_ns = 5'000'000'000;
    for (std::uint32_t i = 0; i < size(); ++i) {
      if (!masked(i)) op.peers[i] = ranks_[i].peer;
      if (op.peers[i].inbox != nullptr) op.peers[i].inbox += inbox_.bytes * (tag % world_.inboxes);
    }
    return op;
  }

  // `before_launch`: enqueued between the operation's upload and its kernel.
  void start(Kind kind, Operation& op, std::uint32_t sms, std::uint32_t stages = 0,
             const std::function<void()>& before_launch = nullptr) {
    Rank& own = ranks_[op.rank];
    EPD_CUDA(cudaSetDevice(own.device));
    int bytes = 0;
    EPD_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, own.device));
    if (stages != 0) op.division.stages = stages;
    if (world_.launch == nullptr) sms = std::min(sms, share_of_sms());
    if (!kernels::cuda::configure(kind, static_cast<std::size_t>(bytes), sms, op)) {
      std::fprintf(stderr, "configure refused\n");
      std::exit(1);
    }
    if (world_.launch == nullptr) {
      call(own, kind, op, static_cast<std::uint32_t>(bytes) - kernels::cuda::kStaticBytes);
      return;
    }
    const std::uint32_t place = uploads_++ % kOperations;
    Operation* const slot = own.operations + place;
    own.uploads[place] = op;
    EPD_CUDA(cudaMemcpyAsync(slot, own.uploads + place, sizeof(op), cudaMemcpyHostToDevice, own.stream));
    if (before_launch) before_launch();
    world_.launch(kind, op, slot, own.stream);
  }

  // Waits for all ranks.
  void wait() {
    for (Rank& rank : ranks_) {
      if (!rank.called) continue;
      const std::string wrong = rank.calls->wait();
      if (!wrong.empty()) std::printf("  %s\n", wrong.c_str());
      good_ &= wrong.empty();
      rank.called = false;
    }
    for (Rank& rank : ranks_) {
      EPD_CUDA(cudaSetDevice(rank.device));
      EPD_CUDA(cudaStreamSynchronize(rank.stream));
    }
  }
  // Whether all calls ended as calls do.
  bool good() const { return good_; }
  // The placement that the last dispatch of rank r has told the CPU, word by word. Empty: it has told none.
  std::vector<std::int32_t> host_counts(std::uint32_t r, std::uint64_t tag) const {
    const Rank& rank = ranks_[r];
    if (rank.calls != nullptr) return rank.calls->counts();
    std::vector<std::int32_t> values;
    for (std::size_t i = 0; i < num_placement_words(shape_); ++i) {
      if (rank.counts.host_words[i] >> 32 != static_cast<std::uint32_t>(tag)) return {};
      values.push_back(static_cast<std::int32_t>(rank.counts.host_words[i]));
    }
    return values;
  }
  bool host_sent(std::uint32_t r, std::uint64_t tag) const {
    const Rank& rank = ranks_[r];
    return rank.calls != nullptr ? rank.calls->sent()
                                 : *rank.counts.host_sent == static_cast<std::uint32_t>(tag);
  }
  void abort(std::uint32_t r, std::uint32_t value) {
    if (ranks_[r].calls != nullptr) ranks_[r].calls->abort(value);
    *reinterpret_cast<volatile std::uint32_t*>(ranks_[r].abort) = value;
  }
  OpResult result(std::uint32_t r) const {
    if (ranks_[r].calls != nullptr) return ranks_[r].calls->result();
    OpResult result;
    EPD_CUDA(cudaMemcpy(&result, ranks_[r].result, sizeof(result), cudaMemcpyDefault));
    return result;
  }

 private:
  // Ranks that share a device run at the same time.
  std::uint32_t share_of_sms() const {
    const auto devices = static_cast<std::uint32_t>(num_devices());
    return kMaxSms / ((size() + devices - 1) / devices);
  }
  // Calls need as many inboxes as they have slots.
  static WorldShape with_slots(WorldShape world) {
    if (world.launch == nullptr) world.inboxes = std::max(world.inboxes, CallLane::kSlots);
    return world;
  }
  // All ranks have taken their memory in the same order, so distances in it are the same everywhere.
  kernels::DeviceView view_of(std::uint32_t r, const kernels::Shape& configured) {
    using abi::Region;
    const auto at = [](const void* memory) {
      return static_cast<std::uint8_t*>(const_cast<void*>(memory));  // NOLINT
    };
    Rank& own = ranks_[r];
    kernels::DeviceView view;
    kernels::GroupView& group = view.group;
    group.shape = configured;
    group.inbox = inbox_.at;
    group.rank = r;
    group.exchange_arena = at(own.peer.ready);
    group.workspace = own.workspace;
    group.workspace_bytes = own.workspace_bytes;
    const auto distance = [&](const void* from, const void* to) {
      return static_cast<std::uint64_t>(at(to) - at(from));
    };
    abi::ExchangeArenaLayout& layout = group.exchange;
    layout.ready = layout.block_bytes = layout.routing_bytes = layout.half_bytes = 0;
    layout.arrived = distance(own.peer.ready, own.peer.arrived);
    layout.announcement = distance(own.peer.ready, own.peer.announcement);
    layout.rank_counts = distance(own.peer.ready, own.peer.rank_counts);
    layout.expert_counts = distance(own.peer.ready, own.peer.expert_counts);
    layout.inboxes = own.peer.inbox == nullptr ? 0 : distance(own.peer.ready, own.peer.inbox);
    layout.inbox_bytes = inbox_.bytes;
    layout.routing = distance(own.peer.ready, own.head);
    layout.topk = distance(own.head, own.routing.topk);
    layout.rows = distance(own.head, own.routing.rows);
    layout.placement = distance(own.head, own.routing.placement);
    const bool scales = shape_.format.scale_bytes != 0 && !shape_.format.cast;
    const std::pair<Region, const void*> regions[] = {{Region::kX, own.x},
                                                      {Region::kXScales, scales ? own.x_scales : nullptr},
                                                      {Region::kTopkIdx, own.topk_idx},
                                                      {Region::kTopkWeights, own.topk_weights},
                                                      {Region::kRankOffsets, own.counts.rank_offsets},
                                                      {Region::kExpertCounts, own.counts.expert_counts},
                                                      {Region::kExpertOffsets, own.counts.expert_offsets},
                                                      {Region::kSourceRanges, own.counts.source_ranges},
                                                      {Region::kBias0, own.bias[0]},
                                                      {Region::kBias1, own.bias[1]},
                                                      {Region::kOut, own.out},
                                                      {Region::kOutWeights, own.out_weights}};
    for (const auto& [region, memory] : regions)
      group.regions[static_cast<std::size_t>(region)] = {at(memory), 0};
    for (std::uint32_t i = 0; i < size(); ++i) {
      if (masked(i)) continue;
      const kernels::Peer& peer = ranks_[i].peer;
      view.peers[i] = {at(peer.ready),
                       0,
                       {at(peer.target.recv_x), 0},
                       {at(peer.target.recv_scales), 0},
                       {at(peer.target.recv_topk_idx), 0},
                       {at(peer.target.recv_topk_weights), 0},
                       {at(peer.target.recv_src), 0},
                       {at(peer.source.y), 0},
                       {at(peer.source.y_weights), 0}};
    }
    return view;
  }
  void call(Rank& rank, Kind kind, const Operation& op, std::uint32_t shared_bytes) {
    kernels::WorkerArguments own =
        rank.calls->arguments(view_of(op.rank, op.shape), world_.max_tokens, world_.inboxes);
    const auto launch_pair = [&] {
      own.number = ++rank.pairs * kernels::kWorksOfPair;
      Image::get().launch_pair(own, shared_bytes, rank.stream);
    };
    const bool late = world_.late_calls && ++rank.made % 4 == 0;
    rank.calls->start(kind, op, [&] {
      if (late) launch_pair();
    });
    launch_pair();
    rank.called = true;
  }

  void make(std::uint32_t r) {
    Rank& rank = ranks_[r];
    rank.device = static_cast<int>(r) % num_devices();
    EPD_CUDA(cudaSetDevice(rank.device));
    EPD_CUDA(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    EPD_CUDA(cudaStreamCreateWithFlags(&rank.control, cudaStreamNonBlocking));
    EPD_CUDA(cudaHostAlloc(&rank.abort, 64, cudaHostAllocMapped | cudaHostAllocPortable));
    *rank.abort = 0;
    EPD_CUDA(cudaHostAlloc(&rank.uploads, kOperations * sizeof(Operation), cudaHostAllocPortable));
    EPD_CUDA(cudaHostAlloc(&rank.counts.host_words, num_placement_words(shape_) * 8,
                           cudaHostAllocMapped | cudaHostAllocPortable));
    EPD_CUDA(cudaHostAlloc(&rank.counts.host_sent, 64, cudaHostAllocMapped | cudaHostAllocPortable));
    const RegionSizes sizes{shape_, world_.max_tokens, kernels::cuda::workspace_bytes(shape_, kMaxSms),
                            inbox_.bytes * world_.inboxes};
    rank.memory = std::make_unique<DeviceMemory>(rank.device,
                                                 sizes.total() + (1 << 20) + kOperations * sizeof(Operation));
    rank.memory->fill(0);
    DeviceMemory& m = *rank.memory;
    rank.take_from(m, sizes);
    rank.operations = m.take<Operation>(kOperations);
  }

  kernels::Shape shape_;
  WorldShape world_;
  InboxPlan inbox_;
  std::vector<Rank> ranks_;
  std::uint64_t tag_ = 0;
  std::uint32_t uploads_ = 0;
  bool good_ = true;
};

}  // namespace epd::gpu_test

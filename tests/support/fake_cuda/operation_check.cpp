#include "fake_cuda/operation_check.h"

#include <cstdint>
#include <cstdio>

namespace epd::fake_cuda {
namespace {

using namespace kernels;
using namespace kernels::cuda;
using kernels::cuda::Operation;

// Collects the first thing that is wrong.
class Checker {
 public:
  Checker(const Operation& op, const KernelDevice& device)
      : op_(op),
        s_(op.shape),
        device_(device),
        tokens_(op.num_tokens),
        choices_(s_.per_expert ? 1 : s_.topk) {}

  std::string dispatch() {
    common(op_.cached);
    const RowFormat& f = s_.format;
    if (!op_.cached) must("topk_idx", op_.topk_idx, tokens_ * s_.topk * index_bytes());
    must("x", op_.x, tokens_ * f.x_bytes);
    if (!f.cast) must("x_scales", op_.x_scales, tokens_ * f.scale_bytes);
    may("topk_weights", op_.topk_weights, tokens_ * s_.topk * 4);
    may("routing.head", op_.routing.head, op_.cached ? 0 : sizeof(abi::RoutingRecord));
    counts();
    for (std::uint32_t rank = 0; rank < s_.num_ranks; ++rank) {
      if (op_.peers[rank].ready != nullptr) target(op_.peers[rank].target);
    }
    return wrong_;
  }

  std::string combine() {
    common(true);
    const std::size_t row = std::size_t{s_.hidden} * 2;
    may("topk_weights", op_.topk_weights, tokens_ * s_.topk * 4);
    must("out", op_.out, tokens_ * row);
    may("bias[0]", op_.bias[0], tokens_ * row);
    may("bias[1]", op_.bias[1], tokens_ * row);
    may("out_weights", op_.out_weights, tokens_ * s_.topk * 4);
    for (std::uint32_t rank = 0; rank < s_.num_ranks; ++rank) {
      if (op_.peers[rank].ready == nullptr) continue;
      const CombineSource& source = op_.peers[rank].source;
      if (source.y == nullptr) continue;  // it has lost its rows since
      must("a peer's y", source.y, s_.recv_rows * row);
      if (op_.out_weights != nullptr)
        must("a peer's y_weights", source.y_weights, s_.recv_rows * choices_ * 4);
    }
    return wrong_;
  }

 private:
  std::size_t index_bytes() const { return s_.index64 ? 8 : 4; }
  std::size_t placement_words() const {
    return abi::placement_words(s_.num_ranks, s_.num_experts, s_.per_expert);
  }

  void inbox() {
    if (!wrong_.empty()) return;
    if (tokens_ > op_.inbox.max_tokens) wrong_ = "there are more tokens than the inbox has slots";
    if (op_.announcement.num_tokens != op_.num_tokens)
      wrong_ = "the announcement has another number of tokens";
  }
  std::size_t inbox_bytes() const {
    return op_.inbox.slots + std::size_t{s_.num_ranks} * op_.inbox.max_tokens * op_.inbox.slot_bytes;
  }

  void may(const char* what, const void* address, std::size_t bytes) {
    if (address == nullptr || !wrong_.empty() || bytes == 0 || device_.reaches(address, bytes)) return;
    char text[160];
    std::snprintf(text, sizeof(text), "%s, %zu bytes at %p, is out of reach", what, bytes, address);
    wrong_ = text;
  }
  void must(const char* what, const void* address, std::size_t bytes) {
    if (address == nullptr && bytes != 0 && wrong_.empty()) wrong_ = std::string(what) + " is null";
    may(what, address, bytes);
  }

  void ends() {
    must("result", op_.result, sizeof(OpResult));
    if (op_.inbox.max_tokens != 0) inbox();
    may("abort", op_.abort, 4);
    may("signal.done", op_.signal.done, 4);
    must("workspace", op_.workspace, op_.workspace_bytes);
  }

  void common(bool routed) {
    const std::size_t ranks = s_.num_ranks;
    ends();
    const std::size_t targets = s_.per_expert ? s_.num_experts : ranks;
    const std::size_t least = 64 + (ranks + s_.num_experts + op_.division.ctas * targets) * 4;
    if (op_.workspace_bytes < least && wrong_.empty()) wrong_ = "workspace_bytes";
    must("routing.topk", op_.routing.topk, tokens_ * s_.topk * 4);
    must("routing.rows", op_.routing.rows, tokens_ * s_.topk * 4);
    must("routing.placement", op_.routing.placement, placement_words() * 4);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const Peer& peer = op_.peers[rank];
      if (peer.ready == nullptr) continue;
      must("a peer's ready", peer.ready, ranks * sizeof(abi::SignalLine));
      must("a peer's arrived", peer.arrived, ranks * sizeof(abi::SignalLine));
      must("a peer's announcement", peer.announcement, ranks * sizeof(abi::OpAnnouncement));
      if (op_.inbox.max_tokens != 0) must("a peer's inbox", peer.inbox, inbox_bytes());
      if (routed) continue;
      must("a peer's rank_counts", peer.rank_counts, ranks * ranks * 4);
      must("a peer's expert_counts", peer.expert_counts, ranks * s_.num_experts * 4);
    }
  }

  void counts() {
    const std::size_t experts = s_.num_experts / s_.num_ranks;
    const std::size_t blocks = s_.per_expert ? experts : 0;
    may("counts.rank_offsets", op_.counts.rank_offsets, (std::size_t{s_.num_ranks} + 1) * 4);
    may("counts.expert_counts", op_.counts.expert_counts, experts * 4);
    may("counts.expert_offsets", op_.counts.expert_offsets, s_.per_expert ? (experts + 1) * 4 : 0);
    may("counts.source_ranges", op_.counts.source_ranges, blocks * s_.num_ranks * 8);
    may("counts.host_words", op_.counts.host_words, placement_words() * 8);
    may("counts.host_sent", op_.counts.host_sent, 4);
    may("the call's result", op_.out_result.to, sizeof(abi::CallResult));
  }

  void target(const DispatchTarget& target) {
    const std::size_t rows = s_.recv_rows;
    must("a peer's recv_x", target.recv_x, rows * s_.format.row_bytes);
    must("a peer's recv_scales", target.recv_scales, s_.format.scales_bytes(rows));
    must("a peer's recv_topk_idx", target.recv_topk_idx, rows * choices_ * index_bytes());
    must("a peer's recv_topk_weights", target.recv_topk_weights, rows * choices_ * 4);
    must("a peer's recv_src", target.recv_src, rows * 8);
  }

  const Operation& op_;
  const Shape& s_;
  const KernelDevice& device_;
  const std::size_t tokens_;
  const std::size_t choices_;  // that come with a row
  std::string wrong_;
};

std::string check_shape(const Launch& launch, Task task, const Operation& op) {
  const Shape& s = op.shape;
  if (s.num_ranks == 0 || s.num_ranks > kMaxRanks || op.rank >= s.num_ranks)
    return "shape.num_ranks, or rank";
  if (s.num_experts == 0 || s.num_experts % s.num_ranks != 0) return "shape.num_experts";
  if (s.topk == 0 || s.topk > 32) return "shape.topk";
  if (op.peers[op.rank].ready == nullptr) return "the rank itself is not among its peers";
  if (launch.ctas != op.division.ctas || launch.threads != op.division.threads ||
      launch.shared_bytes != op.division.shared_bytes) {
    return "it is launched otherwise than `division` says";
  }
  const bool per_expert = task == Task::kCombinePerExpert;
  if (task != Task::kDispatch && per_expert != s.per_expert) return "it is the kernel of another layout";
  return {};
}

}  // namespace

std::string check_operation(const Launch& launch, Task task, const Operation& op,
                            const KernelDevice& device) {
  Checker checker(op, device);
  if (std::string wrong = check_shape(launch, task, op); !wrong.empty()) return wrong;
  return task == Task::kDispatch ? checker.dispatch() : checker.combine();
}

}  // namespace epd::fake_cuda

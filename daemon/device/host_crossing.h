// The far side of one operation that a host carries out, in a group whose ranks are on several nodes: what
// the rank sends to far gateways, and what it does as the gateway of far ranks. That is part of the gateway
// rank's own operation of the same number.
//
// dispatch  Own rows for a far node are packed into batches when every rank has announced. Rows that come are
//           forwarded into the ranks of this node, in any order of batches. When all rows that a far rank has
//           announced are forwarded, `arrived` is stored for it.
// combine   Asks leave with the announcement. Asks that come are served in their order: rows of this node's
//           ranks are summed, and the sums leave. When all of a far rank's asks are served, `arrived` is
//           stored for it. The own output is merged from rows of this node and the sums that come, in token
//           order.
//
// Far announcements are stored into the blocks of all ranks of this node, as the far rank would. Steps are as
// short as those of HostOperation; rows are moved by RowWork.
#pragma once

#include "device/launcher.h"
#include "far/far_group.h"
#include "host_rows.h"
#include "kernels/far.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace epd::device {

class HostCrossing final : private far::Receiver {
 public:
  // All of it must outlive the crossing.
  struct Needs {
    far::FarGroup& group;
    const kernels::Operation& op;
    kernels::Kind kind;
    const OperationPeers& peers;
    Share share;
  };
  explicit HostCrossing(const Needs& needs);
  // Gives back everything that it holds.
  ~HostCrossing() override;
  HostCrossing(const HostCrossing&) = delete;
  HostCrossing& operator=(const HostCrossing&) = delete;

  // [R] not 0: active ranks of this node. Other ranks neither have nor need places here.
  std::span<const std::uint8_t> near() const { return near_; }

  // ---- in the order of their calls

  // Finds which tokens have rows on which node. True when it is done. The plan must outlive the crossing.
  bool list(const kernels::RoutingPlan& plan, std::uint32_t tokens);
  void announce();
  // The sources for which a new routing has to place rows, beside the rank's own.
  std::span<kernels::SourcePlaces> places() { return places_; }
  // Called when every rank has announced. False: a rank of this node does not hold the routing that it
  // announced.
  bool start();
  // Called for a combine, after start(): the arguments are those of one node, with null for far sources.
  void merge(const kernels::CombineArgs& args);

  // ---- at any time

  bool step();
  bool can_step() const;
  // The rank's inputs are no longer read. For a combine: the output is complete, too.
  bool sent() const;
  // A rank that the rank's own part waits for, or OperationInFlight::kNobody.
  std::uint32_t awaited() const;
  // Names the message or rank of another node that it waits for, for people; "" if there is none.
  std::string waits_for() const;

 private:
  // A far node to which this rank sends.
  struct Target {
    std::uint32_t node = 0;
    std::uint32_t gateway = 0;
    kernels::PlanArray<std::uint32_t> tokens;  // that have rows there
    std::uint32_t packed = 0;                  // tokens
    std::uint32_t batches = 0;                 // handed out
    bool packing = false;
    // Combine: sums that have come.
    std::map<std::uint32_t, far::Arrival> early;  // by batch: an earlier one is missing
    std::deque<far::Arrival> sums;                // in order, not used up
    std::uint32_t next_sums = 0;                  // number of the next batch
    std::uint32_t used = 0;                       // records of the first of `sums`
  };
  // A far rank whose gateway this rank is.
  struct Source {
    std::uint32_t rank = 0;
    bool announced = false;
    abi::FarAnnouncement announcement{};
    std::map<std::uint32_t, far::Arrival> held;   // by batch: rows or asks
    std::vector<far::Arrival> forwarding;         // dispatch: taken from `held`
    std::vector<bool> seen;                       // dispatch: batches
    std::uint32_t next_asks = 0;                  // combine: the batch to serve next
    std::uint32_t served = 0;                     // asks of that batch
    std::uint32_t done = 0;                       // records forwarded, asks served
    std::uint32_t batches = 0;                    // of sums, handed out
    std::vector<kernels::CombineSource> sources;  // [R] combine: ranks of this node
    bool busy = false;
    bool arrived = false;
  };
  struct Job {
    std::unique_ptr<RowWork> work;
    std::function<void()> done;
  };

  // far::Receiver
  far::Drop receive(const far::Arrival& arrival) override;
  far::Drop receive_announcement(const far::Arrival& arrival, std::size_t source);
  far::Drop receive_batch(const far::Arrival& arrival, Source& source) const;
  far::Drop receive_sums(const far::Arrival& arrival);

  bool is_dispatch() const { return needs_.kind == kernels::Kind::kDispatch; }
  bool routes() const { return is_dispatch() && !needs_.op.cached; }
  bool returns_weights(std::uint32_t flags) const;
  std::uint64_t tag() const { return needs_.op.tag; }
  abi::FarHeader header(abi::FarType type, std::uint32_t to) const;
  std::size_t source_of(std::uint32_t rank) const;
  bool recall_places(std::size_t source);
  void pass_arrival(Source& source);

  bool wants_to_pack(const Target& target) const;
  bool wants_to_serve(const Source& source) const;
  bool may_pack(const Target& target) const;
  bool may_forward(const Source& source) const;
  bool may_serve(const Source& source) const;
  bool begin_job();
  void begin_pack(Target& target);
  void pack(const Target& target, std::uint32_t first, std::uint32_t count, std::byte* records) const;
  void begin_forward(std::size_t source);
  void begin_serve(std::size_t source);
  void begin_merge();
  void end_merge(std::uint32_t merged, const std::vector<kernels::FarStream>& streams);
  std::uint32_t sums_of_ask() const;
  void run(RowWork::Body body, std::uint32_t items, std::uint64_t bytes, std::function<void()> done);

  const Needs needs_;
  far::FarGroup& group_;
  const far::Span& span_;
  const kernels::FarShape shape_;
  std::vector<std::uint8_t> near_;           // [R]
  std::vector<std::uint32_t> nodes_;         // [R] kernels::FarNodes
  std::vector<std::uint8_t> whole_domains_;  // [domains]
  const kernels::RoutingPlan* plan_ = nullptr;
  std::vector<kernels::PlanArray<std::uint32_t>> lists_;  // until the targets take them
  std::optional<kernels::FarLister> lister_;
  std::vector<Target> targets_;                // in the order of Span::far_nodes
  std::vector<Source> sources_;                // by rank
  std::vector<kernels::SourcePlaces> places_;  // of sources_
  bool announced_ = false;
  bool started_ = false;
  std::optional<kernels::FarMergeArgs> merge_;
  std::uint32_t merged_ = 0;  // tokens
  bool merging_ = false;
  bool more_sums_ = false;  // sums have come since begin_merge() looked
  std::deque<Job> jobs_;
};

}  // namespace epd::device

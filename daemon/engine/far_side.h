// A group whose ranks are on several nodes, as this engine sees the other nodes: the group's view, the
// far::FarGroup of each epoch, and the greetings. For clients an epoch has begun when each far engine that
// serves an active rank has sent its greeting. Then both sides have the same shape and view, they reach each
// other, and nobody sends to an engine that has not entered the epoch.
//
// A greeting is repeated every kGreetingNs until that of the other side has come. It tells whether that is
// so. A message that says "not yet" is answered.
#pragma once

#include "common/status.h"
#include "far/far_group.h"
#include "proto/link.h"
#include "transport/network.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace epd::engine {

// The number by which engines know each other.
constexpr far::EngineId far_engine_id(std::uint32_t node, std::uint32_t device_index) {
  return std::uint64_t{node} << 32 | device_index;
}

class FarSide {
 public:
  static constexpr std::uint64_t kGreetingNs = 20'000'000;

  // `port` is null in an engine that reaches no others: then only the view is kept. The port must outlive the
  // side. `incarnation` is that of this engine. `ledger` must outlive the side; tests may pass null.
  FarSide(const abi::GroupBegin& message, const transport::NetworkOptions& network, std::uint64_t incarnation,
          far::Port* port, far::Ledger* ledger);

  // ---- the view, as the supervisor tells it

  void place(const abi::GroupRank& message);
  void set_epoch(std::uint64_t view, const std::uint64_t (&key)[2]);
  bool is_near(std::uint32_t rank) const { return places_[rank].node == node_; }
  std::uint32_t node_of(std::uint32_t rank) const { return places_[rank].node; }
  // For example "node-b", or "node 2" if its name was never told.
  std::string node_name(std::uint32_t rank) const;
  std::uint32_t node() const { return node_; }  // of this engine
  std::uint64_t group_id() const { return id_; }
  // Engines that serve active ranks on other nodes, in ascending order.
  std::vector<far::EngineId> engines() const;
  far::EngineId engine_of(std::uint32_t rank) const {
    return far_engine_id(places_[rank].node, places_[rank].device);
  }

  // ---- epochs

  // The lanes' view of the group. `device` is this engine's device, the same at each call.
  far::FarGroup& group(std::uint32_t device);
  // Why the group's records don't fit into windows and messages; OK if they do.
  Status check_sizes(std::uint64_t max_body_bytes) const;
  // Does nothing if no rank of this engine could be served. `masked`: [R] or empty. `first_index` is counted
  // as in tags.
  void begin(std::uint64_t epoch, std::uint64_t first_index, std::span<const std::uint8_t> masked,
             std::uint64_t now_ns);
  // No operation may be in flight. May be called between epochs.
  void end();
  bool in_epoch() const { return group_ != nullptr && group_->in_epoch(); }
  // Bytes of windows and send buffers in the epoch, or in the last one.
  std::uint64_t memory_bytes() const { return memory_bytes_; }
  // Those for one engine.
  std::uint64_t memory_bytes(far::EngineId engine) const;

  // Messages dropped since the group began, by reason; or "none".
  std::string drops() const { return group_ == nullptr ? "none" : group_->drops().text(); }

  // ---- greetings

  // All greetings have come, or none is expected.
  bool greeted() const { return !awaited(); }
  // In an epoch, and all greetings have come: operations may be launched.
  bool has_begun() const { return in_epoch() && greeted(); }
  // The first engine whose greeting has not come.
  std::optional<far::EngineId> awaited() const;
  bool awaits(far::EngineId engine) const;
  // The first engine that was told something else of the group, and what differs.
  struct Difference {
    far::EngineId engine;
    std::string what;
  };
  std::optional<Difference> difference() const;

  // ---- of the loop

  // Handles a message with this group's number. The side keeps the body.
  void received(far::EngineId from, std::span<const std::byte> header, const far::Body& body);
  // True: something was sent.
  bool step(std::uint64_t now_ns);
  // See far::FarGroup::take_faults.
  std::vector<far::FarGroup::Fault> take_faults() {
    return group_ == nullptr ? std::vector<far::FarGroup::Fault>() : group_->take_faults();
  }
  // When step() next has something to do; kNever: only after a message has come.
  std::uint64_t next_look_ns() const;

 private:
  struct Place {
    std::uint32_t node = 0;  // 0: the rank was never active
    std::uint32_t device = 0;
    bool active = false;  // as told, whether or not it could be mapped here
  };
  struct Greeting {
    bool heard = false;
    bool asked = false;   // by the other side, which has not heard this one
    std::string differs;  // "": nothing
    std::uint64_t say_ns = 0;
  };

  far::Drop greet(far::EngineId from, std::span<const std::byte> header, const far::Body& body);
  bool say_greeting(far::EngineId to, const Greeting& greeting);
  std::uint64_t shape_digest() const;
  std::uint64_t view_digest() const;

  const std::uint64_t id_;
  const abi::GroupShape shape_;
  const std::uint32_t node_;
  const std::uint64_t incarnation_;
  const std::uint32_t batch_bytes_;
  const std::uint32_t window_bytes_;
  const abi::FarCheck check_;
  const std::uint64_t gap_ns_;
  far::Port* const port_;
  far::Ledger* const ledger_;
  std::vector<Place> places_;  // [R]
  std::uint64_t view_;
  far::EpochKey key_;
  std::unique_ptr<far::FarGroup> group_;
  far::EngineId own_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint64_t first_index_ = 0;
  std::uint64_t memory_bytes_ = 0;
  std::map<far::EngineId, std::uint64_t> memory_of_;  // by engine
  std::map<far::EngineId, Greeting> greetings_;       // of the epoch
};

}  // namespace epd::engine

// The engine's end of one session: rings the client, and says how the session ends.
#pragma once

#include "common/memory.h"
#include "page.h"
#include "proto/session.h"
#include "stats.h"

#include <memory>
#include <string>
#include <vector>

namespace epd::engine {

class Member;

class SessionPort {
 public:
  struct Ends {
    UniqueFd segment_a;
    UniqueFd segment_b;
    UniqueFd ring_client;  // an eventfd of the client's porter, which rings the client
  };
  static Result<std::unique_ptr<SessionPort>> open(std::uint64_t id, Ends ends);

  std::uint64_t id() const { return id_; }

  // Rings the client if it sleeps.
  void ring();
  void set_sleeping(bool sleeping) {
    b_->engine_sleep.sleeping.store(sleeping ? abi::kAsleep : abi::kAwake, std::memory_order_relaxed);
  }

  // Ends the session for the client: publishes the reason, then the state, then rings.
  void end(StatusCode status, const std::string& text);
  bool ended() const { return ended_; }

  std::vector<Member*> members;
  Statistics statistics;

 private:
  SessionPort() = default;
  void set_state(abi::SessionState state) {
    b_->state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
  }

  std::uint64_t id_ = 0;
  UniqueFd ring_client_;
  Mapping a_mapping_;
  Mapping b_mapping_;
  abi::SegmentA* a_ = nullptr;
  abi::SegmentB* b_ = nullptr;
  bool ended_ = false;
};

}  // namespace epd::engine

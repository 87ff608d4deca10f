// The engine's part in the operations of a rank that are calls (proto/call_words.h): it tells the device
// where to continue, and reads what the device has done.
#pragma once

#include "call_views.h"
#include "device/launcher.h"
#include "failures.h"
#include "proto/call_words.h"

#include <optional>
#include <string>
#include <vector>

namespace epd::engine {

class Calls final : private device::CallGroup {
 public:
  using JournalEntry = kernels::JournalEntry;

  // The member must have its lane and its memory. Halted at first.
  Calls(Member& member, device::Launcher& launcher);

  // For calls that are taken from now on: the group's SMs, and the timeout of calls that give none.
  void follow_settings(std::uint32_t timeout_ms, std::uint32_t linger_us);

  bool by_kernels() const { return member_.lane->by_kernels(); }
  // When look() has to be called again on a host device, if no bell rings before.
  std::uint64_t next_look_ns() const;

  void halt() { port_.halt(); }
  bool halted() const { return port_.halted(); }
  // Begins no further call.
  void stop() { port_.stop(); }
  bool stopped() const { return port_.stopped(); }
  // Whether one is known to run.
  bool is_running() const { return port_.running() != nullptr; }
  // The device continues with the member's next operation. `fresh`: nothing has run in this group, and no
  // record holds a routing.
  void resume(bool fresh);

  // For a member that a former engine has served: finds out what that has begun.
  void catch_up();
  bool resumed() const { return port_.resumed(); }
  // Memory of a rank of the group was mapped or unmapped.
  void set_memory(std::uint32_t rank, std::uint32_t number, const abi::MappedMemory& memory) {
    port_.set_memory(rank, number, memory);
  }

  const JournalEntry* front() const { return port_.front(); }
  void pop(std::uint64_t now_ns);

  // Now and then copies the rings, which takes a moment, and shows what is enqueued. Called for an active
  // group, after the journal has been read.
  void look(Page& page, std::uint64_t now_ns);
  void show_none();
  // Why the first call that is enqueued fails though no kernel says so: its time is up, and none has begun
  // it, or none has looked at it again since.
  std::optional<Failure> overdue(std::uint64_t now_ns) const;

  // Why the call of this entry ends the session; "" if it was legal.
  std::string illegal(const JournalEntry& entry) const;
  // The following are for entries of legal calls.
  // The operation's number.
  std::uint64_t index_of(const JournalEntry& entry) const { return group_.from_tags(entry.index); }
  Failure failure(const JournalEntry& entry, std::uint64_t now_ns) const;
  // Rows of a call that succeeded. To be called once for each, in their order: see count_rows().
  std::uint32_t rows_of(const JournalEntry& entry);

  std::uint64_t last_end_ns = 0;  // when the journal last had an entry

 private:
  // device::CallGroup
  bool may_begin() const override { return group_.far == nullptr || group_.far->has_begun(); }
  std::span<const std::uint8_t> masked() const override { return group_.masked; }
  bool holds_rows(std::uint32_t rank, std::uint64_t routing) const override {
    return group_.serves(rank, abi::epoch_of_tag(routing));
  }
  void ring_peers() const override { group_.ring_peers(); }
  void ring_client() const override;

  std::uint32_t timeout_of(std::uint32_t own_ms) const { return own_ms != 0 ? own_ms : timeout_ms_; }
  void note_ended(kernels::CallRing ring, std::uint32_t end);
  std::vector<CallViews::Enqueued> enqueued(const device::CallPort::Ring& ring) const;
  void add_enqueued(kernels::CallRing ring, const abi::PackedCall (&calls)[abi::kCallSlots],
                    std::uint64_t& index, std::vector<CallViews::Enqueued>& all) const;
  void note_first(const std::vector<CallViews::Enqueued>& all, std::uint64_t now_ns);
  void show_running(std::uint64_t now_ns);
  void show_in_flight(const device::OperationInFlight& running, std::uint64_t now_ns);
  Failure old_memory(const JournalEntry& entry, const abi::Call& call) const;

  Member& member_;
  Group& group_;
  device::Launcher& launcher_;
  device::CallPort& port_;
  std::uint32_t timeout_ms_ = 0;
  // For each ring, the calls that have ended, as far as the journal or a look has told.
  std::optional<std::uint32_t> ended_[kernels::kCallRings];
  std::uint64_t next_look_ns_ = 0;
  std::uint64_t next_far_look_ns_ = 0;
  CallViews views_;
  // The first call that is enqueued: it runs, or is about to.
  struct First {
    CallViews::Enqueued call;
    std::uint64_t since_ns = 0;  // when it was first seen to be the first, or to stand
    std::uint64_t seen_ns = 0;   // last
    bool begun = false;          // other ranks have been told of it
    std::uint32_t awaited = device::SignalCopy::kNobody;  // the rank that a call which stands waits for
    std::uint32_t longest_ms = 0;  // the timeout of that call, which may be the other ring's
  };
  std::optional<First> first_;
  device::SeenWaits seen_waits_;
  std::vector<std::uint32_t> recv_rows_;  // by record: rows of its routing
};

}  // namespace epd::engine

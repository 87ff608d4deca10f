// The engine's side of a rank whose operations are calls (proto/call_words.h): where the device is to go on,
// and what it says that it has done.
#pragma once

#include "call_views.h"
#include "device/launcher.h"
#include "failures.h"
#include "proto/session.h"

#include <optional>
#include <string>
#include <vector>

namespace epd::engine {

class Calls {
 public:
  using JournalEntry = kernels::cuda::JournalEntry;

  // The member has its lane and its memory. Halted at first.
  Calls(Member& member, device::Launcher& launcher);

  // Of calls that are taken from now on: the group's SMs, and the timeout of those that say none.
  void follow_settings(std::uint32_t timeout_ms);

  void halt() { port_.halt(); }
  bool halted() const { return port_.halted(); }
  // The operation that the member has next is the device's next. `fresh`: nothing has run in this group, and
  // no record holds a routing.
  void resume(bool fresh);

  bool resumed() const { return port_.resumed(); }
  bool waits_for_room() const { return port_.waits_for_room(); }

  const JournalEntry* front() const { return port_.front(); }
  void pop();

  // Shows what is enqueued, by a look at the rings now and then, which takes a moment. Of an active group,
  // when the journal has been read.
  void look(Page& page, std::uint64_t now_ns);
  void show_none();
  // Whether one was seen that has not ended.
  bool runs() const { return !views_.empty(); }

  // Of an entry. What ends the session; "" if the call was lawful.
  std::string illegal(const JournalEntry& entry) const;
  // Of one that is lawful:
  static abi::Submission submission(const JournalEntry& entry);
  // The operation's number.
  std::uint64_t index_of(const JournalEntry& entry) const { return group_.from_tags(entry.index); }
  Failure failure(const JournalEntry& entry, std::uint64_t now_ns) const;
  // Of one that went well, each once and in their order: see count_rows().
  std::uint32_t rows_of(const JournalEntry& entry);

  std::uint64_t last_end_ns = 0;  // when the journal last had something

 private:
  std::uint32_t timeout_of(std::uint32_t own_ms) const { return own_ms != 0 ? own_ms : timeout_ms_; }
  void note_ended(kernels::cuda::CallRing ring, std::uint32_t end);
  std::vector<CallViews::Enqueued> enqueued(const device::CallPort::Ring& ring) const;
  void add_enqueued(kernels::cuda::CallRing ring, const abi::PackedCall (&calls)[abi::kCallSlots],
                    std::uint64_t& index, std::vector<CallViews::Enqueued>& all) const;
  void show_running(std::uint64_t now_ns);

  Member& member_;
  Group& group_;
  device::Launcher& launcher_;
  device::CallPort& port_;
  std::uint32_t timeout_ms_ = 0;
  // Calls of each ring, as far as the journal or a look at it has told.
  std::optional<std::uint32_t> ended_[kernels::cuda::kCallRings];
  std::uint64_t next_look_ns_ = 0;
  CallViews views_;
  // The first that is shown: it runs, or is about to.
  struct Running {
    std::uint64_t index = 0;
    std::uint64_t seen_ns = 0;
  };
  std::optional<Running> running_;        // none, or a noop
  std::vector<std::uint32_t> recv_rows_;  // of the routing in each record
};

}  // namespace epd::engine

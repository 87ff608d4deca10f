// The sessions whose operations this engine runs: they come and go by the supervisor's messages, and lose
// their engine by their own fault.
#pragma once

#include "round_clock.h"
#include "session_port.h"
#include "supervisor_link.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace epd::engine {

class Sessions {
 public:
  Sessions(Page& page, SupervisorLink& link) : page_(page), link_(link) {}

  // The supervisor's messages.
  Status add(Packet& packet);
  Status remove(const abi::SessionRef& message);
  Status note_all_told(const abi::AllTold& message);

  SessionPort* find(std::uint64_t id);
  std::size_t size() const { return sessions_.size(); }
  // The one behind that which this gave last, and so on around. There is one.
  SessionPort& next();
  // What no correct client library writes: `text` has the field, the value and what is allowed.
  void end(SessionPort& session, const std::string& text);

  // Of those that are being removed forgets the ones that `busy`, given the id, is false of. True: there
  // were some.
  template <typename Busy>
  bool finish_removals(Busy busy) {
    bool removed = false;
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      const bool goes = it->second->removing && !busy(it->first);
      removed |= goes;
      it = goes ? forget(it) : std::next(it);
    }
    return removed;
  }
  // Operations that a former engine took for a group that did not come back with this one. True if there
  // may be more of them.
  bool answer_stray_orphans(const Clock& clock);

  void set_sleeping(bool sleeping);
  // Whether a ring has a submission, or room that a completion waits for.
  bool pending() const;

 private:
  using Map = std::map<std::uint64_t, std::unique_ptr<SessionPort>>;
  Map::iterator forget(Map::iterator session);

  Page& page_;
  SupervisorLink& link_;
  Map sessions_;
  bool all_told_ = false;   // kAllTold has come
  std::uint64_t last_ = 0;  // that next() gave
};

}  // namespace epd::engine

// The sessions whose operations this engine runs. The supervisor's messages add and remove them. A session
// that breaks the rules is ended.
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

  // Messages of the supervisor.
  Status add(Packet& packet);
  Status remove(const abi::SessionRef& message);
  Status note_all_told(const abi::AllTold& message);

  SessionPort* find(std::uint64_t id);
  std::size_t size() const { return sessions_.size(); }
  // The session after the one that was returned last, in a circle. There must be one.
  SessionPort& next();
  // Ends a session whose client wrote what a correct client library never writes. `text` has the field, the
  // value and what is allowed.
  void end(SessionPort& session, const std::string& text);

  // Forgets sessions that are being removed and for whose id `busy` is false. True: there was at least one.
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
  // Answers operations that a former engine took for a group that did not come back with this engine. True if
  // there may be more.
  bool answer_stray_orphans(const Clock& clock);

  void set_sleeping(bool sleeping);
  // Whether a ring has a submission, or room for a completion that waits.
  bool pending() const;

 private:
  using Map = std::map<std::uint64_t, std::unique_ptr<SessionPort>>;
  Map::iterator forget(Map::iterator session);

  Page& page_;
  SupervisorLink& link_;
  Map sessions_;
  bool all_told_ = false;   // kAllTold has come
  std::uint64_t last_ = 0;  // the last that next() returned
};

}  // namespace epd::engine

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

  SessionPort* find(std::uint64_t id);
  // Ends a session whose client wrote what a correct client library never writes. `text` has the field, the
  // value and what is allowed.
  void end(SessionPort& session, const std::string& text);

  void set_sleeping(bool sleeping);

 private:
  using Map = std::map<std::uint64_t, std::unique_ptr<SessionPort>>;

  Page& page_;
  SupervisorLink& link_;
  Map sessions_;
};

}  // namespace epd::engine

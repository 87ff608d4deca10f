#include "sessions.h"

#include "base/log.h"
#include "group.h"

#include <algorithm>

namespace epd::engine {

using abi::LinkType;

Status Sessions::add(Packet& packet) {
  const Result<abi::AddSession> body = packet.read<abi::AddSession>();
  if (!body.ok()) return body.status();
  if (packet.fds.size() != 3)
    return invalid_argument("kAddSession with " + std::to_string(packet.fds.size()) + " fds");
  const std::uint64_t id = body.value().session_id;
  auto port =
      SessionPort::open(id, {std::move(packet.fds[0]), std::move(packet.fds[1]), std::move(packet.fds[2])});
  if (!port.ok()) {
    abi::SessionFailed failed{id, port.status().code(), {}};
    abi::set_text(failed.text, port.status().message().data(), port.status().message().size());
    link_.send(LinkType::kSessionFailed, failed);
    return {};
  }
  (*port)->statistics = Statistics::of_session(page_, id);
  if (all_told_) (*port)->set_all_told();
  sessions_[id] = std::move(port).value();
  return {};
}

Status Sessions::remove(const abi::SessionRef& message) {
  SessionPort* const session = find(message.session_id);
  if (session == nullptr) {
    link_.send(LinkType::kSessionRemoved, message);  // never got this far, or failed to open
  } else {
    session->removing = true;
  }
  return {};
}

// Whatever former engines left behind for another group than those told by now, nobody waits for any more.
Status Sessions::note_all_told(const abi::AllTold& /*message*/) {
  all_told_ = true;
  for (const auto& [id, session] : sessions_) session->set_all_told();
  return {};
}

SessionPort* Sessions::find(std::uint64_t id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

SessionPort& Sessions::next() {
  auto next = sessions_.upper_bound(last_);
  if (next == sessions_.end()) next = sessions_.begin();
  last_ = next->first;
  return *next->second;
}

void Sessions::end(SessionPort& session, const std::string& text) {
  static LogLimiter limiter;
  limiter.log(LogLevel::kWarning, "illegal submission, session ended",
              {{"session", session.id()}, {"error", text}});
  count(page_->submissions_refused);
  session.statistics.refused(StatusCode::kInvalidArgument);
  session.end(StatusCode::kInvalidArgument, text);
  abi::SessionFailed failed{session.id(), StatusCode::kInvalidArgument, {}};
  abi::set_text(failed.text, text.data(), text.size());
  link_.send(LinkType::kSessionFailed, failed);
}

Sessions::Map::iterator Sessions::forget(Map::iterator session) {
  for (const auto& [number, member] : session->second->members) member->session = nullptr;
  const abi::SessionRef reply{session->first};
  const auto next = sessions_.erase(session);
  link_.send(LinkType::kSessionRemoved, reply);
  return next;
}

bool Sessions::answer_stray_orphans(const Clock& clock) {
  if (!all_told_) return false;
  const std::uint64_t end = clock.now_ns() + kShareNs;
  for (const auto& [id, session] : sessions_) {
    if (session->orphans().empty()) continue;
    if (clock.now_ns() >= end) return true;
    std::erase_if(session->orphans(), [&port = *session](const SessionPort::Orphan& orphan) {
      if (port.members.contains(orphan.record.member)) return false;
      const abi::Completion completion = completion_of(orphan.record, StatusCode::kEngineRestarted);
      port.statistics.ended(completion.status);
      port.complete(completion);
      return true;
    });
  }
  return false;
}

void Sessions::set_sleeping(bool sleeping) {
  for (const auto& [id, session] : sessions_) session->set_sleeping(sleeping);
}

bool Sessions::pending() const {
  return std::any_of(sessions_.begin(), sessions_.end(), [](const auto& entry) {
    return entry.second->has_submission() || entry.second->can_flush();
  });
}

}  // namespace epd::engine

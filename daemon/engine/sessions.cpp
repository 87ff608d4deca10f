#include "sessions.h"

#include "base/log.h"
#include "group.h"

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
  sessions_[id] = std::move(port).value();
  return {};
}

// It may never have come here.
Status Sessions::remove(const abi::SessionRef& message) {
  if (const auto found = sessions_.find(message.session_id); found != sessions_.end()) {
    for (Member* member : found->second->members) member->session = nullptr;
    sessions_.erase(found);
  }
  link_.send(LinkType::kSessionRemoved, message);
  return {};
}

SessionPort* Sessions::find(std::uint64_t id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

void Sessions::end(SessionPort& session, const std::string& text) {
  static LogLimiter limiter;
  limiter.log(LogLevel::kWarning, "illegal call, session ended",
              {{"session", session.id()}, {"error", text}});
  count(page_->submissions_refused);
  session.statistics.refused(StatusCode::kInvalidArgument);
  session.end(StatusCode::kInvalidArgument, text);
  abi::SessionFailed failed{session.id(), StatusCode::kInvalidArgument, {}};
  abi::set_text(failed.text, text.data(), text.size());
  link_.send(LinkType::kSessionFailed, failed);
}

void Sessions::set_sleeping(bool sleeping) {
  for (const auto& [id, session] : sessions_) session->set_sleeping(sleeping);
}

}  // namespace epd::engine

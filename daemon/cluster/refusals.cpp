#include "refusals.h"

#include "base/event.h"

namespace epd::cluster {
namespace {

const char* word_of(Refusal reason) {
  switch (reason) {
    case Refusal::kPlainText: return "plain_text";
    case Refusal::kHandshake: return "handshake";
    case Refusal::kConnections: return "connections";
    case Refusal::kIdentity: return "identity";
    case Refusal::kOtherCluster: return "other_cluster";
    case Refusal::kVersion: return "version";
    case Refusal::kFrame: return "frame";
    case Refusal::kNotCoordinator: return "not_coordinator";
    case Refusal::kNodes: return "nodes";
    case Refusal::kTerm: return "term";
    case Refusal::kFlood: return "flood";
  }
  return "unknown";
}

}  // namespace

void Refusals::refuse(Who who, Refusal reason, const std::string& peer, const std::string& node,
                      const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    ++counts_[reason];
  }
  LogLimiter& limiter = who == Who::kStranger ? strangers_ : nodes_;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "node refused",
                 {{"why", word_of(reason)}, {"peer", peer}, {"node", node}, {"reason", text}}, kDaemonOwner);
}

std::vector<std::pair<std::string, std::uint64_t>> Refusals::counts() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, std::uint64_t>> list;
  for (const auto& [reason, count] : counts_) list.emplace_back(word_of(reason), count);
  return list;
}

}  // namespace epd::cluster

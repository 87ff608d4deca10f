#include "membership/agent.h"

namespace epd::membership {

void Requests::index(const RequestId& id, const Request& request) {
  if (!request.said && request.held_by == 0) to_say_.insert(id);
  if (request.held_by != 0) held_.emplace(request.held_by, id);
  if (std::holds_alternative<LeaveRequest>(request.event)) {
    leaves_.insert(id);
  } else {
    (request.said ? said_joins_ : unsaid_joins_).emplace(request.due_ns, id);
  }
}

void Requests::unindex(const RequestId& id, const Request& request) {
  to_say_.erase(id);
  held_.erase({request.held_by, id});
  leaves_.erase(id);
  (request.said ? said_joins_ : unsaid_joins_).erase({request.due_ns, id});
}

void Requests::add(const RequestId& id, Event event, std::uint64_t due_ns) {
  erase(id);
  index(id, all_[id] = Request{std::move(event), due_ns});
}

const Requests::Request* Requests::find(const RequestId& id) const {
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : &found->second;
}

bool Requests::erase(const RequestId& id) {
  const auto found = all_.find(id);
  if (found == all_.end()) return false;
  unindex(id, found->second);
  all_.erase(found);
  return true;
}

void Requests::erase_session(SessionId session) {
  for (auto entry = all_.lower_bound({session, 0}); entry != all_.end() && entry->first.session == session;) {
    unindex(entry->first, entry->second);
    entry = all_.erase(entry);
  }
}

void Requests::mark_said(const RequestId& id) {
  Request& request = all_.at(id);
  unindex(id, request);
  request.said = true;
  index(id, request);
}

void Requests::hold(const RequestId& id, std::uint64_t group_id) {
  Request& request = all_.at(id);
  unindex(id, request);
  request.held_by = group_id;
  index(id, request);
}

std::vector<std::uint64_t> Requests::holders() const {
  std::vector<std::uint64_t> groups;
  for (auto entry = held_.begin(); entry != held_.end();
       entry = held_.lower_bound({groups.back() + 1, RequestId{}}))
    groups.push_back(entry->first);
  return groups;
}

void Requests::release(std::uint64_t group_id) {
  for (auto entry = held_.lower_bound({group_id, RequestId{}});
       entry != held_.end() && entry->first == group_id; entry = held_.erase(entry)) {
    all_.at(entry->second).held_by = 0;
    to_say_.insert(entry->second);
  }
}

void Requests::unsay_all() {
  for (const auto& [due_ns, id] : said_joins_) {
    all_.at(id).said = false;
    to_say_.insert(id);
  }
  unsaid_joins_.merge(said_joins_);
  for (const RequestId& id : leaves_) {
    all_.at(id).said = false;
    to_say_.insert(id);
  }
}

std::vector<RequestId> Requests::unsaid_joins(std::uint64_t due_by_ns) const {
  std::vector<RequestId> ids;
  for (const auto& [due_ns, id] : unsaid_joins_) {
    if (due_ns > due_by_ns) break;
    ids.push_back(id);
  }
  return ids;
}

}  // namespace epd::membership

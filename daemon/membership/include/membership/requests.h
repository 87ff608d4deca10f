// Pending joins and leaves of a node. Each question that an agent asks in every turn has an index, so a
// request costs the same however many others wait.
#pragma once

#include "membership/group.h"
#include "membership/messages.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace epd::membership {

class Requests {
 public:
  struct Request {
    Event event;                // JoinRequest, LeaveRequest
    std::uint64_t due_ns = 0;   // of a join; a leave has none
    bool said = false;          // to the coordinator that the agent is attached to
    std::uint64_t held_by = 0;  // the ended group that keeps it from being said; 0: none
  };

  void add(const RequestId& id, Event event, std::uint64_t due_ns);
  const Request* find(const RequestId& id) const;  // null: there is none
  bool erase(const RequestId& id);
  void erase_session(SessionId session);

  // Those that are neither said nor held.
  const std::set<RequestId>& to_say() const { return to_say_; }
  void mark_said(const RequestId& id);
  // The next coordinator has been told of none.
  void unsay_all();

  void hold(const RequestId& id, std::uint64_t group_id);
  std::vector<std::uint64_t> holders() const;
  void release(std::uint64_t group_id);

  const std::set<RequestId>& leaves() const { return leaves_; }
  // Joins that are not said and due by then, the first deadline first.
  std::vector<RequestId> unsaid_joins(std::uint64_t due_by_ns) const;
  // The first deadline of joins that are not said, and of all joins; kNever: there is none.
  std::uint64_t unsaid_due_ns() const { return first(unsaid_joins_); }
  std::uint64_t due_ns() const { return std::min(first(unsaid_joins_), first(said_joins_)); }

 private:
  using Deadlines = std::set<std::pair<std::uint64_t, RequestId>>;
  static std::uint64_t first(const Deadlines& deadlines) {
    return deadlines.empty() ? kNever : deadlines.begin()->first;
  }
  void index(const RequestId& id, const Request& request);
  void unindex(const RequestId& id, const Request& request);

  std::map<RequestId, Request> all_;
  // Indexes of it:
  std::set<RequestId> to_say_;
  std::set<std::pair<std::uint64_t, RequestId>> held_;  // by group
  std::set<RequestId> leaves_;
  Deadlines said_joins_;
  Deadlines unsaid_joins_;
};

}  // namespace epd::membership

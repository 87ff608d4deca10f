#include "agent_side.h"

#include "base/event.h"
#include "cluster/address.h"
#include "frames.h"
#include "node_table.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint64_t kFirstPauseMs = 50;
constexpr std::uint64_t kLongestPauseMs = 1'000;

bool nobody_listens(const Status& why) {
  return why.message().find("Connection refused") != std::string::npos;
}

constexpr std::string_view kUnresolved = "can't be resolved: ";

// gRPC leaves out the host that was asked for, or words the same problem differently each time. This replaces
// its text.
Status explained(const Status& why, const std::string& coordinator) {
  const std::string& text = why.message();
  const std::optional<HostPort> address = parse_host_port(coordinator);
  const std::string host = address ? address->host : coordinator;
  if (text.find("Hostname Verification Check failed") != std::string::npos) {
    return {why.code(), "the certificate at cluster.coordinator = \"" + coordinator + "\" does not name \"" +
                            host + "\" (Hostname Verification Check failed); allowed: a name that it has"};
  }
  if (text.find("DNS resolution failed") != std::string::npos) {
    const std::size_t detail = text.rfind(": ");
    return {why.code(), "the host \"" + host + "\" of cluster.coordinator " + std::string(kUnresolved) +
                            text.substr(detail == std::string::npos ? 0 : detail + 2)};
  }
  return why;
}

// A host is resolved for several kinds of addresses, and the answer may be about either.
bool same_problem(const std::string& before, const std::string& now) {
  const bool both_unresolved =
      before.find(kUnresolved) != std::string::npos && now.find(kUnresolved) != std::string::npos;
  return before == now || both_unresolved;
}

unsigned seed_of(const std::string& boot_id) {
  unsigned seed = 1;
  for (const char byte : boot_id) seed = seed * 31 + static_cast<unsigned char>(byte);
  return seed;
}

// Records that nodes came or were lost.
void record_changes(const v1::NodeTable& before, const v1::NodeTable& after, const std::string& own) {
  std::map<std::string, const v1::NodeRow*> old;
  for (const v1::NodeRow& row : before.rows()) old[row.node().name()] = &row;
  for (const v1::NodeRow& row : after.rows()) {
    const std::string& name = row.node().name();
    const auto found = old.find(name);
    const bool lost = row.condition() == v1::NODE_CONDITION_LOST;
    const bool was_there = found != old.end() && found->second->condition() != v1::NODE_CONDITION_LOST;
    if (name == own || (found == old.end() && lost)) continue;
    if (lost && was_there) {
      record_event(EventKind::kNodeLost, LogLevel::kWarning, "node lost",
                   {{"node", name}, {"reason", row.reason()}});
    } else if (!lost && (!was_there || found->second->node().boot_id() != row.node().boot_id())) {
      record_event(
          EventKind::kNodeUp, LogLevel::kInfo, "node up",
          {{"node", name}, {"address", row.node().address()}, {"version", row.node().daemon_version()}});
    }
  }
}

}  // namespace

AgentSide::AgentSide(Self self, Dial dial)
    : self_(std::move(self)),
      dial_(std::move(dial)),
      own_(self_.description),
      started_ns_(self_.clock.now_ns()),
      random_(seed_of(own_.boot_id())),
      coordinator_since_ns_(started_ns_),
      problem_("it has not been reached yet"),
      problem_ns_(started_ns_) {}

void AgentSide::on_opened(std::shared_ptr<Stream> stream) {
  const std::string text =
      "node " + own_.name() + " does not coordinate; the coordinator is at " + self_.settings.coordinator;
  self_.refusals.refuse(Who::kNode, Refusal::kNotCoordinator, stream->peer().address, "", text);
  stream->finish({StatusCode::kVersionMismatch, text});
}

void AgentSide::say_greeting() {
  stream_ = dial_();
  heard_ns_ = self_.clock.now_ns();
  v1::Frame frame;
  v1::Hello& hello = *frame.mutable_hello();
  hello.set_version_min(kVersionMin);
  hello.set_version_max(kVersionMax);
  hello.set_cluster(self_.settings.name);
  *hello.mutable_node() = own_;
  hello.set_term(highest_term());
  if (coordinator_) hello.set_coordinator_boot_id(coordinator_->boot_id());
  if (conversation_) {
    hello.set_channel(channel_);
    hello.set_received(conversation_->channel().received());
  }
  writes_hello_ = true;
  stream_->write(frame);
  stream_->read();
}

void AgentSide::on_frame(Stream& stream, Result<v1::Frame> frame) {
  if (&stream != stream_.get()) return;
  Status status = frame.status();
  if (status.ok()) {
    if (attached() ? !frame->has_message() : !frame->has_welcome()) {
      status = invalid_argument("the coordinator sends a frame that has no place here");
    } else {
      status =
          attached() ? take_message(std::move(*frame->mutable_message())) : take_welcome(frame->welcome());
    }
  }
  if (!status.ok()) {
    self_.refusals.refuse(Who::kNode, Refusal::kFrame, stream.peer().address, "", status.message());
    give_up(status);
    return;
  }
  heard_ns_ = coordinator_heard_ns_ = self_.clock.now_ns();
  set_coordinator(NodeState::kUp, "");
  stream.read();
}

Status AgentSide::take_welcome(const v1::Welcome& welcome) {
  const v1::NodeDescription& node = welcome.node();
  if (Status status = check_description(node); !status.ok()) return status;
  if (Status status = check_identity(node, stream_->peer(), self_.settings); !status.ok()) return status;
  if (welcome.version() < kVersionMin || welcome.version() > kVersionMax)
    return invalid_argument("the coordinator chooses version " + std::to_string(welcome.version()));
  const bool same_coordinator = coordinator_ && node.boot_id() == coordinator_->boot_id();
  const std::uint64_t lowest = highest_term() + (same_coordinator || highest_term() == 0 ? 0 : 1);
  if (welcome.term() < std::max<std::uint64_t>(lowest, 1) || welcome.term() > kMaxTerm) {
    return invalid_argument("the coordinator's term is " + std::to_string(welcome.term()) +
                            "; allowed: " + std::to_string(std::max<std::uint64_t>(lowest, 1)) + ".." +
                            std::to_string(kMaxTerm));
  }
  const std::uint64_t now = self_.clock.now_ns();
  const bool goes_on =
      conversation_ && welcome.channel() == channel_ && welcome.term() == term_ && same_coordinator;
  if (!goes_on) {
    conversation_.emplace(Channel::Ends{welcome.term(), own_.boot_id(), node.boot_id()},
                          self_.settings.heartbeat_ms, kMaxNodeFrameBytes);
  }
  term_ = welcome.term();
  channel_ = welcome.channel();
  coordinator_ = node;
  if (Status status = conversation_->opened(stream_, welcome.received(), writes_hello_, now); !status.ok()) {
    conversation_.reset();
    return status;
  }
  if (!goes_on) self_.agent.channel_began();
  pause_ms_ = 0;
  if (!problem_.empty() || !goes_on) {
    record_event(EventKind::kNodeUp, LogLevel::kInfo, "attached to the coordinator",
                 {{"node", node.name()},
                  {"address", self_.settings.coordinator},
                  {"term", term_},
                  {"again", goes_on}});
  }
  problem_.clear();
  return {};
}

Status AgentSide::take_message(v1::ChannelMessage&& message) {
  Result<std::optional<std::string>> payload = conversation_->receive(std::move(message));
  if (!payload.ok()) return payload.status();
  if (!payload.value()) return {};
  Result<v1::NodeMessage> content = parse_content(*payload.value());
  Status status = content.ok() ? take_content(std::move(*content)) : content.status();
  // The message counts as received, so the channel can't continue.
  if (!status.ok()) conversation_.reset();
  return status;
}

Status AgentSide::take_content(v1::NodeMessage&& content) {
  switch (content.what_case()) {
    case v1::NodeMessage::kTable: take_table(std::move(*content.mutable_table())); return {};
    case v1::NodeMessage::kToAgent: return take_order(content.to_agent());
    case v1::NodeMessage::WHAT_NOT_SET: return {};  // of a later version
    default: return invalid_argument("the coordinator says what only a node says");
  }
}

Status AgentSide::take_order(const std::string& bytes) {
  const Result<membership::ToAgent> order = decode_to_agent(bytes);
  if (!order.ok()) return order.status();
  if (order.value().term != term_) {
    return invalid_argument("term is " + std::to_string(order.value().term) +
                            "; allowed: that of the channel, which is " + std::to_string(term_));
  }
  self_.agent.handle(order.value());
  return {};
}

void AgentSide::take_table(v1::NodeTable&& table) {
  record_changes(told_, table, own_.name());
  told_ = std::move(table);
  told_ns_ = self_.clock.now_ns();
}

void AgentSide::on_written(Stream& stream) {
  if (&stream != stream_.get()) return;
  writes_hello_ = false;
  if (!attached()) return;
  conversation_->written();
  conversation_->pump(self_.clock.now_ns());
}

void AgentSide::on_closed(Stream& stream, const Status& why) {
  if (&stream == stream_.get()) give_up(explained(why, self_.settings.coordinator));
}

void AgentSide::give_up(const Status& why) {
  const std::uint64_t now = self_.clock.now_ns();
  const std::shared_ptr<Stream> stream = std::move(stream_);
  stream_.reset();
  if (conversation_) conversation_->closed();
  if (stream != nullptr) stream->finish(why);
  if (problem_.empty()) problem_ns_ = now;
  if (!same_problem(problem_, why.message())) {
    static LogLimiter limiter;
    limiter.log(LogLevel::kWarning, "no coordinator",
                {{"address", self_.settings.coordinator}, {"reason", why.to_string()}});
    problem_ = why.message();
  }
  if (coordinator_state_ != NodeState::kLost)
    set_coordinator(coordinator_ && nobody_listens(why) ? NodeState::kLost : NodeState::kSilent, problem_);
  pause_ms_ = std::clamp(pause_ms_ * 2, kFirstPauseMs, kLongestPauseMs);
  retry_ns_ = now + pause_ms_ * kMsNs * (75 + random_() % 50) / 100;
}

void AgentSide::set_coordinator(NodeState state, const std::string& reason) {
  if (state == coordinator_state_) return;
  coordinator_state_ = state;
  coordinator_since_ns_ = self_.clock.now_ns();
  if (state == NodeState::kLost) {
    record_event(EventKind::kNodeLost, LogLevel::kWarning, "coordinator lost",
                 {{"node", coordinator_->name()}, {"reason", reason}});
  }
}

void AgentSide::tell(v1::NodeChange change) {
  v1::NodeMessage message;
  message.set_change(change);
  send(message);
}

// If the channel is given up, the next stream begins a new one.
void AgentSide::send(const v1::NodeMessage& message) {
  if (!conversation_) return;
  const Status status = conversation_->send(message.SerializeAsString());
  if (status.ok()) return;
  conversation_.reset();
  if (stream_ != nullptr) give_up(status);
}

void AgentSide::send_of_agent() {
  for (const membership::ToCoordinator& message : self_.agent.take_messages()) {
    // An old heartbeat is of no use.
    const bool beat = std::holds_alternative<membership::AgentHeartbeat>(message.body);
    if (beat && !attached()) continue;
    v1::NodeMessage content;
    content.set_to_coordinator(encode(message, kMaxNodeFrameBytes - 2 * kFrameHeadBytes));
    send(content);
  }
}

void AgentSide::drain() {
  own_.set_draining(true);
  drained_ns_ = self_.clock.now_ns();
  tell(v1::NODE_CHANGE_DRAINS);
}

void AgentSide::leave() {
  tell(v1::NODE_CHANGE_LEAVES);
}

void AgentSide::tick() {
  const std::uint64_t now = self_.clock.now_ns();
  const std::uint64_t timeout_ns = self_.settings.node_timeout_ms * kMsNs;
  if (stream_ != nullptr && now >= heard_ns_ + timeout_ns) {
    give_up({StatusCode::kDeadlineExceeded, "the coordinator has said nothing for " +
                                                std::to_string(self_.settings.node_timeout_ms) + " ms"});
  }
  if (coordinator_ && coordinator_state_ != NodeState::kLost) {
    const std::uint64_t silence = now - coordinator_heard_ns_;
    if (silence >= timeout_ns) {
      set_coordinator(NodeState::kLost, problem_);
    } else if (silence >= timeout_ns / 2) {
      set_coordinator(NodeState::kSilent, "");
    }
  }
  send_of_agent();
  if (stream_ == nullptr && now >= retry_ns_) say_greeting();
  if (attached()) conversation_->pump(now);
}

std::uint64_t AgentSide::next_due_ns() const {
  const std::uint64_t timeout_ns = self_.settings.node_timeout_ms * kMsNs;
  std::uint64_t due = stream_ == nullptr ? retry_ns_ : heard_ns_ + timeout_ns;
  if (coordinator_ && coordinator_state_ != NodeState::kLost) {
    const bool silent = coordinator_state_ == NodeState::kSilent;
    due = std::min(due, coordinator_heard_ns_ + (silent ? timeout_ns : timeout_ns / 2));
  }
  if (attached()) due = std::min(due, conversation_->next_due_ns());
  return due;
}

View AgentSide::view() const {
  const std::uint64_t now = self_.clock.now_ns();
  View view;
  view.term = term_;
  view.problem = problem_;
  if (!problem_.empty()) view.problem_ms = (now - problem_ns_) / kMsNs;
  std::map<std::string, NodeView> nodes;
  for (const v1::NodeRow& row : told_.rows()) {
    NodeView& node = nodes[row.node().name()];
    node.boot_id = boot_id_of(row.node().boot_id());
    node.address = row.node().address();
    node.version = row.node().daemon_version();
    node.state = state_of(row.condition());
    node.since_ms = row.since_ms() + (now - told_ns_) / kMsNs;
    node.reason = row.reason();
    if (coordinator_state_ == NodeState::kUp) continue;
    node.state = NodeState::kUnknown;
    node.since_ms = (now - coordinator_since_ns_) / kMsNs;
    node.reason = "the coordinator, which tells of it, is away";
  }
  if (coordinator_) {
    NodeView& node = nodes[coordinator_->name()];
    node.boot_id = boot_id_of(coordinator_->boot_id());
    node.address = coordinator_->address();
    node.version = coordinator_->daemon_version();
    node.coordinator = true;
    node.heard_ms = (now - coordinator_heard_ns_) / kMsNs;
    if (coordinator_state_ != NodeState::kUp || node.state != NodeState::kDraining) {
      node.state = coordinator_state_;
      node.since_ms = (now - coordinator_since_ns_) / kMsNs;
      node.reason = coordinator_state_ == NodeState::kUp ? "" : problem_;
    }
  }
  NodeView& own = nodes[own_.name()];
  own.boot_id = boot_id_of(own_.boot_id());
  own.address = own_.address();
  own.version = own_.daemon_version();
  own.state = own_.draining() ? NodeState::kDraining : NodeState::kUp;
  own.since_ms = (now - (own_.draining() ? drained_ns_ : started_ns_)) / kMsNs;
  own.reason.clear();
  own.own = true;
  own.heard_ms = 0;
  for (auto& [name, node] : nodes) {
    node.name = name;
    view.nodes.push_back(std::move(node));
  }
  view.refusals = self_.refusals.counts();
  return view;
}

}  // namespace epd::cluster

#include "coordinator_side.h"

#include "base/event.h"
#include "frames.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <utility>
#include <vector>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint64_t kHelloNs = 5'000 * kMsNs;
constexpr std::uint64_t kLookNs = 200 * kMsNs;  // between two looks for a node whose stream has ended
constexpr std::size_t kMaxNewcomers = 64;

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Where the node listens; on all its addresses: on the one from which it has come.
std::optional<SocketAddress> place_of(const v1::NodeDescription& node, const PeerFacts& peer) {
  std::optional<HostPort> place = parse_host_port(node.listen());
  const std::optional<HostPort> from = parse_host_port(peer.address);
  if (place && is_wildcard(place->host) && from) place->host = from->host;
  return place ? numeric_address(*place) : std::nullopt;
}

NodeView view_of(const NodeRow& row, std::uint64_t now_ns) {
  NodeView view;
  view.name = row.node.name();
  view.boot_id = boot_id_of(row.node.boot_id());
  view.address = row.node.address();
  view.version = row.node.daemon_version();
  view.state = row.state;
  view.since_ms = (now_ns - row.since_ns) / kMsNs;
  view.reason = row.reason;
  return view;
}

}  // namespace

CoordinatorSide::CoordinatorSide(Self self, Probe probe)
    : self_(std::move(self)), probe_(std::move(probe)), table_(self_.settings.node_timeout_ms) {
  own_.node = self_.description;
  own_.since_ns = self_.clock.now_ns();
}

void CoordinatorSide::on_opened(std::shared_ptr<Stream> stream) {
  if (newcomers_.size() >= kMaxNewcomers) {
    refuse(*stream, Refusal::kConnections, "",
           resource_exhausted("too many streams that have not said Hello"));
    return;
  }
  Stream* key = stream.get();
  newcomers_[key] = {std::move(stream), self_.clock.now_ns() + kHelloNs};
  key->read();
}

void CoordinatorSide::refuse(Stream& stream, Refusal reason, const std::string& node, const Status& status) {
  self_.refusals.refuse(reason, stream.peer().address, node, status.message());
  stream.finish(status);
}

void CoordinatorSide::on_frame(Stream& stream, Result<v1::Frame> frame) {
  const auto member_name = by_stream_.find(&stream);
  const bool greeted = member_name != by_stream_.end();
  const std::string name = greeted ? member_name->second : "";
  Status bad = frame.status();
  if (bad.ok() && (greeted ? !frame->has_message() : !frame->has_hello()))
    bad =
        invalid_argument(greeted ? "a frame that is no message, after Hello" : "the first frame is no Hello");
  if (!greeted) {
    const auto newcomer = newcomers_.extract(&stream);
    if (newcomer.empty()) return;
    const std::shared_ptr<Stream> kept = newcomer.mapped().stream;
    if (bad.ok()) {
      take_in(kept, std::move(*frame->mutable_hello()));
    } else {
      refuse(stream, Refusal::kFrame, "", bad);
    }
    return;
  }
  Member& member = members_.at(name);
  if (bad.ok()) {
    Result<std::optional<v1::NodeMessage>> message =
        member.conversation.receive(std::move(*frame->mutable_message()));
    if (message.ok()) {
      table_.heard(name, self_.clock.now_ns());
      stream.read();
      if (message.value()) take(name, *message.value());
      return;
    }
    bad = message.status();
  }
  self_.refusals.refuse(Refusal::kFrame, stream.peer().address, name, bad.message());
  drop(name, bad);
}

// Whether the node may come in; if not, it has been told.
bool CoordinatorSide::judge(Stream& stream, v1::Hello& hello) {
  const v1::NodeDescription& node = hello.node();
  const Settings& settings = self_.settings;
  if (Status status = check_description(node); !status.ok()) {
    refuse(stream, Refusal::kFrame, "", status);
    return false;
  }
  hello.mutable_node()->set_name(lower(node.name()));
  if (const auto version = common_version(hello); !version.ok()) {
    refuse(stream, Refusal::kVersion, node.name(), version.status());
    return false;
  }
  if (hello.cluster() != settings.name) {
    const std::string theirs = is_name(hello.cluster()) ? "\"" + hello.cluster() + "\"" : "no name";
    refuse(stream, Refusal::kOtherCluster, node.name(),
           {StatusCode::kVersionMismatch,
            "its cluster.name is " + theirs + ", that of the coordinator \"" + settings.name + "\""});
    return false;
  }
  if (Status status = check_identity(node, stream.peer(), settings); !status.ok()) {
    refuse(stream, Refusal::kIdentity, node.name(), status);
    return false;
  }
  const auto member = members_.find(node.name());
  const NodeRow* row = table_.find(node.name());
  const bool in_use = member != members_.end() && row != nullptr && row->node.boot_id() != node.boot_id() &&
                      row->connected && row->state != NodeState::kSilent;
  if (node.name() == own_.node.name() || in_use) {
    refuse(stream, Refusal::kNodes, node.name(),
           {StatusCode::kAborted, "another daemon is node " + node.name() + " already"});
    return false;
  }
  return true;
}

void CoordinatorSide::take_in(std::shared_ptr<Stream> stream, v1::Hello hello) {
  if (!judge(*stream, hello)) return;
  hear_of_term(hello);
  const std::uint64_t now = self_.clock.now_ns();
  const std::string name = hello.node().name();
  const std::uint32_t version = common_version(hello).value();
  auto member = members_.find(name);
  if (member != members_.end()) {
    drop(name, {StatusCode::kAborted, "a later stream of node " + name + " takes its place"});
    if (resume(member->second, stream, hello).ok()) {
      by_stream_[stream.get()] = name;
      (void)table_.up(hello.node(), now);  // it has a row
      log_event(LogLevel::kInfo, "node attached again", {{"node", name}, {"peer", stream->peer().address}});
      welcome(stream, member->second, version);
      return;
    }
    lose(name, "its daemon has attached anew");
  }
  if (Status status = table_.up(hello.node(), now); !status.ok()) {
    refuse(*stream, Refusal::kNodes, name, status);
    return;
  }
  const membership::Channel::Ends ends{term_, boot_id_of(own_.node.boot_id()),
                                       boot_id_of(hello.node().boot_id())};
  member = members_.emplace(name, Member{++last_number_, {ends, self_.settings.heartbeat_ms}}).first;
  (void)member->second.conversation.opened(stream, 0, true, now);  // a new channel has received nothing
  by_stream_[stream.get()] = name;
  record_event(EventKind::kNodeUp, LogLevel::kInfo, "node up",
               {{"node", name},
                {"peer", stream->peer().address},
                {"address", hello.node().address()},
                {"version", hello.node().daemon_version()}});
  welcome(stream, member->second, version);
}

Status CoordinatorSide::resume(Member& member, const std::shared_ptr<Stream>& stream,
                               const v1::Hello& hello) {
  const membership::Channel::Ends& ends = member.conversation.channel().ends();
  const bool same = hello.channel() == member.number && hello.coordinator_boot_id() == own_.node.boot_id() &&
                    boot_id_of(hello.node().boot_id()) == ends.other && ends.term == term_;
  if (!same) return not_found("another channel");
  member.place.reset();
  return member.conversation.opened(stream, hello.received(), true, self_.clock.now_ns());
}

void CoordinatorSide::welcome(const std::shared_ptr<Stream>& stream, Member& member, std::uint32_t version) {
  v1::Frame frame;
  v1::Welcome& message = *frame.mutable_welcome();
  message.set_version(version);
  *message.mutable_node() = own_.node;
  message.set_term(term_);
  message.set_channel(member.number);
  message.set_received(member.conversation.channel().received());
  stream->write(frame);
  stream->read();
}

// A node that has obeyed a coordinator before this one tells its term: this one's must be above it.
void CoordinatorSide::hear_of_term(const v1::Hello& hello) {
  if (hello.coordinator_boot_id() == own_.node.boot_id() || hello.term() < term_) return;
  if (hello.term() == std::numeric_limits<std::uint64_t>::max()) return;  // none follows; the node refuses us
  term_ = hello.term() + 1;
  log_event(LogLevel::kInfo, "term", {{"term", term_}, {"node", hello.node().name()}});
  std::vector<std::string> names;
  for (const auto& [name, member] : members_) names.push_back(name);
  for (const std::string& name : names) {
    drop(name, {StatusCode::kAborted, "the term is " + std::to_string(term_) + " now"});
    members_.erase(name);
  }
}

void CoordinatorSide::take(const std::string& name, const v1::NodeMessage& message) {
  switch (message.change()) {
    case v1::NODE_CHANGE_DRAINS:
      record_event(EventKind::kNodeDrains, LogLevel::kInfo, "node drains", {{"node", name}});
      table_.drains(name, self_.clock.now_ns());
      break;
    case v1::NODE_CHANGE_LEAVES: lose(name, "its daemon has stopped"); break;
    default: break;  // of a later version
  }
}

void CoordinatorSide::on_written(Stream& stream) {
  const auto found = by_stream_.find(&stream);
  if (found == by_stream_.end()) return;
  Conversation& conversation = members_.at(found->second).conversation;
  conversation.written();
  conversation.pump(self_.clock.now_ns());
}

void CoordinatorSide::on_closed(Stream& stream, const Status& why) {
  newcomers_.erase(&stream);
  const auto found = by_stream_.find(&stream);
  if (found == by_stream_.end()) return;
  const std::string name = found->second;
  Member& member = members_.at(name);
  member.place = place_of(table_.find(name)->node, stream.peer());
  log_event(LogLevel::kInfo, "node's stream ended", {{"node", name}, {"reason", why.message()}});
  drop(name, why);
  if (member.place) look_for(name, member);
}

// Ends the node's stream; its channel waits for another one.
void CoordinatorSide::drop(const std::string& name, const Status& why) {
  Conversation& conversation = members_.at(name).conversation;
  const std::shared_ptr<Stream> stream = conversation.stream();
  conversation.closed();
  table_.disconnected(name, "its stream has ended: " + why.message(), self_.clock.now_ns());
  if (stream == nullptr) return;
  by_stream_.erase(stream.get());
  stream->finish(why);
}

// A daemon that is killed leaves nobody who listens; then there is nothing to wait for. It is looked for
// again and again: its connections may end a moment before its port does.
void CoordinatorSide::look_for(const std::string& name, Member& member) {
  const NodeRow& gone = *table_.find(name);
  member.look_due_ns = self_.clock.now_ns() + kLookNs;
  const std::string at = to_string(*member.place);
  probe_(*member.place, [this, name, boot_id = gone.node.boot_id(), at](bool refused) {
    const NodeRow* row = table_.find(name);
    const bool same = row != nullptr && row->node.boot_id() == boot_id;
    if (refused && same && !row->connected && row->state != NodeState::kLost)
      lose(name, "nobody listens at " + at + " any more");
  });
}

void CoordinatorSide::lose(const std::string& name, const std::string& reason) {
  const auto member = members_.find(name);
  if (member != members_.end()) {
    drop(name, {StatusCode::kAborted, "node " + name + " is lost: " + reason});
    members_.erase(member);
  }
  table_.lost(name, reason, self_.clock.now_ns());
  record_event(EventKind::kNodeLost, LogLevel::kWarning, "node lost", {{"node", name}, {"reason", reason}});
}

void CoordinatorSide::drain() {
  own_.node.set_draining(true);
  own_.state = NodeState::kDraining;
  own_.since_ns = self_.clock.now_ns();
  own_changed_ = true;
}

void CoordinatorSide::tell_all() {
  const std::uint64_t now = self_.clock.now_ns();
  v1::NodeMessage message;
  v1::NodeTable& table = *message.mutable_table();
  bool own_told = false;
  const auto tell_own = [&] {
    *table.add_rows() = message_of(own_, now);
    own_told = true;
  };
  for (const auto& [name, row] : table_.rows()) {
    if (!own_told && own_.node.name() < name) tell_own();
    *table.add_rows() = message_of(row, now);
  }
  if (!own_told) tell_own();
  std::vector<std::string> full;
  for (auto& [name, member] : members_) {
    if (!member.conversation.send(message).ok()) full.push_back(name);
  }
  for (const std::string& name : full)
    lose(name, "it takes nothing in: " + std::to_string(membership::Channel::kMaxKeptBytes) + " bytes wait");
}

void CoordinatorSide::tick() {
  const std::uint64_t now = self_.clock.now_ns();
  for (const std::string& name : table_.tick(now)) {
    const std::string reason = table_.find(name)->reason;
    lose(name, reason);
  }
  std::vector<std::shared_ptr<Stream>> late;
  for (const auto& [key, newcomer] : newcomers_) {
    if (now >= newcomer.due_ns) late.push_back(newcomer.stream);
  }
  for (const auto& stream : late) {
    newcomers_.erase(stream.get());
    refuse(*stream, Refusal::kFrame, "", invalid_argument("no Hello within 5 s"));
  }
  if (table_.take_change() || own_changed_) {
    own_changed_ = false;
    tell_all();
  }
  for (auto& [name, member] : members_) {
    member.conversation.pump(now);
    if (member.place && now >= member.look_due_ns) look_for(name, member);
  }
}

std::uint64_t CoordinatorSide::next_due_ns() const {
  std::uint64_t due = table_.next_due_ns();
  for (const auto& [key, newcomer] : newcomers_) due = std::min(due, newcomer.due_ns);
  for (const auto& [name, member] : members_) {
    due = std::min(due, member.conversation.next_due_ns());
    if (member.place) due = std::min(due, member.look_due_ns);
  }
  return due;
}

View CoordinatorSide::view() const {
  const std::uint64_t now = self_.clock.now_ns();
  View view;
  view.coordinates = true;
  view.term = term_;
  NodeView own = view_of(own_, now);
  own.own = own.coordinator = true;
  own.heard_ms = 0;
  view.nodes.push_back(std::move(own));
  for (const auto& [name, row] : table_.rows()) {
    NodeView node = view_of(row, now);
    node.heard_ms = (now - row.heard_ns) / kMsNs;
    view.nodes.push_back(std::move(node));
  }
  std::sort(view.nodes.begin(), view.nodes.end(),
            [](const NodeView& a, const NodeView& b) { return a.name < b.name; });
  view.refusals = self_.refusals.counts();
  return view;
}

}  // namespace epd::cluster

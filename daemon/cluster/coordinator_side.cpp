#include "coordinator_side.h"

#include "base/event.h"
#include "frames.h"

#include <algorithm>
#include <cctype>
#include <utility>
#include <vector>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint64_t kHelloNs = 5'000 * kMsNs;
constexpr std::uint64_t kLookNs = 200 * kMsNs;  // between two probes of a node whose stream has ended
constexpr std::size_t kMaxNewcomers = 64;
constexpr std::size_t kMaxCertificateText = 300;  // of a refusal: a certificate may have many names

// The wall clocks of two coordinators may differ by this much: 136 years, as when one of them begins in 1970.
constexpr std::uint64_t kClockErrorSeconds = std::uint64_t{1} << 32;

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// One text for all certificates of the same names.
std::string certificate_of(const PeerFacts& peer) {
  return peer.names.empty() ? "certificates without names, or none"
                            : "the certificate of " + listed(peer.names);
}

// How well the connection proves that its node is reached at that host.
int claim(const PeerFacts& peer, const std::string& host) {
  const auto is_host = [&](const std::string& name) { return same_name(name, host); };
  if (std::any_of(peer.names.begin(), peer.names.end(), is_host) ||
      std::any_of(peer.addresses.begin(), peer.addresses.end(), is_host))
    return 2;
  const std::optional<HostPort> from = parse_host_port(peer.address);
  return from && is_host(from->host) ? 1 : 0;
}

// Returns the address to probe: where the node listens, or, if it listens on all addresses, the one that it
// came from.
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

CoordinatorSide::CoordinatorSide(Self self, Options options, Probe probe)
    : self_(std::move(self)),
      options_(std::move(options)),
      probe_(std::move(probe)),
      raise_ns_(std::max<std::uint64_t>(1'000, 4 * std::uint64_t{self_.settings.node_timeout_ms}) * kMsNs),
      table_(self_.settings.node_timeout_ms) {
  own_.node = self_.description;
  own_.since_ns = self_.clock.now_ns();
  begin_term(std::max({options_.first_term, std::uint64_t{1}, self_.agent.term() + 1}));
}

void CoordinatorSide::on_opened(std::shared_ptr<Stream> stream) {
  if (newcomers_.size() >= kMaxNewcomers) make_room_for_newcomer();
  Stream* key = stream.get();
  std::string certificate = certificate_of(stream->peer());
  newcomers_[key] = {std::move(stream), std::move(certificate), self_.clock.now_ns() + kHelloNs};
  key->read();
}

// Ends the oldest newcomer of the certificate that has most, so that no other certificate is kept out.
void CoordinatorSide::make_room_for_newcomer() {
  std::map<std::string, std::size_t> held;
  for (const auto& [key, newcomer] : newcomers_) ++held[newcomer.certificate];
  const auto most = std::max_element(held.begin(), held.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  auto oldest = newcomers_.end();
  for (auto one = newcomers_.begin(); one != newcomers_.end(); ++one) {
    const bool older = oldest == newcomers_.end() || one->second.due_ns < oldest->second.due_ns;
    if (one->second.certificate == most->first && older) oldest = one;
  }
  const std::shared_ptr<Stream> stream = std::move(oldest->second.stream);
  newcomers_.erase(oldest);
  refuse(*stream, Refusal::kConnections, "",
         resource_exhausted("too many streams that have not said Hello: " + std::to_string(most->second) +
                            " of " + std::to_string(kMaxNewcomers) + " are of " +
                            most->first.substr(0, kMaxCertificateText) +
                            ", whose oldest makes room for another"));
}

void CoordinatorSide::refuse(Stream& stream, Refusal reason, const std::string& node, const Status& status) {
  self_.refusals.refuse(Who::kNode, reason, stream.peer().address, node, status.message());
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
    Result<std::optional<std::string>> payload =
        member.conversation.receive(std::move(*frame->mutable_message()));
    bad = payload.status();
    if (bad.ok()) {
      table_.heard(name, self_.clock.now_ns());
      const Status status = payload.value() ? take(name, *payload.value()) : Status();
      if (status.ok()) {
        if (by_stream_.contains(&stream)) stream.read();
        return;
      }
      // The message counts as received, so the channel can't continue.
      self_.refusals.refuse(Who::kNode, Refusal::kFrame, stream.peer().address, name, status.message());
      drop(name, status);
      lose(name, "it says what no node says: " + status.message());
      return;
    }
  }
  self_.refusals.refuse(Who::kNode, Refusal::kFrame, stream.peer().address, name, bad.message());
  drop(name, bad);
}

// Whether the node may come in. If not, it has been told.
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
  // While its stream is open, a node is replaced by nobody but itself, which knows the channel.
  const auto member = members_.find(node.name());
  const bool in_use = member != members_.end() && member->second.conversation.stream() != nullptr &&
                      !has_channel(member->second, hello);
  if (node.name() == own_.node.name() || in_use) {
    refuse(stream, Refusal::kNodes, node.name(),
           {StatusCode::kAborted, "another daemon is node " + node.name() + " already"});
    return false;
  }
  return judge_term(stream, hello) && judge_address(stream, node);
}

// An address belongs to the node whose certificate names its host, else to the node that connects from there,
// else to the node that has it. A node that held it wrongly is lost.
bool CoordinatorSide::judge_address(Stream& stream, const v1::NodeDescription& node) {
  const std::string holder = holder_of_address(node);
  if (holder.empty()) return true;
  const std::string host = parse_host_port(node.address())->host;
  const auto member = members_.find(holder);
  const Stream* held = member == members_.end() ? nullptr : member->second.conversation.stream().get();
  if (held == nullptr || claim(stream.peer(), host) <= claim(held->peer(), host)) {
    refuse(stream, Refusal::kNodes, node.name(),
           invalid_argument("its cluster.advertise is \"" + node.address() + "\", where node " + holder +
                            " is reached; allowed: where others reach this node"));
    return false;
  }
  lose(holder, "its cluster.advertise is \"" + node.address() + "\", which belongs to node " + node.name());
  return true;
}

// Another node that is reached at the node's address; "" if none is.
std::string CoordinatorSide::holder_of_address(const v1::NodeDescription& node) const {
  if (node.address() == own_.node.address()) return own_.node.name();
  for (const auto& [name, row] : table_.rows()) {
    const bool here = row.connected && row.state != NodeState::kLost;
    if (here && name != node.name() && row.node.address() == node.address()) return name;
  }
  return "";
}

bool CoordinatorSide::has_channel(const Member& member, const v1::Hello& hello) const {
  const Channel::Ends& ends = member.conversation.channel().ends();
  return hello.channel() == member.number && hello.coordinator_boot_id() == own_.node.boot_id() &&
         hello.node().boot_id() == ends.other && ends.term == term_;
}

// Whether the node has obeyed an earlier coordinator of this or a higher term.
bool CoordinatorSide::is_raised_by(const v1::Hello& hello) const {
  return hello.term() >= term_ && hello.coordinator_boot_id() != own_.node.boot_id();
}

// The highest term of another coordinator that is believed. Terms begin with the wall clock's seconds, and
// clocks may be wrong. The bound grows with the clock, so a node that raises the term to it leaves room for
// the next coordinator, which begins later.
std::uint64_t CoordinatorSide::most_term() const {
  return std::min(options_.seconds() + kClockErrorSeconds, kMaxTerm - 2);
}

bool CoordinatorSide::judge_term(Stream& stream, const v1::Hello& hello) {
  const std::string& name = hello.node().name();
  const bool own = hello.coordinator_boot_id() == own_.node.boot_id();
  const std::uint64_t most = own ? term_ : most_term();
  if (hello.term() > most) {
    const char* why = own ? ", which is this coordinator's" : ", by this node's clock";
    refuse(stream, Refusal::kTerm, name,
           invalid_argument("its term is " + std::to_string(hello.term()) + "; allowed: at most " +
                            std::to_string(most) + why));
    return false;
  }
  if (!is_raised_by(hello)) return true;
  const auto raised = raised_ns_.find(name);
  if (raised == raised_ns_.end() || self_.clock.now_ns() >= raised->second + raise_ns_) return true;
  refuse(stream, Refusal::kTerm, name,
         {StatusCode::kAborted, "node " + name + " has raised the term to " + std::to_string(term_) +
                                    "; allowed: once in " + std::to_string(raise_ns_ / kMsNs) + " ms"});
  return false;
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
    lose(name, "its daemon has attached again without its channel");
  }
  if (Status status = table_.up(hello.node(), now); !status.ok()) {
    refuse(*stream, Refusal::kNodes, name, status);
    return;
  }
  const Channel::Ends ends{term_, own_.node.boot_id(), hello.node().boot_id()};
  const std::uint64_t number = std::max<std::uint64_t>(options_.random(), 1);
  member = members_.emplace(name, Member{number, {ends, self_.settings.heartbeat_ms, kMaxFrameBytes}}).first;
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
  if (!has_channel(member, hello)) return not_found("another channel");
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

void CoordinatorSide::hear_of_term(const v1::Hello& hello) {
  if (!is_raised_by(hello)) return;
  const std::uint64_t now = self_.clock.now_ns();
  std::erase_if(raised_ns_, [&](const auto& raised) { return now >= raised.second + raise_ns_; });
  raised_ns_[hello.node().name()] = now;
  begin_term(hello.term() + 1);
}

Status CoordinatorSide::take(const std::string& name, const std::string& payload) {
  const Result<v1::NodeMessage> content = parse_content(payload);
  if (!content.ok()) return content.status();
  switch (content.value().what_case()) {
    case v1::NodeMessage::kChange: take_change(name, content.value().change()); return {};
    case v1::NodeMessage::kToCoordinator: return take_event(name, content.value().to_coordinator());
    case v1::NodeMessage::WHAT_NOT_SET: return {};  // of a later version
    default: return invalid_argument("a node says what only the coordinator says");
  }
}

Status CoordinatorSide::take_event(const std::string& name, const std::string& bytes) {
  Result<membership::ToCoordinator> event = decode_to_coordinator(bytes);
  if (!event.ok()) return event.status();
  // No agent can have obeyed this coordinator before it is open. A node that claims so would make it take the
  // next term, again and again.
  const bool listens = coordinator_->listening();
  const std::uint64_t most = listens ? term_ - 1 : term_;
  if (event->term > most) {
    return invalid_argument("term is " + std::to_string(event->term) + "; allowed: at most " +
                            std::to_string(most) +
                            (listens ? ", while the coordinator listens" : ", which is that of the channel"));
  }
  coordinator_->handle(name, std::move(*event));
  deliver();
  return {};
}

void CoordinatorSide::take_change(const std::string& name, v1::NodeChange change) {
  switch (change) {
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

// Ends the node's stream. Its channel waits for another one.
void CoordinatorSide::drop(const std::string& name, const Status& why) {
  Conversation& conversation = members_.at(name).conversation;
  const std::shared_ptr<Stream> stream = conversation.stream();
  conversation.closed();
  table_.disconnected(name, "its stream has ended: " + why.message(), self_.clock.now_ns());
  if (stream == nullptr) return;
  by_stream_.erase(stream.get());
  stream->finish(why);
}

// Nobody listens for a killed daemon, so it is lost at once. It is probed repeatedly: its connections may end
// a moment before its port does.
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
  coordinator_->node_gone(name, reason);
  deliver();
}

void CoordinatorSide::drain() {
  own_.node.set_draining(true);
  own_.state = NodeState::kDraining;
  own_.since_ns = self_.clock.now_ns();
  untold_ = true;
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
  const std::string payload = message.SerializeAsString();
  std::vector<std::string> names;
  for (const auto& [name, member] : members_) names.push_back(name);
  for (const std::string& name : names) send(name, payload);
}

// Sends only to a node that is still a member.
void CoordinatorSide::send(const std::string& name, std::string payload) {
  const auto member = members_.find(name);
  if (member == members_.end()) return;
  const Status status = member->second.conversation.send(std::move(payload));
  if (!status.ok()) lose(name, "it takes nothing in: " + status.message());
}

// ---- groups that span nodes

void CoordinatorSide::begin_term(std::uint64_t term) {
  term_ = term;
  log_event(LogLevel::kInfo, "term", {{"term", term_}});
  while (!members_.empty()) {
    drop(members_.begin()->first, {StatusCode::kAborted, "the term is " + std::to_string(term_) + " now"});
    members_.erase(members_.begin());
  }
  sent_.clear();
  const Settings& settings = self_.settings;
  coordinator_ = std::make_unique<membership::Coordinator>(
      self_.clock, membership::Coordinator::Options{
                       {settings.heartbeat_ms, settings.node_timeout_ms, options_.orphan_ms},
                       options_.limits,
                       term_,
                       [random = options_.random] {
                         return membership::EpochKey{random(), random()};
                       },
                       [this](const std::string& name) {
                         const NodeRow* row = name == own_.node.name() ? &own_ : table_.find(name);
                         return row == nullptr ? std::string() : row->node.address();
                       },
                       options_.most_groups_of,
                       [this](const std::string& name, std::uint32_t uid) {
                         return self_.settings.check_user(name, uid);
                       }});
  self_.agent.channel_began();
}

void CoordinatorSide::turn_of_groups() {
  coordinator_->tick();
  deliver();
  // The own agent is connected without a channel.
  for (auto messages = self_.agent.take_messages(); !messages.empty();
       messages = self_.agent.take_messages()) {
    for (membership::ToCoordinator& message : messages) {
      coordinator_->handle(own_.node.name(), std::move(message));
      deliver();
    }
  }
  if (coordinator_->superseded() || coordinator_->term() != term_)
    begin_term(std::max({term_, coordinator_->term(), self_.agent.term()}) + 1);
}

void CoordinatorSide::deliver() {
  for (membership::Coordinator::Sent& one : coordinator_->take_messages()) sent_.push_back(std::move(one));
  if (delivers_) return;  // the running call delivers them
  delivers_ = true;
  while (!sent_.empty()) {
    membership::Coordinator::Sent one = std::move(sent_.front());
    sent_.pop_front();
    deliver(std::move(one));
  }
  delivers_ = false;
}

void CoordinatorSide::deliver(membership::Coordinator::Sent&& sent) {
  if (sent.node == own_.node.name()) {
    self_.agent.handle(sent.message);
    return;
  }
  const auto member = members_.find(sent.node);
  if (member == members_.end()) return;
  // A node that is lost for its groups is lost altogether. Its next channel tells it.
  if (const auto* out = std::get_if<membership::PutOut>(&sent.message.body)) {
    lose(sent.node, out->text);
    return;
  }
  const bool beat = std::holds_alternative<membership::CoordinatorHeartbeat>(sent.message.body);
  if (beat && member->second.conversation.stream() == nullptr) return;  // an old one is of no use
  v1::NodeMessage content;
  content.set_to_agent(encode(sent.message));
  send(sent.node, content.SerializeAsString());
}

std::vector<SpanningGroup> CoordinatorSide::spanning_groups() const {
  std::map<std::uint32_t, std::string> names;
  for (const auto& [name, node] : coordinator_->nodes()) names[node.number] = name;
  std::vector<SpanningGroup> list;
  for (const auto& [id, group] : coordinator_->groups()) {
    SpanningGroup one{id, group.uid, group.name, group.phase(), group.epoch, {}};
    for (const auto& [rank, member] : group.members) one.ranks.emplace_back(rank, names[member.engine.node]);
    list.push_back(std::move(one));
  }
  return list;
}

// ---- time

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
  turn_of_groups();
  untold_ |= table_.take_change();
  if (untold_ && now >= told_ns_ + self_.settings.heartbeat_ms * kMsNs) {
    untold_ = false;
    told_ns_ = now;
    tell_all();
  }
  for (auto& [name, member] : members_) {
    member.conversation.pump(now);
    if (member.place && now >= member.look_due_ns) look_for(name, member);
  }
}

std::uint64_t CoordinatorSide::next_due_ns() const {
  std::uint64_t due = std::min(table_.next_due_ns(), coordinator_->next_due_ns());
  if (untold_) due = std::min(due, told_ns_ + self_.settings.heartbeat_ms * kMsNs);
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

#include "far_side.h"

#include "round_clock.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>

namespace epd::engine {

using abi::FarGreeting;
using abi::FarHeader;
using far::Drop;

namespace {

// A checksum by which two engines compare what they were told. It protects no secret.
std::uint64_t digest(std::span<const std::uint64_t> words) {
  return far::sip_hash({}, std::as_bytes(words));
}

}  // namespace

FarSide::FarSide(const abi::GroupBegin& message, const transport::NetworkOptions& network,
                 std::uint64_t incarnation, far::Port* port, far::Ledger* ledger)
    : id_(message.group_id),
      shape_(message.shape),
      node_(message.node),
      incarnation_(incarnation),
      batch_bytes_(static_cast<std::uint32_t>(network.batch_bytes)),
      window_bytes_(static_cast<std::uint32_t>(network.window_bytes)),
      check_(network.check),
      gap_ns_(std::uint64_t{network.peer_timeout_ms} * 1'000'000),
      port_(port),
      ledger_(ledger),
      places_(message.shape.num_ranks),
      view_(message.view),
      key_{message.epoch_key[0], message.epoch_key[1]} {}

// ---- the view

// For a masked rank the supervisor names no node.
void FarSide::place(const abi::GroupRank& message) {
  Place& place = places_[message.rank];
  place.active = message.active_since != 0;
  if (place.active) place = {message.node, message.device_index, true};
}

void FarSide::set_epoch(std::uint64_t view, const std::uint64_t (&key)[2]) {
  view_ = view;
  key_ = {key[0], key[1]};
}

std::string FarSide::node_name(std::uint32_t rank) const {
  const std::string name = ledger_ == nullptr ? "" : ledger_->node_name(engine_of(rank));
  return name.empty() ? "node " + std::to_string(node_of(rank)) : name;
}

std::uint64_t FarSide::memory_bytes(far::EngineId engine) const {
  const auto found = memory_of_.find(engine);
  return found == memory_of_.end() ? 0 : found->second;
}

std::vector<far::EngineId> FarSide::engines() const {
  std::set<far::EngineId> engines;
  for (std::uint32_t rank = 0; rank < places_.size(); ++rank) {
    if (places_[rank].active && !is_near(rank)) engines.insert(engine_of(rank));
  }
  return {engines.begin(), engines.end()};
}

std::uint64_t FarSide::shape_digest() const {
  std::vector<std::uint64_t> words{batch_bytes_, window_bytes_};
  std::uint32_t fields[sizeof(shape_) / sizeof(std::uint32_t)];
  std::memcpy(fields, &shape_, sizeof(shape_));
  words.insert(words.end(), std::begin(fields), std::end(fields));
  return digest(words);
}

std::uint64_t FarSide::view_digest() const {
  std::vector<std::uint64_t> words{view_, first_index_};
  for (const Place& place : places_)
    words.push_back(place.active ? far_engine_id(place.node, place.device) : ~std::uint64_t{0});
  return digest(words);
}

// ---- epochs

far::FarGroup& FarSide::group(std::uint32_t device) {
  EPD_CHECK(port_ != nullptr);
  if (group_ == nullptr) {
    own_ = far_engine_id(node_, device);
    group_ = std::make_unique<far::FarGroup>(
        far::FarGroup::Facts{id_, shape_, own_, batch_bytes_, window_bytes_, ledger_, check_, gap_ns_},
        *port_);
  }
  EPD_CHECK(own_ == far_engine_id(node_, device));
  return *group_;
}

// Checked for every possible view: all ranks but one may be on another node.
Status FarSide::check_sizes(std::uint64_t max_body_bytes) const {
  const far::FarSizes sizes(shape_, std::max(1u, shape_.num_ranks - 1), 0, 0);
  const std::uint64_t token = sizes.batch_bytes;
  if (2 * token > window_bytes_) {
    return resource_exhausted("network.window_bytes is " + std::to_string(window_bytes_) +
                              "; allowed: at least " + std::to_string(2 * token) +
                              " for two tokens of this group");
  }
  if (token > max_body_bytes) {
    return resource_exhausted("a token of this group may need " + std::to_string(token) +
                              " bytes; allowed: " + std::to_string(max_body_bytes) + " in a message");
  }
  return {};
}

void FarSide::begin(std::uint64_t epoch, std::uint64_t first_index, std::span<const std::uint8_t> masked,
                    std::uint64_t now_ns) {
  if (group_ == nullptr) return;
  epoch_ = epoch;
  first_index_ = first_index;
  std::vector<std::uint32_t> nodes;
  std::vector<far::EngineId> engines;
  std::vector<std::uint8_t> away;
  for (std::uint32_t rank = 0; rank < places_.size(); ++rank) {
    nodes.push_back(places_[rank].node);
    engines.push_back(engine_of(rank));
    away.push_back(!places_[rank].active || (!masked.empty() && masked[rank] != 0) ? 1 : 0);
  }
  group_->begin({epoch, first_index, nodes, engines, away, node_, key_, now_ns});
  memory_bytes_ = group_->memory_bytes();
  memory_of_.clear();
  greetings_.clear();
  for (const far::EngineId engine : this->engines()) {
    memory_of_[engine] = group_->memory_bytes(engine);
    greetings_[engine] = {};
  }
}

void FarSide::end() {
  if (in_epoch()) group_->end();
  greetings_.clear();
}

// ---- greetings

std::optional<far::EngineId> FarSide::awaited() const {
  for (const auto& [engine, greeting] : greetings_) {
    if (!greeting.heard) return engine;
  }
  return std::nullopt;
}

bool FarSide::awaits(far::EngineId engine) const {
  const auto found = greetings_.find(engine);
  return found != greetings_.end() && !found->second.heard;
}

std::optional<FarSide::Difference> FarSide::difference() const {
  for (const auto& [engine, greeting] : greetings_) {
    if (!greeting.differs.empty()) return Difference{engine, greeting.differs};
  }
  return std::nullopt;
}

Drop FarSide::greet(far::EngineId from, std::span<const std::byte> bytes, const far::Body& body) {
  FarHeader header;
  FarGreeting words;
  if (abi::read_far_header(bytes, body.bytes, header) != abi::FarReason::kNone) return Drop::kHeader;
  if (!in_epoch()) return Drop::kBroken;
  if (header.tag != abi::far_epoch_tag(epoch_)) return Drop::kEpoch;
  const auto found = greetings_.find(from);
  if (found == greetings_.end()) return Drop::kEngine;
  if (header.token != far::message_token(key_, from, own_)) return Drop::kToken;
  if (!far::body_is_whole(header, {body.data, body.bytes}, check_)) return Drop::kChecksum;
  if (abi::read_far_greeting({body.data, body.bytes}, words) != abi::FarReason::kNone) return Drop::kContent;
  // Before any word of it is believed. A side with another check tells the difference itself.
  if (!group_->is_authentic(from, header, {body.data, body.bytes})) return Drop::kChecksum;
  Greeting& greeting = found->second;
  greeting.asked |= words.heard == 0;
  if (words.check != static_cast<std::uint64_t>(check_)) {
    greeting.differs = std::string("network.check (here \"") + abi::far_check_name(check_) + "\", there \"" +
                       abi::far_check_name(static_cast<abi::FarCheck>(words.check)) + "\")";
  } else if (words.shape_digest != shape_digest()) {
    greeting.differs = "shape, network.batch_bytes (here " + std::to_string(batch_bytes_) +
                       ") or network.window_bytes (here " + std::to_string(window_bytes_) + ")";
  } else if (words.view_digest != view_digest()) {
    greeting.differs = "view: which ranks take part, and where";
  } else {
    greeting.heard = true;
    greeting.differs.clear();
  }
  return Drop::kNone;
}

bool FarSide::say_greeting(far::EngineId to, const Greeting& greeting) {
  auto message = std::make_unique<far::Message>();
  FarHeader& header = message->header;
  header.type = abi::FarType::kGreeting;
  header.tag = abi::far_epoch_tag(epoch_);
  header.from_rank = header.to_rank = abi::kFarNoRank;
  header.body_bytes = sizeof(FarGreeting);
  FarGreeting words{};
  words.incarnation = incarnation_;
  words.shape_digest = shape_digest();
  words.view_digest = view_digest();
  words.heard = greeting.heard ? 1 : 0;
  words.check = static_cast<std::uint64_t>(check_);
  const std::string node = "node " + std::to_string(node_);
  std::memcpy(words.node, node.data(), std::min(node.size(), sizeof(words.node) - 1));
  message->engine = to;
  message->body = far::Buffer(sizeof(words));
  std::memcpy(message->body.data(), &words, sizeof(words));
  group_->seal(*message);
  return port_->send(message);
}

// ---- of the loop

void FarSide::received(far::EngineId from, std::span<const std::byte> header, const far::Body& body) {
  FarHeader raw;
  std::memcpy(&raw, header.data(),
              sizeof(raw));  // the finder of the group's number in the header has checked its size
  if (raw.type != abi::FarType::kGreeting) {
    if (group_ != nullptr) return group_->received(from, header, body);
  } else if (const Drop drop = greet(from, header, body); drop != Drop::kNone && group_ != nullptr) {
    group_->drop(from, drop);
  }
  port_->release(body);
}

bool FarSide::step(std::uint64_t now_ns) {
  if (!in_epoch()) return false;
  bool sent = false;
  for (auto& [engine, greeting] : greetings_) {
    const bool due = !greeting.heard && now_ns >= greeting.say_ns;
    if ((!due && !greeting.asked) || !say_greeting(engine, greeting)) continue;
    greeting.asked = false;
    greeting.say_ns = now_ns + kGreetingNs;
    sent = true;
  }
  return group_->step(now_ns) || sent;
}

std::uint64_t FarSide::next_look_ns() const {
  if (!in_epoch()) return kNever;
  const std::uint64_t due = group_->due_ns();
  std::uint64_t next = due == 0 ? kNever : due;
  for (const auto& [engine, greeting] : greetings_) {
    if (greeting.asked) return 0;
    if (!greeting.heard) next = std::min(next, greeting.say_ns);
  }
  return next;
}

}  // namespace epd::engine

// A node that does not coordinate: it attaches to the coordinator, again and again, and keeps what the
// coordinator sends. Pure but for streams, which are injected.
#pragma once

#include "channel.h"
#include "side.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>

namespace epd::cluster {

// Begins to connect to the coordinator. Frames may be written at once. Never null.
using Dial = std::function<std::shared_ptr<Stream>()>;

class AgentSide final : public Side {
 public:
  AgentSide(Self self, Dial dial);

  void on_opened(std::shared_ptr<Stream> stream) override;
  void on_frame(Stream& stream, Result<v1::Frame> frame) override;
  void on_written(Stream& stream) override;
  void on_closed(Stream& stream, const Status& why) override;
  void drain() override;
  void leave() override;
  void tick() override;
  std::uint64_t next_due_ns() const override;
  View view() const override;

 private:
  bool attached() const { return conversation_ && conversation_->stream() != nullptr; }
  void say_greeting();
  Status take_welcome(const v1::Welcome& welcome);
  Status take_message(v1::ChannelMessage&& message);
  Status take_content(v1::NodeMessage&& content);
  Status take_order(const std::string& bytes);
  void take_table(v1::NodeTable&& table);
  void tell(v1::NodeChange change);
  void send(const v1::NodeMessage& message);
  void send_of_agent();
  std::uint64_t highest_term() const { return std::max(term_, self_.agent.term()); }
  // The stream ends, or has ended; another try follows.
  void give_up(const Status& why);
  void set_coordinator(NodeState state, const std::string& reason);

  const Self self_;
  const Dial dial_;
  v1::NodeDescription own_;
  const std::uint64_t started_ns_;
  std::uint64_t drained_ns_ = 0;
  std::minstd_rand random_;

  std::shared_ptr<Stream> stream_;  // null: none until retry_ns_
  bool writes_hello_ = false;       // on stream_: nothing else may be written meanwhile
  std::uint64_t retry_ns_ = 0;
  std::uint64_t pause_ms_ = 0;  // before the next try
  std::uint64_t heard_ns_ = 0;  // when the stream began, or the coordinator's last message came

  // The coordinator that this node obeyed last.
  std::uint64_t term_ = 0;
  std::uint64_t channel_ = 0;
  std::optional<v1::NodeDescription> coordinator_;
  std::optional<Conversation> conversation_;
  NodeState coordinator_state_ = NodeState::kSilent;
  std::uint64_t coordinator_since_ns_ = 0;
  std::uint64_t coordinator_heard_ns_ = 0;
  std::string problem_;
  std::uint64_t problem_ns_ = 0;  // since when there is no coordinator

  v1::NodeTable told_;
  std::uint64_t told_ns_ = 0;
};

}  // namespace epd::cluster

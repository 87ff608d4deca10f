// The coordinator: takes nodes in, judges their silence, and sends all of them the table of nodes. Pure but
// for streams and probes, which are injected.
#pragma once

#include "channel.h"
#include "cluster/address.h"
#include "membership/coordinator.h"
#include "node_table.h"
#include "side.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace epd::cluster {

// Tries to connect to the address, and answers on the loop whether the connection was refused.
using Probe = std::function<void(const SocketAddress& address, std::function<void(bool refused)> answer)>;

class CoordinatorSide final : public Side {
 public:
  struct Options {
    membership::MembershipLimits limits;  // of groups that span nodes
    std::uint32_t orphan_ms = 0;
    std::uint64_t first_term = 1;           // of the first coordinator; above all earlier ones, if possible
    std::function<std::uint64_t()> random;  // unpredictable
    std::function<std::uint64_t()> seconds = [] { return 0; };    // of the wall clock, from which terms come
    std::function<Quota(std::uint32_t uid)> most_groups_of = {};  // of a user
  };
  CoordinatorSide(Self self, Options options, Probe probe);

  void on_opened(std::shared_ptr<Stream> stream) override;
  void on_frame(Stream& stream, Result<v1::Frame> frame) override;
  void on_written(Stream& stream) override;
  void on_closed(Stream& stream, const Status& why) override;
  void drain() override;
  void leave() override {}
  void tick() override;
  std::uint64_t next_due_ns() const override;
  View view() const override;
  std::vector<SpanningGroup> spanning_groups() const override;

 private:
  struct Newcomer {
    std::shared_ptr<Stream> stream;
    std::string certificate;
    std::uint64_t due_ns = 0;  // for its Hello
  };
  struct Member {
    std::uint64_t number = 0;  // of its channel
    Conversation conversation;
    // After its stream has ended: where it listens, and when to probe that again.
    std::optional<SocketAddress> place = std::nullopt;
    std::uint64_t look_due_ns = 0;
  };

  void make_room_for_newcomer();
  void take_in(std::shared_ptr<Stream> stream, v1::Hello hello);
  bool judge(Stream& stream, v1::Hello& hello);
  std::string holder_of_address(const v1::NodeDescription& node) const;
  bool judge_address(Stream& stream, const v1::NodeDescription& node);
  bool judge_term(Stream& stream, const v1::Hello& hello);
  std::uint64_t most_term() const;
  bool is_raised_by(const v1::Hello& hello) const;
  bool has_channel(const Member& member, const v1::Hello& hello) const;
  void refuse(Stream& stream, Refusal reason, const std::string& node, const Status& status);
  // Resumes the channel that the node still has. Not OK: it needs a new one.
  Status resume(Member& member, const std::shared_ptr<Stream>& stream, const v1::Hello& hello);
  void welcome(const std::shared_ptr<Stream>& stream, Member& member, std::uint32_t version);
  void hear_of_term(const v1::Hello& hello);
  Status take(const std::string& name, const std::string& payload);
  Status take_event(const std::string& name, const std::string& bytes);
  void take_change(const std::string& name, v1::NodeChange change);
  void lose(const std::string& name, const std::string& reason);
  void drop(const std::string& name, const Status& why);
  void look_for(const std::string& name, Member& member);
  void tell_all();

  // Groups that span nodes.
  void begin_term(std::uint64_t term);
  void turn_of_groups();
  void deliver();  // the coordinator's messages, in order
  void deliver(membership::Coordinator::Sent&& sent);
  void send(const std::string& name, std::string payload);

  const Self self_;
  const Options options_;
  const Probe probe_;
  // The least time between two rises of the term by one node. Most of it is left for groups.
  const std::uint64_t raise_ns_;
  std::uint64_t term_ = 0;
  std::map<std::string, std::uint64_t> raised_ns_;  // when the node has raised the term
  std::unique_ptr<membership::Coordinator> coordinator_;
  std::deque<membership::Coordinator::Sent> sent_;  // not delivered yet
  bool delivers_ = false;
  NodeRow own_;
  bool untold_ = true;         // a state has changed
  std::uint64_t told_ns_ = 0;  // when all were told last
  NodeTable table_;
  std::map<Stream*, Newcomer> newcomers_;
  std::map<std::string, Member> members_;  // those that are not lost, by name
  std::map<Stream*, std::string> by_stream_;
};

}  // namespace epd::cluster

// The coordinator: takes nodes in, hears from them, and tells all of all. Pure but for streams and probes,
// which are injected.
#pragma once

#include "address.h"
#include "conversation.h"
#include "node_table.h"
#include "side.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace epd::cluster {

// Looks whether anybody listens there, and says on the loop whether the connection was refused.
using Probe = std::function<void(const SocketAddress& address, std::function<void(bool refused)> answer)>;

class CoordinatorSide final : public Side {
 public:
  CoordinatorSide(Self self, Probe probe);

  void on_opened(std::shared_ptr<Stream> stream) override;
  void on_frame(Stream& stream, Result<v1::Frame> frame) override;
  void on_written(Stream& stream) override;
  void on_closed(Stream& stream, const Status& why) override;
  void drain() override;
  void leave() override {}
  void tick() override;
  std::uint64_t next_due_ns() const override;
  View view() const override;

 private:
  struct Newcomer {
    std::shared_ptr<Stream> stream;
    std::uint64_t due_ns = 0;  // for its Hello
  };
  struct Member {
    std::uint64_t number = 0;  // of its channel
    Conversation conversation;
    // While its stream has ended: where it listens, and when to look again whether it still does.
    std::optional<SocketAddress> place = std::nullopt;
    std::uint64_t look_due_ns = 0;
  };

  void take_in(std::shared_ptr<Stream> stream, v1::Hello hello);
  bool judge(Stream& stream, v1::Hello& hello);
  void refuse(Stream& stream, Refusal reason, const std::string& node, const Status& status);
  // Of the channel that the node still has; not OK: it needs a new one.
  Status resume(Member& member, const std::shared_ptr<Stream>& stream, const v1::Hello& hello);
  void welcome(const std::shared_ptr<Stream>& stream, Member& member, std::uint32_t version);
  void hear_of_term(const v1::Hello& hello);
  void take(const std::string& name, const v1::NodeMessage& message);
  void lose(const std::string& name, const std::string& reason);
  void drop(const std::string& name, const Status& why);
  void look_for(const std::string& name, Member& member);
  void tell_all();

  const Self self_;
  const Probe probe_;
  std::uint64_t term_ = 1;
  std::uint64_t last_number_ = 0;
  NodeRow own_;
  bool own_changed_ = true;
  NodeTable table_;
  std::map<Stream*, Newcomer> newcomers_;
  std::map<std::string, Member> members_;  // those that are not lost, by name
  std::map<Stream*, std::string> by_stream_;
};

}  // namespace epd::cluster

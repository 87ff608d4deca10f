// What two daemons say to each other, over streams that may break: first in, first out, without loss and
// without duplicates, for as long as the channel lives. It lives until the node is lost, its daemon has a new
// boot id, or the term changes; then both ends drop theirs, and make new ones.
//
// Every message has a number, and says up to which number its sender has received. What is not acknowledged
// is kept and sent again when another stream has been opened. Pure: whoever owns it carries messages to and
// from the stream, says what time it is, and judges how long the other end may be silent.
#pragma once

#include "common/status.h"
#include "epd/v1/cluster.pb.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>

namespace epd::cluster {

class Channel {
 public:
  // Of payloads that are not acknowledged. One that would exceed it ends the channel.
  static constexpr std::size_t kMaxKeptBytes = std::size_t{16} << 20;

  struct Ends {
    std::uint64_t term = 0;
    std::string own;  // boot ids
    std::string other;
  };
  Channel(Ends ends, std::uint64_t heartbeat_ns) : ends_(std::move(ends)), heartbeat_ns_(heartbeat_ns) {}

  const Ends& ends() const { return ends_; }
  std::uint64_t received() const { return received_; }
  std::size_t kept_bytes() const { return kept_bytes_; }
  bool given_up() const { return given_up_; }

  // RESOURCE_EXHAUSTED: given up, now or before; nothing goes through any more.
  Status send(std::string payload);

  // A stream carries the channel from now on; the other end has received all up to `acknowledged`. Not OK: it
  // can't have, so it is another channel.
  Status opened(std::uint64_t acknowledged, std::uint64_t now_ns);
  void closed() { open_ = false; }
  bool open() const { return open_; }

  // What is to be sent next, in order: messages, then a heartbeat if one is due. Nothing: not before
  // next_due_ns().
  std::optional<v1::ChannelMessage> next(std::uint64_t now_ns);
  std::uint64_t next_due_ns() const;

  // What has come: a payload that is delivered now, or nothing (a heartbeat, something that came before). Not
  // OK: no channel sends that; nothing has changed.
  Result<std::optional<std::string>> receive(v1::ChannelMessage&& message);

 private:
  Status check(const v1::ChannelMessage& message) const;
  void acknowledge(std::uint64_t number);
  v1::ChannelMessage message(std::uint64_t number, std::string payload, std::uint64_t now_ns);

  const Ends ends_;
  const std::uint64_t heartbeat_ns_;
  bool open_ = false;
  bool given_up_ = false;
  std::deque<std::string> kept_;    // not acknowledged yet; the first has number acknowledged_ + 1
  std::size_t kept_bytes_ = 0;      // of kept_
  std::uint64_t acknowledged_ = 0;  // by the other end
  std::size_t sent_ = 0;            // of kept_, on this stream
  std::uint64_t received_ = 0;      // from the other end
  std::uint64_t last_sent_ns_ = 0;  // while it is open
};

}  // namespace epd::cluster

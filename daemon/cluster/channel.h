#pragma once

#include "common/status.h"
#include "epd/v1/cluster.pb.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace epd::cluster {

// The other end of a stream, as its connection tells.
struct PeerFacts {
  std::string address;                      // "10.0.0.2:41234"
  bool secure = false;                      // by TLS, with a certificate of cluster.tls_ca
  std::vector<std::string> names;           // DNS names of that certificate
  std::vector<std::string> addresses = {};  // numeric ones of it
};

class Stream;

// Called on the loop. Nothing follows closed().
class StreamEvents {
 public:
  virtual ~StreamEvents() = default;
  // The frame that read() asked for. Not OK: what came is no frame.
  virtual void on_frame(Stream& stream, Result<v1::Frame> frame) = 0;
  virtual void on_written(Stream& stream) = 0;
  virtual void on_closed(Stream& stream, const Status& why) = 0;
};

// A stream between two daemons: gRPC's (grpc.h), or a test's. All calls are made on the loop. One
// frame is read and one is written at a time, so nothing queues up.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual const PeerFacts& peer() const = 0;  // complete as soon as a frame has come
  virtual void read() = 0;
  virtual void write(const v1::Frame& frame) = 0;
  // Ends the stream; with this status, if the other end opened it. Nothing is reported any more.
  virtual void finish(const Status& status) = 0;
};

// A channel carries the messages of two daemons over streams that may break: first in, first out, without
// loss and without duplicates. It lives until the node is lost, its daemon has a new boot id, or the term
// changes; then both ends drop it and make a new one.
// Every message has a number, and says up to which number its sender has received. What is not acknowledged
// is kept, and sent again when another stream has been opened. Pure: its owner carries messages to and from
// the stream, gives the time, and judges silence.
class Channel {
 public:
  // The limit of payloads that are not acknowledged. One that would exceed it ends the channel.
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

  // RESOURCE_EXHAUSTED: the channel is given up, now or before, and carries nothing more.
  Status send(std::string payload);

  // A stream carries the channel from now on. The other end has received all up to `acknowledged`. Not OK: it
  // can't have, so it is another channel.
  Status opened(std::uint64_t acknowledged, std::uint64_t now_ns);
  void closed() { open_ = false; }
  bool open() const { return open_; }

  // Returns the next message to send: one that was not sent, or a heartbeat that is due. Nothing: none before
  // next_due_ns().
  std::optional<v1::ChannelMessage> next(std::uint64_t now_ns);
  std::uint64_t next_due_ns() const;

  // Takes a message that has come. Returns its payload, or nothing (a heartbeat, a duplicate). Not OK: no
  // channel sends this; nothing has changed.
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

// A channel and the stream that carries it now. Both sides have one.
class Conversation {
 public:
  // `max_frame_bytes` limits what this end sends.
  Conversation(const Channel::Ends& ends, std::uint32_t heartbeat_ms, std::size_t max_frame_bytes);

  Channel& channel() { return channel_; }
  const Channel& channel() const { return channel_; }

  // `stream` carries the channel from now on. If `writes`, a frame is already being written to it.
  Status opened(std::shared_ptr<Stream> stream, std::uint64_t acknowledged, bool writes,
                std::uint64_t now_ns);
  // The stream has ended. The caller finishes it.
  void closed();
  const std::shared_ptr<Stream>& stream() const { return stream_; }

  // `payload`: a NodeMessage. RESOURCE_EXHAUSTED: the channel has been given up.
  Status send(std::string payload);
  Result<std::optional<std::string>> receive(v1::ChannelMessage&& message) {
    return channel_.receive(std::move(message));
  }
  // Writes the next message, if the stream has taken the one before.
  void pump(std::uint64_t now_ns);
  void written() { writing_ = false; }
  std::uint64_t next_due_ns() const;

 private:
  Channel channel_;
  std::size_t max_payload_bytes_;
  std::shared_ptr<Stream> stream_;
  bool writing_ = false;
};

}  // namespace epd::cluster

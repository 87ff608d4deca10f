// A channel and the stream that carries it at the moment. On both sides.
#pragma once

#include "channel.h"
#include "stream.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace epd::cluster {

class Conversation {
 public:
  // `max_frame_bytes`: of what this end sends.
  Conversation(const Channel::Ends& ends, std::uint32_t heartbeat_ms, std::size_t max_frame_bytes);

  Channel& channel() { return channel_; }
  const Channel& channel() const { return channel_; }

  // `stream` carries it from now on. If `writes`, a frame is being written to it already.
  Status opened(std::shared_ptr<Stream> stream, std::uint64_t acknowledged, bool writes,
                std::uint64_t now_ns);
  // No stream any more; it is the caller's to finish.
  void closed();
  const std::shared_ptr<Stream>& stream() const { return stream_; }

  // `payload`: a NodeMessage. RESOURCE_EXHAUSTED: the channel has been given up.
  Status send(std::string payload);
  Result<std::optional<std::string>> receive(v1::ChannelMessage&& message) {
    return channel_.receive(std::move(message));
  }
  // Writes what is next, if the stream has taken what was before.
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

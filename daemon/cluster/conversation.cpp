#include "conversation.h"

#include "frames.h"

#include <limits>
#include <utility>

namespace epd::cluster {

Conversation::Conversation(const Channel::Ends& ends, std::uint32_t heartbeat_ms, std::size_t max_frame_bytes)
    : channel_(ends, std::uint64_t{heartbeat_ms} * 1'000'000),
      max_payload_bytes_(max_frame_bytes - kFrameHeadBytes) {}

Status Conversation::opened(std::shared_ptr<Stream> stream, std::uint64_t acknowledged, bool writes,
                            std::uint64_t now_ns) {
  if (Status status = channel_.opened(acknowledged, now_ns); !status.ok()) return status;
  stream_ = std::move(stream);
  writing_ = writes;
  return {};
}

void Conversation::closed() {
  channel_.closed();
  stream_.reset();
  writing_ = false;
}

Status Conversation::send(std::string payload) {
  if (payload.size() > max_payload_bytes_) {
    return resource_exhausted("a message of " + std::to_string(payload.size()) +
                              " bytes; allowed: " + std::to_string(max_payload_bytes_));
  }
  return channel_.send(std::move(payload));
}

void Conversation::pump(std::uint64_t now_ns) {
  if (stream_ == nullptr || writing_) return;
  std::optional<v1::ChannelMessage> message = channel_.next(now_ns);
  if (!message) return;
  writing_ = true;
  v1::Frame frame;
  *frame.mutable_message() = std::move(*message);
  stream_->write(frame);
}

std::uint64_t Conversation::next_due_ns() const {
  if (stream_ == nullptr || writing_) return std::numeric_limits<std::uint64_t>::max();
  return channel_.next_due_ns();
}

}  // namespace epd::cluster

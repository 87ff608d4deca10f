#include "conversation.h"

#include "frames.h"

#include <limits>
#include <utility>

namespace epd::cluster {

Conversation::Conversation(const membership::Channel::Ends& ends, std::uint32_t heartbeat_ms)
    : channel_(ends, std::uint64_t{heartbeat_ms} * 1'000'000) {}

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

Status Conversation::send(const v1::NodeMessage& message) {
  return channel_.send(message.SerializeAsString());
}

Result<std::optional<v1::NodeMessage>> Conversation::receive(v1::ChannelMessage&& message) {
  Result<membership::Envelope> envelope = envelope_of(std::move(message));
  if (!envelope.ok()) return envelope.status();
  Result<std::optional<std::string>> payload = channel_.receive(std::move(*envelope));
  if (!payload.ok()) return payload.status();
  if (!payload.value()) return std::optional<v1::NodeMessage>();
  v1::NodeMessage content;
  if (!content.ParseFromString(*payload.value()))
    return invalid_argument("a message of " + std::to_string(payload.value()->size()) +
                            " bytes that is none");
  return std::optional(std::move(content));
}

void Conversation::pump(std::uint64_t now_ns) {
  if (stream_ == nullptr || writing_) return;
  std::optional<membership::Envelope> envelope = channel_.next(now_ns);
  if (!envelope) return;
  writing_ = true;
  stream_->write(frame_of(std::move(*envelope)));
}

std::uint64_t Conversation::next_due_ns() const {
  if (stream_ == nullptr || writing_) return std::numeric_limits<std::uint64_t>::max();
  return channel_.next_due_ns();
}

}  // namespace epd::cluster

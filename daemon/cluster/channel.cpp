#include "channel.h"

#include "frames.h"

#include <limits>
#include <utility>

namespace epd::cluster {

// ---- channel

Status Channel::send(std::string payload) {
  if (given_up_ || payload.size() > kMaxKeptBytes - kept_bytes_) {
    given_up_ = true;
    return {StatusCode::kResourceExhausted, "more than " + std::to_string(kMaxKeptBytes) +
                                                " bytes wait for the other end: the channel is given up"};
  }
  kept_bytes_ += payload.size();
  kept_.push_back(std::move(payload));
  return {};
}

Status Channel::opened(std::uint64_t acknowledged, std::uint64_t now_ns) {
  if (acknowledged < acknowledged_ || acknowledged > acknowledged_ + kept_.size()) {
    return invalid_argument("the other end says that it has received " + std::to_string(acknowledged) +
                            " messages; allowed: " + std::to_string(acknowledged_) + ".." +
                            std::to_string(acknowledged_ + kept_.size()));
  }
  acknowledge(acknowledged);
  sent_ = 0;
  open_ = true;
  last_sent_ns_ = now_ns;
  return {};
}

std::optional<v1::ChannelMessage> Channel::next(std::uint64_t now_ns) {
  if (!open_ || given_up_) return std::nullopt;
  if (sent_ < kept_.size()) {
    const std::size_t index = sent_++;
    return message(acknowledged_ + index + 1, kept_[index], now_ns);
  }
  if (now_ns < next_due_ns()) return std::nullopt;
  return message(0, {}, now_ns);
}

std::uint64_t Channel::next_due_ns() const {
  if (!open_ || given_up_) return std::numeric_limits<std::uint64_t>::max();
  return sent_ < kept_.size() ? 0 : last_sent_ns_ + heartbeat_ns_;
}

v1::ChannelMessage Channel::message(std::uint64_t number, std::string payload, std::uint64_t now_ns) {
  last_sent_ns_ = now_ns;
  v1::ChannelMessage message;
  message.set_term(ends_.term);
  message.set_boot_id(ends_.own);
  message.set_number(number);
  message.set_acknowledged(received_);
  message.set_payload(std::move(payload));
  return message;
}

Status Channel::check(const v1::ChannelMessage& message) const {
  if (message.term() != ends_.term) {
    return invalid_argument("term is " + std::to_string(message.term()) +
                            "; allowed: " + std::to_string(ends_.term));
  }
  if (message.boot_id() != ends_.other) return invalid_argument("the boot id is of another daemon");
  if (message.acknowledged() > acknowledged_ + sent_) {
    return invalid_argument("message " + std::to_string(message.acknowledged()) +
                            " is acknowledged; the last that was sent is " +
                            std::to_string(acknowledged_ + sent_));
  }
  if (message.number() > received_ + 1) {
    return invalid_argument("message " + std::to_string(message.number()) + " follows message " +
                            std::to_string(received_));
  }
  if (message.number() == 0 && !message.payload().empty())
    return invalid_argument("a heartbeat has " + std::to_string(message.payload().size()) +
                            " bytes of payload");
  return {};
}

Result<std::optional<std::string>> Channel::receive(v1::ChannelMessage&& message) {
  if (Status status = check(message); !status.ok()) return status;
  if (message.acknowledged() > acknowledged_) acknowledge(message.acknowledged());
  if (message.number() <= received_) return std::optional<std::string>();
  received_ = message.number();
  return std::optional<std::string>(std::move(*message.mutable_payload()));
}

void Channel::acknowledge(std::uint64_t number) {
  for (; acknowledged_ < number; ++acknowledged_) {
    kept_bytes_ -= kept_.front().size();
    kept_.pop_front();
    if (sent_ > 0) --sent_;
  }
}

// ---- conversation

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

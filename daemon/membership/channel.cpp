#include "membership/channel.h"

#include <limits>
#include <utility>

namespace epd::membership {

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

std::optional<Envelope> Channel::next(std::uint64_t now_ns) {
  if (!open_ || given_up_) return std::nullopt;
  if (sent_ < kept_.size()) {
    const std::size_t index = sent_++;
    return envelope(acknowledged_ + index + 1, kept_[index], now_ns);
  }
  if (now_ns < next_due_ns()) return std::nullopt;
  return envelope(0, {}, now_ns);
}

std::uint64_t Channel::next_due_ns() const {
  if (!open_ || given_up_) return std::numeric_limits<std::uint64_t>::max();
  return sent_ < kept_.size() ? 0 : last_sent_ns_ + heartbeat_ns_;
}

Envelope Channel::envelope(std::uint64_t number, std::string payload, std::uint64_t now_ns) {
  last_sent_ns_ = now_ns;
  return {ends_.term, ends_.own, number, received_, std::move(payload)};
}

Status Channel::check(const Envelope& envelope) const {
  if (envelope.term != ends_.term) {
    return invalid_argument("term is " + std::to_string(envelope.term) +
                            "; allowed: " + std::to_string(ends_.term));
  }
  if (envelope.boot_id != ends_.other) return invalid_argument("the boot id is of another daemon");
  if (envelope.acknowledged > acknowledged_ + sent_) {
    return invalid_argument("message " + std::to_string(envelope.acknowledged) +
                            " is acknowledged; the last that was sent is " +
                            std::to_string(acknowledged_ + sent_));
  }
  if (envelope.number > received_ + 1) {
    return invalid_argument("message " + std::to_string(envelope.number) + " follows message " +
                            std::to_string(received_));
  }
  if (envelope.number == 0 && !envelope.payload.empty())
    return invalid_argument("a heartbeat has " + std::to_string(envelope.payload.size()) +
                            " bytes of payload");
  return {};
}

Result<std::optional<std::string>> Channel::receive(Envelope envelope) {
  if (Status status = check(envelope); !status.ok()) return status;
  if (envelope.acknowledged > acknowledged_) acknowledge(envelope.acknowledged);
  if (envelope.number <= received_) return std::optional<std::string>();
  received_ = envelope.number;
  return std::optional<std::string>(std::move(envelope.payload));
}

void Channel::acknowledge(std::uint64_t number) {
  for (; acknowledged_ < number; ++acknowledged_) {
    kept_bytes_ -= kept_.front().size();
    kept_.pop_front();
    if (sent_ > 0) --sent_;
  }
}

}  // namespace epd::membership

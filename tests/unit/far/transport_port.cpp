#include "transport_port.h"

#include <array>
#include <cstring>

namespace epd::test {

namespace {
constexpr std::uint64_t kCopied = std::uint64_t{1} << 63;
}

void TransportPort::connect(far::EngineId engine, std::span<const std::byte> address) {
  const transport::PeerId peer = transport_->connect(address).value();
  peers_[engine] = peer;
  engines_[peer] = engine;
}

bool TransportPort::send(std::unique_ptr<far::Message>& message) {
  const std::uint64_t cookie = ++last_;
  if (spoil_ != nullptr && message->header.type == spoiled_type_ && message->header.body_bytes != 0 &&
      (*spoil_)() % 4 == 0) {
    for (int i = 0; i < 4; ++i)
      message->body.data()[(*spoil_)() % message->header.body_bytes] = static_cast<std::byte>((*spoil_)());
  }
  const Status status = transport_->send(
      peers_.at(message->engine), std::as_bytes(std::span(&message->header, 1)), message->bytes(), cookie);
  if (status.code() == StatusCode::kWouldBlock) return false;
  records_[static_cast<std::size_t>(message->header.type)] += message->header.records;
  if (status.ok()) sent_[cookie] = std::move(message);
  message.reset();  // the peer is down: the message is lost, as its group will be told
  return true;
}

void TransportPort::release(const far::Body& body) {
  if (body.hold == 0) return;
  --held_;
  if ((body.hold & kCopied) != 0) {
    aligned_.erase(body.hold);
  } else {
    transport_->release({body.data, body.bytes, body.hold});
  }
}

bool TransportPort::step(far::FarGroup& group) {
  std::array<transport::Event, 4> events;
  const std::size_t count = transport_->progress(events);
  for (transport::Event& event : std::span(events).first(count)) {
    if (event.kind == transport::EventKind::kSent) sent_.erase(event.cookie);
    if (event.kind != transport::EventKind::kReceived) continue;
    far::Body body{event.body.data, event.body.bytes, event.body.hold};
    if (body.hold != 0) ++held_;
    if (reinterpret_cast<std::uintptr_t>(body.data) % abi::kFarRecordAlign != 0) {
      std::vector<Line> copy((body.bytes + 63) / 64);
      std::memcpy(copy.data(), body.data, body.bytes);
      transport_->release(event.body);
      body.hold = kCopied | ++last_;
      body.data = copy.data()->bytes;
      aligned_[body.hold] = std::move(copy);
    }
    group.received(engines_.at(event.peer), event.header.bytes(), body);
  }
  return count != 0;
}

}  // namespace epd::test

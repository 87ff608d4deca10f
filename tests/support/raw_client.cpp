#include "support/raw_client.h"

#include "support/ranks.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <algorithm>
#include <atomic>
#include <cstring>

namespace epd::test {

UniqueFd RawClient::make_unconnected() {
  return UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
}

RawClient::RawClient(const std::string& socket) : RawClient(make_unconnected(), socket) {}

RawClient::RawClient(UniqueFd unconnected, const std::string& socket) : socket_(std::move(unconnected)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket.c_str(), sizeof(address.sun_path) - 1);
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    socket_.reset();
}

abi::Hello RawClient::good_hello() {
  abi::Hello hello{};
  hello.version_min = abi::kAbiVersionMin;
  hello.version_max = abi::kAbiVersion;
  hello.layout_hash = abi::layout_hash();
  hello.nonce = 42;
  abi::set_text(hello.library, "raw client of a test", 20);
  return hello;
}

bool RawClient::send(abi::AttachType type, const void* body, std::size_t bytes) const {
  return send_packet(socket_.get(), static_cast<std::uint16_t>(type), 1, body, bytes).ok();
}

bool RawClient::send_bytes(const void* data, std::size_t bytes) const {
  return ::send(socket_.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

std::optional<Packet> RawClient::receive(double seconds) const {
  const double end = now_s() + seconds;
  for (;;) {
    Packet packet;
    Status error;
    const ReceiveResult result = receive_packet(socket_.get(), packet, error);
    if (result == ReceiveResult::kPacket) return packet;
    if (result != ReceiveResult::kNothing || now_s() > end) return std::nullopt;
    pollfd entry{socket_.get(), POLLIN, 0};
    ::poll(&entry, 1, 20);
  }
}

bool RawClient::closed_within(double seconds) const {
  return eventually(seconds, [&] {
    pollfd entry{socket_.get(), POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLRDHUP | POLLHUP)) != 0;
  });
}

namespace {

template <typename T>
Packet must_answer(const RawClient& client, T& body) {
  std::optional<Packet> packet = client.receive(20);
  const Result<T> read = packet ? packet->read<T>() : Result<T>(internal_error("no answer"));
  if (!read.ok()) RANK_FAIL(refusal(packet));
  body = read.value();
  return std::move(*packet);
}

Mapping must_map(const UniqueFd& fd, std::uint64_t bytes, Access access) {
  Result<Mapping> mapping = Mapping::map(fd.get(), bytes, access);
  if (!mapping.ok()) RANK_FAIL(mapping.status().to_string());
  return std::move(*mapping);
}

}  // namespace

RawRank::RawRank(const std::string& socket, const std::string& device, const abi::Join& join)
    : client_(socket), shape_(join.shape) {
  RANK_CHECK(client_.valid(), "no connection to " + socket);
  abi::Hello hello = RawClient::good_hello();
  abi::set_text(hello.device, device.data(), device.size());
  client_.send(abi::AttachType::kHello, &hello, sizeof(hello));
  abi::Welcome welcome{};
  Packet packet = must_answer(client_, welcome);
  RANK_CHECK(packet.fds.size() == 4, "Welcome without descriptors");
  a_ = must_map(packet.fds[0], sizeof(abi::SegmentA), Access::kReadWrite);
  b_ = must_map(packet.fds[1], sizeof(abi::SegmentB), Access::kReadOnly);
  bell_ = std::move(packet.fds[2]);
  client_.send(abi::AttachType::kJoin, &join, sizeof(join));
  packet = must_answer(client_, joined_);
  RANK_CHECK(packet.fds.size() == 3, "Joined without descriptors");
  arena_ = must_map(packet.fds[0], joined_.user_bytes, Access::kReadWrite);
  board_ = must_map(packet.fds[1], joined_.board_bytes, Access::kReadOnly);
  results_ = must_map(packet.fds[2], abi::ResultsLayout(shape_).total_bytes, Access::kReadOnly);
}

void write_call(abi::CallWords& words, const abi::Call& call, std::uint32_t count) {
  const abi::PackedCall packed = abi::pack(call);
  abi::PackedCall& place = words.host_calls[call.number % abi::kCallSlots];
  for (std::uint32_t i = 0; i < count; ++i)
    std::atomic_ref(place.words[i]).store(packed.words[i], std::memory_order_release);
}

bool read_end(const Mapping& results, std::uint32_t result, abi::CallEnd& end) {
  std::uint64_t words[abi::CallResult::kWords];
  auto& place = results.as<abi::Results>()->places[abi::place_of(result)];
  for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
    words[i] = std::atomic_ref(place.words[i]).load(std::memory_order_acquire);
  return abi::read_result(words, end) && end.result == result;
}

void RawRank::write(const abi::Call& call, std::uint32_t words) const {
  const abi::UserArenaLayout layout(shape_);
  write_call(*reinterpret_cast<abi::CallWords*>(arena() + layout.calls), call, words);
}

void RawRank::ring() const {
  ring_socket(bell_.get());
}

bool RawRank::ended(abi::CallEnd& end) const {
  return read_end(results_, 0, end);
}

bool RawRank::counted() const {
  const abi::ResultsLayout layout(shape_);
  const auto* const word = results_.as<const std::uint64_t>(layout.counts);
  return std::atomic_ref(const_cast<std::uint64_t&>(*word)).load(std::memory_order_acquire) >> 32 == 1;
}

std::string refusal(const std::optional<Packet>& packet) {
  if (!packet.has_value()) return "no answer";
  if (packet->header.type != static_cast<std::uint16_t>(abi::AttachType::kRefused)) {
    return "message type " + std::to_string(packet->header.type);
  }
  const Result<abi::Refused> body = packet->read<abi::Refused>();
  if (!body.ok()) return body.status().to_string();
  const abi::Refused& refused = body.value();
  return std::string(status_name(refused.status)) + ": " +
         std::string(refused.text, abi::text_length(refused.text));
}

}  // namespace epd::test

#include "transport_end.h"

#include <poll.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace epd::transport {
namespace {

using std::chrono::steady_clock;

struct Tag {
  std::uint64_t sender;
  std::uint64_t number;
  std::uint64_t bytes;
};
static_assert(sizeof(Tag) == End::kLeastHeader);

}  // namespace

std::vector<std::byte> pattern(std::uint64_t sender, std::uint64_t number, std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  std::uint64_t state = sender * 0x9e3779b97f4a7c15ull + number * 0xbf58476d1ce4e5b9ull + bytes;
  for (std::size_t i = 0; i < bytes; i += sizeof(state)) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::memcpy(made.data() + i, &state, std::min(sizeof(state), bytes - i));
  }
  return made;
}

PeerId End::connect(End& other) {
  return connect(other.transport().address());
}

PeerId End::connect(std::span<const std::byte> address) {
  Result<PeerId> peer = transport_->connect(address);
  EXPECT_TRUE(peer.ok()) << peer.status().to_string();
  return peer.ok() ? *peer : 0;
}

Status End::close(PeerId peer) {
  Status status = transport_->close(peer);
  if (status.ok()) closed_.insert(peer);
  return status;
}

Status End::send(PeerId peer, std::size_t body_bytes, std::size_t header_bytes) {
  const std::uint64_t number = next_;
  std::vector<std::byte> header = pattern(name_, number, header_bytes);
  const Tag tag{name_, number, body_bytes};
  if (header_bytes >= sizeof(tag)) std::memcpy(header.data(), &tag, sizeof(tag));
  Sent& sent = bodies_[number];
  sent = {peer, pattern(name_, number, body_bytes)};
  Status status = transport_->send(peer, header, sent.body, number);
  if (status.ok()) {
    ++next_;
  } else {
    bodies_.erase(number);
  }
  std::fill(header.begin(), header.end(), std::byte{0xdd});  // it has been copied
  return status;
}

Status End::flush(PeerId peer) {
  Status status = transport_->flush(peer, next_);
  if (status.ok()) flushes_[next_++] = peer;
  return status;
}

void End::check_received(const Event& event) {
  EXPECT_EQ(closed_.count(event.peer), 0u) << "received of a closed peer";
  const std::span<const std::byte> header = event.header.bytes();
  ASSERT_GE(header.size(), sizeof(Tag));
  Tag tag{};
  std::memcpy(&tag, header.data(), sizeof(tag));
  EXPECT_EQ(tag.bytes, event.body.bytes);
  EXPECT_TRUE(seen_.insert({tag.sender, tag.number}).second)
      << "message " << tag.number << " of " << tag.sender << " came twice";
  const std::vector<std::byte> expected = pattern(tag.sender, tag.number, header.size());
  EXPECT_TRUE(std::equal(header.begin() + sizeof(tag), header.end(), expected.begin() + sizeof(tag)));
  Received message{event.peer, tag.sender, tag.number, header.size(), event.body.bytes, event.body};
  EXPECT_TRUE(intact(message)) << "body of message " << tag.number << " of " << tag.sender;
  if (!hold) {
    transport_->release(event.body);
    message.body = {};
  }
  received.push_back(message);
}

bool End::intact(const Received& message) const {
  const std::vector<std::byte> expected = pattern(message.sender, message.number, message.bytes);
  return std::equal(expected.begin(), expected.end(), message.body.data,
                    message.body.data + message.body.bytes);
}

void End::check_settled(const Event& event) {
  EXPECT_TRUE(event.status.ok() || event.status.code() == StatusCode::kAborted) << event.status.to_string();
  if (event.kind == EventKind::kFlushed) {
    const auto flush = flushes_.find(event.cookie);
    ASSERT_NE(flush, flushes_.end()) << "flushed twice, or never asked for";
    EXPECT_EQ(flush->second, event.peer);
    flushes_.erase(flush);
    if (event.status.ok()) ++flushed_ok_;
    return;
  }
  const auto sent = bodies_.find(event.cookie);
  ASSERT_NE(sent, bodies_.end()) << "sent twice, or never";
  EXPECT_EQ(sent->second.peer, event.peer);
  ++(event.status.ok() ? sent_ok_ : sent_aborted_);
  // A reader that still uses it spoils a message, or ASan sees it.
  std::fill(sent->second.body.begin(), sent->second.body.end(), std::byte{0xee});
  bodies_.erase(sent);
}

std::size_t End::turn() {
  std::vector<Event> events(span);
  const std::size_t count = transport_->progress(events);
  EXPECT_LE(count, span);
  for (std::size_t i = 0; i < count; ++i) {
    const Event& event = events[i];
    trace.push_back(event.kind);
    EXPECT_EQ(downs_.count(event.peer), 0u) << "an event behind kDown of peer " << event.peer;
    switch (event.kind) {
      case EventKind::kReceived: check_received(event); break;
      case EventKind::kSent:
      case EventKind::kFlushed: check_settled(event); break;
      case EventKind::kDown:
        EXPECT_EQ(closed_.count(event.peer), 0u) << "kDown of a closed peer";
        EXPECT_EQ(event.status.code(), StatusCode::kAborted) << event.status.to_string();
        downs_[event.peer] = event.status;
        for (const auto& [cookie, sent] : bodies_) EXPECT_NE(sent.peer, event.peer) << "a send is owed";
        for (const auto& [cookie, peer] : flushes_) EXPECT_NE(peer, event.peer) << "a flush is owed";
        break;
    }
  }
  return count;
}

std::size_t End::received_of(std::uint64_t sender) const {
  return static_cast<std::size_t>(
      std::count_if(received.begin(), received.end(),
                    [sender](const Received& message) { return message.sender == sender; }));
}

void sleep_all(const std::vector<End*>& ends, int ms) {
  std::vector<pollfd> fds;
  for (End* one : ends) {
    if (!one->transport().arm()) return;
    fds.push_back({one->transport().wait_fd(), POLLIN, 0});
  }
  ::poll(fds.data(), fds.size(), ms);
}

bool run_until(const std::vector<End*>& ends, const std::function<bool()>& done) {
  const auto end = steady_clock::now() + std::chrono::seconds(20);
  int idle = 0;
  while (!done()) {
    if (steady_clock::now() > end) return false;
    std::size_t events = 0;
    for (End* one : ends) events += one->turn();
    idle = events == 0 ? idle + 1 : 0;
    if (idle > 50) sleep_all(ends, 5);
  }
  return true;
}

void run_for(const std::vector<End*>& ends, unsigned ms) {
  const auto end = steady_clock::now() + std::chrono::milliseconds(ms);
  while (steady_clock::now() < end) {
    for (End* one : ends) one->turn();
  }
}

std::pair<PeerId, PeerId> introduce(End& a, End& b) {
  const std::pair<PeerId, PeerId> peers{a.connect(b), b.connect(a)};
  const std::size_t before_a = a.received.size();
  const std::size_t before_b = b.received.size();
  EXPECT_TRUE(send_patiently(a, peers.first, 0, {&a, &b}).ok());
  EXPECT_TRUE(send_patiently(b, peers.second, 0, {&a, &b}).ok());
  EXPECT_TRUE(run_until({&a, &b}, [&] {
    return a.received.size() > before_a && b.received.size() > before_b && a.unsettled() + b.unsettled() == 0;
  }));
  a.received.clear();
  b.received.clear();
  return peers;
}

Status send_patiently(End& from, PeerId peer, std::size_t bytes, const std::vector<End*>& ends) {
  Status status;
  run_until(ends, [&] {
    status = from.send(peer, bytes);
    return status.code() != StatusCode::kWouldBlock;
  });
  return status;
}

std::uint64_t test_seed() {
  const char* given = std::getenv("EPD_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("EPD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

double thread_cpu_ms() {
  struct timespec time {};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

}  // namespace epd::transport

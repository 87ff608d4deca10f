#include "session/segments.h"

#include "proto/wire.h"

#include <sys/socket.h>

namespace epd::session {

using abi::SegmentA;
using abi::SegmentB;
using abi::SessionState;

Result<Segments> make_segments(ClientEnds& client) {
  Segments made;
  auto a = make_sealed_memfd("epd-segment-a", sizeof(SegmentA));
  if (!a.ok()) return a.status();
  auto b = make_sealed_memfd("epd-segment-b", sizeof(SegmentB));
  if (!b.ok()) return b.status();
  made.a = std::move(*a);
  made.b = std::move(*b);
  auto a_map = Mapping::map(made.a.get(), sizeof(SegmentA), Access::kReadWrite);
  if (!a_map.ok()) return a_map.status();
  a_map->as<SegmentA>()->magic = abi::kSegmentAMagic;
  a_map->as<SegmentA>()->version = abi::kAbiVersion;
  auto b_map = Mapping::map(made.b.get(), sizeof(SegmentB), Access::kReadWrite);
  if (!b_map.ok()) return b_map.status();
  b_map->as<SegmentB>()->magic = abi::kSegmentBMagic;
  b_map->as<SegmentB>()->version = abi::kAbiVersion;
  made.b_map = std::move(*b_map);

  auto read_only = reopen_read_only(made.b.get());
  if (!read_only.ok()) return read_only.status();
  auto engine_bell = make_socketpair();
  if (!engine_bell.ok()) return engine_bell.status();
  auto client_bell = make_socketpair();
  if (!client_bell.ok()) return client_bell.status();
  auto ring_client = make_eventfd();
  if (!ring_client.ok()) return ring_client.status();
  // From now on a send from the client's end of its own doorbell fails. So the queue of our end stays empty.
  if (::shutdown(client_bell->second.get(), SHUT_RD) != 0) return errno_status("shutdown");
  if (::shutdown(engine_bell->second.get(), SHUT_WR) != 0) return errno_status("shutdown");
  client.b_read_only = std::move(*read_only);
  client.engine_bell = std::move(engine_bell->first);
  client.engine_bell_porter = std::move(engine_bell->second);
  client.client_bell = std::move(client_bell->first);
  client.client_bell_porter = std::move(client_bell->second);
  made.ring_client = std::move(*ring_client);
  return made;
}

bool end_segments(const Segments& segments, const Status& status) {
  if (!segments.b_map.valid()) return false;
  auto* b = segments.b_map.as<SegmentB>();
  const auto ended = static_cast<std::uint32_t>(SessionState::kEnded);
  if (b->state.load(std::memory_order_acquire) == ended) return false;
  abi::set_text(b->message, status.message().data(), status.message().size());
  b->end_status.store(static_cast<std::uint32_t>(status.code()), std::memory_order_relaxed);
  b->state.store(ended, std::memory_order_release);
  return true;
}

void unserve_segments(const Segments& segments) {
  if (!segments.b_map.valid()) return;
  auto serving = static_cast<std::uint32_t>(SessionState::kServing);
  segments.b_map.as<SegmentB>()->state.compare_exchange_strong(
      serving, static_cast<std::uint32_t>(SessionState::kStarting), std::memory_order_acq_rel);
}

}  // namespace epd::session

#include "session_port.h"

#include <utility>

namespace epd::engine {

using abi::SegmentA;
using abi::SegmentB;

Result<std::unique_ptr<SessionPort>> SessionPort::open(std::uint64_t id, Ends ends) {
  Result<Mapping> a = Mapping::map(ends.segment_a.get(), sizeof(SegmentA), Access::kReadWrite);
  if (!a.ok()) return a.status();
  Result<Mapping> b = Mapping::map(ends.segment_b.get(), sizeof(SegmentB), Access::kReadWrite);
  if (!b.ok()) return b.status();
  std::unique_ptr<SessionPort> port(new SessionPort);
  port->id_ = id;
  port->ring_client_ = std::move(ends.ring_client);
  port->a_mapping_ = std::move(a).value();
  port->b_mapping_ = std::move(b).value();
  port->a_ = port->a_mapping_.as<SegmentA>();
  port->b_ = port->b_mapping_.as<SegmentB>();
  // A former engine may have died between storing something and ringing for it.
  const bool inherited = port->b_->incarnation.fetch_add(1, std::memory_order_relaxed) != 0;
  port->set_sleeping(false);
  port->set_state(abi::SessionState::kServing);
  if (inherited) port->ring();
  return port;
}

void SessionPort::ring() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (a_->client_sleep.sleeping.load(std::memory_order_relaxed) != 0) ring_eventfd(ring_client_.get());
}

void SessionPort::end(StatusCode status, const std::string& text) {
  ended_ = true;
  abi::set_text(b_->message, text.data(), text.size());
  b_->end_status.store(static_cast<std::uint32_t>(status), std::memory_order_relaxed);
  set_state(abi::SessionState::kEnded);
  ring();
}

}  // namespace epd::engine

// One transport under test, with a notary: whatever goes through is held against the contract.
#pragma once

#include "transport/transport.h"

#include <gtest/gtest.h>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace epd::transport {

// The true body and header of message `number` of `sender`: what they contain follows from both.
std::vector<std::byte> pattern(std::uint64_t sender, std::uint64_t number, std::size_t bytes);

struct Received {
  PeerId peer = 0;
  std::uint64_t sender = 0;
  std::uint64_t number = 0;
  std::size_t header_bytes = 0;
  std::uint64_t bytes = 0;
  Body body;
};

class End {
 public:
  // `name`: the sender in its messages; no two ends of a test share one.
  End(std::unique_ptr<Transport> transport, std::uint64_t name)
      : transport_(std::move(transport)), name_(name) {}

  Transport& transport() { return *transport_; }
  PeerId connect(End& other);
  PeerId connect(std::span<const std::byte> address);
  Status close(PeerId peer);

  // The next message; its body lies in memory of its own until kSent, is overwritten and freed then.
  Status send(PeerId peer, std::size_t body_bytes, std::size_t header_bytes = kLeastHeader);
  Status flush(PeerId peer);
  // One call of progress(). Bodies are checked, and released unless `hold` is set. Returns the events.
  std::size_t turn();
  // Whether a body that is held still is what was sent.
  bool intact(const Received& message) const;

  std::size_t unsettled() const { return bodies_.size() + flushes_.size(); }
  std::uint64_t sent_ok() const { return sent_ok_; }
  std::uint64_t sent_aborted() const { return sent_aborted_; }
  std::uint64_t flushed_ok() const { return flushed_ok_; }
  bool down(PeerId peer) const { return downs_.count(peer) != 0; }
  const Status& why(PeerId peer) const { return downs_.at(peer); }
  // Counts messages of this sender, whatever the peer.
  std::size_t received_of(std::uint64_t sender) const;
  void end() { transport_.reset(); }

  bool hold = false;
  std::size_t span = 16;  // events for each turn
  std::vector<Received> received;
  std::vector<EventKind> trace;

  static constexpr std::size_t kLeastHeader = 24;

 private:
  void check_received(const Event& event);
  void check_settled(const Event& event);

  std::unique_ptr<Transport> transport_;
  const std::uint64_t name_;
  std::uint64_t next_ = 1;  // number and cookie
  struct Sent {
    PeerId peer = 0;
    std::vector<std::byte> body;
  };
  std::map<std::uint64_t, Sent> bodies_;
  std::map<std::uint64_t, PeerId> flushes_;
  std::map<PeerId, Status> downs_;
  std::set<PeerId> closed_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen_;
  std::uint64_t sent_ok_ = 0;
  std::uint64_t sent_aborted_ = 0;
  std::uint64_t flushed_ok_ = 0;
};

// Sleeps until one of them has something to do, at most `ms`; not at all if one can't be armed.
void sleep_all(const std::vector<End*>& ends, int ms);
// Turns all ends until `done`, and sleeps when nothing comes; false after 20 s.
bool run_until(const std::vector<End*>& ends, const std::function<bool()>& done);
// Turns for so long, whatever happens.
void run_for(const std::vector<End*>& ends, unsigned ms);
// Connects both ways and waits until each has heard of the other.
std::pair<PeerId, PeerId> introduce(End& a, End& b);
// Sends, and turns `ends` while that would block.
Status send_patiently(End& from, PeerId peer, std::size_t bytes, const std::vector<End*>& ends);
// From EPD_TEST_SEED, or random; printed.
std::uint64_t test_seed();
double thread_cpu_ms();

}  // namespace epd::transport

// Engines without a supervisor: threads that run engine_main, a link that the test speaks, and a client
// that writes its calls by hand, rightly or wrongly.
#pragma once

#include "common/memory.h"
#include "common/packet.h"
#include "engine/engine_main.h"
#include "proto/call_words.h"
#include "proto/link.h"
#include "proto/waits.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace epd::test {

// Looks every 50 us; false after `timeout_ms`.
template <typename Condition>
bool comes(Condition condition, int timeout_ms = 10'000) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// One engine process's worth of descriptors, on a thread.
class EngineThread {
 public:
  // `kind`: "host" or "cuda".
  explicit EngineThread(std::uint32_t device_index, std::string kind = "host");
  ~EngineThread();

  void start();
  // From the next start on: how it reaches engines of other nodes.
  void set_network(const transport::NetworkOptions& network, engine::OpenTransport open);
  // Where it is reached, as it said when it started.
  const std::vector<std::byte>& address() const { return address_; }
  // kStop, then join. Returns engine_main's exit code.
  int stop();
  int link() const { return link_.get(); }
  const UniqueFd& page() const { return page_; }
  const UniqueFd& bell() const { return bell_; }
  // The next message of this type; others that come before are dropped. Empty after `timeout_ms`.
  std::optional<Packet> expect(abi::LinkType type, int timeout_ms = 10000);

  template <typename T>
  void send(abi::LinkType type, const T& body, const FdList& fds = {}) {
    const Status sent = send_message(link_.get(), type, body, fds);
    if (!sent.ok()) throw std::runtime_error(sent.to_string());
  }

 private:
  const std::uint32_t device_index_;
  const std::string kind_;
  transport::NetworkOptions network_;
  engine::OpenTransport open_;
  std::vector<std::byte> address_;
  UniqueFd link_;
  UniqueFd page_;
  UniqueFd bell_;
  std::thread thread_;
  int exit_code_ = -1;
};

// The client's end of a session, and the descriptors an engine is given.
class RawSession {
 public:
  explicit RawSession(std::uint64_t id);

  void add_to(EngineThread& engine);
  abi::SegmentA& a() const { return *a_.as<abi::SegmentA>(); }
  abi::SegmentB& b() const { return *b_.as<abi::SegmentB>(); }
  std::uint64_t id() const { return id_; }
  void ring() const;
  // The engine rings within ten seconds. Takes the ring.
  bool rung() const;

 private:
  const std::uint64_t id_;
  UniqueFd a_fd_, b_fd_;
  UniqueFd engine_bell_, ring_client_;  // as a porter has them
  Mapping a_, b_;
};

constexpr abi::Call call_on(abi::Op op, std::uint32_t slot) {
  abi::Call call;
  call.op = op;
  call.slot = call.route = slot;
  return call;
}
constexpr abi::Call dispatch_on(std::uint32_t slot) {
  return call_on(abi::Op::kDispatch, slot);
}
constexpr abi::Call combine_on(std::uint32_t slot) {
  return call_on(abi::Op::kCombine, slot);
}
inline constexpr abi::Call kNoopCall = call_on(abi::Op::kNoop, 0);

// As a client's kernel stores it.
inline void store_call(abi::PackedCall (&calls)[abi::kCallSlots], const abi::Call& call) {
  const abi::PackedCall packed = abi::pack(call);
  abi::PackedCall& to = calls[call.number % abi::kCallSlots];
  for (std::uint32_t i = abi::PackedCall::kWords; i-- > 0;)
    std::atomic_ref(to.words[i]).store(packed.words[i], std::memory_order_release);
}

// The client's part for one rank: its kernels, or by_host() its library. `session`: that of a rank on a host
// device, whose engine sleeps until it is rung.
class Ringer {
 public:
  Ringer(abi::CallWords& words, abi::Results& results, bool by_host = false,
         const RawSession* session = nullptr)
      : words_(&words), results_(&results), by_host_(by_host), session_(session) {}

  // Returns the number.
  std::uint32_t ring(abi::Call call, std::uint32_t num_tokens, std::uint64_t epoch, bool flagged = false);
  bool ended(std::uint32_t number, int timeout_ms = 10'000) {
    return comes([&] { return static_cast<std::int32_t>(done() - number) > 0; }, timeout_ms);
  }
  // After ended().
  abi::CallEnd end(std::uint32_t number);
  bool ends_well(std::uint32_t number, int timeout_ms = 10'000) {
    return ended(number, timeout_ms) && end(number).ending == abi::CallEnding::kCarriedOut;
  }
  std::uint32_t done() {
    return std::atomic_ref(by_host_ ? results_->host_ended : words_->done).load(std::memory_order_acquire);
  }
  std::uint32_t tail() const { return by_host_ ? host_tail_ : words_->tail; }
  std::uint32_t failed() { return std::atomic_ref(words_->failed).load(); }
  // As if calls had been made that went nowhere.
  void skip(std::uint32_t calls) { (by_host_ ? host_tail_ : words_->tail) += calls; }

 private:
  static std::uint32_t result_of(std::uint32_t number) {
    return abi::result_of(number % abi::kOnceResults, number / abi::kOnceResults);
  }

  abi::CallWords* words_;
  abi::Results* results_;
  bool by_host_;
  const RawSession* session_;
  std::uint32_t host_tail_ = 0;
};

// Memory of a whole group; ranks are dealt to engines round robin.
class RawGroup {
 public:
  RawGroup(std::uint64_t id, const abi::GroupShape& shape, const std::string& kind = "host",
           std::uint32_t num_devices = 1);

  void add_to(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions) const;
  // To one engine only, as after its restart.
  void add_to_engine(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
                     std::uint32_t engine, bool broken) const;
  template <typename T>
  T* region(std::uint32_t rank, std::uint32_t slot, abi::Region region) const {
    return user_[rank].as<T>(abi::UserArenaLayout(shape_).at(slot, region));
  }
  abi::Board& board(std::uint32_t rank) const { return *board_[rank].as<abi::Board>(); }
  abi::RankWaits waits(std::uint32_t rank) const { return abi::RankWaits::in(board_[rank].bytes(), shape_); }
  static std::uint32_t member(std::uint32_t rank) { return 100 + rank; }

  std::uint64_t epoch = 1;
  std::uint64_t resume_index = 0;
  std::int32_t priority = 0;

  abi::CallWords& words(std::uint32_t rank) const {
    return *user_[rank].as<abi::CallWords>(abi::UserArenaLayout(shape_).calls);
  }
  abi::Results& results(std::uint32_t rank) const { return *results_[rank].as<abi::Results>(); }
  // The ringer of a rank on a host device.
  Ringer host_ringer(std::uint32_t rank, const RawSession& session) const {
    return {words(rank), results(rank), true, &session};
  }
  // One rank to one engine; its member too, if it is there.
  void tell_rank(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
                 std::uint32_t engine, std::uint32_t rank) const;
  // As of a group that ended before this engine was here.
  void close_streams(EngineThread& engine, std::uint32_t rank) const;
  // The rank is masked.
  void mask_rank(EngineThread& engine, std::uint32_t rank) const;
  // Memory of its own for another that takes the rank's place, and since when.
  void replace(std::uint32_t rank, std::uint64_t since);
  // Maps the rank's exchange arena.
  Mapping map_exchange(std::uint32_t rank) const;
  void commit(EngineThread& engine) const;
  // To one engine, all but the commit.
  void begin(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
             std::uint32_t engine, bool broken) const;
  // To one engine, without an answer.
  void announce(const std::vector<EngineThread*>& engines, const std::vector<RawSession*>& sessions,
                std::uint32_t engine, bool broken) const;

 private:
  void make(std::uint32_t rank);

  const std::uint64_t id_;
  const abi::GroupShape shape_;
  const std::string kind_;
  const std::uint32_t num_devices_;
  std::vector<std::uint64_t> since_;  // [R] epoch in which each came
  std::vector<UniqueFd> user_fd_, exchange_fd_, board_fd_, results_fd_;
  std::vector<Mapping> user_, board_, results_;
};

}  // namespace epd::test

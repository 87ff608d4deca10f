// The thread that owns an engine's transport. For the engine's loop it is a far::Port. Two rings connect
// them: messages, releases and peers go to the thread; events and sent messages come back. Neither side waits
// for the other. A side keeps what a full ring does not take, and is woken when the ring has space.
//
// Each connect() begins a new connection. Messages that an earlier connection of that engine still brings are
// ignored.
//
// The thread polls for a while after work. Then it arms the transport and sleeps, at most
// transport::kMaxSleepMs at a time. It tells the loop by `notify`, which rings the loop's bell if it sleeps.
#pragma once

#include "far/port.h"
#include "spsc_ring.h"
#include "transport/transport.h"

#include "common/fd.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace epd::engine {

class FarProxy final : public far::Port {
 public:
  struct Event {
    enum class Kind { kReceived, kConnected, kDown, kDropped };
    Kind kind = Kind::kReceived;
    far::EngineId engine = 0;
    transport::Header header;
    far::Body body;
    Status status;                            // for kDown: the reason
    std::unique_ptr<transport::Facts> facts;  // for kConnected
    // For kDropped: messages that the transport has dropped since the event of that kind before.
    std::uint64_t strangers = 0;
    std::uint64_t malformed = 0;
  };
  using Open = std::function<Result<std::unique_ptr<transport::Transport>>()>;

  // The thread calls `open` and `notify`. An error comes from `open` or from eventfd, or there are no more
  // threads.
  static Result<std::unique_ptr<FarProxy>> start(Open open, std::uint64_t spin_ns,
                                                 std::function<void()> notify);
  // Bodies that were not released become invalid.
  ~FarProxy() override;

  // ---- the loop's

  const transport::Address& address() const { return address_; }
  const std::string& carrier() const { return carrier_; }
  // Replaces an existing connection. If the address is no good, or the peer can't be reached, the peer is
  // down. kConnected is the first event of a connection, and kDown the last.
  void connect(far::EngineId engine, transport::Address address);
  // Nothing more comes from this engine.
  void close(far::EngineId engine);
  // A message to an engine without a connection is lost. A message that the transport refuses takes its peer
  // down.
  bool send(std::unique_ptr<far::Message>& message) override;
  void release(const far::Body& body) override;
  // False: nothing has come. Sent messages are freed here.
  bool next(Event& event);
  // Whether next() has something to do.
  bool has_news() const { return !to_loop_.empty() || (!unsent_orders_.empty() && !to_thread_.full()); }
  // How long the thread polls after work.
  void set_spin_ns(std::uint64_t spin_ns) { spin_ns_.store(spin_ns, std::memory_order_relaxed); }
  // Nobody can connect to this engine any more.
  bool deaf() const { return deaf_.load(std::memory_order_relaxed); }
  std::uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  using Connection = std::uint64_t;  // from 1, never used again

  struct ToThread {
    enum class Kind { kSend, kRelease, kConnect, kClose };
    Kind kind = Kind::kSend;
    far::EngineId engine = 0;
    Connection connection = 0;
    std::unique_ptr<far::Message> message;
    far::Body body;
    transport::Address address;
  };
  struct ToLoop {
    std::unique_ptr<far::Message> away;  // a message that was sent, or
    Event event;
    Connection connection = 0;
  };
  struct Peer {
    transport::PeerId id = 0;
    Connection connection = 0;
    bool heard = false;
    std::deque<std::unique_ptr<far::Message>> waiting;  // for room
  };
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  FarProxy(UniqueFd bell, std::uint64_t spin_ns, std::function<void()> notify);
  // For the loop.
  bool push(ToThread& command);
  void order(ToThread command);
  void send_orders();
  void wake();

  // For the thread.
  void run();
  bool take_orders();
  void carry_out(ToThread& command);
  void connect_peer(const ToThread& command);
  void send_to_peer(ToThread& command);
  void release_body(const far::Body& body);
  bool send_waiting();
  Status send_one(const Peer& peer, std::unique_ptr<far::Message>& message);
  bool progress();
  void take(transport::Event& event);
  void forget(far::EngineId engine);
  void tell_connected(far::EngineId engine, Peer& peer);
  void tell_down(far::EngineId engine, Connection connection, const Status& status);
  bool tell_dropped(std::uint64_t now_ns);
  bool tell_loop();
  void look_whether_deaf(std::uint64_t now_ns);
  void sleep();

  static constexpr std::size_t kSlots = 4096;

  const UniqueFd bell_;
  std::atomic<std::uint64_t> spin_ns_;
  const std::function<void()> notify_;
  transport::Address address_;
  std::string carrier_;
  SpscRing<ToThread> to_thread_{kSlots};
  SpscRing<ToLoop> to_loop_{kSlots};
  std::atomic<bool> ring_was_full_{false};  // the loop is to be told of room in to_thread_
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> deaf_{false};
  std::atomic<std::uint64_t> sleeps_{0};

  // Used by the loop.
  std::deque<ToThread> unsent_orders_;  // the ring was full
  std::map<far::EngineId, Connection> connections_;
  Connection last_connection_ = 0;

  // Used by the thread.
  std::unique_ptr<transport::Transport> transport_;
  std::map<far::EngineId, Peer> peers_;
  std::map<transport::PeerId, far::EngineId> engines_;
  std::map<std::uint64_t, std::unique_ptr<far::Message>> sent_;  // by cookie
  std::map<std::uint64_t, std::vector<Line>> aligned_;           // by hold
  transport::Counters told_dropped_;
  std::uint64_t told_dropped_ns_ = 0;
  std::uint64_t looked_deaf_ns_ = 0;
  std::deque<ToLoop> untold_;  // the ring was full
  std::uint64_t last_ = 0;     // cookie, hold

  std::thread thread_;
};

}  // namespace epd::engine

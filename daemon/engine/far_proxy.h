// The thread that owns an engine's transport, behind a far::Port of the engine's loop. Two rings connect
// them: messages, releases and peers go there, what has come and messages that are away come back. Neither
// side waits for the other.
//
// The thread polls for a while after work, then it arms the transport and sleeps, at most
// transport::kMaxSleepMs at a time. The loop is told by `notify`, which rings its bell if it sleeps.
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

namespace epd {

class FarProxy final : public far::Port {
 public:
  struct Event {
    enum class Kind { kReceived, kDown };
    Kind kind = Kind::kReceived;
    far::EngineId engine = 0;
    transport::Header header;
    far::Body body;
    Status status;  // kDown: why
  };
  using Open = std::function<Result<std::unique_ptr<transport::Transport>>()>;

  // `open` and `notify` are called by the thread. An error is that of `open`, or of eventfd.
  static Result<std::unique_ptr<FarProxy>> start(Open open, std::uint64_t spin_ns,
                                                 std::function<void()> notify);
  // Bodies that were not released are gone with it.
  ~FarProxy() override;

  // ---- the loop's

  const transport::Address& address() const { return address_; }
  // A peer whose address is no good, or that can't be reached, is down.
  void connect(far::EngineId engine, transport::Address address);
  // Nothing of it comes any more but what lies in the ring.
  void close(far::EngineId engine);
  bool send(std::unique_ptr<far::Message>& message) override;
  void release(const far::Body& body) override;
  // False: nothing has come. Messages that are away are freed here.
  bool next(Event& event);
  bool has_news() const { return !to_loop_.empty(); }
  std::uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  struct ToThread {
    enum class Kind { kSend, kRelease, kConnect, kClose };
    Kind kind = Kind::kSend;
    far::EngineId engine = 0;
    std::unique_ptr<far::Message> message;
    far::Body body;
    transport::Address address;
  };
  struct ToLoop {
    std::unique_ptr<far::Message> away;  // or
    Event event;
  };
  struct Peer {
    transport::PeerId id = 0;
    std::deque<std::unique_ptr<far::Message>> waiting;  // for room
  };
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  FarProxy(UniqueFd bell, std::uint64_t spin_ns, std::function<void()> notify);
  void order(ToThread command);  // the loop's
  void wake();                   // likewise

  // The thread's.
  void run();
  bool take_orders();
  void carry_out(ToThread& command);
  void connect_peer(far::EngineId engine, const transport::Address& address);
  bool send_waiting();
  bool send_one(Peer& peer, std::unique_ptr<far::Message>& message);
  bool progress();
  void take(transport::Event& event);
  void tell_down(far::EngineId engine, const Status& status);
  bool tell_loop();
  void sleep();

  static constexpr std::size_t kSlots = 4096;

  const UniqueFd bell_;
  const std::uint64_t spin_ns_;
  const std::function<void()> notify_;
  transport::Address address_;
  SpscRing<ToThread> to_thread_{kSlots};
  SpscRing<ToLoop> to_loop_{kSlots};
  std::deque<ToThread> unsent_orders_;  // the loop's: the ring was full
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> sleeps_{0};

  // The thread's.
  std::unique_ptr<transport::Transport> transport_;
  std::map<far::EngineId, Peer> peers_;
  std::map<transport::PeerId, far::EngineId> engines_;
  std::map<std::uint64_t, std::unique_ptr<far::Message>> sent_;  // by cookie
  std::map<std::uint64_t, std::vector<Line>> aligned_;           // by hold
  std::deque<ToLoop> untold_;                                    // the ring was full
  std::uint64_t last_ = 0;                                       // cookie, hold

  std::thread thread_;
};

}  // namespace epd

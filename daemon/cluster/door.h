// The cluster's port. A thread of its own takes connections in, looks at their first byte, hands them to
// gRPC, and sees them end. So connections are counted and limited, and what gRPC refuses in silence has a
// name in the log.
#pragma once

#include "cluster/address.h"
#include "common/fd.h"
#include "refusals.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace epd::cluster {

class Door {
 public:
  static constexpr std::size_t kMaxConnections = 2048;  // a node has one
  static constexpr std::size_t kMaxOfAddress = 64;

  struct Options {
    SocketAddress listen;
    bool secure = true;
    std::size_t max_connections = kMaxConnections;
    std::size_t max_of_address = kMaxOfAddress;
    std::function<void(UniqueFd connection)> hand_over;  // on the door's thread
  };
  static Result<std::unique_ptr<Door>> open(Options options, Refusals& refusals);
  // Takes connections in from now on, on a thread of its own. Once.
  Status begin();
  ~Door();  // stops
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // From any thread.
  // The connection from that address has opened a stream: its end is none of a refused one. Until the stream
  // is closed, refused for instance, the connection need not make room for others.
  void opened_stream(const std::string& peer);
  void closed_stream(const std::string& peer);
  // Connects to that address and ends the connection at once; `answer` comes on the door's thread.
  void probe(const SocketAddress& address, std::function<void(bool refused)> answer);
  // Takes nobody in any more, and ends.
  void stop();

 private:
  struct Connection {
    UniqueFd fd;  // until it is handed over; then a copy, to see its end
    std::string peer;
    std::string host;  // of peer
    bool handed_over = false;
    std::uint64_t due_ns = 0;  // for its first byte
  };
  struct Streams {
    std::uint64_t connection = 0;  // its id: a later one may come from the same address
    bool any = false;              // ever
    std::size_t open = 0;
  };
  struct Probe {
    UniqueFd fd;
    std::function<void(bool refused)> answer;
    std::uint64_t due_ns = 0;
  };
  struct WantedProbe {
    SocketAddress address;
    std::function<void(bool refused)> answer;
  };

  Door(Options options, Refusals& refusals) : options_(std::move(options)), refusals_(refusals) {}
  Status listen();
  void run();
  void take_in();
  // Room for one more from that host. If the host, or all together, have as many as they may, the oldest of
  // those without an open stream is ended for it.
  Status make_room(const std::string& host);
  // Of that host, or of all if it is null. `full` says why.
  Status end_oldest(const std::string* host, const std::string& full);
  const Streams* streams_of(std::uint64_t id, const Connection& connection) const;  // with mutex_ held
  void forget(std::uint64_t id);
  void look(std::uint64_t id, Connection& connection);
  void ended(std::uint64_t id, Connection& connection);
  void begin_probes();
  void end_probe(std::uint64_t id);
  void end_late();
  bool watch(int fd, std::uint64_t id, std::uint32_t events, bool again = false);

  const Options options_;
  Refusals& refusals_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::thread thread_;
  std::uint64_t last_id_ = 1;  // 0: the listener; 1: wake_
  bool stopping_now_ = false;
  std::map<std::uint64_t, Connection> connections_;
  std::map<std::string, std::size_t> of_address_;  // connections_ by host
  std::map<std::uint64_t, Probe> probes_;

  std::mutex mutex_;
  bool stopping_ = false;                   // guarded by mutex_
  std::map<std::string, Streams> streams_;  // of those handed over, by peer; guarded by mutex_
  std::deque<WantedProbe> wanted_;          // guarded by mutex_
};

}  // namespace epd::cluster

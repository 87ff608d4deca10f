// The cluster's port. Its thread accepts connections, looks at their first byte, carries their bytes to gRPC
// and back, and sees them end. So connections and their bytes are limited, and the log names what gRPC
// refuses in silence.
#pragma once

#include "cluster/address.h"
#include "common/fd.h"
#include "gate.h"
#include "refusals.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace epd::cluster {

class Door {
 public:
  static constexpr std::size_t kMaxConnections = 2048;  // a node has one
  static constexpr std::size_t kMaxOfAddress = 64;
  // How long a certificate whose connection was ended for a flood may open no stream.
  static constexpr std::uint64_t kWaitNs = 5'000'000'000;

  struct Options {
    SocketAddress listen;
    bool secure = true;
    std::size_t max_connections = kMaxConnections;
    std::size_t max_of_address = kMaxOfAddress;
    // Gets one end of a pair of sockets; the door carries the connection's bytes. Called on the door's
    // thread.
    std::function<void(UniqueFd inner)> hand_over;
  };
  static Result<std::unique_ptr<Door>> open(Options options, Refusals& refusals);
  // Starts the thread that accepts connections. Once.
  Status begin();
  ~Door();  // stops
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // The following may be called from any thread. `key` is the peer of what was handed over, as gRPC names it.
  // The connection has opened a stream. Until the stream is closed, for instance refused, the connection need
  // not make room for others. `peer`, if not null, is set to the connection's address. Not OK: it had opened
  // one before, so it is ended, or its certificate has to wait. `certificate` is "" if there is none.
  Status opened_stream(const std::string& key, const std::string& certificate, std::string* peer = nullptr);
  void took_frame(const std::string& key);  // as a whole
  void welcomed(const std::string& key);    // its Hello was taken
  void closed_stream(const std::string& key);
  // Connects to the address and closes the connection at once. `answer` is called on the door's thread.
  void probe(const SocketAddress& address, std::function<void(bool refused)> answer);
  // Accepts no more connections, and ends.
  void stop();

 private:
  struct Connection {
    UniqueFd fd;
    std::string peer;
    std::string host;            // of peer
    std::uint64_t due_ns = 0;    // for its first byte
    std::unique_ptr<Gate> gate;  // once it is handed over
    std::string key;             // once it is handed over
  };
  enum class Stage { kNoStream, kOpen, kClosed };
  struct Stream {
    int fd = -1;  // the connection's; open as long as this is here
    std::string peer;
    Stage stage = Stage::kNoStream;
    bool welcomed = false;  // ever
    std::uint64_t frames = 0;
    std::string certificate;
    bool flooded = false;
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
  // Makes room for one more connection of the host. If the host, or all together, have as many as they may,
  // the oldest one without an open stream is ended.
  Status make_room(const std::string& host);
  // `host` null: of all hosts. `full` says why.
  Status end_oldest(const std::string* host, const std::string& full);
  void forget(std::uint64_t id);
  void look(std::uint64_t id, Connection& connection);
  Status hand_over(std::uint64_t id, Connection& connection);
  void carry(std::uint64_t id, Connection& connection);
  Status end_flood(Stream& stream, const std::string& why);  // with mutex_ held
  void ended(std::uint64_t id, Connection& connection);
  void begin_probes();
  void end_probe(std::uint64_t id);
  void end_late();
  bool watch(int fd, std::uint64_t id, std::uint32_t events, bool again = false);

  const Options options_;
  Refusals& refusals_;
  UniqueFd listener_;
  std::uint64_t listen_ns_ = 0;  // when the listener is watched again; 0: it is
  UniqueFd epoll_;
  UniqueFd wake_;
  std::thread thread_;
  std::uint64_t last_id_ = 1;  // 0: the listener; 1: wake_
  bool stopping_now_ = false;
  std::map<std::uint64_t, Connection> connections_;
  std::map<std::string, std::size_t> of_address_;  // connections_ by host
  std::set<std::uint64_t> pausing_;                // connections_ whose gates pause
  std::map<std::uint64_t, Probe> probes_;

  std::mutex mutex_;
  bool stopping_ = false;                       // guarded by mutex_
  std::map<std::string, Stream> streams_;       // of those handed over, by key; guarded by mutex_
  std::map<std::string, std::uint64_t> waits_;  // by certificate, until when; guarded by mutex_
  std::deque<WantedProbe> wanted_;              // guarded by mutex_
};

}  // namespace epd::cluster

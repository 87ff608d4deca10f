// The attach protocol: connections, their handshake, sessions and their quotas.
//
// A connection becomes a session with its Hello. It ends with its socket, with its process, or with end().
// The table has an epoll descriptor: its owner waits for poll_fd() and calls process(). No socket here
// belongs to a client, because each client has a porter (base/gate.h). Threads: one thread makes all calls.
#pragma once

#include "base/clock.h"
#include "base/closer.h"
#include "base/gate.h"
#include "base/peer.h"
#include "base/quota.h"
#include "common/packet.h"
#include "proto/attach.h"
#include "session/listener.h"
#include "session/segments.h"

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace epd::session {

struct SessionLimits {
  std::uint32_t max_sessions = 256;
  std::uint32_t attach_timeout_ms = 5'000;
};

struct Session {
  std::uint64_t id = 0;
  UniqueFd socket;  // to its porter
  PeerIdentity peer;
  DescriptorShare descriptors;
  std::uint64_t accepted_ns = 0;
  bool attached = false;  // it has sent Hello and got Welcome
  std::uint32_t device = 0;
  std::string library;
  std::int32_t claimed_pid = 0;  // as the client claims it; for people
  std::string claimed_host;      // the same
  Segments segments;
  std::set<std::uint32_t> pending_requests;  // Joins and Leaves that wait for their replies
};

// A text of the client for logs and messages, safe for a terminal.
std::string printable(const char* text, std::size_t length);
// The refusal that a client receives for `status`.
abi::Refused refusal(const Status& status);
// The process for people: its pid or, in another PID namespace, "4711@node7?", which the client claims.
std::string process_name(const Session& session);

// The table's owner: it decides, and is told of events.
class SessionHost {
 public:
  virtual ~SessionHost() = default;
  // OK, or the reason why this peer may not attach (now, or ever).
  virtual Status may_attach(const PeerIdentity& peer) = 0;
  // OK, or the reason why this device accepts no session of this peer.
  virtual Status may_use_device(const PeerIdentity& peer, std::uint32_t device) = 0;
  virtual Quota max_sessions_of(const PeerIdentity& peer) = 0;
  // Closed sessions of a user that their engines have not freed yet.
  virtual std::uint64_t ending_sessions(std::uint32_t uid) const = 0;
  // The eventfd that wakes the engine of a device. It is the same for each engine process.
  virtual int engine_bell(std::uint32_t device) const = 0;
  virtual void session_opened(const Session& session) = 0;
  // `how`: "died", "detached", "was ended: ...". The session is gone from the table when this is called.
  virtual void session_closed(Session session, const std::string& how) = 0;
  // Each is answered with SessionTable::reply, at once or later. `memory`: the descriptors that came with it.
  virtual void join_requested(const Session& session, std::uint32_t request_id, const abi::Join& join) = 0;
  virtual void leave_requested(const Session& session, std::uint32_t request_id, const abi::Leave& leave) = 0;
  virtual void map_requested(const Session& session, std::uint32_t request_id, const abi::MapMemory& message,
                             std::vector<UniqueFd> memory) = 0;
  // Not answered.
  virtual void rows_told(const Session& session, const abi::RowsTold& message) = 0;
};

// How descriptors of peers are counted and closed. Both outlive the table.
struct PeerResources {
  Closer& closer;
  DescriptorBudget& descriptors;
};

// How a session ends whose client has gone without a word: killed, crashed, or it exited without detaching.
inline constexpr const char* kDied = "died";
// How the text begins of one that the daemon ends.
inline constexpr const char* kEnded = "was ended: ";

struct Carried;  // of a porter: porter.h

class SessionTable {
 public:
  // Limits of connections that have not sent Hello: of one user, and of all. The oldest is closed for one
  // more. A user may have many uids (newuidmap), and each connection takes two descriptors.
  static constexpr std::uint32_t kMaxHalfOpenPerUser = 32;
  static constexpr std::uint32_t kMaxHalfOpen = 512;
  // Limits of connections that have ended here, and whose porters have not: of one user, and of all. Root and
  // the daemon's own user have only their own limits.
  static constexpr std::size_t kMaxEndingPerUser = 64;
  static constexpr std::size_t kMaxEnding = 512;
  static constexpr std::size_t kMaxUnclosed = 1024;  // descriptors of a user's that wait for their close
  // Joins of a user that may wait for each session that it may have, but kMaxPendingRequests at least. As
  // many leaves have room beside them.
  static constexpr std::uint64_t kPendingPerSession = 4;
  // Packets of a user's sessions in one call of process(): shared by those that have any, each has at least
  // one and at most kPacketsPerSession.
  static constexpr int kPacketsPerUser = 64;
  static constexpr int kPacketsPerSession = 16;

  struct Options {
    std::string daemon;  // name and version
    std::array<std::uint8_t, 16> boot_id{};
    struct Device {
      std::string name;
      abi::DeviceKind kind = abi::DeviceKind::kHost;
      abi::GpuUuid uuid{};
    };
    std::vector<Device> devices;  // by index
    SessionLimits limits;
  };

  // The host is not called before listen().
  SessionTable(Options options, const Clock& clock, SessionHost& host, PeerResources resources)
      : options_(std::move(options)),
        clock_(clock),
        host_(host),
        closer_(resources.closer),
        descriptors_(resources.descriptors) {}
  // Once, before anything else.
  Status listen(Listener listener);

  int poll_fd() const { return epoll_.get(); }
  void process();
  // Takes a connection, from the gate or, in tests, from the test's porter.
  void admit(Gate::Arrival arrival);
  // Ends half-open connections that are due. Returns when the next one is; UINT64_MAX: none.
  void tick();
  std::uint64_t next_due_ns() const;

  void set_limits(const SessionLimits& limits);
  // Answers the session's pending request with this id. Does nothing if there is none, or no session.
  template <typename T>
  void reply(std::uint64_t session_id, std::uint32_t request_id, abi::AttachType type, const T& body,
             const FdList& fds = {}) {
    send_reply(session_id, request_id, static_cast<std::uint16_t>(type), &body, sizeof(body), fds);
  }
  void refuse(std::uint64_t session_id, std::uint32_t request_id, const Status& status);
  // Rings the client, after a change that it reads and that no engine could ring for.
  void ring(std::uint64_t session_id);
  // Sends Goodbye and closes.
  void end(std::uint64_t session_id, const Status& status);
  void end_all(const Status& status);
  // The process is ending. The connection shows that only when it has ended.
  void died(std::uint64_t session_id) { close(session_id, "died"); }
  // Stops listening and removes the socket; sessions live on.
  void stop_listening();

  const Session* find(std::uint64_t session_id) const;
  const std::map<std::uint64_t, Session>& connections() const { return connections_; }  // half-open too
  std::uint32_t attached() const { return attached_; }
  std::uint32_t attached_on(std::uint32_t device) const;
  std::uint64_t total_attached() const { return total_attached_; }
  std::uint64_t total_refused() const;

 private:
  Status watch(int fd, std::uint64_t key);
  void receive(std::uint64_t id, int max_packets);
  Status check_descriptors(const Session& session, const Packet& packet, const Carried& carried) const;
  void handle(Session& session, Packet& packet, const Carried& carried);
  bool expect_reply(Session& session, abi::AttachType type, std::uint32_t request_id);
  Status check_pending(const Session& session, abi::AttachType type) const;
  bool note_pending(Session& session, std::uint32_t request_id);
  void forget_pending(std::uint32_t uid, std::size_t count);
  void malformed(Session& session, std::uint32_t request_id, const Status& error);
  void close(std::uint64_t id, const std::string& how);
  void ring(const Session& session) const;
  void hang_up(UniqueFd socket, std::uint32_t uid);
  void send_reply(std::uint64_t session_id, std::uint32_t request_id, std::uint16_t type, const void* body,
                  std::size_t bytes, const FdList& fds);

  // arrivals.cpp
  void admit_all();
  Status check_arrival(const PeerIdentity& peer) const;
  void make_room(const PeerIdentity& peer);
  void end_half_open(std::uint64_t id, const Status& status);
  void turn_away(const Gate::Arrival& arrival, const Status& status);

  // handshake.cpp
  void hello(Session& session, const Packet& packet);
  Status check_hello(const Session& session, const abi::Hello& hello) const;
  Result<std::uint32_t> choose_device(const Session& session, const abi::Hello& hello) const;
  Status none_visible(const abi::Hello& hello) const;
  Result<ClientEnds> prepare(Session& session) const;
  Status welcome(const Session& session, const abi::Hello& hello, std::uint32_t request_id,
                 const ClientEnds& client) const;

  Options options_;
  Listener listener_;
  const Clock& clock_;
  SessionHost& host_;
  Closer& closer_;
  DescriptorBudget& descriptors_;
  std::unique_ptr<Gate> gate_;  // until stop_listening()
  UniqueFd epoll_;
  std::map<std::uint64_t, Session> connections_;  // ids grow, so the oldest is the first
  std::map<std::uint32_t, std::size_t> pending_;  // by user: pending_requests of all its connections
  std::uint64_t next_id_ = 1;
  std::uint32_t attached_ = 0;
  std::uint64_t total_attached_ = 0;
  std::uint64_t total_refused_ = 0;
};

}  // namespace epd::session

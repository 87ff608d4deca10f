// The attach connection, which is the session: requests over it, and how the session ends.
#pragma once

#include "attach_socket.h"
#include "proto/session.h"
#include "waits.h"

#include <unordered_map>
#include <vector>

namespace epd::client {

// Events of a connection. With the mutex.
class ConnectionEvents {
 public:
  virtual ~ConnectionEvents() = default;
  // Once: Connection::ended() says why.
  virtual void on_end_locked() = 0;
  // A join was given up. Some thread must read the socket while awaits_late_join_locked().
  virtual void on_late_join_locked() = 0;
};

class ReplyWaiter;

// The mutex also guards the reading end of the socket.
class Connection {
 public:
  Connection(const UniqueFd& socket, const abi::SegmentB& b, Waits& waits, ConnectionEvents& events)
      : socket_(socket), b_(b), waits_(waits), events_(events) {}

  struct Request {
    abi::AttachType type;
    abi::AttachType reply_type;
    const void* body;
    std::size_t body_bytes;
    Deadline send_by;           // DEADLINE_EXCEEDED if it could not be sent by then
    Deadline reply_by;          // likewise for the reply
    std::vector<int> fds = {};  // the caller's descriptors to send with it
  };
  Status request(const Request& request, Packet& reply);
  // A message whose reply does not matter, if it has one. False: it was not sent, as the socket is full.
  bool tell_locked(abi::AttachType type, const void* body, std::size_t body_bytes);
  void leave(std::uint32_t member, Deadline deadline);
  void detach() { send_detach(socket_); }

  void look_at_socket() noexcept;  // takes the packets that have come; needs no lock
  void probe();                    // likewise, at most once a millisecond
  const UniqueFd& socket() const { return socket_; }

  // Not OK once the session is over. With the mutex.
  const Status& ended() const { return ended_; }
  void end_locked(Status status);
  void note_end_locked();  // ends the session if segment B says that it has ended
  // False: the engine is away.
  bool serving() const;
  bool awaits_late_join_locked() const;
  Status blocked(Lock& lock, std::string why);  // WOULD_BLOCK, unless the session is over

 private:
  class Expected;
  Status send_request(Lock& lock, const Request& request, std::uint32_t id);
  std::uint32_t new_request_id_locked();
  void take_packets_locked();
  void route_locked(Packet& packet);
  void give_up_join_locked(std::uint32_t id);
  void send_owed_leaves_locked();

  const UniqueFd& socket_;
  const abi::SegmentB& b_;
  Waits& waits_;
  ConnectionEvents& events_;

  // Guarded by the mutex.
  Status ended_;
  SteadyClock::time_point last_probe_{};
  std::uint32_t last_request_id_ = 1;  // 1 was Hello
  // The waiter for the reply, by id. Null: a join that was given up.
  std::unordered_map<std::uint32_t, ReplyWaiter*> requests_;
  std::vector<std::uint32_t> owed_leaves_;  // members to leave: their joins had been given up
};

}  // namespace epd::client

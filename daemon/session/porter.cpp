#include "porter.h"

#include "base/own_table.h"
#include "common/descriptor_message.h"
#include "proto/attach.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace epd::session {
namespace {

constexpr unsigned kNvidiaMajor = 195;  // of /dev/nvidiactl, to which CUDA's exported handles belong
constexpr int kMostReadOut = 256;       // packets
constexpr int kMostRings = 1024;        // read at once
constexpr std::size_t kMostKept = 256;  // descriptors of one connection that are not memory

using Moved = PacketPorter::Moved;

Moved not_moved() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? Moved::kNotNow : Moved::kOver;
}

bool may_be_memory(int fd) {
  if (::fcntl(fd, F_GET_SEALS) >= 0) return true;
  struct statx info;
  // Without a request to the file system's server, which could take for ever.
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &info) != 0) return false;
  return (info.stx_mode & S_IFMT) == S_IFCHR && info.stx_rdev_major == kNvidiaMajor;
}

}  // namespace

PacketPorter::Moved PacketPorter::Load::receive(int socket) {
  iovec part{data.data(), data.size()};
  DescriptorMessage message({&part, 1});
  // ECONNRESET: the other end was closed with packets that it had not read. It is reported once, before the
  // packets that the other end sent.
  long n;
  do {
    n = own_table::receive(socket, message.header(), MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == ECONNRESET);
  if (n < 0) return not_moved();
  message.take_descriptors(fds);
  bytes = static_cast<std::size_t>(n);
  truncated = message.is_cut();
  full = n != 0 || truncated || !fds.empty();
  return full ? Moved::kYes : Moved::kOver;
}

PacketPorter::Moved PacketPorter::Load::send(int socket, iovec prefix, bool with_fds) {
  iovec parts[2] = {prefix, {data.data(), bytes}};
  DescriptorMessage message(parts, std::span(fds).first(with_fds ? fds.size() : 0));
  return own_table::send(socket, message.header(), MSG_DONTWAIT) >= 0 ? Moved::kYes : not_moved();
}

abi::WireHeader PacketPorter::Load::header() const {
  abi::WireHeader header{};
  std::memcpy(&header, data.data(), std::min(bytes, sizeof(header)));
  return header;
}

void PacketPorter::Load::drop() {
  full = false;
  for (const int fd : fds) own_table::close(fd);
  fds.clear();
}

PacketPorter::~PacketPorter() {
  in_.drop();
  out_.drop();
  for (const int bell : {bells_.from_client, bells_.to_client, bells_.engine, bells_.ring_client})
    own_table::close(bell);
  for (const int fd : kept_) own_table::close(fd);
}

void PacketPorter::leave_to_the_kernel() {
  kept_.clear();
  bells_ = {};
}

void PacketPorter::run() {
  bool client_ended = false;
  for (;;) {
    // poll() reports the inner socket's end even if no event is requested. It reports the client's end only
    // on request.
    const auto peer_events =
        static_cast<short>((admitted_ && !in_.full ? POLLIN : 0) | (out_.full ? POLLOUT : 0));
    const auto inner_events = static_cast<short>((out_.full ? 0 : POLLIN) | (in_.full ? POLLOUT : 0));
    pollfd entries[5] = {{peer_events == 0 ? -1 : at_.peer, peer_events, 0},
                         {at_.inner, inner_events, 0},
                         {client_ended ? -1 : at_.process, POLLIN, 0},
                         {bells_.from_client, POLLIN, 0},
                         {bells_.ring_client, POLLIN, 0}};
    own_table::poll(entries, 5, -1);
    if (entries[3].revents != 0 || entries[4].revents != 0) pass_rings();
    client_ended = client_ended || entries[2].revents != 0;
    const bool loop_ended = (entries[1].revents & (POLLHUP | POLLERR)) != 0;
    // Packets that the client sent before its end still count.
    if (move() && !(client_ended && !in_.full) && !(loop_ended && (out_.full || in_.full))) continue;
    say_farewell();
    return;
  }
}

bool PacketPorter::move() {
  return carry_out() && carry_in();
}

bool PacketPorter::carry_in() {
  Moved moved = Moved::kYes;
  while (moved == Moved::kYes) moved = admitted_ ? take_in() : Moved::kNotNow;
  return moved != Moved::kOver;
}

PacketPorter::Moved PacketPorter::take_in() {
  if (!in_.full) {
    if (const Moved moved = in_.receive(at_.peer); moved != Moved::kYes) return moved;
    note_ = {static_cast<std::uint32_t>(in_.fds.size()), -1, in_.truncated ? 1u : 0u, 0};
    const bool brings_memory = in_.header().type == static_cast<std::uint16_t>(abi::AttachType::kMapMemory);
    const auto odd = std::find_if_not(in_.fds.begin(), in_.fds.end(),
                                      [&](int fd) { return brings_memory && may_be_memory(fd); });
    if (odd != in_.fds.end()) note_.not_memory = static_cast<std::int32_t>(odd - in_.fds.begin());
    if (odd != in_.fds.end() && kept_.size() + in_.fds.size() > kMostKept) note_.too_many = 1;
  }
  const bool with_fds = note_.not_memory < 0 && !in_.truncated && in_.header().num_fds == in_.fds.size();
  Moved moved = in_.send(at_.inner, {&note_, sizeof(note_)}, with_fds);
  // Sending fails if the kernel takes no more descriptors in flight. Then the loop sees that they are
  // missing. Or the loop has ended the connection.
  if (moved == Moved::kOver && with_fds && !in_.fds.empty())
    moved = in_.send(at_.inner, {&note_, sizeof(note_)}, false);
  if (moved != Moved::kYes) return moved;
  if (note_.not_memory >= 0) keep_until_the_end(in_.fds);
  in_.drop();
  return moved;
}

bool PacketPorter::carry_out() {
  Moved moved = Moved::kYes;
  while (moved == Moved::kYes) {
    if (!out_.full) moved = out_.receive(at_.inner);
    if (moved != Moved::kYes) break;
    moved = out_.header().type >= kPorterOrders ? obey() : tell();
    if (moved == Moved::kYes) out_.drop();
  }
  return moved != Moved::kOver;
}

// A client that has ended gets nothing more. Packets that it sent before still count.
PacketPorter::Moved PacketPorter::tell() {
  if (deaf_) return Moved::kYes;
  const Moved moved = out_.send(at_.peer, {}, true);
  deaf_ = moved == Moved::kOver;
  return deaf_ ? Moved::kYes : moved;
}

PacketPorter::Moved PacketPorter::obey() {
  switch (static_cast<PorterOrder>(out_.header().type)) {
    case PorterOrder::kAdmit: admitted_ = true; break;
    case PorterOrder::kTakeBells: take_bells(); break;
    case PorterOrder::kRing: own_table::ring_socket(bells_.to_client); break;
  }
  return Moved::kYes;
}

// Closing a descriptor that is not memory may block, and its sender waits for answers. So it stays open until
// this thread ends.
void PacketPorter::keep_until_the_end(std::vector<int>& fds) {
  kept_.insert(kept_.end(), fds.begin(), fds.end());
  fds.clear();
}

void PacketPorter::take_bells() {
  if (out_.fds.size() != 4) return;
  bells_ = {out_.fds[0], out_.fds[1], out_.fds[2], out_.fds[3]};
  out_.fds.clear();
}

// A doorbell is emptied before its ring is passed on. So a ring that arrives in between is passed on once
// more.
void PacketPorter::pass_rings() {
  if (bells_.from_client >= 0 && own_table::is_ready(bells_.from_client)) {
    const bool rings_on = clear_from_client();
    own_table::ring_eventfd(bells_.engine);
    if (!rings_on) kept_.push_back(std::exchange(bells_.from_client, -1));
  }
  if (bells_.ring_client >= 0 && own_table::is_ready(bells_.ring_client)) {
    own_table::clear_eventfd(bells_.ring_client);
    own_table::ring_socket(bells_.to_client);
  }
}

// False: the doorbell has ended, because the client has closed it or has sent descriptors, whose close could
// block.
bool PacketPorter::clear_from_client() const {
  for (int i = 0; i < kMostRings; ++i) {
    char byte;
    iovec part{&byte, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const long n = own_table::receive(bells_.from_client, message, MSG_DONTWAIT | MSG_PEEK);
    if (n < 0) return not_moved() == Moved::kNotNow;
    if (n == 0 || (message.msg_flags & MSG_CTRUNC) != 0) return false;
    own_table::receive(bells_.from_client, message, MSG_DONTWAIT);
  }
  return true;
}

// Reads and drops packets without descriptors, so that the client reads our last message and not ECONNRESET.
void PacketPorter::say_farewell() const {
  for (int i = 0; i < kMostReadOut; ++i) {
    char byte;
    iovec part{&byte, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (own_table::receive(at_.peer, message, MSG_DONTWAIT | MSG_PEEK) <= 0) break;
    if ((message.msg_flags & MSG_CTRUNC) != 0) break;  // the packet carries descriptors
    own_table::receive(at_.peer, message, MSG_DONTWAIT);
  }
  own_table::shut_down(at_.peer, SHUT_RDWR);
}

Status order(int socket, PorterOrder what, const FdList& fds) {
  return send_packet(socket, static_cast<std::uint16_t>(what), 0, nullptr, 0, fds);
}

void carry_packets(const Doorstep& doorstep) {
  const auto porter = std::make_unique<PacketPorter>(doorstep);
  porter->run();
  porter->leave_to_the_kernel();  // does not block, because this task ends
}

}  // namespace epd::session

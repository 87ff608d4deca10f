#include "transport_child.h"

#include "common/signal.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <deque>

namespace epd::transport {
namespace {

bool read_all(int fd, void* data, std::size_t bytes) {
  for (auto* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t got = ::read(fd, at, bytes);
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

Address read_address_from(int fd) {
  std::uint32_t bytes = 0;
  if (!read_all(fd, &bytes, sizeof(bytes)) || bytes > kMaxAddressBytes) return {};
  Address address(bytes);
  return read_all(fd, address.data(), bytes) ? address : Address();
}

void write_address(int fd, const Address& address) {
  const auto bytes = static_cast<std::uint32_t>(address.size());
  if (::write(fd, &bytes, sizeof(bytes)) != sizeof(bytes)) return;
  if (::write(fd, address.data(), bytes) != static_cast<ssize_t>(bytes)) return;
}

}  // namespace

Child::Child(const std::string& mode, std::uint64_t name, Carrier carrier) {
  int to[2];
  int from[2];
  EXPECT_EQ(::pipe2(to, O_CLOEXEC), 0);
  EXPECT_EQ(::pipe2(from, O_CLOEXEC), 0);
  to_.reset(to[1]);
  from_.reset(from[0]);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(to[0], 0);
    ::dup2(from[1], 3);
    ::close_range(4, ~0u, 0);  // UCX's sockets outlive an exec
    ::execl("/proc/self/exe", "transport_test", "--peer", mode.c_str(), std::to_string(name).c_str(),
            std::to_string(static_cast<int>(carrier)).c_str(), nullptr);
    ::_exit(127);
  }
  ::close(to[0]);
  ::close(from[1]);
  address_ = read_address_from(from_.get());
  EXPECT_FALSE(address_.empty()) << "the peer process has not begun";
}

void Child::introduce(const Address& own) {
  write_address(to_.get(), own);
}

void Child::signal(int number) const {
  EXPECT_EQ(send_signal(pid_, number), 0);
}

void Child::kill_and_reap() {
  if (pid_ < 0) return;
  send_signal(pid_, SIGKILL);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the peer process ended by itself: " << WEXITSTATUS(status);
  pid_ = -1;
}

Child::~Child() {
  kill_and_reap();
}

int run_child(const std::string& mode, std::uint64_t name, Carrier carrier) {
  End end(World({carrier, false}, 0).open(kChildLimits), name);
  write_address(3, end.transport().address());
  const Address other = read_address_from(0);
  if (other.empty()) return 2;
  PeerId peer = end.connect(other);
  std::deque<std::size_t> owed;
  if (mode != "echo") owed.push_back(10);
  bool heard = false;
  for (std::uint64_t i = 0;; ++i) {
    // A connection that fails before anything has come is tried again, as engines do.
    if (!heard && end.down(peer) && end.close(peer).ok()) peer = end.connect(other);
    if (mode == "talk" && !end.down(peer)) (void)end.send(peer, i * 7919 % 300000);
    while (!owed.empty() && end.send(peer, owed.front()).code() != StatusCode::kWouldBlock) owed.pop_front();
    if (end.turn() == 0) sleep_all({&end}, kMaxSleepMs);
    if (mode == "echo") {
      for (const Received& message : end.received) owed.push_back(message.bytes);
    }
    heard |= !end.received.empty();
    end.received.clear();
    if (::testing::Test::HasFailure()) return 3;
  }
}

}  // namespace epd::transport

// Hello and Welcome: who is let in, and who is not.
#include "session_fixture.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>

std::atomic<int> g_peer_pidfd_error = 0;
std::atomic<std::int64_t> g_peer_uid = -1;

// In place of the C library's, also for the code under test.
extern "C" int getsockopt(int socket, int level, int option, void* value, socklen_t* bytes) noexcept {
  constexpr int kPeerPidfd = 77;
  if (level == SOL_SOCKET && option == kPeerPidfd && g_peer_pidfd_error != 0) {
    errno = g_peer_pidfd_error;
    return -1;
  }
  const auto result = static_cast<int>(::syscall(SYS_getsockopt, socket, level, option, value, bytes));
  if (result == 0 && level == SOL_SOCKET && option == SO_PEERCRED && g_peer_uid.load() >= 0)
    static_cast<ucred*>(value)->uid = static_cast<uid_t>(g_peer_uid++);
  return result;
}

namespace epd::session {
namespace {

TEST_F(Attach, WelcomeCarriesTheSessionsMemory) {
  const UniqueFd socket = attach("host:1");
  const abi::Welcome welcome = welcome_.read<abi::Welcome>().value();
  EXPECT_EQ(welcome.nonce, 4711u);
  EXPECT_EQ(welcome.version, abi::kAbiVersion);
  EXPECT_EQ(welcome.device_index, 1u);
  EXPECT_STREQ(welcome.device, "host:1");
  EXPECT_EQ(welcome_.header.request_id, 1u);
  ASSERT_EQ(welcome_.fds.size(), 4u);
  EXPECT_EQ(sealed_size(welcome_.fds[0].get()).value(), sizeof(abi::SegmentA));
  EXPECT_EQ(sealed_size(welcome_.fds[1].get()).value(), sizeof(abi::SegmentB));
  const Mapping a = Mapping::map(welcome_.fds[0].get(), sizeof(abi::SegmentA), Access::kReadWrite).value();
  EXPECT_EQ(a.as<abi::SegmentA>()->magic, abi::kSegmentAMagic);
  const Mapping b = Mapping::map(welcome_.fds[1].get(), sizeof(abi::SegmentB), Access::kReadOnly).value();
  EXPECT_EQ(b.as<abi::SegmentB>()->magic, abi::kSegmentBMagic);
  EXPECT_EQ(host_.opened, (std::vector<std::uint64_t>{welcome.session_id}));
  const Session* session = table_->find(welcome.session_id);
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->peer.uid, ::getuid());
  EXPECT_EQ(session->peer.pid, ::getpid());
  std::vector<std::uint32_t> groups(65536);
  groups.resize(static_cast<std::size_t>(::getgroups(static_cast<int>(groups.size()), groups.data())));
  groups.insert(groups.begin(), ::getgid());
  EXPECT_EQ(session->peer.gids, groups);
}

TEST_F(Attach, SegmentBCannotBeWrittenThroughThePassedDescriptor) {
  const UniqueFd socket = attach();
  const int fd = welcome_.fds[1].get();
  void* map = ::mmap(nullptr, sizeof(abi::SegmentB), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  EXPECT_EQ(map, MAP_FAILED);
  void* readable = ::mmap(nullptr, sizeof(abi::SegmentB), PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_NE(::mprotect(readable, sizeof(abi::SegmentB), PROT_READ | PROT_WRITE), 0);
  ::munmap(readable, sizeof(abi::SegmentB));
  const char byte = 1;
  EXPECT_LT(::pwrite(fd, &byte, 1, 0), 0);
  EXPECT_NE(::ftruncate(fd, 0), 0);
  // Root may reopen anything; a client of another user may not.
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setresgid(65534, 65534, 65534) != 0 || ::setresuid(65534, 65534, 65534) != 0) ::_exit(2);
    const std::string name = "/proc/self/fd/" + std::to_string(fd);
    ::_exit(::open(name.c_str(), O_RDWR | O_CLOEXEC) < 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "another user could reopen segment B for writing";
}

TEST_F(Attach, VersionsAndLayoutsThatDifferAreNamed) {
  abi::Hello hello = good_hello();
  hello.version_min = 5;
  hello.version_max = 7;
  UniqueFd socket = connect();
  expect_refused_and_closed(socket, exchange(socket, AttachType::kHello, hello),
                            {"VERSION_MISMATCH", "5..7", "3..3"});
  hello = good_hello();
  hello.layout_hash = 0x1234;
  socket = connect();
  expect_refused_and_closed(socket, exchange(socket, AttachType::kHello, hello),
                            {"VERSION_MISMATCH", "0x0000000000001234"});
  hello = good_hello();
  hello.features = 2;
  socket = connect();
  expect_refused_and_closed(socket, exchange(socket, AttachType::kHello, hello), {"UNSUPPORTED", "features"});
  EXPECT_EQ(table_->total_refused(), 3u);
  EXPECT_TRUE(host_.opened.empty());
}

TEST_F(Attach, DevicesAreChosenByNameOrByLoad) {
  abi::Hello hello = good_hello();
  abi::set_text(hello.device, "host:9", 6);
  const UniqueFd bad = connect();
  expect_refused_and_closed(bad, exchange(bad, AttachType::kHello, hello),
                            {"NOT_FOUND", "host:9", "host:0, host:1"});
  const UniqueFd a = attach("host:0");
  const UniqueFd b = attach();
  EXPECT_EQ(welcome_.read<abi::Welcome>().value().device_index, 1u);
  const UniqueFd c = attach("host:1");
  const UniqueFd d = attach();
  EXPECT_EQ(welcome_.read<abi::Welcome>().value().device_index, 0u);
  host_.failed_device = 0;
  const UniqueFd e = attach();
  EXPECT_EQ(welcome_.read<abi::Welcome>().value().device_index, 1u);
  hello = good_hello();
  abi::set_text(hello.device, "host:0", 6);
  const UniqueFd f = connect();
  expect_refused_and_closed(f, exchange(f, AttachType::kHello, hello), {"INTERNAL", "host:0 has failed"});
}

TEST_F(Attach, QuotasRefuseTheNextOne) {
  start({2, 5000});
  UniqueFd a = attach();
  const UniqueFd b = attach();
  UniqueFd c = connect();
  expect_refused_and_closed(c, exchange(c, AttachType::kHello, good_hello()),
                            {"RESOURCE_EXHAUSTED", "limits.max_sessions", "2"});
  a.reset();
  EXPECT_TRUE(pump_until([&] { return host_.closed.size() == 1; }));
  const UniqueFd d = attach();
  table_->set_limits({256, 5000});
  host_.quota = {2, "access.rule 7"};
  c = connect();
  expect_refused_and_closed(
      c, exchange(c, AttachType::kHello, good_hello()),
      {"RESOURCE_EXHAUSTED", "access.rule 7", "has 2 sessions", std::to_string(::getuid())});
}

TEST_F(Attach, DrainingRefusesWithTheReason) {
  host_.attach_status = Status(StatusCode::kAborted, "draining");
  const UniqueFd socket = connect();
  expect_refused_and_closed(socket, exchange(socket, AttachType::kHello, good_hello()),
                            {"ABORTED", "draining"});
}

TEST_F(Attach, WhoDoesNotSayHelloIsClosedAtTheDeadline) {
  const UniqueFd socket = connect();
  EXPECT_EQ(table_->next_due_ns(), clock_.now_ns() + 5'000'000'000);
  clock_.advance_ms(4'999);
  table_->tick();
  Packet packet;
  EXPECT_TRUE(is_silent(socket));
  clock_.advance_ms(1);
  table_->tick();
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"DEADLINE_EXCEEDED", "5000"});
  EXPECT_TRUE(table_->connections().empty());
  EXPECT_TRUE(host_.closed.empty()) << "it never was a session";
}

TEST_F(Attach, OfHalfOpenConnectionsOfAUserTheOldestMakesRoom) {
  std::vector<UniqueFd> sockets;
  for (std::uint32_t i = 0; i < SessionTable::kMaxHalfOpenPerUser; ++i) sockets.push_back(connect());
  // The oldest's Hello is here, and has not been read yet.
  ASSERT_TRUE(send_message(sockets[0].get(), AttachType::kHello, good_hello()).ok());
  pollfd inner{table_->connections().begin()->second.socket.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&inner, 1, 10'000), 1);
  const UniqueFd more = connect();
  EXPECT_EQ(host_.opened.size(), 1u);
  const UniqueFd another = connect();
  Packet packet;
  ASSERT_EQ(receive(sockets[1], packet), ReceiveResult::kPacket);
  expect_refused_and_closed(
      sockets[1], packet,
      {"RESOURCE_EXHAUSTED", "user " + std::to_string(::geteuid()) + " has 32 connections without Hello"});
  for (const UniqueFd* socket : {&std::as_const(sockets[2]), &more, &another})
    EXPECT_TRUE(is_silent(*socket));
  EXPECT_EQ(exchange(another, AttachType::kHello, good_hello()).header.type,
            static_cast<std::uint16_t>(AttachType::kWelcome));
}

// A user may have many uids. 300 users with silent connections kept all others from attaching.
TEST_F(Attach, SilentConnectionsOfManyUsersKeepNobodyOut) {
  std::vector<UniqueFd> sockets;
  sockets.push_back(connect());  // the daemon's own user
  g_peer_uid = 100'000;
  while (sockets.size() < SessionTable::kMaxHalfOpen) sockets.push_back(connect());
  EXPECT_EQ(table_->connections().size(), SessionTable::kMaxHalfOpen);
  const UniqueFd more = connect();
  EXPECT_EQ(table_->connections().size(), SessionTable::kMaxHalfOpen);
  Packet packet;
  ASSERT_EQ(receive(sockets[1], packet), ReceiveResult::kPacket);
  expect_refused_and_closed(sockets[1], packet, {"RESOURCE_EXHAUSTED", "all users have 512", "allowed: 512"});
  for (const UniqueFd* socket : {&std::as_const(sockets[0]), &std::as_const(sockets[2]), &more}) {
    EXPECT_EQ(exchange(*socket, AttachType::kHello, good_hello()).header.type,
              static_cast<std::uint16_t>(AttachType::kWelcome));
  }
}

// The number of a process that has been reaped may be a stranger's, who would be watched in its place.
TEST_F(Attach, APeerWhoseProcessIsNotKnownIsNotTakenByItsNumber) {
  for (const int error : {ESRCH, ENODATA, EINVAL}) {
    g_peer_pidfd_error = error;
    const UniqueFd socket = connect_unseen();
    Packet packet;
    EXPECT_EQ(receive(socket, packet), ReceiveResult::kClosed) << std::strerror(error);
    EXPECT_TRUE(table_->connections().empty());
  }
  g_peer_pidfd_error = EMFILE;
  const UniqueFd waits = connect_unseen();
  EXPECT_TRUE(is_silent(waits));
  EXPECT_TRUE(table_->connections().empty());
  g_peer_pidfd_error = 0;
  ASSERT_TRUE(pump_until([&] { return table_->connections().size() == 1; })) << "there is room again";
  g_peer_pidfd_error = ENOPROTOOPT;  // Linux before 6.5
  const UniqueFd socket = connect();
  Packet packet;
  EXPECT_TRUE(is_silent(socket));
  ASSERT_EQ(table_->connections().size(), 2u);
  EXPECT_TRUE(table_->connections().rbegin()->second.peer.pidfd.valid());
}

TEST_F(Attach, MalformedPacketsAreRefusedWithTheValueAndEndTheConnection) {
  const auto raw = [&](const std::vector<std::uint8_t>& bytes, const std::vector<std::string>& words) {
    const UniqueFd socket = connect();
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    Packet packet;
    ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket) << words.front();
    expect_refused_and_closed(socket, packet, words);
  };
  const auto packet = [](abi::WireHeader header, std::size_t body) {
    std::vector<std::uint8_t> bytes(sizeof(header) + body);
    std::memcpy(bytes.data(), &header, sizeof(header));
    return bytes;
  };
  raw({1, 2, 3}, {"3 bytes"});
  raw(packet({0xdead, 1, 0, 16, 1}, 0), {"magic", "57005"});
  raw(packet({abi::kWireMagic, 1, 0, 999, 1}, 0), {"999"});
  raw(packet({abi::kWireMagic, 1, 1, 16, 1}, 0), {"1 descriptors"});
  raw(packet({abi::kWireMagic, 1, 0, 20, 1}, 4), {"body of 4 bytes", std::to_string(sizeof(abi::Hello))});
  raw(packet({abi::kWireMagic, 77, 0, 16, 1}, 0), {"type 77", "Hello"});
  raw(packet({abi::kWireMagic, 1, 0, 5000, 1}, 4984), {"2048"});
  EXPECT_EQ(table_->total_refused(), 7u);
  EXPECT_TRUE(table_->connections().empty());
  const UniqueFd healthy = attach();
}

// Clients in other PID namespaces have no number here; they were all "pid 0".
TEST_F(Attach, WhatAClientSaysOfItsProcessIsShownAsAClaim) {
  start({});
  abi::Hello hello = good_hello();
  hello.pid = 4711;
  abi::set_text(hello.host, "node7\x1b", 6);
  const UniqueFd socket = connect();
  exchange(socket, AttachType::kHello, hello);
  ASSERT_EQ(host_.opened.size(), 1u);
  const Session* session = table_->find(host_.opened[0]);
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->peer.pid, ::getpid()) << "the kernel's word";
  EXPECT_EQ(session->claimed_pid, 4711);
  EXPECT_EQ(session->claimed_host, "node7?");
  EXPECT_EQ(process_name(*session), std::to_string(::getpid()));
  Session foreign;
  foreign.claimed_pid = 4711;
  foreign.claimed_host = "node7";
  EXPECT_EQ(process_name(foreign), "4711@node7?");
  foreign.claimed_pid = 0;
  EXPECT_EQ(process_name(foreign), "0");
}

}  // namespace
}  // namespace epd::session

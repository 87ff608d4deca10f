// The attach socket, by a client that speaks the protocol by hand.
#include "session/session_table.h"

#include "proto/attach.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

namespace {

// What the kernel says of who has connected, where a test has something else to say.
int g_peer_pidfd_error = 0;
std::optional<uid_t> g_peer_uid;  // of the next to connect; those after it have others

}  // namespace

// In place of the C library's, also for the code under test.
extern "C" int getsockopt(int socket, int level, int option, void* value, socklen_t* bytes) noexcept {
  constexpr int kPeerPidfd = 77;
  if (level == SOL_SOCKET && option == kPeerPidfd && g_peer_pidfd_error != 0) {
    errno = g_peer_pidfd_error;
    return -1;
  }
  const auto result = static_cast<int>(::syscall(SYS_getsockopt, socket, level, option, value, bytes));
  if (result == 0 && level == SOL_SOCKET && option == SO_PEERCRED && g_peer_uid.has_value())
    static_cast<ucred*>(value)->uid = (*g_peer_uid)++;
  return result;
}

namespace epd {
namespace {

using abi::AttachType;

class FakeHost final : public SessionHost {
 public:
  Status may_attach(const PeerIdentity&) override { return attach_status; }
  Quota max_sessions_of(const PeerIdentity&) override { return quota; }
  Status may_use_device(const PeerIdentity&, std::uint32_t device) override {
    return device == failed_device ? internal_error("host:" + std::to_string(device) + " has failed")
                                   : Status();
  }
  std::uint64_t ending_sessions(std::uint32_t) const override { return ending; }
  void session_opened(const Session& session) override { opened.push_back(session.id); }
  void session_closed(Session session, const std::string& how) override {
    closed.push_back(session.id);
    closed_how = how;
  }
  void join_requested(const Session& session, std::uint32_t request, const abi::Join& join,
                      std::vector<UniqueFd> memory) override {
    last_memory = std::move(memory);
    joins.push_back({session.id, request});
    last_join = join;
  }
  void leave_requested(const Session& session, std::uint32_t request, const abi::Leave&) override {
    leaves.push_back({session.id, request});
  }

  Status attach_status;
  Quota quota;
  std::uint32_t failed_device = 99;
  std::uint64_t ending = 0;
  std::vector<std::uint64_t> opened, closed;
  std::string closed_how;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> joins, leaves;
  abi::Join last_join{};
  std::vector<UniqueFd> last_memory;
};

abi::Hello good_hello() {
  abi::Hello hello{};
  hello.version_min = abi::kAbiVersionMin;
  hello.version_max = abi::kAbiVersion;
  hello.layout_hash = abi::layout_hash();
  hello.nonce = 4711;
  abi::set_text(hello.library, "test", 4);
  return hello;
}

class Attach : public testing::Test {
 protected:
  Attach() {
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-session-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/sub/epd.sock";
    start({});
  }
  ~Attach() override {
    g_peer_pidfd_error = 0;
    g_peer_uid.reset();
    table_.reset();
    std::filesystem::remove_all(directory_);
  }

  void start(const SessionLimits& limits) {
    table_.reset();
    Result<Listener> listener = Listener::open({path_, 0660, {}});
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    SessionTable::Options options;
    options.daemon = "epd test";
    options.devices = {{"host:0"}, {"host:1"}};
    options.limits = limits;
    auto table = SessionTable::create(std::move(options), std::move(*listener), clock_, host_,
                                      {*airlock_, descriptors_});
    ASSERT_TRUE(table.ok()) << table.status().to_string();
    table_ = std::move(*table);
  }

  UniqueFd connect() {
    UniqueFd socket = connect_unseen();
    pump();
    return socket;
  }
  UniqueFd connect_unseen() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }

  // Lets the table see everything that has been sent so far.
  void pump() {
    pollfd waiting{table_->poll_fd(), POLLIN, 0};
    while (::poll(&waiting, 1, 20) > 0) table_->process();
    airlock_->flush();
  }

  ReceiveResult receive(const UniqueFd& socket, Packet& packet) {
    Status error;
    const ReceiveResult result = receive_packet(socket.get(), packet, error);
    EXPECT_NE(result, ReceiveResult::kMalformed) << error.to_string();
    return result;
  }

  // Sends and returns what comes back; type 0 if nothing does.
  template <typename T>
  Packet exchange(const UniqueFd& socket, AttachType type, const T& body, std::uint32_t request = 1) {
    EXPECT_TRUE(send_message(socket.get(), type, body, {}, request).ok());
    pump();
    Packet packet;
    if (receive(socket, packet) != ReceiveResult::kPacket) packet.header.type = 0;
    return packet;
  }

  UniqueFd attach(const char* device = "") {
    UniqueFd socket = connect();
    abi::Hello hello = good_hello();
    abi::set_text(hello.device, device, std::strlen(device));
    welcome_ = exchange(socket, AttachType::kHello, hello);
    EXPECT_EQ(welcome_.header.type, static_cast<std::uint16_t>(AttachType::kWelcome)) << text_of(welcome_);
    return socket;
  }

  static std::string text_of(const Packet& packet) {
    if (packet.header.type != static_cast<std::uint16_t>(AttachType::kRefused))
      return "type " + std::to_string(packet.header.type);
    const abi::Refused refused = packet.read<abi::Refused>().value();
    return std::string(status_name(refused.status)) + ": " + refused.text;
  }

  void expect_refused_and_closed(const UniqueFd& socket, const Packet& reply,
                                 const std::vector<std::string>& words) {
    for (const std::string& word : words)
      EXPECT_NE(text_of(reply).find(word), std::string::npos) << text_of(reply) << " lacks " << word;
    Packet next;
    EXPECT_EQ(receive(socket, next), ReceiveResult::kClosed);
  }

  std::string directory_, path_;
  ManualClock clock_;
  FakeHost host_;
  std::unique_ptr<Airlock> airlock_ = std::move(Airlock::create()).value();
  DescriptorBudget descriptors_{100'000};
  std::unique_ptr<SessionTable> table_;
  Packet welcome_;
};

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
                            {"VERSION_MISMATCH", "5..7", "2..2"});
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
  pump();
  EXPECT_EQ(host_.closed.size(), 1u);
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
  EXPECT_EQ(receive(socket, packet), ReceiveResult::kNothing);
  clock_.advance_ms(1);
  table_->tick();
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"DEADLINE_EXCEEDED", "5000"});
  EXPECT_TRUE(table_->connections().empty());
  EXPECT_TRUE(host_.closed.empty()) << "it never was a session";
}

TEST_F(Attach, HalfOpenConnectionsOfAUserAreFew) {
  std::vector<UniqueFd> sockets;
  for (std::uint32_t i = 0; i < SessionTable::kMaxHalfOpenPerUser; ++i) sockets.push_back(connect());
  const UniqueFd more = connect();
  Packet packet;
  ASSERT_EQ(receive(more, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(more, packet, {"RESOURCE_EXHAUSTED", "32"});
  Packet reply = exchange(sockets.front(), AttachType::kHello, good_hello());
  EXPECT_EQ(reply.header.type, static_cast<std::uint16_t>(AttachType::kWelcome));
}

// A user may have many uids.
TEST_F(Attach, HalfOpenConnectionsOfAllUsersAreLimited) {
  std::vector<UniqueFd> sockets;
  g_peer_uid = 100'000;
  for (std::uint32_t i = 0; i < SessionTable::kMaxHalfOpen; ++i) {
    sockets.push_back(connect_unseen());
    if (i % 64 == 63) pump();  // fewer than the kernel's backlog
  }
  EXPECT_EQ(table_->connections().size(), SessionTable::kMaxHalfOpen);
  const UniqueFd more = connect();
  Packet packet;
  ASSERT_EQ(receive(more, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(more, packet, {"RESOURCE_EXHAUSTED", "all users have 512", "allowed: 512"});
  Packet reply = exchange(sockets.front(), AttachType::kHello, good_hello());
  EXPECT_EQ(reply.header.type, static_cast<std::uint16_t>(AttachType::kWelcome));
  const UniqueFd again = connect();
  EXPECT_EQ(receive(again, packet), ReceiveResult::kNothing) << "there is room for one";
}

// The number of a process that has been reaped may be a stranger's, who would be watched in its place.
TEST_F(Attach, APeerWhoseProcessIsNotKnownIsNotTakenByItsNumber) {
  for (const int error : {ESRCH, ENODATA, EINVAL, EMFILE}) {
    g_peer_pidfd_error = error;
    const UniqueFd socket = connect();
    Packet packet;
    EXPECT_EQ(receive(socket, packet), ReceiveResult::kClosed) << std::strerror(error);
    EXPECT_TRUE(table_->connections().empty());
  }
  g_peer_pidfd_error = ENOPROTOOPT;  // Linux before 6.5
  const UniqueFd socket = connect();
  Packet packet;
  EXPECT_EQ(receive(socket, packet), ReceiveResult::kNothing);
  ASSERT_EQ(table_->connections().size(), 1u);
  EXPECT_TRUE(table_->connections().begin()->second.peer.pidfd.valid());
}

TEST_F(Attach, MalformedPacketsAreRefusedWithTheValueAndEndTheConnection) {
  const auto raw = [&](const std::vector<std::uint8_t>& bytes, const std::vector<std::string>& words) {
    const UniqueFd socket = connect();
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    pump();
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

TEST_F(Attach, AJoinMayBringMemory) {
  const UniqueFd socket = attach();
  Result<UniqueFd> memory = make_sealed_memfd("memory", 4096);
  ASSERT_TRUE(send_message(socket.get(), AttachType::kJoin, abi::Join{},
                           std::vector<int>(abi::kNumRegions, memory->get()), 7)
                  .ok());
  pump();
  ASSERT_EQ(host_.joins.size(), 1u);
  ASSERT_EQ(host_.last_memory.size(), abi::kNumRegions);
  EXPECT_EQ(sealed_size(host_.last_memory[0].get()).value(), 4096u);
}

TEST_F(Attach, NoMoreMemoryThanThereAreRegions) {
  const UniqueFd socket = attach();
  ASSERT_TRUE(send_message(socket.get(), AttachType::kJoin, abi::Join{},
                           std::vector<int>(abi::kNumRegions + 1, socket.get()), 7)
                  .ok());
  pump();
  Packet packet;
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"20 descriptors", "allowed: 19"});
  EXPECT_TRUE(host_.joins.empty());
}

TEST_F(Attach, DescriptorsFromAClientAreRefused) {
  const UniqueFd socket = connect();
  ASSERT_TRUE(send_message(socket.get(), AttachType::kHello, good_hello(), {0}).ok());
  pump();
  Packet packet;
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  expect_refused_and_closed(socket, packet, {"descriptors", "allowed: 0"});
}

TEST_F(Attach, AMalformedRequestEndsTheSessionAndSaysSoInSegmentB) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  const Mapping b = Mapping::map(welcome_.fds[1].get(), sizeof(abi::SegmentB), Access::kReadOnly).value();
  const Packet reply = exchange(socket, AttachType::kHello, good_hello(), 9);
  EXPECT_EQ(reply.header.request_id, 9u);
  expect_refused_and_closed(socket, reply, {"type is 1"});
  EXPECT_EQ(host_.closed, (std::vector<std::uint64_t>{id}));
  const auto* segment = b.as<abi::SegmentB>();
  EXPECT_EQ(segment->state.load(), static_cast<std::uint32_t>(abi::SessionState::kEnded));
  EXPECT_NE(std::string(segment->message).find("type is 1"), std::string::npos);
}

TEST_F(Attach, RequestsWaitForTheirRepliesInAnyOrder) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  abi::Join join{};
  std::strcpy(join.group, "g");
  EXPECT_EQ(exchange(socket, AttachType::kJoin, join, 5).header.type, 0u);
  EXPECT_EQ(exchange(socket, AttachType::kLeave, abi::Leave{1, 0}, 6).header.type, 0u);
  EXPECT_EQ(exchange(socket, AttachType::kJoin, join, 7).header.type, 0u);
  EXPECT_EQ(host_.joins.size(), 2u);
  EXPECT_EQ(host_.leaves.size(), 1u);
  EXPECT_STREQ(host_.last_join.group, "g");
  table_->refuse(id, 4, not_found("another request"));
  for (const std::uint32_t request : {7u, 5u, 6u}) {
    table_->refuse(id, request, not_found("no such thing"));
    table_->refuse(id, request, not_found("twice"));
    Packet reply;
    ASSERT_EQ(receive(socket, reply), ReceiveResult::kPacket);
    EXPECT_EQ(text_of(reply), "NOT_FOUND: no such thing");
    EXPECT_EQ(reply.header.request_id, request);
    EXPECT_EQ(receive(socket, reply), ReceiveResult::kNothing);
  }
  EXPECT_EQ(exchange(socket, AttachType::kLeave, abi::Leave{1, 0}, 6).header.type, 0u)
      << "the id is free again";
  EXPECT_EQ(host_.leaves.size(), 2u);
}

TEST_F(Attach, TheIdOfARequestThatWaitsIsTaken) {
  const UniqueFd socket = attach();
  EXPECT_EQ(exchange(socket, AttachType::kJoin, abi::Join{}, 5).header.type, 0u);
  EXPECT_EQ(exchange(socket, AttachType::kLeave, abi::Leave{1, 0}, 6).header.type, 0u);
  expect_refused_and_closed(socket, exchange(socket, AttachType::kLeave, abi::Leave{1, 0}, 5),
                            {"request id is 5", "no request that still waits"});
  EXPECT_EQ(host_.leaves.size(), 1u);
}

TEST_F(Attach, AJoinTooManyIsRefusedAndTheSessionGoesOn) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  std::uint32_t request = 1;
  for (std::size_t i = 0; i < abi::kMaxPendingRequests; ++i) {
    ASSERT_EQ(exchange(socket, AttachType::kJoin, abi::Join{}, request++).header.type, 0u);
  }
  const Packet refused = exchange(socket, AttachType::kJoin, abi::Join{}, request);
  EXPECT_EQ(refused.header.request_id, request);
  EXPECT_NE(text_of(refused).find("RESOURCE_EXHAUSTED"), std::string::npos) << text_of(refused);
  EXPECT_NE(text_of(refused).find("has 64 requests without a reply"), std::string::npos) << text_of(refused);
  EXPECT_EQ(host_.joins.size(), abi::kMaxPendingRequests);
  EXPECT_EQ(exchange(socket, AttachType::kLeave, abi::Leave{1, 0}, ++request).header.type, 0u);
  EXPECT_EQ(host_.leaves.size(), 1u) << "a leave is taken";
  table_->refuse(id, request, not_found("left"));
  table_->refuse(id, 1, not_found("joined"));
  Packet reply;
  while (receive(socket, reply) == ReceiveResult::kPacket) {
  }
  EXPECT_EQ(exchange(socket, AttachType::kJoin, abi::Join{}, ++request).header.type, 0u);
  EXPECT_EQ(host_.joins.size(), abi::kMaxPendingRequests + 1);
  EXPECT_TRUE(host_.closed.empty());
}

TEST_F(Attach, ADeadClientIsReportedOnce) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) ::_exit(1);
    if (!send_message(socket.get(), AttachType::kHello, good_hello()).ok()) ::_exit(1);
    [[maybe_unused]] const ssize_t n = ::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  pump();
  ASSERT_EQ(host_.opened.size(), 1u);
  EXPECT_EQ(table_->find(host_.opened[0])->peer.pid, child);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  pump();
  EXPECT_EQ(host_.closed, host_.opened);
  EXPECT_EQ(host_.closed_how, "died");
  EXPECT_EQ(table_->attached(), 0u);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(Attach, EndSaysGoodbyeAndWakesTheClient) {
  const UniqueFd socket = attach();
  const std::uint64_t id = welcome_.read<abi::Welcome>().value().session_id;
  const Mapping b = Mapping::map(welcome_.fds[1].get(), sizeof(abi::SegmentB), Access::kReadOnly).value();
  table_->end(id, Status(StatusCode::kAborted, "maintenance"));
  Packet packet;
  ASSERT_EQ(receive(socket, packet), ReceiveResult::kPacket);
  ASSERT_EQ(packet.header.type, static_cast<std::uint16_t>(AttachType::kGoodbye));
  EXPECT_STREQ(packet.read<abi::Goodbye>().value().text, "maintenance");
  EXPECT_EQ(b.as<abi::SegmentB>()->end_status.load(), static_cast<std::uint32_t>(StatusCode::kAborted));
  char byte;
  EXPECT_EQ(::recv(welcome_.fds[3].get(), &byte, 1, MSG_DONTWAIT), 1) << "the doorbell rang";
  EXPECT_EQ(host_.closed.size(), 1u);
}

// ---- the socket in the file system

TEST_F(Attach, TheSocketHasItsModeAndGoesWithTheTable) {
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
  table_->stop_listening();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(Attach, ALivingDaemonIsNotDisplacedAndADeadOneIs) {
  const Result<Listener> second = Listener::open({path_, 0660, {}});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("pid " + std::to_string(::getpid())), std::string::npos)
      << second.status().message();
  const UniqueFd still = attach();

  const std::string other = directory_ + "/stale.sock";
  const pid_t child = ::fork();
  if (child == 0) {
    const Result<Listener> listener = Listener::open({other, 0660, {}});
    ::_exit(listener.ok() ? 0 : 1);  // without removing its socket, as if killed
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(std::filesystem::exists(other));
  EXPECT_TRUE(Listener::open({other, 0660, {}}).ok());
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

TEST_F(Attach, OtherFilesAndBadPathsAreLeftAlone) {
  const std::string file = directory_ + "/file";
  std::ofstream(file) << "precious";
  EXPECT_EQ(Listener::open({file, 0660, {}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::exists(file));
  const Result<Listener> longer = Listener::open({directory_ + "/" + std::string(200, 'x'), 0660, {}});
  EXPECT_NE(longer.status().message().find("107"), std::string::npos) << longer.status().message();
}

}  // namespace
}  // namespace epd

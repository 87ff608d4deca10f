// Clients that lie: about who they are, with every field of every message and call, and to the memory
// that they were given. Each gets a typed refusal that names the value; the bystander notices nothing.
#include "hostile_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstring>
#include <limits>

namespace epd::test {
namespace {

using abi::AttachType;

constexpr std::uint32_t kMax32 = std::numeric_limits<std::uint32_t>::max();

// ---- identity

TEST_F(Hostile, AWrongUserIsRefusedAndCounted) {
  if (!root()) GTEST_SKIP() << "needs root, to become other users";
  const std::uint64_t before = shown("status", "sessions_refused");
  attack([&] {
    become(kStranger);
    const abi::Hello hello = RawClient::good_hello();
    for (int i = 0; i < 50; ++i) {
      const RawClient client(socket());
      RANK_CHECK(client.send(AttachType::kHello, &hello, sizeof(hello)), "Hello");
      must_hold(refusal(client.receive(10)),
                {"PERMISSION_DENIED", "user 61002 may not attach", "access.rule 3", "attach = false"});
    }
  });
  EXPECT_EQ(shown("status", "sessions_refused"), before + 50);
  expect_logged("user 61002 may not attach");
}

// A Hello with credentials attached that say something else.
void send_with_credentials(int socket, const ucred& credentials) {
  abi::Hello hello = RawClient::good_hello();
  abi::WireHeader header{abi::kWireMagic, static_cast<std::uint16_t>(AttachType::kHello), 0,
                         sizeof(header) + sizeof(hello), 1};
  iovec parts[2] = {{&header, sizeof(header)}, {&hello, sizeof(hello)}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_CREDENTIALS;
  c->cmsg_len = CMSG_LEN(sizeof(ucred));
  std::memcpy(CMSG_DATA(c), &credentials, sizeof(credentials));
  RANK_CHECK(::sendmsg(socket, &message, MSG_NOSIGNAL) > 0, std::strerror(errno));
}

TEST_F(Hostile, AForgedPidIsNotBelieved) {
  if (!root()) GTEST_SKIP() << "needs root, to forge credentials";
  const pid_t daemon_pid = daemon().pid();
  attack([&] {
    const RawClient client(socket());
    send_with_credentials(client.fd(), {daemon_pid, kStranger, kStranger});
    const std::optional<Packet> answer = client.receive(10);
    RANK_CHECK(answer && answer->header.type == static_cast<std::uint16_t>(AttachType::kWelcome),
               refusal(answer));
    const std::string id = std::to_string(answer->read<abi::Welcome>().value().session_id);
    const std::string sessions = daemon().epctl({"--json", "sessions"}).out;
    must_hold(sessions, {std::to_string(::getpid())});
    RANK_CHECK(sessions.find(std::to_string(daemon_pid)) == std::string::npos, sessions);
    RANK_CHECK(sessions.find(std::to_string(kStranger)) == std::string::npos, sessions);
  });
}

// A connection belongs to the process that made it: its end is the session's, even if another process holds
// the socket.
TEST_F(Hostile, AConnectionThatWasHandedOnEndsWithItsMaker) {
  attack([&] {
    int ready[2];
    RANK_CHECK(::pipe(ready) == 0, "pipe");
    const pid_t maker = ::fork();
    if (maker == 0) {
      const HostileSession session(socket(), "host:0");
      const pid_t heir = ::fork();
      if (heir == 0) {
        char byte = 0;
        while (::recv(session.socket(), &byte, 1, 0) > 0) {  // until the daemon hangs up
        }
        (void)!::write(ready[1], "e", 1);
      }
      ::_exit(0);
    }
    ::close(ready[1]);
    char byte = 0;
    RANK_CHECK(::read(ready[0], &byte, 1) == 1, "the heir's connection was not closed");
  });
}

// ---- messages

TEST_F(Hostile, EveryFieldOfHelloIsChecked) {
  struct Lie {
    std::function<void(abi::Hello&)> tell;
    std::vector<std::string> words;
  };
  const std::vector<Lie> lies = {
      {[](auto& h) { h.version_min = 7, h.version_max = 3; }, {"VERSION_MISMATCH", "7..3"}},
      {[](auto& h) { h.version_min = kMax32, h.version_max = kMax32; }, {"VERSION_MISMATCH", "4294967295"}},
      {[](auto& h) { h.version_max = 0; }, {"VERSION_MISMATCH", "..0"}},
      {[](auto& h) { h.layout_hash = 0; }, {"VERSION_MISMATCH", "0x0000000000000000"}},
      {[](auto& h) { h.features = ~0ull; }, {"UNSUPPORTED", "0xffffffffffffffff"}},
      {[](auto& h) { std::memset(h.device, 'x', sizeof(h.device)); }, {"NOT_FOUND", "xxxx", "host:0"}},
      {[](auto& h) { abi::set_text(h.device, "host:0\n\x1b[2J", 11); }, {"NOT_FOUND", "host:0??[2J"}},
  };
  attack([&] {
    for (const Lie& lie : lies) {
      note(lie.words.back());
      abi::Hello hello = RawClient::good_hello();
      lie.tell(hello);
      const RawClient client(socket());
      RANK_CHECK(client.send(AttachType::kHello, &hello, sizeof(hello)), "Hello");
      must_hold(refusal(client.receive(10)), lie.words);
      RANK_CHECK(client.closed_within(5), "the connection goes on after a refused Hello");
    }
  });
}

TEST_F(Hostile, EveryFieldOfJoinAndLeaveIsChecked) {
  struct Lie {
    std::function<void(abi::Join&)> tell;
    std::vector<std::string> words;
  };
  const std::string invalid = "INVALID_ARGUMENT";
  const std::vector<Lie> lies = {
      {[](auto& j) { std::memset(j.group, 'x', sizeof(j.group)); }, {invalid, "64 characters"}},
      {[](auto& j) { j.group[0] = 0; }, {invalid, "0 characters"}},
      {[](auto& j) { j.group[0] = '\n'; }, {invalid, "code 10"}},
      {[](auto& j) { j.rank = -2; }, {invalid, "rank is -2"}},
      {[](auto& j) { j.rank = std::numeric_limits<std::int32_t>::max(); }, {invalid, "rank is 2147483647"}},
      {[](auto& j) { j.shape.num_ranks = 0; }, {invalid, "num_ranks is 0"}},
      {[](auto& j) { j.shape.num_ranks = kMax32; }, {invalid, "num_ranks is 4294967295", "1024"}},
      {[](auto& j) { j.shape.num_experts = kMax32; }, {invalid, "num_experts is 4294967295", "4096"}},
      {[](auto& j) { j.shape.max_tokens = kMax32; }, {invalid, "max_tokens is 4294967295", "65536"}},
      {[](auto& j) { j.shape.hidden = kMax32 - 127; }, {invalid, "hidden is 4294967168", "16384"}},
      {[](auto& j) { j.shape.hidden = 127; }, {invalid, "hidden is 127"}},
      {[](auto& j) { j.shape.topk = 0; }, {invalid, "topk is 0", "32"}},
      {[](auto& j) { j.shape.depth = kMax32; }, {invalid, "depth is 4294967295", "16"}},
      {[](auto& j) { j.shape.payload = static_cast<abi::Payload>(99); }, {invalid, "payload is 99"}},
      {[](auto& j) { j.shape.index_type = static_cast<abi::IndexType>(99); }, {invalid, "index_type is 99"}},
      {[](auto& j) { j.shape.policy = static_cast<abi::LossPolicy>(99); }, {invalid, "policy is 99"}},
  };
  attack([&] {
    HostileSession session(socket(), "host:0");
    for (const Lie& lie : lies) {
      note(lie.words.back());
      abi::Join join = HostileSession::good_join("lies");
      lie.tell(join);
      must_hold(session.ask(AttachType::kJoin, join), lie.words);
    }
    for (const std::uint32_t member : {0u, 1u, 0x10000u, kMax32})
      must_hold(session.ask(AttachType::kLeave, abi::Leave{member, 0}),
                {"NOT_FOUND", std::to_string(member)});
    abi::Join join = HostileSession::good_join("wishes");  // may ask for any number of these
    join.sms = kMax32;
    join.timeout_ms = kMax32;
    RANK_CHECK(session.ask(AttachType::kJoin, join) == "OK", "join");
    const abi::Joined joined = session.answer().read<abi::Joined>().value();
    session.map_rank(joined);
    session.push(joined, session.dispatch(joined, 0));
    RANK_CHECK(session.take(joined).has_value(), "a dispatch with all the SMs of the world");
    RANK_CHECK(session.ask(AttachType::kLeave, abi::Leave{joined.member, 0}) == "OK", "leave");
    must_hold(session.ask(AttachType::kLeave, abi::Leave{joined.member, 0}), {"NOT_FOUND"});
    RANK_CHECK(session.ended(0).empty(), "the session lives on");
  });
  expect_logged("num_ranks is 4294967295");
}

// ---- calls

struct CallLie {
  std::function<void(abi::Call&)> tell;
  std::vector<std::string> words;
};

TEST_F(Hostile, EveryFieldOfACallIsChecked) {
  const std::vector<CallLie> lies = {
      {[](auto& c) { c.number += abi::kCallSlots; }, {"number is 64", "0, since"}},
      {[](auto& c) { c.op = abi::Op::kNone; }, {"op is 0"}},
      {[](auto& c) { c.slot = 2; }, {"slot is 2", "0 .. 1"}},
      {[](auto& c) { c.slot = 15; }, {"slot is 15"}},
      {[](auto& c) { c.num_tokens = 17; }, {"num_tokens is 17", "0 .. 16"}},
      {[](auto& c) { c.num_tokens = abi::kMostCommandTokens; }, {"num_tokens is 131071"}},
      {[](auto& c) { c.flags = 1u << 15; }, {"flags is 32768"}},
      {[](auto& c) { c.flags = abi::kFlagPlaces; }, {"flags is 1024"}},
      {[](auto& c) { c.route = 1; }, {"route is 1", "the slot, 0"}},
      {[](auto& c) { c.route = (1u << abi::kCallRouteBits) - 1; }, {"route is 8191"}},
      {[](auto& c) { c.result = abi::kResultPlaces; }, {"result is 9216", "below 9216"}},
  };
  const std::uint64_t refused = shown("devices", "submissions_refused");
  attack([&] {
    for (std::size_t i = 0; i < lies.size(); ++i) {
      note(lies[i].words.front());
      HostileSession session(socket(), "host:0");
      const abi::Joined joined = session.join("lie-" + std::to_string(i));
      abi::Call call = session.dispatch(joined, 4);
      lies[i].tell(call);
      session.push(joined, call);
      const std::string end = session.ended();
      must_hold(end, {"INVALID_ARGUMENT"});
      must_hold(end, lies[i].words);
    }
  });
  EXPECT_EQ(shown("devices", "submissions_refused"), refused + lies.size());
  for (const char* text : {"slot is 15", "num_tokens is 17"}) expect_logged(text);
}

// A record that holds no routing is the caller's mistake, not an attack: the operation fails, the session
// continues. So does a call of an epoch that is not, which is discarded.
TEST_F(Hostile, CallsThatMeanNothingEndNoSession) {
  attack([&] {
    HostileSession session(socket(), "host:1");
    const abi::Joined joined = session.join("mistakes");
    abi::Call late = session.dispatch(joined, 4);
    late.epoch += 1;
    session.push(joined, late);
    const std::optional<abi::CallEnd> discarded = session.take(joined);
    RANK_CHECK(discarded && discarded->ending == abi::CallEnding::kDiscarded, "of another epoch");
    abi::Call combine = session.dispatch(joined, 0);
    combine.op = abi::Op::kCombine;
    session.push(joined, combine);
    const std::optional<abi::CallEnd> failed = session.take(joined);
    RANK_CHECK(failed && failed->ending == abi::CallEnding::kFailed, "a combine of no routing succeeds");
    RANK_CHECK(session.ended(0).empty(), "the session lives on: " + session.ended(0));
  });
}

// ---- memory

void must_be_sealed(int fd, off_t size) {
  for (const off_t wanted : {off_t{0}, size - 4096, size + 4096, off_t{1} << 40})
    RANK_CHECK(::ftruncate(fd, wanted) != 0, "resized to " + std::to_string(wanted));
  RANK_CHECK(::fallocate(fd, 0, size, 4096) != 0, "grown");
  for (const int seal : {F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL})
    RANK_CHECK(::fcntl(fd, F_ADD_SEALS, seal) != 0, "sealed with " + std::to_string(seal));
  RANK_CHECK(::fchmod(fd, 0666) != 0, "its mode changed by another user");
  struct stat info {};
  RANK_CHECK(::fstat(fd, &info) == 0 && info.st_size == size, "its size is what it was");
}

void must_be_read_only(int fd, off_t size) {
  const auto bytes = static_cast<std::size_t>(size);
  RANK_CHECK(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED,
             "mapped writable");
  void* map = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  RANK_CHECK(map != MAP_FAILED, "not mapped at all");
  RANK_CHECK(::mprotect(map, bytes, PROT_READ | PROT_WRITE) != 0, "made writable");
  RANK_CHECK(::madvise(map, 4096, MADV_REMOVE) != 0, "punched through the mapping");
  ::munmap(map, bytes);
  const char byte = 1;
  RANK_CHECK(::pwrite(fd, &byte, 1, 0) < 0, "written");
  RANK_CHECK(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) != 0, "punched");
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  for (const int flags : {O_RDWR, O_WRONLY, O_RDWR | O_TRUNC}) {
    const int again = ::open(path.c_str(), flags | O_CLOEXEC);
    RANK_CHECK(again < 0, "reopened with flags " + std::to_string(flags));
  }
}

TEST_F(Hostile, SegmentsKeepTheirSizeAndReadOnlyOnesStaySo) {
  if (!root()) GTEST_SKIP() << "needs root, to become another user";
  attack([&] {
    become(kMallory);
    HostileSession session(socket(), "host:0");
    const abi::Joined joined = session.join("segments");
    const int arena = session.answer().fds[0].get();
    const int board = session.answer().fds[1].get();
    const int results = session.answer().fds[2].get();
    const int a = session.segments()[0].get();
    const int b = session.segments()[1].get();
    must_be_sealed(a, sizeof(abi::SegmentA));
    must_be_sealed(b, sizeof(abi::SegmentB));
    must_be_sealed(arena, static_cast<off_t>(joined.user_bytes));
    struct stat of_board {};
    RANK_CHECK(::fstat(board, &of_board) == 0 && of_board.st_size >= static_cast<off_t>(joined.board_bytes),
               "the board, and what is counted behind it");
    must_be_sealed(board, of_board.st_size);
    must_be_read_only(b, sizeof(abi::SegmentB));
    must_be_read_only(board, of_board.st_size);
    struct stat of_results {};
    RANK_CHECK(::fstat(results, &of_results) == 0, "the results");
    must_be_sealed(results, of_results.st_size);
    must_be_read_only(results, of_results.st_size);
    // The session may also empty memory that it may write: its own loss.
    RANK_CHECK(::fallocate(arena, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                           static_cast<off_t>(joined.user_bytes)) == 0,
               "its own arena");
    session.push(joined, session.dispatch(joined, 16));
    RANK_CHECK(session.take(joined).has_value(), "a dispatch of nothing but zeros");
    RANK_CHECK(::fallocate(a, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                           static_cast<off_t>(sizeof(abi::SegmentA))) == 0,
               "its own segment");
    session.push(joined, session.noop(joined));
    RANK_CHECK(session.take(joined).has_value(), "a noop after that");
  });
}

}  // namespace
}  // namespace epd::test

// The base room: sealed memory, packets with descriptors, statuses, logs.
#include "base/clock.h"
#include "base/event.h"
#include "base/log.h"
#include "base/thread.h"
#include "common/fd.h"
#include "common/memory.h"
#include "common/packet.h"
#include "common/signal.h"
#include "common/status.h"
#include "support/census.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace epd {
namespace {

using test::count_own_fds;

// ---- memory ------------------------------------------------------------------------------------

TEST(SealedMemfd, IsZeroFilledPrivateAndOfTheSizeAskedFor) {
  Result<UniqueFd> fd = make_sealed_memfd("test", 10000);
  ASSERT_TRUE(fd.ok()) << fd.status().to_string();
  struct stat info {};
  ASSERT_EQ(::fstat(fd->get(), &info), 0);
  EXPECT_EQ(info.st_size, 10000);
  EXPECT_EQ(info.st_mode & 0777, 0u);
  EXPECT_NE(::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  Result<Mapping> mapping = Mapping::map(fd->get(), 10000, Access::kReadWrite);
  ASSERT_TRUE(mapping.ok());
  for (std::size_t i = 0; i < 10000; ++i) ASSERT_EQ(mapping->bytes()[i], std::byte{0});
}

TEST(SealedMemfd, CanNotBeShrunkGrownOrSealedFurther) {
  Result<UniqueFd> fd = make_sealed_memfd("test", 8192);
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(::ftruncate(fd->get(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(fd->get(), 16384), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE), -1) << "a peer could stop us from writing";
  EXPECT_EQ(errno, EPERM);
  const char byte = 1;
  EXPECT_EQ(::pwrite(fd->get(), &byte, 1, 8192), -1) << "a write past the end grows a file";
  Result<std::uint64_t> size = sealed_size(fd->get());
  ASSERT_TRUE(size.ok());
  EXPECT_EQ(*size, 8192u);
}

TEST(SealedMemfd, SizeOfAnUnsealedOneIsRefused) {
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(fd.valid());
  ASSERT_EQ(::ftruncate(fd.get(), 4096), 0);
  Result<std::uint64_t> size = sealed_size(fd.get());
  ASSERT_FALSE(size.ok());
  EXPECT_EQ(size.status().code(), StatusCode::kInvalidArgument);
  ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_FALSE(sealed_size(fd.get()).ok()) << "one of the two seals is not enough";
}

TEST(SealedMemfd, SizeOfSomethingElseIsAnError) {
  Result<UniqueFd> event = make_eventfd();
  ASSERT_TRUE(event.ok());
  EXPECT_FALSE(sealed_size(event->get()).ok());
}

TEST(SealedMemfd, ReadOnlyViewCanNotBeWritten) {
  Result<UniqueFd> fd = make_sealed_memfd("test", 4096);
  ASSERT_TRUE(fd.ok());
  Result<UniqueFd> view = reopen_read_only(fd->get());
  ASSERT_TRUE(view.ok()) << view.status().to_string();
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, view->get(), 0), MAP_FAILED);
  EXPECT_FALSE(Mapping::map(view->get(), 4096, Access::kReadWrite).ok());
  const char byte = 1;
  EXPECT_EQ(::write(view->get(), &byte, 1), -1);

  void* read_only = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, view->get(), 0);
  ASSERT_NE(read_only, MAP_FAILED);
  EXPECT_EQ(::mprotect(read_only, 4096, PROT_READ | PROT_WRITE), -1) << "nor made writable later";
  Result<Mapping> writer = Mapping::map(fd->get(), 4096, Access::kReadWrite);
  ASSERT_TRUE(writer.ok());
  *writer->as<std::uint32_t>(std::uint64_t{100} * 4) = 77;
  EXPECT_EQ(static_cast<volatile std::uint32_t*>(read_only)[100], 77u) << "it is the same memory";
  ::munmap(read_only, 4096);
}

// As a user without privileges: neither the file nor its read-only view can be opened for writing by name.
TEST(SealedMemfd, NobodyReopensItForWriting) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setresgid(65534, 65534, 65534) != 0 || ::setresuid(65534, 65534, 65534) != 0) ::_exit(2);
    Result<UniqueFd> fd = make_sealed_memfd("test", 4096);
    if (!fd.ok()) ::_exit(3);
    Result<UniqueFd> view = reopen_read_only(fd->get());
    if (!view.ok() || !reopen_read_only(fd->get()).ok()) ::_exit(4);
    for (const int number : {fd->get(), view->get()}) {
      const std::string name = "/proc/self/fd/" + std::to_string(number);
      if (::open(name.c_str(), O_RDWR | O_CLOEXEC) >= 0) ::_exit(5);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(MappingTest, OutlivesItsDescriptorAndUnmapsOnce) {
  const std::size_t before = count_own_fds();
  const std::size_t mappings = test::take_census(::getpid()).memfd_mappings;
  {
    Mapping kept;
    EXPECT_FALSE(kept.valid());
    {
      Result<UniqueFd> fd = make_sealed_memfd("test", 4096);
      ASSERT_TRUE(fd.ok());
      Result<Mapping> mapping = Mapping::map(fd->get(), 4096, Access::kReadWrite);
      ASSERT_TRUE(mapping.ok());
      kept = std::move(mapping).value();
    }
    EXPECT_TRUE(kept.valid());
    EXPECT_EQ(kept.size(), 4096u);
    kept.bytes()[4095] = std::byte{5};
    Mapping moved = std::move(kept);
    EXPECT_EQ(moved.bytes()[4095], std::byte{5});
    EXPECT_EQ(test::take_census(::getpid()).memfd_mappings, mappings + 1);
  }
  EXPECT_EQ(test::take_census(::getpid()).memfd_mappings, mappings);
  EXPECT_EQ(count_own_fds(), before);
}

TEST(MappingTest, BadDescriptorIsAStatus) {
  Result<Mapping> mapping = Mapping::map(-1, 4096, Access::kReadOnly);
  ASSERT_FALSE(mapping.ok());
  EXPECT_NE(mapping.status().message().find("4096"), std::string::npos) << mapping.status().message();
}

// ---- descriptors -------------------------------------------------------------------------------

TEST(UniqueFdTest, ClosesExactlyWhatItOwns) {
  const std::size_t before = count_own_fds();
  {
    Result<UniqueFd> event = make_eventfd();
    ASSERT_TRUE(event.ok());
    Result<UniqueFd> copy = duplicate(event->get());
    ASSERT_TRUE(copy.ok());
    UniqueFd moved = std::move(*copy);
    UniqueFd& alias = moved;
    moved = std::move(alias);
    EXPECT_TRUE(moved.valid()) << "assigned to itself";
    EXPECT_EQ(count_own_fds(), before + 2);
    UniqueFd released(moved.release());
    EXPECT_FALSE(moved.valid());
    EXPECT_TRUE(released.valid());
  }
  EXPECT_EQ(count_own_fds(), before);
}

TEST(UniqueFdTest, DuplicateOfABadDescriptorNamesIt) {
  Result<UniqueFd> copy = duplicate(987654);
  ASSERT_FALSE(copy.ok());
  EXPECT_NE(copy.status().message().find("987654"), std::string::npos);
}

TEST(Eventfd, RingingAFullOneDoesNotBlock) {
  Result<UniqueFd> event = make_eventfd();
  ASSERT_TRUE(event.ok());
  const std::uint64_t almost_full = ~std::uint64_t{0} - 1;
  ASSERT_EQ(::write(event->get(), &almost_full, 8), 8);
  ring_eventfd(event->get());
  std::uint64_t value = 0;
  ASSERT_EQ(::read(event->get(), &value, 8), 8);
  EXPECT_EQ(value, almost_full);
}

// ---- packets -----------------------------------------------------------------------------------

enum class PingType : std::uint16_t { kFirst = 7 };
struct PingBody {
  std::uint64_t a;
  std::uint32_t b;
  std::uint32_t c;
};

class Packets : public testing::Test {
 protected:
  void SetUp() override {
    fds_before_ = count_own_fds();
    Result<std::pair<UniqueFd, UniqueFd>> pair = make_socketpair();
    ASSERT_TRUE(pair.ok());
    here_ = std::move(pair->first);
    there_ = std::move(pair->second);
  }
  void TearDown() override {
    here_.reset();
    there_.reset();
    EXPECT_EQ(count_own_fds(), fds_before_) << "descriptors leaked";
  }

  // Sends raw bytes with `num_fds` copies of a descriptor.
  void send_raw(const void* data, std::size_t bytes, std::size_t num_fds) {
    Result<UniqueFd> event = make_eventfd();
    ASSERT_TRUE(event.ok());
    iovec part{const_cast<void*>(data), bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    std::vector<char> control(CMSG_SPACE(num_fds * sizeof(int)));
    if (num_fds != 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
      const std::vector<int> fds(num_fds, event->get());
      std::memcpy(CMSG_DATA(c), fds.data(), num_fds * sizeof(int));
    }
    ASSERT_EQ(::sendmsg(there_.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
  }

  void send_header(abi::WireHeader header, std::size_t bytes, std::size_t num_fds) {
    std::vector<char> data(bytes);
    std::memcpy(data.data(), &header, std::min(bytes, sizeof(header)));
    send_raw(data.data(), bytes, num_fds);
  }

  void expect_malformed(const char* what) {
    const std::size_t before = count_own_fds();
    Packet packet;
    Status error;
    EXPECT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kMalformed) << what;
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument) << what;
    EXPECT_FALSE(error.message().empty()) << what;
    EXPECT_TRUE(packet.fds.empty()) << what;
    EXPECT_EQ(count_own_fds(), before) << what << ": descriptors leaked";
  }

  UniqueFd here_, there_;
  std::size_t fds_before_ = 0;
};

TEST_F(Packets, BodyAndDescriptorsArriveInOrder) {
  Result<UniqueFd> first = make_sealed_memfd("first", 4096);
  Result<UniqueFd> second = make_sealed_memfd("second", 8192);
  ASSERT_TRUE(first.ok() && second.ok());
  const Status sent =
      send_message(there_.get(), PingType::kFirst, PingBody{1, 2, 3}, {first->get(), second->get()}, 55);
  ASSERT_TRUE(sent.ok()) << sent.to_string();
  Packet packet;
  Status error;
  ASSERT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kPacket) << error.to_string();
  EXPECT_EQ(packet.header.type, 7);
  EXPECT_EQ(packet.header.request_id, 55u);
  Result<PingBody> body = packet.read<PingBody>();
  ASSERT_TRUE(body.ok());
  EXPECT_EQ(body->a, 1u);
  EXPECT_EQ(body->c, 3u);
  ASSERT_EQ(packet.fds.size(), 2u);
  EXPECT_EQ(sealed_size(packet.fds[0].get()).value(), 4096u);
  EXPECT_EQ(sealed_size(packet.fds[1].get()).value(), 8192u);
  EXPECT_NE(::fcntl(packet.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0) << "would leak into a child";
}

TEST_F(Packets, NothingThenClosed) {
  Packet packet;
  Status error;
  EXPECT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kNothing);
  there_.reset();
  EXPECT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kClosed);
  EXPECT_FALSE(send_message(here_.get(), PingType::kFirst, PingBody{}).ok()) << "and no SIGPIPE";
}

TEST_F(Packets, OfAPeerThatLeftSomeUnreadArriveBeforeItsEnd) {
  ASSERT_TRUE(send_packet(here_.get(), 3, 1, "unread", 6).ok());
  ASSERT_TRUE(send_packet(there_.get(), 4, 2, "last", 4).ok());
  there_.reset();  // the next receive reports ECONNRESET
  Packet packet;
  Status error;
  ASSERT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kPacket);
  EXPECT_EQ(packet.header.type, 4u);
  EXPECT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kClosed);
}

TEST_F(Packets, WrongBodySizeIsRefusedWithBothSizes) {
  ASSERT_TRUE(send_message(there_.get(), PingType::kFirst, std::uint64_t{1}).ok());
  Packet packet;
  Status error;
  ASSERT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kPacket);
  Result<PingBody> body = packet.read<PingBody>();
  ASSERT_FALSE(body.ok());
  EXPECT_NE(body.status().message().find(" 8 "), std::string::npos) << body.status().message();
  EXPECT_NE(body.status().message().find("16"), std::string::npos) << body.status().message();
}

TEST_F(Packets, MalformedOnesAreRefusedAndTheirDescriptorsClosed) {
  send_header({0x12345678, 1, 3, 32, 0}, 32, 3);
  expect_malformed("wrong magic");
  send_header({abi::kWireMagic, 1, 1, 32, 0}, 40, 1);
  expect_malformed("longer than it says");
  send_header({abi::kWireMagic, 1, 0, 64, 0}, 40, 0);
  expect_malformed("shorter than it says");
  send_header({abi::kWireMagic, 1, 0, 32, 0}, 32, 2);
  expect_malformed("more descriptors than it says");
  send_header({abi::kWireMagic, 1, 2, 32, 0}, 32, 0);
  expect_malformed("fewer descriptors than it says");
  send_header({abi::kWireMagic, 1, 1, 15, 0}, 15, 1);
  expect_malformed("less than a header");
  send_header({abi::kWireMagic, 1, 0, 5000, 0}, 5000, 0);
  expect_malformed("larger than any message");
  send_header({abi::kWireMagic, 1, abi::kMaxMessageFds + 1, 32, 0}, 32, abi::kMaxMessageFds + 1);
  expect_malformed("more descriptors than any message has");

  ASSERT_TRUE(send_message(there_.get(), PingType::kFirst, PingBody{9, 9, 9}).ok());
  Packet packet;
  Status error;
  EXPECT_EQ(receive_packet(here_.get(), packet, error), ReceiveResult::kPacket) << "the socket still works";
}

TEST_F(Packets, AnEmptyPacketWithDescriptorsLeaksNothing) {
  const std::size_t before = count_own_fds();
  send_raw("", 0, 2);
  {
    Packet packet;
    Status error;
    const ReceiveResult result = receive_packet(here_.get(), packet, error);
    EXPECT_TRUE(result == ReceiveResult::kClosed || result == ReceiveResult::kMalformed);
  }
  EXPECT_EQ(count_own_fds(), before);
}

TEST_F(Packets, APeerThatDoesNotReadGivesWouldBlock) {
  Status status;
  int sent = 0;
  for (; sent < 100000 && status.ok(); ++sent)
    status = send_message(there_.get(), PingType::kFirst, PingBody{});
  EXPECT_EQ(status.code(), StatusCode::kWouldBlock) << "after " << sent;
}

// ---- signals -------------------------------------------------------------------------------------

// To kill(2) these name the process group, all processes, and another group. Signal 0 harms nobody if they
// get there.
TEST(Signals, NumbersThatNameNoProcessReachNobody) {
  for (const pid_t none : {0, -1, -::getpgrp()}) {
    SCOPED_TRACE(none);
    errno = 0;
    EXPECT_EQ(send_signal(none, 0), -1);
    EXPECT_EQ(errno, ESRCH);
  }
  EXPECT_EQ(send_signal(::getpid(), 0), 0);
}

// ---- threads -------------------------------------------------------------------------------------

TEST(Threads, AreTriedWithinTheLimit) {
  EXPECT_EQ(try_threads(0).to_string(), "OK");
  EXPECT_EQ(try_threads(4).to_string(), "OK");
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become a user of whom nothing runs";
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit four{4, 4};
    if (::setrlimit(RLIMIT_NPROC, &four) != 0 || ::setresuid(64217, 64217, 64217) != 0) ::_exit(2);
    if (!try_threads(3).ok()) ::_exit(3);
    const Status status = try_threads(8);
    if (status.code() != StatusCode::kResourceExhausted) ::_exit(4);
    if (!status.message().starts_with("3 threads can be started: ")) ::_exit(5);
    ::_exit(try_threads(3).ok() ? 0 : 6);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// It was ended by std::terminate.
TEST(LogDeathTest, AStartWithoutRoomForTheLogsThreadSaysSo) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become a user of whom nothing runs";
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process in which nothing was logged
  const auto start = [] {
    const rlimit one{1, 1};
    if (::setrlimit(RLIMIT_NPROC, &one) != 0 || ::setresuid(64218, 64218, 64218) != 0) ::_exit(2);
    log_init("epd", {}, LogFormat::kLogfmt, false);
  };
  EXPECT_EXIT(start(), testing::ExitedWithCode(1), "epd: no thread can be started for the log: ");
}

// ---- status, clock -----------------------------------------------------------------------------

TEST(StatusTest, SaysCodeAndMessage) {
  EXPECT_EQ(Status().to_string(), "OK");
  EXPECT_EQ(invalid_argument("hidden is 100").to_string(), "INVALID_ARGUMENT: hidden is 100");
  errno = ENOENT;
  EXPECT_EQ(errno_status("open x").to_string(), "INTERNAL: open x: No such file or directory");
  for (const int error : {EMFILE, ENFILE, ENOMEM, ENOBUFS})
    EXPECT_EQ(errno_status("open x", error).code(), StatusCode::kResourceExhausted) << error;
  Result<int> bad = not_found("x");
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), StatusCode::kNotFound);
  Result<int> good = 5;
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(*good, 5);
}

TEST(Clocks, MonotonicGrowsManualStepsOnlyWhenTold) {
  const MonotonicClock clock;
  const std::uint64_t before = clock.now_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_GE(clock.now_ns() - before, 2'000'000u);
  ManualClock manual;
  const std::uint64_t start = manual.now_ns();
  EXPECT_EQ(manual.now_ns(), start);
  manual.advance_ms(3);
  EXPECT_EQ(manual.now_ns(), start + 3'000'000);
}

// ---- logs --------------------------------------------------------------------------------------

std::vector<std::string> captured_lines(LogFormat format, const std::function<void()>& body) {
  log_init("epd \"test\"", LogLevel::kInfo, format);
  testing::internal::CaptureStderr();
  body();
  log_flush();
  std::istringstream in(testing::internal::GetCapturedStderr());
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  log_init("epd", LogLevel::kInfo, LogFormat::kLogfmt);
  return lines;
}

TEST(Log, JsonLinesParseWhateverAClientWrites) {
  const std::string hostile =
      std::string("a\"b\\c\n\t\x01\x7f {}% ") + "gr\xc3\xbc\xc3\x9f" + " \xff\xc3( \xed\xa0\x80 \xf5";
  const std::vector<std::string> lines = captured_lines(LogFormat::kJson, [&] {
    log_event(LogLevel::kInfo, "session \"x\" {} %v",
              {{"text", hostile},
               {"session", 12},
               {"ok", true},
               {"share", 0.5},
               {"bad", std::nan("")},
               {"neg", -3}});
    log_event(LogLevel::kWarning, "plain");
  });
  ASSERT_EQ(lines.size(), 2u);
  nlohmann::json first;
  ASSERT_NO_THROW(first = nlohmann::json::parse(lines[0])) << lines[0];
  EXPECT_EQ(first["process"], "epd \"test\"");
  EXPECT_EQ(first["event"], "session \"x\" {} %v");
  EXPECT_EQ(first["session"], 12);
  EXPECT_EQ(first["ok"], true);
  EXPECT_EQ(first["share"], 0.5);
  EXPECT_EQ(first["neg"], -3);
  EXPECT_EQ(first["level"], "info");
  const std::string text = first["text"];
  EXPECT_EQ(text.substr(0, 8), "a\"b\\c\n\t\x01");
  EXPECT_NE(text.find("gr\xc3\xbc\xc3\x9f"), std::string::npos) << "good UTF-8 stays as it is";
  EXPECT_EQ(nlohmann::json::parse(lines[1])["event"], "plain");
}

TEST(Log, LogfmtIsOneLineWithQuotedText) {
  const std::vector<std::string> lines = captured_lines(LogFormat::kLogfmt, [] {
    log_event(LogLevel::kInfo, "session attached", {{"library", "a b\"c\nlevel=error"}, {"pid", 42}});
  });
  ASSERT_EQ(lines.size(), 1u) << "a field must not be able to forge a line";
  EXPECT_NE(lines[0].find(" level=info process=\"epd \\\"test\\\"\" event=\"session attached\""),
            std::string::npos)
      << lines[0];
  EXPECT_NE(lines[0].find(" pid=42"), std::string::npos);
  EXPECT_NE(lines[0].find("library=\"a b\\\"c\\u000alevel=error\""), std::string::npos) << lines[0];
}

TEST(Log, LevelsBelowTheThresholdAreSilent) {
  const std::vector<std::string> lines = captured_lines(LogFormat::kLogfmt, [] {
    log_event(LogLevel::kDebug, "no");
    log_set_levels(LogLevel::kError);
    EXPECT_FALSE(log_enabled(LogLevel::kInfo));
    log_event(LogLevel::kInfo, "no");
    log_event(LogLevel::kError, "yes");
  });
  ASSERT_EQ(lines.size(), 1u);
}

TEST(Log, ARoomMayHaveALevelOfItsOwn) {
  const char* const session = "../../daemon/session/handshake.cpp";
  const std::vector<std::string> lines = captured_lines(LogFormat::kLogfmt, [&] {
    log_set_levels(*parse_log_levels("warning,session=debug,engine=error"));
    EXPECT_TRUE(log_enabled(LogLevel::kDebug, session));
    EXPECT_FALSE(log_enabled(LogLevel::kTrace, session));
    EXPECT_FALSE(log_enabled(LogLevel::kInfo, "daemon/supervisor/orders.cpp"));
    EXPECT_FALSE(log_enabled(LogLevel::kInfo)) << "a file of no room has the general level";
    EXPECT_FALSE(log_enabled(LogLevel::kWarning, "/src/daemon/engine/starts.cpp"));
    log_event(LogLevel::kDebug, "yes", {}, session);
    log_event(LogLevel::kDebug, "no", {}, "daemon/control/acceptor.cpp");
    LogLimiter limiter(3);
    limiter.log(LogLevel::kDebug, "limited", {}, session);
    record_event(EventKind::kOther, LogLevel::kDebug, "event", {}, kDaemonOwner, session);
  });
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_NE(lines[0].find("level=debug process=\"epd \\\"test\\\"\" event=\"yes\""), std::string::npos)
      << lines[0];
  EXPECT_NE(lines[1].find("event=\"limited\""), std::string::npos) << lines[1];
}

TEST(Log, LevelsAreReadAndWrittenAlike) {
  for (const char* text :
       {"trace", "info", "error", "info,session=debug", "debug,base=error,supervisor=warning"}) {
    const auto levels = parse_log_levels(text);
    ASSERT_TRUE(levels) << text;
    EXPECT_EQ(to_text(*levels), text);
  }
  EXPECT_EQ(to_text(*parse_log_levels("info,engine=debug,engine=trace,base=info")),
            "info,base=info,engine=trace");
  for (const char* text :
       {"", "loud", "off", "info,", ",info", "session=debug", "info,kitchen=debug", "info,debug",
        "info,session=loud", "info,session=", "info session=debug", "INFO"}) {
    EXPECT_FALSE(parse_log_levels(text)) << text;
  }
}

// As on a full disk, which has room again later.
TEST(Log, ALineThatWasCutIsNotContinuedByTheNext) {
  struct sigaction ignored {};
  struct sigaction before {};
  ignored.sa_handler = SIG_IGN;
  ASSERT_EQ(::sigaction(SIGXFSZ, &ignored, &before), 0);
  rlimit unlimited{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  const std::vector<std::string> lines = captured_lines(LogFormat::kLogfmt, [&] {
    const rlimit few{90, unlimited.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &few), 0);
    log_event(LogLevel::kInfo, "cut", {{"text", std::string(100, 'x')}});
    log_event(LogLevel::kInfo, "lost");
    log_flush();
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
    log_event(LogLevel::kInfo, "whole");
  });
  ::sigaction(SIGXFSZ, &before, nullptr);
  ASSERT_GE(lines.size(), 2u);
  EXPECT_EQ(lines[0].size(), 90u) << lines[0];
  bool whole = false;
  for (const std::string& line : lines) {
    whole |= line.find("event=\"whole\"") != std::string::npos;
    EXPECT_EQ(line.find("level=", line.find("level=") + 1), std::string::npos) << "two in one: " << line;
  }
  EXPECT_TRUE(whole) << "the last line has its own beginning";
}

// The reason was that of the moment in which it was told, when the disk had room again.
TEST(Log, LinesThatAFullDiskLostWereBlamedOnTheReader) {
  EventLog log;
  log.install();
  std::map<std::string, std::string> told;  // by the last event
  const auto all_told = [&] {
    for (const Event& event : log.read(0, 4096, 0).events)
      if (event.text == "log lines lost") told = {event.fields.begin(), event.fields.end()};
    return told["in_all"] == std::to_string(log_lines_lost());
  };
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(full.valid());
  captured_lines(LogFormat::kLogfmt, [&] {
    const UniqueFd captured(::dup(STDERR_FILENO));
    ASSERT_GE(::dup2(full.get(), STDERR_FILENO), 0);
    for (int i = 0; i < 2; ++i) {  // the first is told at once, and the rest a second later
      log_event(LogLevel::kInfo, "lost");
      log_flush();
    }
    ASSERT_GE(::dup2(captured.get(), STDERR_FILENO), 0);
    for (int i = 0; i < 1000 && !all_told(); ++i) {  // it is told once a second at most
      log_event(LogLevel::kInfo, "whole");
      log_flush();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  EXPECT_EQ(told["reason"], "standard error: " + std::string(std::strerror(ENOSPC)));
}

// sd-daemon(3): the journal takes a line's importance from its beginning.
TEST(Log, InTheJournalLinesBeginWithTheirImportance) {
  for (const LogFormat format : {LogFormat::kLogfmt, LogFormat::kJson}) {
    const std::vector<std::string> lines = captured_lines(format, [&] {
      log_init("epd", LogLevel::kTrace, format, true);
      log_event(LogLevel::kDebug, "a");
      log_event(LogLevel::kInfo, "b");
      log_event(LogLevel::kWarning, "c");
      log_event(LogLevel::kError, "d");
      print_last_error("epd: INTERNAL: it is over\n");
    });
    ASSERT_EQ(lines.size(), 5u);
    const char* const begins[] = {"<7>", "<6>", "<4>", "<3>", "<3>"};
    for (std::size_t i = 0; i < lines.size(); ++i) EXPECT_TRUE(lines[i].starts_with(begins[i])) << lines[i];
    if (format != LogFormat::kJson) continue;
    EXPECT_EQ(nlohmann::json::parse(lines[4].substr(3))["reason"], "epd: INTERNAL: it is over");
  }
  EXPECT_FALSE(
      captured_lines(LogFormat::kLogfmt, [] { log_event(LogLevel::kInfo, "a"); }).at(0).starts_with("<"));
}

// A reader of JSON gets JSON to the end; at a terminal people get their text.
TEST(Log, TheLastErrorHasTheFormatOfTheLog) {
  const auto last = [] { print_last_error("epd: INTERNAL: it is \"over\"\n"); };
  const std::vector<std::string> json = captured_lines(LogFormat::kJson, last);
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(json[0])["reason"], "epd: INTERNAL: it is \"over\"");
  EXPECT_EQ(captured_lines(LogFormat::kLogfmt, last),
            std::vector<std::string>{"epd: INTERNAL: it is \"over\""});
}

TEST(LogLimiterTest, SaysHowManyItKeptBack) {
  constexpr int kBurstCalls = 50;
  LogLimiter limiter(3);
  const std::vector<std::string> lines = captured_lines(LogFormat::kJson, [&] {
    for (int i = 0; i < kBurstCalls; ++i) limiter.log(LogLevel::kInfo, "refused", {{"i", i}});
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    limiter.log(LogLevel::kInfo, "refused", {{"i", kBurstCalls}});
  });
  int shown = 0;
  int suppressed = 0;
  for (const std::string& line : lines) {
    const nlohmann::json parsed = nlohmann::json::parse(line);
    if (parsed["event"] == "refused") {
      ++shown;
    } else {
      EXPECT_EQ(parsed["event_name"], "refused");
      suppressed += parsed["count"].get<int>();
    }
  }
  EXPECT_GE(shown, 4);
  EXPECT_LT(shown, kBurstCalls / 2);
  EXPECT_EQ(shown + suppressed, kBurstCalls + 1) << "every line is either shown or counted";
}

// ---- the end -----------------------------------------------------------------------------------

// A daemon with too few threads said "stopped" and stayed.
TEST(EndWithin, AProcessThatHangsIsEndedWithItsCode) {
  const auto hang = [] {
    sigset_t own;  // as whoever has started the daemon may leave it
    ::sigemptyset(&own);
    ::sigaddset(&own, SIGALRM);
    ::pthread_sigmask(SIG_BLOCK, &own, nullptr);
    end_within(1, 7);
    std::this_thread::sleep_for(std::chrono::seconds(30));
    ::_exit(1);
  };
  EXPECT_EXIT(hang(), testing::ExitedWithCode(7), "epd: the process did not end in time");
}

}  // namespace
}  // namespace epd

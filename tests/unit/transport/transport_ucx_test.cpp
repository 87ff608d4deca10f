// Faults that only UCX can have: options, the library; and what it tells about itself.
#include "transport_flavors.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

namespace epd::transport {
namespace {

std::string maps() {
  std::ostringstream text;
  text << std::ifstream("/proc/self/maps").rdbuf();
  return text.str();
}

// As they were before main.
const std::map<int, void (*)(int)>& own_handlers() {
  static const std::map<int, void (*)(int)> handlers = [] {
    std::map<int, void (*)(int)> found;
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
      struct sigaction action {};
      ::sigaction(number, nullptr, &action);
      found[number] = action.sa_handler;
    }
    return found;
  }();
  return handlers;
}
[[maybe_unused]] const bool kLooked = !own_handlers().empty();

TEST(Ucx, OptionsThatCanNotBeAreRefusedByName) {
  const auto refused = [](const UcxOptions& options, StatusCode code, const std::string& named) {
    const Status status = open_ucx(options).status();
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.message().find(named), std::string::npos) << status.to_string();
  };
  EXPECT_EQ(maps().find("libucp"), std::string::npos) << "loaded without being asked for";
  UcxOptions options = loopback();
  options.library = "libnosuch.so";
  refused(options, StatusCode::kNotFound, "libnosuch.so");
  options.library = "libm.so.6";
  refused(options, StatusCode::kUnsupported, "libm.so.6 has no function ucp_get_version");
  options.library = EPD_TEST_UCX_OLD;
  refused(options, StatusCode::kVersionMismatch, "is UCX 1.12.0; needed: 1.13 or a later 1.x");
  options.library = EPD_TEST_UCX_PART;
  refused(options, StatusCode::kUnsupported, "has no function ucp_config_read");
  options = loopback();
  options.devices = "";
  refused(options, StatusCode::kInvalidArgument, "UCX devices are empty");
  options = loopback();
  options.transports = "";
  refused(options, StatusCode::kInvalidArgument, "UCX transports are empty");
  options = loopback();
  options.rendezvous_bytes = 0;
  refused(options, StatusCode::kInvalidArgument, "rendezvous_bytes is 0");
  options = loopback();
  options.limits.max_sends = 0;
  refused(options, StatusCode::kInvalidArgument, "max_sends is 0");
  options = loopback();
  options.limits.max_body_bytes = 1ull << 40;
  refused(options, StatusCode::kInvalidArgument, "max_body_bytes is 1099511627776");
  EXPECT_EQ(maps().find("libucp"), std::string::npos) << "loaded before the options were judged";
  options = loopback();
  options.devices = "nosuch0";
  refused(options, StatusCode::kUnsupported, "nosuch0");
  options = loopback();
  options.transports = "nosuch";
  refused(options, StatusCode::kUnsupported, "nosuch");
  options = loopback();
  options.library = "libucp.so";
  refused(options, StatusCode::kInvalidArgument, "this process has loaded libucp.so.0");
  EXPECT_TRUE(open_ucx(loopback()).ok());
}

// UCX 1.13 handles signals of the process unless UCX_ERROR_SIGNALS is empty when it is loaded.
TEST(Ucx, SignalsStayThePrograms) {
  ASSERT_TRUE(open_ucx(loopback()).ok());
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    struct sigaction action {};
    ASSERT_EQ(::sigaction(number, nullptr, &action), 0);
    EXPECT_EQ(action.sa_handler, own_handlers().at(number)) << ::strsignal(number);
  }
}

TEST(Ucx, FactsNameVersionsAndLanes) {
  World world({Carrier::kUcx, false}, 0);
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  Result<Facts> facts = a->transport().facts(to_b);
  ASSERT_TRUE(facts.ok()) << facts.status().to_string();
  EXPECT_EQ(facts->carrier.rfind("UCX 1.", 0), 0u) << facts->carrier;
  EXPECT_EQ(facts->peer, facts->carrier);
  EXPECT_NE(facts->lanes.find("tcp/lo"), std::string::npos) << facts->lanes;
  b->end();
  ASSERT_TRUE(run_until({a.get()}, [&] { return a->down(to_b); }));
  ASSERT_TRUE(a->transport().facts(to_b).ok());
  EXPECT_EQ(a->transport().facts(to_b)->lanes, "");
}

// Nodes on one host are still nodes: no shared memory between them.
TEST(Ucx, TransportsOfOneHostTalkByTcp) {
  World world({Carrier::kUcx, false}, 0);
  auto a = world.end(1);
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  const std::string lanes = a->transport().facts(to_b)->lanes;
  for (const char* memory : {"posix", "sysv", "cma", "self"})
    EXPECT_EQ(lanes.find(memory), std::string::npos) << lanes;
}

// UCX pairs the n-th endpoints of both sides. If one side connects again, the other's endpoint works on
// without its partner. UCX's keepalive takes that for the end of the connection.
TEST(Ucx, APeerThatConnectsAgainTakesNobodyDown) {
  ::setenv("UCX_KEEPALIVE_INTERVAL", "50ms", 1);  // 20 s otherwise
  World world({Carrier::kUcx, false}, 0);
  auto a = world.end(1);
  auto b = world.end(2);
  ::unsetenv("UCX_KEEPALIVE_INTERVAL");
  auto [to_b, to_a] = introduce(*a, *b);
  std::size_t from_a = 0;
  const std::vector<End*> both = {a.get(), b.get()};
  for (int round = 0; round < 20 && !b->down(to_a); ++round) {
    SCOPED_TRACE(round);
    ASSERT_TRUE(run_until(both, [&] { return a->unsettled() + b->unsettled() == 0; }));
    ASSERT_TRUE(a->close(to_b).ok());
    to_b = a->connect(*b);
    const std::size_t before = a->received.size();
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(send_patiently(*a, to_b, 100000, both).ok());
      ASSERT_TRUE(send_patiently(*b, to_a, 100000, both).ok());
    }
    from_a += 10;
    ASSERT_TRUE(
        run_until(both, [&] { return a->received.size() >= before + 10 && b->received.size() >= from_a; }));
    run_for(both, 100);
    EXPECT_FALSE(a->down(to_b)) << a->why(to_b).to_string();
    EXPECT_FALSE(b->down(to_a)) << b->why(to_a).to_string();
  }
  EXPECT_EQ(a->sent_aborted() + b->sent_aborted(), 0u);
}

std::size_t open_sockets() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error).string().starts_with("socket:")) ++count;
  }
  return count;
}

// UCX keeps a socket until it has heard of both sides.
TEST(Ucx, EndpointsThatBothSidesCloseLeaveNoSocket) {
  World world({Carrier::kUcx, false}, 0);
  auto a = world.end(1);
  auto b = world.end(2);
  const std::vector<End*> both = {a.get(), b.get()};
  const std::size_t listening = open_sockets();
  for (int round = 0; round < 2; ++round) {
    const auto [to_b, to_a] = introduce(*a, *b);
    ASSERT_TRUE(run_until(both, [&] { return a->unsettled() + b->unsettled() == 0; }));
    ASSERT_TRUE(a->close(to_b).ok());
    ASSERT_TRUE(b->close(to_a).ok());
    EXPECT_TRUE(run_until(both, [&] { return open_sockets() == listening; })) << open_sockets();
  }
}

TEST(Ucx, EndpointsThatOneSideClosesLeaveNoSockets) {
  World world({Carrier::kUcx, false}, 0);
  auto a = world.end(1);
  auto b = world.end(2);
  const std::vector<End*> both = {a.get(), b.get()};
  const std::size_t listening = open_sockets();
  auto [to_b, to_a] = introduce(*a, *b);
  for (int round = 0; round < 16; ++round) {
    ASSERT_TRUE(run_until(both, [&] { return a->unsettled() + b->unsettled() == 0; }));
    if (round < 8) {
      ASSERT_TRUE(a->close(to_b).ok());
      to_b = a->connect(*b);
    } else {
      ASSERT_TRUE(b->close(to_a).ok());
      to_a = b->connect(*a);
    }
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(send_patiently(*a, to_b, 50000, both).ok());
      ASSERT_TRUE(send_patiently(*b, to_a, 50000, both).ok());
    }
  }
  // One for each direction.
  EXPECT_TRUE(run_until(both, [&] { return open_sockets() <= listening + 4; })) << open_sockets();
  EXPECT_FALSE(a->down(to_b));
  EXPECT_FALSE(b->down(to_a));
}

// Where this process listens; of several places one.
sockaddr_in listening_address() {
  sockaddr_in address{};
  for (int fd = 0; fd < 256; ++fd) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    socklen_t address_size = sizeof(address);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &address_size) == 0)
      break;
  }
  return address;
}

// UCX 1.13 closes its port for good when it can't accept a connection.
void run_out_of_descriptors() {
  World world({Carrier::kUcx, false}, 0);
  auto a = world.end(1);
  const sockaddr_in address = listening_address();
  auto b = world.end(2);
  const PeerId to_b = introduce(*a, *b).first;
  EXPECT_FALSE(a->transport().deaf());
  const int stranger = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_EQ(::connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_TRUE(run_until({a.get(), b.get()}, [&] { return a->transport().deaf(); }));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ::close(stranger);
  EXPECT_FALSE(b->transport().deaf());
  ASSERT_TRUE(send_patiently(*a, to_b, 1000, {a.get(), b.get()}).ok());
  EXPECT_TRUE(run_until({a.get(), b.get()}, [&] { return b->received.size() == 1; }));
  EXPECT_FALSE(a->down(to_b));
}

// In a process of its own: UCX does not forget the descriptor of its port, and can't use that number again.
TEST(Ucx, WithoutADescriptorForAConnectionItIsDeaf) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    run_out_of_descriptors();
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace epd::transport

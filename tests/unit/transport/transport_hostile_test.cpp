// Who reaches the TCP port on which UCX listens, and speaks nonsense: what it can do, and to whom.
#include "support/sockets.h"
#include "transport_child.h"

#include <sys/socket.h>
#include <unistd.h>
#include <cstring>

namespace epd::transport {
namespace {

// With what a connection to UCX 1.x begins (src/uct/tcp/tcp.h).
constexpr std::uint64_t kUcxMagic = 0xCAFEBABE12345678ull;

class UcxHostile : public ::testing::Test {
 protected:
  UcxHostile() : seed(test_seed()), random(seed), own(world.open(), 1) {}

  // The victim serves `own`, and its port is known.
  void begin() {
    victim.introduce(own.transport().address());
    to_victim = own.connect(victim.address());
    served(1);
    port = test::listening_port(victim.pid());
    ASSERT_NE(port, 0);
  }
  void served(std::size_t messages) {
    own.received.clear();
    for (std::size_t i = 0; i < messages; ++i) ASSERT_TRUE(send_patiently(own, to_victim, 1000, {&own}).ok());
    ASSERT_TRUE(run_until({&own}, [&] { return own.received.size() == messages; }))
        << "the victim serves no more";
  }
  std::string garbage(std::size_t bytes) {
    std::string text(bytes, '\0');
    for (char& byte : text) byte = static_cast<char>(random());
    return text;
  }
  void write(const UniqueFd& fd, const std::string& text) {
    (void)::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }

  const std::uint64_t seed;
  std::mt19937_64 random;
  World world{{Carrier::kUcx, false}, 0};
  End own;
  Child victim{"echo"};
  PeerId to_victim = 0;
  std::uint16_t port = 0;
};

TEST_F(UcxHostile, WhoDoesNotKnowTheProtocolHurtsNobody) {
  begin();
  std::vector<UniqueFd> open;
  for (int i = 0; i < 60; ++i) {
    open.push_back(test::tcp_connect(port));
    ASSERT_GE(open.back().get(), 0);
    if (i % 3 != 0) write(open.back(), garbage(1 + random() % 5000));
    if (i % 4 == 0) open.back().reset();
  }
  served(200);
}

// UCX believes whoever says its magic number. With 1.13.1 such a one ends the process or writes to its memory
// (uct_tcp_ep_handle_put_req). Held here: those who talk to the victim are told, and lose nothing else.
TEST_F(UcxHostile, WhoKnowsTheProtocolEndsAtMostTheVictim) {
  begin();
  End bystander(world.open(), 3);
  const auto [by_to_own, own_to_by] = introduce(bystander, own);
  std::string hello(sizeof(kUcxMagic), '\0');
  std::memcpy(hello.data(), &kUcxMagic, sizeof(kUcxMagic));
  std::vector<UniqueFd> open;
  for (int i = 0; i < 20; ++i) {
    open.push_back(test::tcp_connect(port));
    if (open.back().get() < 0) break;  // it has ended
    write(open.back(), hello + garbage(1 + random() % 5000));
    run_for({&own, &bystander}, 5);
  }
  (void)own.send(to_victim, 1000);
  own.received.clear();
  ASSERT_TRUE(run_until({&own, &bystander}, [&] { return own.down(to_victim) || own.received_of(2) == 1; }))
      << "neither served nor told";
  std::printf("the victim %s\n", own.down(to_victim) ? "has ended" : "goes on");
  own.received.clear();
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(send_patiently(bystander, by_to_own, 1000, {&own, &bystander}).ok());
    ASSERT_TRUE(send_patiently(own, own_to_by, 1000, {&own, &bystander}).ok());
  }
  EXPECT_TRUE(run_until({&own, &bystander},
                        [&] { return own.received_of(3) == 100 && bystander.received_of(1) >= 100; }));
}

}  // namespace
}  // namespace epd::transport

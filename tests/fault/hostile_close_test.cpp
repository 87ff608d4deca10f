// Descriptors whose last close blocks: TCP sockets that linger over unsent bytes. Wherever a client can put
// one, the daemon must not be the process that waits for it, nor an engine.
#include "hostile_fixture.h"
#include "support/send_descriptors.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstring>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

using abi::AttachType;

constexpr int kLingerS = 12;
constexpr double kPromptS = 6;  // half of that: whoever waited for one close would take longer

// A connection over loopback whose peer never reads: its last close waits for kLingerS.
class Lingering {
 public:
  Lingering() {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    RANK_CHECK(::bind(listener.get(), any, sizeof(address)) == 0 && ::listen(listener.get(), 1) == 0,
               "listen");
    RANK_CHECK(::getsockname(listener.get(), any, &length) == 0, "getsockname");
    slow_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    RANK_CHECK(::connect(slow_.get(), any, sizeof(address)) == 0, "connect");
    peer_.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::vector<char> bytes(1 << 20);
    while (::send(slow_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
    const linger wait{1, kLingerS};
    RANK_CHECK(::setsockopt(slow_.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait)) == 0, "SO_LINGER");
  }
  // Sends a packet with the slow socket `copies` times beside it. It is the packet's from then on.
  void send_with(int socket, const std::vector<char>& packet, std::size_t copies = 1) {
    const std::vector<int> fds(copies, slow_.get());
    RANK_CHECK(send_descriptors(socket, packet.data(), packet.size(), fds) >= 0, std::strerror(errno));
    slow_.reset();
    static std::vector<UniqueFd> peers;  // stay until this process ends
    peers.push_back(std::move(peer_));
  }

 private:
  UniqueFd slow_;
  UniqueFd peer_;
};

template <typename T>
std::vector<char> packet(AttachType type, const T& body, std::size_t num_fds) {
  const abi::WireHeader header{abi::kWireMagic, static_cast<std::uint16_t>(type),
                               static_cast<std::uint16_t>(num_fds), sizeof(header) + sizeof(body), 7};
  std::vector<char> bytes(sizeof(header) + sizeof(body));
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), &body, sizeof(body));
  return bytes;
}

class HostileClose : public Hostile {
 protected:
  // While the daemon is stopped: or it could close its copy before we close ours, and we would linger.
  void send_slow(int socket, const std::vector<char>& packet, std::size_t copies = 1) const {
    daemon().signal(SIGSTOP);
    Lingering().send_with(socket, packet, copies);
    daemon().signal(SIGCONT);
  }
  // Others attach, and are let go, and the control plane answers.
  void expect_prompt(const char* after) const {
    const double begin = now_s();
    const HostileSession other(socket(), "host:1");
    RANK_CHECK(daemon().epctl({"status"}, kPromptS).exit_code == 0,
               std::string("epctl status after ") + after);
    RANK_CHECK(now_s() - begin < kPromptS, std::string("others waited after ") + after);
  }
};

// A rank that dies while the daemon is given descriptors: its peer hears of it, and engines stay what they
// are.
TEST_F(HostileClose, ABreakKeepsItsTime) {
  const Case c = fault_case(2, 1);
  attack([&] {
    Shared<Gate> joined;
    RankProcess peer([&]() -> std::string {
      const Session session(socket(), "host:1");
      const Group group(session, c.config("pair", 1));
      joined->arrive();
      sleep_ms(60'000);
      return "";
    });
    const Session session(socket(), "host:0");
    const Group group(session, c.config("pair", 0));
    joined->wait_for(1);
    std::vector<std::unique_ptr<RawClient>> clients;
    daemon().signal(SIGSTOP);
    for (int i = 0; i < 8; ++i) {
      clients.push_back(std::make_unique<RawClient>(socket()));
      Lingering().send_with(clients.back()->fd(), std::vector<char>(40, 'x'), 4);
    }
    daemon().signal(SIGCONT);
    const double begin = now_s();
    peer.kill(SIGKILL);
    RANK_CHECK(eventually(kPromptS, [&] { return epd_group_check(group.get(), nullptr) == EPD_RANK_LOST; }),
               std::string("its peer has not heard of it: ") + epd_last_error());
    RANK_CHECK(now_s() - begin < kPromptS, "late");
  });
}

TEST_F(HostileClose, ASocketThatLingersIsReceivedAndClosedElsewhere) {
  attack([&] {
    {
      const RawClient client(socket());
      send_slow(client.fd(), packet(AttachType::kHello, RawClient::good_hello(), 1));
      must_hold(refusal(client.receive(kPromptS)), {"INVALID_ARGUMENT", "1 descriptors", "allowed: 0"});
      expect_prompt("a Hello with a descriptor");
    }
    {
      const RawClient client(socket());
      send_slow(client.fd(), std::vector<char>(40, 'x'), 24);
      expect_prompt("garbage with descriptors");
    }
    {
      const RawClient client(socket());
      send_slow(client.fd(), {}, 1);
      expect_prompt("an empty packet with a descriptor");
    }
    {
      RawClient client(socket());
      daemon().signal(SIGSTOP);
      (void)client.send_bytes("half a Hello", 12);
      for (int i = 0; i < 4; ++i) Lingering().send_with(client.fd(), std::vector<char>(40, 'x'), 30);
      daemon().signal(SIGCONT);
      client.close();
      expect_prompt("packets with descriptors that nobody read");
    }
    {
      HostileSession session(socket(), "host:0");
      send_slow(session.socket(), packet(AttachType::kMapMemory, abi::MapMemory{}, 1));
      must_hold(session.next_answer(), {"INVALID_ARGUMENT", "the descriptor is not of memory"});
      expect_prompt("a socket as memory to be mapped");
      RANK_CHECK(session.ended(0).empty(), "the refusal of memory ended its session");
    }
    {
      const HostileSession session(socket(), "host:0");
      send_slow(session.socket(), packet(AttachType::kJoin, session.good_join("slow"), 1));
      must_hold(session.ended(), {"INVALID_ARGUMENT", "1 descriptors", "allowed: 0"});
      expect_prompt("a Join with a descriptor");
    }
    {
      const HostileSession session(socket(), "host:0");
      const abi::WireHeader detach{abi::kWireMagic, static_cast<std::uint16_t>(AttachType::kDetach), 0,
                                   sizeof(detach), 0};
      daemon().signal(SIGSTOP);
      RANK_CHECK(::send(session.socket(), &detach, sizeof(detach), MSG_NOSIGNAL) > 0, "detach");
      for (int i = 0; i < 4; ++i) Lingering().send_with(session.socket(), std::vector<char>(40, 'x'));
      daemon().signal(SIGCONT);
      expect_prompt("descriptors behind a detach");
    }
  });
}

TEST_F(HostileClose, ADoorbellThatBringsDescriptorsHoldsUpNobody) {
  attack([&] {
    {
      HostileSession session(socket(), "host:0");
      bool refused = false;
      try {
        Lingering().send_with(session.client_bell(), {'x'});
      } catch (const RankFailure&) {
        refused = true;
      }
      RANK_CHECK(refused, "the client's bell took a descriptor");
      Lingering().send_with(session.bell(), {'x'}, 4);
      const abi::Joined joined = session.join("slow-bell");
      session.push(joined, session.noop(joined));
      expect_prompt("descriptors for the engine's doorbell");
    }
    expect_prompt("the end of a session whose doorbell holds descriptors");
  });
}

// Those of the backlog, too, whom nobody has accepted when the daemon stops.
TEST(CloseAtStop, ADaemonThatStopsWaitsForNobodysClose) {
  Daemon daemon;
  ASSERT_TRUE(daemon.start());
  daemon.signal(SIGSTOP);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<RawClient>(daemon.socket()));
    Lingering().send_with(clients.back()->fd(), std::vector<char>(40, 'x'), 4);
  }
  daemon.signal(SIGTERM);
  daemon.signal(SIGCONT);
  const int status = daemon.wait_exit(kPromptS);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

}  // namespace
}  // namespace epd::test

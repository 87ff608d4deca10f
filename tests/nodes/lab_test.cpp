// Nodes in network namespaces: they reach each other, are counted, cut off and shaped, and leave nothing.
#include "common/signal.h"
#include "kit/daemon.h"
#include "kit/error.h"
#include "kit/nodes.h"
#include "kit/session.h"
#include "kit/team.h"
#include "support/census.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

namespace epd {
namespace {

namespace fs = std::filesystem;

constexpr std::uint16_t kPort = 5000;

class Lab : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = kit::OwnNodes::why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

sockaddr_in address_of(const kit::NodeNetwork& network, std::uint32_t node) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(kPort);
  ::inet_pton(AF_INET, network.address(node).c_str(), &address.sin_addr);
  return address;
}

// In a process there.
int datagram_socket(const kit::NodeNetwork& network, std::uint32_t node) {
  if (const std::string what = network.enter(node); !what.empty()) kit::fail_errno(what);
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const sockaddr_in own = address_of(network, node);
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof(own)) != 0) kit::fail_errno("bind");
  return fd;
}

constexpr std::size_t kBytes = 1000;
constexpr int kMessages = 20;

// Node 1 answers what node 0 says. Whether all answers came.
bool talk(const kit::NodeNetwork& network) {
  kit::SharedArray<std::uint32_t> answers(1);
  kit::Team team(2);
  team.run(
      [&](kit::TeamRank& self) {
        const int fd = datagram_socket(network, self.rank());
        const sockaddr_in other = address_of(network, 1 - self.rank());
        char message[kBytes] = {};
        self.barrier();
        for (int i = 0; i < kMessages; ++i) {
          const auto say = [&] {
            (void)::sendto(fd, message, kBytes, 0, reinterpret_cast<const sockaddr*>(&other), sizeof(other));
          };
          if (self.rank() == 0) say();
          pollfd entry{fd, POLLIN, 0};
          if (::poll(&entry, 1, 5000) != 1 || ::recv(fd, message, kBytes, 0) != kBytes) break;
          if (self.rank() == 1) say();
          if (self.rank() == 0) ++answers[0];
        }
        self.barrier();
      },
      {});
  return answers[0] == kMessages;
}

TEST_F(Lab, NodesReachEachOtherAndEachByteIsCounted) {
  const kit::NodeNetwork network(3);
  const kit::Traffic before[] = {network.traffic(0), network.traffic(1), network.traffic(2)};
  ASSERT_TRUE(talk(network));
  const auto sent = [&](std::uint32_t node) {
    return network.traffic(node).sent_bytes - before[node].sent_bytes;
  };
  constexpr std::uint64_t kWithHeaders = kMessages * (kBytes + 8 + 20 + 14);  // UDP, IP, Ethernet
  constexpr std::uint64_t kQuestions = 4 * 64;                                // of ARP
  for (const std::uint32_t node : {0u, 1u}) {
    EXPECT_GE(sent(node), kWithHeaders);
    EXPECT_LE(sent(node), kWithHeaders + kQuestions);
    EXPECT_GE(network.traffic(node).received_bytes - before[node].received_bytes, kWithHeaders);
  }
  EXPECT_LE(sent(2), kQuestions) << "a bridge keeps to whom it is meant for";
}

TEST_F(Lab, ACableCanBePulledAndPutBack) {
  kit::NodeNetwork network(2);
  EXPECT_TRUE(talk(network));
  network.unplug(1);
  EXPECT_FALSE(talk(network));
  network.plug(1);
  EXPECT_TRUE(talk(network) || talk(network))
      << "a datagram may be lost while the neighbour's address is found";
}

TEST_F(Lab, ARateIsTheLinksOwn) {
  const kit::NodeNetwork network(2, "4gbit");
  for (const std::uint32_t node : {0u, 1u}) {
    kit::CommandOptions there;
    there.in_child = [&, node] {
      if (*network.enter(node) != '\0') ::_exit(126);
    };
    const std::string said =
        kit::must_run({"tc", "qdisc", "show", "dev", kit::NodeNetwork::kInterface}, there);
    EXPECT_NE(said.find("tbf"), std::string::npos) << said;
    EXPECT_NE(said.find("rate 4Gbit"), std::string::npos) << said;
    EXPECT_EQ(kit::must_run({"ls", "/sys/class/net"}, there), "eth0\nlo\n") << "a /sys of its own";
  }
}

std::set<std::string> interfaces_here() {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator("/sys/class/net")) names.insert(entry.path().filename());
  return names;
}

// The network namespaces of all processes.
std::set<std::string> network_namespaces() {
  std::set<std::string> links;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    std::error_code ended;
    const fs::path link = fs::read_symlink(entry.path() / "ns/net", ended);
    if (!ended) links.insert(link);
  }
  return links;
}

TEST_F(Lab, NothingIsLeft) {
  const std::set<std::string> interfaces = interfaces_here();
  std::string there;
  {
    const kit::OwnNodes nodes({.nodes = 2});
    there = fs::read_symlink("/proc/" + std::to_string(nodes.daemon(1).pid()) + "/ns/net");
    EXPECT_EQ(network_namespaces().count(there), 1u) << "the test can see it";
    EXPECT_EQ(interfaces_here(), interfaces) << "nothing has a name outside";
    send_signal(nodes.daemon(0).pid(), SIGKILL);  // its engines end by themselves
  }
  for (int i = 0; i < 100 && network_namespaces().count(there) != 0; ++i) ::usleep(50'000);
  EXPECT_EQ(network_namespaces().count(there), 0u);
  EXPECT_EQ(interfaces_here(), interfaces);
}

TEST_F(Lab, DaemonsOnItAreUpAndEndWell) {
  kit::OwnNodes nodes({.nodes = 3});
  const auto table = nlohmann::json::parse(kit::epctl(nodes.daemon(2).control_socket(), {"nodes"}));
  EXPECT_EQ(table.at("nodes").size(), 3u);
  EXPECT_GT(nodes.link_bytes(), 0u);
  EXPECT_EQ(nodes.stop(), "");
}

std::string state_of(const kit::OwnDaemon& seen_by, const std::string& node) {
  const auto table = nlohmann::json::parse(kit::epctl(seen_by.control_socket(), {"nodes"}));
  for (const auto& row : table.at("nodes")) {
    if (row.at("name") == node) return row.at("state");
  }
  return "unknown";
}

// Generous: how long it took is not looked at.
bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 400; ++i) {
    if (condition()) return true;
    ::usleep(50'000);
  }
  return false;
}

TEST_F(Lab, ANodeWithoutItsCableIsLostAndComesBack) {
  kit::OwnNodes nodes({.nodes = 3});
  nodes.network().unplug(2);
  EXPECT_TRUE(eventually([&] { return state_of(nodes.daemon(0), "node-2") == "lost"; }));
  EXPECT_EQ(state_of(nodes.daemon(0), "node-1"), "up") << "nobody else is hurt";
  EXPECT_EQ(state_of(nodes.daemon(2), "node-2"), "up");
  nodes.network().plug(2);
  EXPECT_TRUE(eventually([&] { return state_of(nodes.daemon(0), "node-2") == "up"; }));
  EXPECT_TRUE(eventually([&] { return state_of(nodes.daemon(2), "node-0") == "up"; }));
  EXPECT_EQ(nodes.stop(), "");
}

// Ranks on nodes 1 and 2; node 0 coordinates.
epd_group_config_t pair_of_nodes(std::uint32_t rank) {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = "pair";
  config.rank = static_cast<std::int32_t>(rank);
  config.num_ranks = 2;
  config.num_experts = 2;
  config.max_tokens = 4;
  config.hidden = 128;
  config.topk = 1;
  config.span = EPD_SPAN_CLUSTER;
  return config;
}

TEST_F(Lab, AnEngineThatStartsWithoutItsCableServesOthersLater) {
  kit::OwnNodes nodes({.nodes = 2});
  nodes.network().unplug(1);
  ASSERT_TRUE(eventually([&] { return state_of(nodes.daemon(0), "node-1") == "lost"; }));
  const std::vector<pid_t> engines = test::children_of(nodes.daemon(1).pid());
  ASSERT_EQ(engines.size(), 1u);
  send_signal(engines[0], SIGKILL);
  ASSERT_TRUE(eventually([&] {
    const std::vector<pid_t> now = test::children_of(nodes.daemon(1).pid());
    return now.size() == 1 && now != engines;
  }));
  ::sleep(1);  // it has looked for a network by then
  nodes.network().plug(1);
  ASSERT_TRUE(eventually([&] { return state_of(nodes.daemon(0), "node-1") == "up"; }));
  kit::Team team(2);
  team.run(
      [&](kit::TeamRank& self) {
        const kit::SessionPtr session = kit::attach(nodes.daemon(self.rank()).socket(), "host:0");
        epd_group_config_t config = pair_of_nodes(self.rank());
        config.timeout_ms = 1000;
        epd_status_t status = EPD_UNSUPPORTED;
        EXPECT_TRUE(eventually([&] {
          epd_group_t* group = nullptr;
          status = epd_group_join(session.get(), &config, &group);
          if (status == EPD_OK) self.barrier();  // both have joined
          if (status == EPD_OK) epd_group_leave(group);
          return status == EPD_OK;
        })) << epd_last_error();
        if (status != EPD_OK) ::_exit(1);
      },
      {});
}

TEST_F(Lab, AnEngineFollowsTheAddressOfItsInterfaceWhenNoGroupUsesIt) {
  kit::OwnNodes nodes({.nodes = 2});
  kit::CommandOptions there;
  there.in_child = [&] {
    if (*nodes.network().enter(1) != '\0') ::_exit(126);
  };
  const kit::OwnDaemon& daemon = nodes.daemon(1);
  const std::string own = nodes.network().address(1);
  const std::vector<pid_t> engines = test::children_of(daemon.pid());
  const auto problem = [&] {
    const auto network = nlohmann::json::parse(kit::epctl(daemon.control_socket(), {"network"}));
    return network["engines"][0]["problem"].get<std::string>();
  };
  const auto change = [&](const std::string& how) {
    kit::must_run({"sh", "-c", "ip address " + how + " dev eth0"}, there);
  };
  change("add 198.18.0.200/16");
  change("del " + own + "/24");
  ASSERT_TRUE(eventually([&] {
    const std::vector<pid_t> now = test::children_of(daemon.pid());
    return now.size() == 1 && now != engines;
  })) << daemon.log_tail();
  EXPECT_NE(daemon.log_tail().find("its network was eth0 (" + own + ") and is now eth0 (198.18.0.200)"),
            std::string::npos)
      << daemon.log_tail();
  change("add " + own + "/24");
  EXPECT_TRUE(eventually([&] { return problem().empty(); })) << problem();

  {
    const kit::SessionPtr session = kit::attach(daemon.socket(), "host:0");
    epd_group_config_t config = pair_of_nodes(0);
    config.num_ranks = 1;
    config.span = EPD_SPAN_NODE;
    const kit::GroupPtr group = kit::join(session.get(), config);
    change("del 198.18.0.200/16");
    EXPECT_TRUE(eventually([&] {
      return problem().starts_with(
          "it was started with the network eth0 (198.18.0.200), and now it would be eth0 (" + own + ")");
    })) << problem();
    EXPECT_NE(problem().find("epctl restart device host:0"), std::string::npos) << problem();
  }
  EXPECT_TRUE(eventually([&] { return problem().empty(); })) << problem();
  EXPECT_EQ(nodes.stop(), "");
}

TEST_F(Lab, BothSidesOfACutHearOfItAndNoneHangs) {
  kit::OwnNodes nodes({.nodes = 3});
  kit::SharedArray<std::uint32_t> good(2), ended(2);
  kit::SharedArray<double> cut_us(1), ended_us(2);
  kit::Team team(2);
  team.run(
      [&](kit::TeamRank& self) {
        const kit::SessionPtr session = kit::attach(nodes.daemon(1 + self.rank()).socket(), "host:0");
        const kit::GroupPtr group = kit::join(session.get(), pair_of_nodes(self.rank()));
        auto* choices = static_cast<std::int32_t*>(kit::buffers_of(group.get(), 0).topk_idx);
        for (int t = 0; t < 4; ++t) choices[t] = t % 2;
        epd_status_t status = EPD_OK;
        for (int i = 0; status == EPD_OK; ++i) {
          if (i == 20 && self.rank() == 0) {
            cut_us[0] = kit::now_us();
            nodes.network().unplug(2);
          }
          epd_dispatch_args_t args;
          epd_dispatch_args_init(&args);
          args.num_tokens = 4;
          epd_ticket_t ticket = 0;
          epd_handle_t handle = 0;
          status = epd_dispatch(group.get(), &args, EPD_NO_STREAM, &ticket, &handle);
          if (status == EPD_OK) status = epd_ticket_wait(group.get(), ticket, 60'000, nullptr);
          if (status == EPD_OK) ++good[self.rank()];
        }
        ended[self.rank()] = static_cast<std::uint32_t>(status);
        ended_us[self.rank()] = kit::now_us();
      },
      {});
  for (const std::uint32_t rank : {0u, 1u}) {
    std::printf("rank %u: %s %.1f s after the cut\n", rank,
                epd_status_name(static_cast<epd_status_t>(ended[rank])), (ended_us[rank] - cut_us[0]) * 1e-6);
    EXPECT_GE(good[rank], 19u);
    EXPECT_EQ(ended[rank], static_cast<std::uint32_t>(EPD_RANK_LOST));
  }
}

TEST_F(Lab, OneNodeNeedsNoNetwork) {
  kit::OwnNodes nodes({});
  EXPECT_EQ(nodes.link_bytes(), 0u);
  EXPECT_EQ(nodes.size(), 1u);
}

TEST_F(Lab, RefusesWithWhatIsAllowed) {
  const auto refusal = [](std::uint32_t nodes, const std::string& rate) -> std::string {
    try {
      const kit::NodeNetwork network(nodes, rate);
    } catch (const kit::ToolError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(65, ""), "nodes is 65; allowed: 0..64");
  EXPECT_EQ(refusal(2, "4 tons"), "rate is '4 tons'; allowed: a number of kbit, mbit or gbit, as 4gbit");
}

TEST(LabWithoutTools, SaysWhatIsMissing) {
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", "/nonexistent", 1);
  EXPECT_EQ(kit::OwnNodes::why_not(), "openssl is missing");
  EXPECT_EQ(kit::NodeNetwork::why_not(), "ip is missing (iproute2)");
  ::setenv("PATH", path.c_str(), 1);
}

}  // namespace
}  // namespace epd

// Which interface engines use, on machines made of namespaces.
#include "network.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

namespace epd::supervisor {
namespace {

namespace fs = std::filesystem;

void write(const std::string& file, const std::string& text) {
  std::ofstream(file) << text;
}

// Gives this process a network and mounts of its own. A user that may not do so becomes root of a user
// namespace first.
bool unshare_all() {
  constexpr int kNamespaces = CLONE_NEWNET | CLONE_NEWNS;
  if (::unshare(kNamespaces) == 0) return true;
  const std::string uid = std::to_string(::geteuid());
  const std::string gid = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER | kNamespaces) != 0) return false;
  write("/proc/self/setgroups", "deny");
  write("/proc/self/uid_map", "0 " + uid + " 1");
  write("/proc/self/gid_map", "0 " + gid + " 1");
  return true;
}

class Network : public testing::Test {
 protected:
  static constexpr int kNoNamespaces = 77;

  Network() {
    std::string pattern = (fs::temp_directory_path() / "epd-network-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    settings_.listen = "10.9.0.1:7410";
    settings_.advertise = settings_.coordinator = "10.9.0.1:7410";
  }
  ~Network() override { fs::remove_all(directory_); }

  // The choice, or the problem, on a machine with e0 (10.9.0.1/24) after these commands.
  std::string chosen_after(const std::string& commands, const std::string& devices = "auto") const {
    const std::string answer = directory_ + "/answer";
    const pid_t pid = ::fork();
    if (pid == 0) {
      write(directory_ + "/hosts", "127.0.0.1 localhost\n127.0.1.1 node-a\n10.9.0.7 node-b\n");
      if (!unshare_all()) ::_exit(kNoNamespaces);
      const std::string machine =
          "set -e; mount --make-rprivate /; mount --bind " + directory_ +
          "/hosts /etc/hosts; ip link set lo up; ip link add e0 type veth peer name e1; "
          "ip link set e1 up; ip link set e0 up; ip addr add 10.9.0.1/24 dev e0";
      if (std::system(machine.c_str()) != 0) ::_exit(kNoNamespaces);
      if (std::system(("set -e; " + commands).c_str()) != 0) {
        write(answer, "failed: " + commands);
        ::_exit(0);
      }
      const NetworkChoice choice = choose_network(settings_, devices);
      write(answer, choice.devices.empty() ? choice.problem : in_words(choice));
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (WEXITSTATUS(status) == kNoNamespaces) return kNone;
    std::ifstream in(answer);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  static constexpr const char* kNone = "no namespaces can be made here";
  std::string directory_;
  cluster::Settings settings_;
};

#define EXPECT_CHOSEN(expected, ...)                               \
  do {                                                             \
    const std::string chosen = chosen_after(__VA_ARGS__);          \
    if (chosen == kNone) GTEST_SKIP() << kNone;                    \
    EXPECT_NE(chosen.find(expected), std::string::npos) << chosen; \
  } while (false)

TEST_F(Network, TheCoordinatorUsesTheInterfaceThatItListensOn) {
  EXPECT_CHOSEN("e0 (10.9.0.1)", "");
  settings_.listen = "0.0.0.0:7410";
  EXPECT_CHOSEN("e0 (10.9.0.1)", "");
}

// On Debian a machine's own name stands for a loopback address.
TEST_F(Network, TheCoordinatorsLoopbackNameOpensNothing) {
  settings_.advertise = settings_.coordinator = "node-a:7410";
  EXPECT_CHOSEN("e0 (10.9.0.1)", "");
  settings_.listen = "0.0.0.0:7410";
  EXPECT_CHOSEN("\"node-a\" is 127.0.1.1 on this machine; set network.devices", "");
}

TEST_F(Network, WithoutARouteOrAnAddressNothingIsOpened) {
  settings_.advertise = "10.9.0.1:7410";
  settings_.coordinator = "10.7.0.1:7410";
  EXPECT_CHOSEN("there is no route to 10.7.0.1; set network.devices", "");
  EXPECT_CHOSEN("e0 (10.9.0.1)", "ip route add 10.7.0.0/24 dev e0");
  settings_.coordinator = "node-x.invalid:7410";
  EXPECT_CHOSEN("\"node-x.invalid\" can't be resolved", "");
  settings_.coordinator = "node-b:7410";
  EXPECT_CHOSEN("e0 (10.9.0.1)", "");
}

// getifaddrs says the label in place of the interface's name.
TEST_F(Network, AnAddressWithALabelIsOneOfItsInterface) {
  const std::string label = "ip addr del 10.9.0.1/24 dev e0; ip addr add 10.9.0.1/24 dev e0 label e0:1";
  EXPECT_CHOSEN("e0 has no address by which UCX listens, as all have labels", label);
  EXPECT_CHOSEN("e0 (10.9.1.2)", label + "; ip addr add 10.9.1.2/24 dev e0");
}

TEST_F(Network, ALoopbackInterfaceIsForLoopbackAddressesOnly) {
  settings_.advertise = settings_.coordinator = "10.8.0.1:7410";
  settings_.listen = "0.0.0.0:7410";
  EXPECT_CHOSEN("the address 10.8.0.1 is one of the loopback interface lo", "ip addr add 10.8.0.1/32 dev lo");
  for (const char* loopback : {"127.0.0.1:7410", "localhost:7410", "[::1]:7410"}) {
    settings_.advertise = settings_.coordinator = loopback;
    EXPECT_CHOSEN("lo (127.0.0.1)", "");
  }
}

TEST_F(Network, NamedInterfacesAreTakenAsTheyAre) {
  EXPECT_CHOSEN("e0,mlx5_0:1 (10.9.0.1)", "", "e0,mlx5_0:1");
  EXPECT_CHOSEN("mlx5_0:1", "", "mlx5_0:1");
}

// eth0 with these addresses. UCX listens by the first.
NetworkChoice eth0(const std::vector<std::string>& held) {
  NetworkChoice choice{"eth0", {}, held, ""};
  if (!held.empty()) choice.addresses = {held[0]};
  return choice;
}

TEST(NetworkChoices, AnEngineIsOutdatedWhenItsAddressIsGone) {
  const NetworkChoice given = eth0({"10.0.0.1"});
  EXPECT_FALSE(is_outdated(given, given));
  EXPECT_FALSE(is_outdated(given, eth0({"10.0.0.2", "10.0.0.1"}))) << "another one came";
  EXPECT_FALSE(is_outdated(given, eth0({}))) << "it has none for a while";
  EXPECT_FALSE(is_outdated(given, {})) << "no interface is found any more";
  EXPECT_TRUE(is_outdated(given, eth0({"10.0.0.2"})));
  EXPECT_TRUE(is_outdated(given, {"eth1", {"10.1.0.1"}, {"10.1.0.1"}, ""}));
  EXPECT_TRUE(is_outdated({}, given)) << "it was started without a network";
  EXPECT_TRUE(is_outdated(eth0({}), given)) << "its interface had no address";
  const NetworkChoice unlisted{"mlx5_0:1", {}, {}, ""};
  EXPECT_FALSE(is_outdated(unlisted, unlisted)) << "no interface of the kernel";
  const NetworkChoice two{"eth0,eth1", {"10.0.0.1", "10.1.0.1"}, {"10.0.0.1", "10.1.0.1"}, ""};
  const NetworkChoice one{"eth0,eth1", {"10.0.0.1"}, {"10.0.0.1"}, ""};
  EXPECT_FALSE(is_outdated(two, one)) << "eth1 is down for a while";
  EXPECT_TRUE(is_outdated(one, two)) << "it was started while eth1 was down";
}

TEST(NetworkChoices, WhatIsFoundNoMoreIsNoNews) {
  const NetworkChoice known = eth0({"10.0.0.1"});
  EXPECT_TRUE(lacks({}, known));
  EXPECT_TRUE(lacks(eth0({}), known));
  EXPECT_FALSE(lacks(eth0({"10.0.0.2"}), known));
  EXPECT_FALSE(lacks({}, {}));
}

TEST(NetworkChoices, TheCardChecksRowsWhereAllTransportsAreRdma) {
  using abi::FarCheck;
  Config config;
  config.cluster.emplace();
  for (const char* transports : {"rc", "rc_x,ud", "tcp", "rc,tcp", "^tcp", "all"}) {
    const bool rdma = transports == std::string("rc") || transports == std::string("rc_x,ud");
    config.network_transports = transports;
    for (const FarCheck check : {FarCheck::kHeaders, FarCheck::kCrc, FarCheck::kMac}) {
      config.network_check = static_cast<std::uint32_t>(check) - 1;
      EXPECT_EQ(network_options(config, eth0({"10.0.0.1"})).check,
                rdma && check == FarCheck::kCrc ? FarCheck::kHeaders : check)
          << transports << " " << abi::far_check_name(check);
    }
  }
}

}  // namespace
}  // namespace epd::supervisor

// epctl network, and what doctor says of the network between nodes.
#include "ctl_fixture.h"
#include "doctor.h"
#include "render.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <tuple>

namespace epd::ctl {
namespace {

TEST_F(CtlTest, NetworkShowsFarEnginesAndWhatPasses) {
  start_server();
  const Finished text = epctl({"network"});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* part :
       {"DEVICE  NODE    FAR     STATE      CARRIER",
        "host:0  node-b  host:0  connected  UCX 1.13.1 / UCX 1.19.0", "43 us", "8.0 MiB", "30, 3.0 MiB",
        "60, 6.0 MiB", "3, 4.5 ms", "host:0  node-c  host:1  down",
        "host:0 and host:0 on node-b: dropped: token 5\n",
        "host:0 and host:0 on node-b: the longest stall was 2.5 ms, for rank 7 of group 9\n",
        "host:0 and host:1 on node-c: has said nothing for 2000 ms\n", "32.0 MiB", "1.0 GiB",
        "CARRIER     CHECK", "UCX 1.13.1  crc", "host:1: libucp.so.0: cannot open shared object file\n"}) {
    EXPECT_TRUE(text.says(part)) << part << "\n" << text.out;
  }
  const Json document = epctl({"network", "--json"}).json();
  ASSERT_TRUE(document.is_object());
  const Json& far = document["far_engines"][0];
  EXPECT_EQ(far["state"], "connected");
  EXPECT_EQ(far["rows"]["bytes_sent"], 1 << 20);
  EXPECT_EQ(far["lanes"], "#\n# lane[0]: tcp/eth0\n");
  EXPECT_EQ(far["longest_stall"]["rank"], 7);
  EXPECT_EQ(document["far_engines"][1]["round_trip_us"], nullptr);
  EXPECT_EQ(document["engines"][0]["interfaces"], "lo");
  EXPECT_EQ(document["engines"][0]["check"], "crc");
  EXPECT_TRUE(epctl({"network", "--help"}).says("EXAMPLES"));
}

TEST(CtlNetwork, OperationsSayWhatTheyWaitForOfOtherNodes) {
  v1::ListOperationsResponse operations;
  v1::Operation& op = *operations.add_operations();
  op.set_waiting_for(-1);
  op.set_far_wait("a credit for rows of rank 3 on node-b, 5 of 10 packed");
  EXPECT_NE(render(operations).find("a credit for rows of rank 3 on node-b"), std::string::npos);
  op.set_waiting_for(2);
  EXPECT_NE(render(operations).find("rank 2 0 us"), std::string::npos) << render(operations);
}

TEST(CtlNetwork, NobodyIsNeeded) {
  EXPECT_EQ(render(v1::ListFarEnginesResponse()).find("no engine of another node is needed\n"), 0u);
}

class CtlDoctorNetwork : public ::testing::Test {
 protected:
  CtlDoctorNetwork() {
    facts_.interfaces = {"lo", "eth0", "mlx5_0"};
    v1::NetworkEngine& engine = *facts_.network.add_engines();
    engine.set_device("host:0");
    engine.set_state(v1::DEVICE_STATE_READY);
    engine.set_carrier("UCX 1.13.1");
    engine.set_library("libucp.so.0");
    engine.set_interfaces("eth0,mlx5_0:1");
    v1::FarEngine& far = *facts_.network.add_far_engines();
    far.set_device("host:0");
    far.set_node("node-b");
    far.set_far_device("host:1");
    far.set_state(v1::FAR_ENGINE_STATE_CONNECTED);
    far.set_carrier("UCX 1.13.1");
    far.set_far_carrier("UCX 1.13.1");
  }
  v1::NetworkEngine& engine() { return *facts_.network.mutable_engines(0); }
  v1::FarEngine& far() { return *facts_.network.mutable_far_engines(0); }
  Check check(const std::string& name) const {
    const std::vector<Check> checks = judge_network(facts_);
    const auto found =
        std::find_if(checks.begin(), checks.end(), [&](const Check& c) { return c.name == name; });
    return found == checks.end() ? Check{Level::kFail, "", "no such check", ""} : *found;
  }

  ClusterFacts facts_;
};

TEST_F(CtlDoctorNetwork, AllIsWell) {
  EXPECT_EQ(check("network host:0").level, Level::kOk);
  EXPECT_EQ(check("network host:0").text, "UCX 1.13.1 of libucp.so.0, by eth0,mlx5_0:1");
  EXPECT_EQ(check("network host:0 node-b host:1").level, Level::kOk);
  engine().set_interfaces("all");
  EXPECT_EQ(check("network host:0").level, Level::kOk);
}

TEST_F(CtlDoctorNetwork, ALibraryThatDoesNotOpenIsAFailure) {
  engine().set_problem("libucp.so.0: cannot open shared object file");
  EXPECT_EQ(check("network host:0").level, Level::kFail);
  EXPECT_EQ(check("network host:0").text, "libucp.so.0: cannot open shared object file");
  EXPECT_NE(check("network host:0").advice.find("network.library"), std::string::npos);
  engine().set_device("cuda:0");  // groups that span nodes are for host devices
  EXPECT_EQ(judge_network(facts_).size(), 1u);
}

TEST_F(CtlDoctorNetwork, InterfacesThatAreNotThereAreNamed) {
  engine().set_interfaces("eth0,eth7,mlx5_9:1");
  EXPECT_EQ(check("network host:0").level, Level::kWarn);
  EXPECT_NE(check("network host:0").text.find("this machine has no eth7, mlx5_9"), std::string::npos);
}

TEST_F(CtlDoctorNetwork, OtherVersionsAndLossesAreWarnings) {
  const std::string name = "network host:0 node-b host:1";
  far().set_far_carrier("UCX 1.19.0");
  EXPECT_EQ(check(name).level, Level::kWarn);
  EXPECT_EQ(check(name).text, "UCX 1.13.1 here and UCX 1.19.0 there");
  far().set_state(v1::FAR_ENGINE_STATE_DOWN);
  far().set_reason("it is down");
  EXPECT_EQ(check(name).text, "down: it is down");
  EXPECT_EQ(check(name).level, Level::kWarn);
  far().set_state(v1::FAR_ENGINE_STATE_IDLE);
  EXPECT_EQ(judge_network(facts_).size(), 1u) << "nobody needs it";
}

TEST(CtlDoctor, OfALostNodeWhoIsAtItsAddressNow) {
  ClusterFacts facts;
  const std::tuple<const char*, const char*, v1::NodeState> nodes[] = {
      {"node-b", "b:7410", v1::NODE_STATE_LOST},
      {"node-c", "c:7410", v1::NODE_STATE_LOST},
      {"node-d", "b:7410", v1::NODE_STATE_UP},
      {"node-e", "c:7410", v1::NODE_STATE_LOST}};
  for (const auto& [name, address, state] : nodes) {
    v1::Node& node = *facts.nodes.add_nodes();
    node.set_name(name);
    node.set_address(address);
    node.set_state(state);
  }
  const std::vector<Check> checks = judge_cluster(facts);
  ASSERT_EQ(checks.size(), 5u);
  EXPECT_TRUE(checks[1].advice.starts_with("node node-d is at its address now")) << checks[1].advice;
  EXPECT_TRUE(checks[2].advice.starts_with("start epd there")) << checks[2].advice;
  EXPECT_TRUE(checks[4].advice.starts_with("start epd there")) << checks[4].advice;
}

TEST(CtlDoctor, TheMachineHasALoopbackInterface) {
  EXPECT_TRUE(probe_interfaces().contains("lo"));
}

}  // namespace
}  // namespace epd::ctl

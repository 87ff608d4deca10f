// Daemons that know each other: who is up, who is lost and how soon, who comes back.
#include "support/daemon_cluster.h"
#include "support/sockets.h"

#include "epd/epd.hpp"

#include <signal.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

class Nodes : public ClusterOfDaemons {};

// A number of so many ms that a loss must have been noticed by its connection, not by silence.
const Settings kPatient{{"cluster.node_timeout_ms", "60000"}};
const Settings kQuick{{"cluster.node_timeout_ms", "3000"}, {"cluster.heartbeat_ms", "50"}};

TEST_F(Nodes, TwoSeeEachOther) {
  start("a");
  start("b");
  for (const char* seen_by : {"a", "b"}) {
    await(seen_by, "a", "up");
    await(seen_by, "b", "up");
    const Json a = node(seen_by, "a");
    const Json b = node(seen_by, "b");
    EXPECT_EQ(a["address"], address("a"));
    EXPECT_EQ(b["address"], address("b"));
    EXPECT_EQ(b["version"], status(at("b"))["daemon"]["version"]);
    EXPECT_EQ(a["boot_id"], status(at("a"))["daemon"]["boot_id"]);
    EXPECT_EQ(b["boot_id"], status(at("b"))["daemon"]["boot_id"]);
    EXPECT_TRUE(a["coordinator"].get<bool>());
    EXPECT_FALSE(b["coordinator"].get<bool>());
    EXPECT_EQ(a["own"].get<bool>(), std::string(seen_by) == "a");
  }
  const Json cluster = status(at("b"))["daemon"]["cluster"];
  EXPECT_EQ(cluster["name"], "test");
  EXPECT_FALSE(cluster["coordinates"].get<bool>());
  EXPECT_EQ(cluster["problem"], "");
  EXPECT_EQ(cluster["nodes_up"], 2);
  EXPECT_EQ(cluster["term"], status(at("a"))["daemon"]["cluster"]["term"]);
  const std::string text = at("b").epctl({"nodes"}).out;
  EXPECT_NE(text.find("node-b"), std::string::npos) << text;
  EXPECT_NE(text.find("coordinator"), std::string::npos) << text;
  EXPECT_NE(at("a").epctl({"status"}).out.find("test, this is node-a, the coordinator; 2 up"),
            std::string::npos);
}

TEST_F(Nodes, AKilledDaemonIsLostAtOnceAndComesBack) {
  start("a", kPatient);
  start("b", kPatient);
  start("c", kPatient);
  for (const char* letter : {"a", "b", "c"}) await("b", letter, "up");
  const std::string boot_id = node("a", "c")["boot_id"];
  at("c").signal(SIGKILL);
  ASSERT_NE(at("c").wait_exit(10), -1);
  const double took = await("a", "c", "lost", 10);
  std::printf("lost after %.3f s\n", took);
  await("b", "c", "lost", 10);
  EXPECT_NE(node("a", "c")["reason"].get<std::string>().find("nobody listens at " + address("c")),
            std::string::npos)
      << node("a", "c");
  EXPECT_EQ(state("a", "b"), "up") << "nobody else is hurt";
  start("c", kPatient);
  await("a", "c", "up");
  await("b", "c", "up");
  EXPECT_NE(node("a", "c")["boot_id"], boot_id);
}

TEST_F(Nodes, AStoppedDaemonIsSilentThenLostAndGoesOn) {
  start("a", kQuick);
  start("b", kQuick);
  await("a", "b", "up");
  const std::string boot_id = node("a", "b")["boot_id"];
  at("b").signal(SIGSTOP);
  std::set<std::string> seen;
  const double took = until(kSoon, [&] {
    seen.insert(state("a", "b"));
    return seen.count("lost") != 0;
  });
  EXPECT_GE(took, 0);
  std::printf("lost after %.3f s of 3 s\n", took);
  EXPECT_EQ(seen.count("silent"), 1u);
  EXPECT_NE(node("a", "b")["reason"].get<std::string>().find("it has said nothing for "), std::string::npos)
      << node("a", "b");
  at("b").signal(SIGCONT);
  await("a", "b", "up");
  await("b", "a", "up");
  EXPECT_EQ(node("a", "b")["boot_id"], boot_id);
}

TEST_F(Nodes, TheCoordinatorIsMissedAndComesBackWithAHigherTerm) {
  start("a");
  start("b");
  await("b", "a", "up");
  const auto term = [&](const char* name) {
    return status(at(name))["daemon"]["cluster"]["term"].get<std::uint64_t>();
  };
  const std::uint64_t before = term("a");
  EXPECT_EQ(term("b"), before);
  at("a").signal(SIGKILL);
  ASSERT_NE(at("a").wait_exit(10), -1);
  await("b", "a", "lost");
  const Json cluster = status(at("b"))["daemon"]["cluster"];
  EXPECT_NE(cluster["problem"].get<std::string>().find("Connection refused"), std::string::npos) << cluster;
  EXPECT_EQ(state("b", "b"), "up");
  start("a");
  await("b", "a", "up");
  await("a", "b", "up");
  EXPECT_GT(term("a"), before);
  EXPECT_EQ(term("b"), term("a"));
}

// They were shown as the coordinator had told last.
TEST_F(Nodes, ANodeThatIsCutOffShowedOthersAsUp) {
  for (const char* letter : {"a", "b", "c"}) start(letter, kQuick);
  await("b", "c", "up");
  at("a").signal(SIGKILL);
  ASSERT_NE(at("a").wait_exit(10), -1);
  await("b", "c", "unknown", 10);
  EXPECT_EQ(state("b", "b"), "up");
  EXPECT_NE(node("b", "c")["reason"].get<std::string>().find("coordinator"), std::string::npos);
  EXPECT_EQ(status(at("b"))["daemon"]["cluster"]["nodes_unknown"], 1);
  const std::string doctor = at("b").epctl({"doctor"}).out;
  EXPECT_NE(doctor.find("unknown for "), std::string::npos) << doctor;
  start("a", kQuick);
  await("b", "c", "up");
}

TEST_F(Nodes, DrainIsShownAndAnOrderlyEndIsSaid) {
  start("a", kPatient);
  start("b", kPatient);
  await("a", "b", "up");
  {
    epd::AttachOptions options;
    options.socket_path = at("b").socket();
    const epd::Session session(options);
    ASSERT_EQ(at("b").epctl({"drain", "--timeout-ms", "30000"}).exit_code, 0);
    await("a", "b", "draining");
    EXPECT_EQ(state("b", "b"), "draining");
  }
  EXPECT_NE(at("b").wait_exit(20), -1);
  await("a", "b", "lost");
  EXPECT_EQ(node("a", "b")["reason"], "its daemon has stopped");
}

TEST_F(Nodes, CertificatesAreRenewedUnderARunningConnection) {
  start("a", kPatient);
  start("b", kPatient);
  await("a", "b", "up");
  // Another CA and other certificates, in the same files.
  const std::string fresh = directory() + "/fresh";
  make_certificates(fresh, {"node-a,127.0.0.1", "node-b"});
  for (const char* name : {"node-a.key", "node-a.pem", "node-b.key", "node-b.pem", "ca.pem"})
    fs::rename(fresh + "/" + name, directory() + "/" + name);
  std::this_thread::sleep_for(std::chrono::seconds(3));  // they are looked at each second
  EXPECT_EQ(state("a", "b"), "up");
  EXPECT_GE(node("a", "b")["since_ms"].get<std::uint64_t>(), 3'000u) << "the connection has stayed";
  at("b").signal(SIGKILL);
  ASSERT_NE(at("b").wait_exit(10), -1);
  await("a", "b", "lost");
  start("b", kPatient);  // knows the new CA alone
  await("a", "b", "up");
  EXPECT_EQ(refused("a", "handshake"), 0u);
}

std::size_t times_said(const Daemon& daemon, const std::string& text) {
  const std::string log = daemon.log();
  std::size_t times = 0;
  for (std::size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++times;
  return times;
}

// gRPC's own watcher ended the daemon for one, which `cp` makes for a moment and a full disk for longer.
TEST_F(Nodes, AnEmptiedKeyOrCertificateEndsNobody) {
  start("a", kPatient);
  start("b", kPatient);
  await("a", "b", "up");
  std::size_t times = 0;
  for (const std::string name : {"node-a.key", "node-a.pem"}) {
    const std::string path = directory() + "/" + name;
    fs::copy_file(path, path + ".kept");
    std::ofstream(path, std::ios::trunc).flush();
    std::this_thread::sleep_for(std::chrono::seconds(3));
    EXPECT_EQ(state("a", "b"), "up");
    EXPECT_GE(node("a", "b")["since_ms"].get<std::uint64_t>(), 3'000u) << "the connection has stayed";
    start("c", kPatient);
    await("a", "c", "up");  // by the old files
    const std::string doctor = at("a").epctl({"doctor"}).out;
    EXPECT_NE(doctor.find("the daemon uses the last valid files"), std::string::npos) << doctor;
    at("c").signal(SIGKILL);
    ASSERT_NE(at("c").wait_exit(10), -1);
    await("a", "c", "lost");
    fs::rename(path + ".kept", path);
    ++times;
    EXPECT_GE(until(kSoon, [&] { return times_said(at("a"), "certificate files are valid again") == times; }),
              0);
    EXPECT_EQ(times_said(at("a"), "invalid certificate files"), times);
  }
  // Then good new ones are taken up.
  const std::string fresh = directory() + "/fresh";
  make_certificates(fresh, {"node-a,127.0.0.1", "node-b", "node-c"});
  for (const char* name : {"node-a.key", "node-a.pem", "node-c.key", "node-c.pem", "ca.pem"})
    fs::rename(fresh + "/" + name, directory() + "/" + name);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  start("c", kPatient);  // knows the new CA alone
  await("a", "c", "up");
  EXPECT_EQ(state("a", "b"), "up");
}

TEST_F(Nodes, WithoutAClusterNoPortIsOpened) {
  DaemonOptions options;
  options.devices = 1;
  Daemon alone(options);
  ASSERT_TRUE(alone.start());
  for (const pid_t pid : alone.all_pids()) EXPECT_TRUE(network_sockets(pid).empty()) << pid;
  EXPECT_TRUE(status(alone)["daemon"]["cluster"].is_null());
  const CommandResult none = alone.epctl({"nodes"});
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_NE(none.err.find("UNSUPPORTED: this daemon is in no cluster"), std::string::npos) << none.err;
  start("a");
  EXPECT_NE(listening_port(at("a").pid()), 0) << "the test can see one";
}

TEST_F(Nodes, InsecureIsSaidEverywhere) {
  const Settings insecure{{"cluster.insecure", "true"},
                          {"cluster.tls_ca", ""},
                          {"cluster.tls_cert", ""},
                          {"cluster.tls_key", ""}};
  start("a", insecure);
  start("b", insecure);
  await("a", "b", "up");
  await("b", "a", "up");
  for (const char* letter : {"a", "b"}) {
    EXPECT_TRUE(status(at(letter))["daemon"]["cluster"]["insecure"].get<bool>());
    EXPECT_NE(at(letter).epctl({"status"}).out.find("INSECURE"), std::string::npos);
    EXPECT_NE(at(letter).epctl({"nodes"}).out.find("INSECURE"), std::string::npos);
    EXPECT_GE(until(kSoon, [&] { return at(letter).log().find("cluster is insecure") != std::string::npos; }),
              0);
  }
}

std::string check_named(const Daemon& daemon, const std::string& name) {
  const Json document = Json::parse(daemon.epctl({"doctor", "--json"}).out, nullptr, false);
  if (document.is_discarded()) return "no document";
  for (const Json& check : document["checks"]) {
    if (check["name"] == name)
      return check["level"].get<std::string>() + ": " + check["text"].get<std::string>();
  }
  return "no such check: " + document.dump();
}

// Every file that check-config allows comes through the coordinator's port.
TEST_F(Nodes, WithTheLongestChainOfCertificatesANodeIsTakenIn) {
  start("a");
  const auto read = [&](const char* name) {
    std::stringstream text;
    text << std::ifstream(directory() + "/" + name).rdbuf();
    return text.str();
  };
  const std::string authority = read("ca.pem");
  std::string chain = read("node-b.pem");
  while ((chain.size() + authority.size()) * 3 / 4 < 12 << 10) chain += authority;
  std::ofstream(directory() + "/node-b.pem") << chain;
  start("b");
  await("a", "b", "up");
}

TEST_F(Nodes, DoctorLooksAtCertificatesPortsAndNames) {
  make_certificates(directory(), {"node-b"}, 10);
  start("a");
  start("b");
  await("b", "a", "up");
  EXPECT_TRUE(check_named(at("a"), "certificate").starts_with("ok: ")) << check_named(at("a"), "certificate");
  const std::string soon = check_named(at("b"), "certificate");
  EXPECT_TRUE(soon.starts_with("warn: ")) << soon;
  EXPECT_TRUE(soon.ends_with("expires in 9 days") || soon.ends_with("expires in 10 days")) << soon;
  for (const char* command : {"status", "nodes"}) {  // the tenth day ends a second after the test's begin
    const std::string told = at("b").epctl({command}).out;
    EXPECT_TRUE(told.find("expires in 9 days") != std::string::npos ||
                told.find("expires in 10 days") != std::string::npos)
        << command << "\n"
        << told;
  }
  EXPECT_EQ(check_named(at("b"), "port coordinator"), "ok: " + address("a") + " takes connections");
  EXPECT_EQ(check_named(at("a"), "port node node-b"), "ok: " + address("b") + " takes connections");
  EXPECT_TRUE(check_named(at("a"), "node node-b").starts_with("ok: up"));
  // One whose name nobody knows, and one whose certificate goes bad while it runs.
  start("c", {{"cluster.advertise", "\"node-c.invalid:" + std::to_string(port("c")) + "\""}});
  await("a", "c", "up");
  const std::string nameless = check_named(at("a"), "port node node-c");
  EXPECT_TRUE(nameless.starts_with("fail: node-c.invalid:")) << nameless;
  EXPECT_NE(nameless.find("has no address"), std::string::npos) << nameless;
  std::ofstream(directory() + "/node-c.pem") << "nothing\n";
  const std::string bad = check_named(at("c"), "certificate");
  EXPECT_TRUE(bad.starts_with("fail: cluster.tls_cert is ")) << bad;
  at("b").signal(SIGKILL);
  EXPECT_NE(at("b").wait_exit(10), -1);
  await("a", "b", "lost");
  EXPECT_TRUE(check_named(at("a"), "node node-b").starts_with("warn: lost"));
}

}  // namespace
}  // namespace epd::test

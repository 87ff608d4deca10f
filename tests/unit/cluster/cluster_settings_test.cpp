// Addresses, names and certificates of the configuration: what is refused says key, value and what is
// allowed.
#include "base/event.h"
#include "cluster/address.h"
#include "cluster/settings.h"
#include "good_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

namespace epd::cluster {
namespace {

namespace fs = std::filesystem;

TEST(ClusterAddress, HostAndPort) {
  EXPECT_EQ(parse_host_port("node-a:7410")->host, "node-a");
  EXPECT_EQ(parse_host_port("[::1]:7410")->host, "::1");
  EXPECT_EQ(parse_host_port("10.0.0.1:1")->port, 1);
  for (const char* bad : {"", ":", "node-a", "node-a:", ":7410", "node-a:0", "node-a:65536", "node-a:7410x",
                          "a b:1", "::1:7410", "[::1:7410", "[node-a]:7410", "[]:1", "node-a:-1"})
    EXPECT_FALSE(parse_host_port(bad)) << bad;
  for (const char* text : {"node-a:7410", "[::1]:7410", "10.0.0.1:7410"})
    EXPECT_EQ(to_string(*parse_host_port(text)), text);
  EXPECT_EQ(to_string(*numeric_address({"::ffff:10.0.0.1", 5})), "10.0.0.1:5");
  EXPECT_EQ(peer_text("ipv6:%5B::1%5D:7410"), "[::1]:7410");
  EXPECT_EQ(peer_text("ipv4:127.0.0.1:7410"), "127.0.0.1:7410");
  for (const char* host : {"127.0.0.1", "127.9.9.9", "::1", "localhost"})
    EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"0.0.0.0", "::", "128.0.0.1", "node-a", "127.0.0.1.evil"})
    EXPECT_FALSE(is_loopback(host)) << host;
}

TEST(ClusterAddress, NumericHostsHaveOneSpelling) {
  for (const auto& [text, host] : {std::pair("[0::0]:1", "::"),
                                   {"[0:0:0:0:0:0:0:0]:1", "::"},
                                   {"[FD77::0001]:1", "fd77::1"},
                                   {"[::ffff:10.0.0.1]:1", "10.0.0.1"},
                                   {"[::ffff:0:0]:1", "0.0.0.0"},
                                   {"Node-A:1", "Node-A"}})
    EXPECT_EQ(parse_host_port(text)->host, host) << text;
  EXPECT_TRUE(is_wildcard(parse_host_port("[::0]:1")->host));
}

TEST(ClusterAddress, WhatIsNoAddressOfANodeIsToldWithItsReason) {
  for (const auto& [text, why] : {std::pair("999.1.1.1:1", "looks like an IPv4 address"),
                                  {"10.1:1", "looks like an IPv4 address"},
                                  {"0x7f000001:1", "looks like an IPv4 address"},
                                  {"010.0.0.1:1", "looks like an IPv4 address"},
                                  {"10.0.0.1.:1", "looks like an IPv4 address"},
                                  {"node-a:07410", "without leading zeros"},
                                  {"node-a:", "without leading zeros"},
                                  {"[fe80::1%eth0]:1", "scope"},
                                  {"node-a", "no port"}}) {
    EXPECT_FALSE(parse_host_port(text)) << text;
    EXPECT_NE(why_no_host_port(text).find(why), std::string::npos) << text << ": " << why_no_host_port(text);
  }
  for (const auto& [host, why] : {std::pair("255.255.255.255", "all machines"),
                                  {"224.0.0.1", "multicast"},
                                  {"ff02::1", "multicast"},
                                  {"0.0.0.1", "0.0.0.0/8"},
                                  {"fe80::1", "link-local"}})
    EXPECT_NE(why_of_no_node(host).find(why), std::string::npos) << host << ": " << why_of_no_node(host);
  for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "fd77::1", "169.254.0.1", "node-1"})
    EXPECT_EQ(why_of_no_node(host), "") << host;
}

TEST(ClusterAddress, Patterns) {
  EXPECT_TRUE(matches("node-*", "node-a"));
  EXPECT_TRUE(matches("NODE-*", "node-"));
  EXPECT_TRUE(matches("*a*b*", "xaybz"));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_FALSE(matches("node-*", "xnode-a"));
  EXPECT_FALSE(matches("*-a", "node-ab"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_FALSE(matches(std::string(200, '*') + "b", std::string(250, 'a')));
}

TEST(ClusterUsers, ANodeSpeaksForThoseOfItsRules) {
  Settings settings;
  EXPECT_TRUE(settings.check_user("node-x", 0).ok()) << "no rules";
  settings.users = {"login-*=7", "node-*=1000-2000", "NODE-a=0"};
  for (const auto& [node, uid] :
       {std::pair("login-1", 7u), {"node-x", 1000u}, {"node-x", 2000u}, {"node-a", 0u}})
    EXPECT_TRUE(settings.check_user(node, uid).ok()) << node;
  for (const auto& [node, uid] :
       {std::pair("login-1", 1000u), {"node-x", 999u}, {"node-x", 2001u}, {"other", 7u}})
    EXPECT_EQ(settings.check_user(node, uid).code(), StatusCode::kPermissionDenied) << node;
  EXPECT_EQ(settings.check_user("node-x", 0).message(),
            "node node-x may not speak for user 0; cluster.users of the coordinator is login-*=7, "
            "node-*=1000-2000, NODE-a=0");
}

class ClusterSettings : public testing::Test {
 protected:
  ClusterSettings() {
    std::string pattern = (fs::temp_directory_path() / "epd-cluster-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    make("");
    settings_ = {"prod",         "node-a",           "0.0.0.0:7410",     "",    "node-a:7410", {},
                 file("ca.pem"), file("node-a.pem"), file("node-a.key"), false, 100,           2000};
  }
  ~ClusterSettings() override { fs::remove_all(directory_); }

  std::string file(const std::string& name) const { return directory_ + "/" + name; }
  void make(const std::string& arguments, const std::string& under = "") const {
    const std::string command =
        std::string(EPD_TEST_CA) + " " + arguments + " " + directory_ + under + " node-a,10.0.0.1 node-b";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  template <typename Change>
  std::string refusal(Change change) const {
    Settings settings = settings_;
    change(settings);
    const Result<Settings> completed = complete(settings);
    EXPECT_EQ(completed.status().code(), StatusCode::kInvalidArgument);
    return completed.status().message();
  }

  std::string directory_;
  Settings settings_;
};

void expect_says(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(ClusterSettings, NamesOfNodesAreInLowerCase) {
  settings_.node = "Node-A";
  const Result<Settings> complete_settings = complete(settings_);
  ASSERT_TRUE(complete_settings.ok()) << complete_settings.status().to_string();
  EXPECT_EQ(complete_settings.value().node, "node-a");
}

TEST_F(ClusterSettings, DefaultsAreFilledIn) {
  Result<Settings> completed = complete(settings_);
  ASSERT_TRUE(completed.ok()) << completed.status().to_string();
  EXPECT_EQ(completed->advertise, "node-a:7410");
  EXPECT_TRUE(completed->coordinates());
  Settings other = settings_;
  other.coordinator = "node-b:7410";
  completed = complete(other);
  ASSERT_TRUE(completed.ok()) << completed.status().to_string();
  EXPECT_FALSE(completed->coordinates());
}

// Hosts are compared as text, and wildcards found, in any spelling.
TEST_F(ClusterSettings, AddressesAreTheSameInAnySpelling) {
  settings_.listen = "[0::0]:7410";
  settings_.advertise = "[::ffff:10.0.0.1]:7410";
  settings_.coordinator = "10.0.0.1:7410";
  Result<Settings> completed = complete(settings_);
  ASSERT_TRUE(completed.ok()) << completed.status().to_string();
  EXPECT_EQ(completed->listen, "[::]:7410");
  EXPECT_EQ(completed->advertise, "10.0.0.1:7410");
  EXPECT_TRUE(completed->coordinates());
  for (const char* wildcard : {"[::0]:7410", "[::ffff:0.0.0.0]:7410"}) {
    expect_says(refusal([&](Settings& s) { s.advertise = wildcard; }),
                std::string("cluster.advertise is \"") + wildcard + "\"; allowed: HOST:PORT");
  }
}

TEST_F(ClusterSettings, WhatNoNodeCanHaveIsRefusedWithItsReason) {
  expect_says(
      refusal([](Settings& s) { s.advertise = "999.1.1.1:7410"; }),
      "cluster.advertise is \"999.1.1.1:7410\", which looks like an IPv4 address and is none; allowed");
  expect_says(refusal([](Settings& s) { s.advertise = "255.255.255.255:7410"; }),
              "cluster.advertise is \"255.255.255.255:7410\", which is the address of all machines");
  expect_says(refusal([](Settings& s) { s.coordinator = "node-a:07410"; }), "without leading zeros; allowed");
  expect_says(refusal([](Settings& s) { s.listen = "[fe80::1]:7410"; }),
              "cluster.listen is \"[fe80::1]:7410\", which is a link-local address");
  expect_says(refusal([](Settings& s) { s.listen = "[fe80::1%eth0]:7410"; }),
              "cluster.listen is \"[fe80::1%eth0]:7410\", whose scope (%)");
}

TEST_F(ClusterSettings, NamesAndAddresses) {
  expect_says(refusal([](Settings& s) { s.name = "a b"; }), "cluster.name is \"a b\"; allowed: 1..253");
  expect_says(refusal([](Settings& s) { s.node = "a/b"; }), "cluster.node is \"a/b\"; allowed: 1..253");
  expect_says(refusal([](Settings& s) { s.listen = "node-a:7410"; }),
              "cluster.listen is \"node-a:7410\"; allowed: a numeric address");
  expect_says(refusal([](Settings& s) { s.advertise = "0.0.0.0:7410"; }),
              "cluster.advertise is \"0.0.0.0:7410\"");
  expect_says(refusal([](Settings& s) { s.coordinator = ""; }),
              "cluster.coordinator is \"\"; allowed: HOST:PORT");
  expect_says(refusal([](Settings& s) { s.coordinator = "node-a:99999"; }), "cluster.coordinator");
  expect_says(refusal([](Settings& s) { s.coordinator = "NODE-A:7411"; }),
              "cluster.advertise = \"node-a:7410\" if this");
  expect_says(refusal([](Settings& s) { s.nodes = {"node-*", "a b"}; }), "cluster.nodes is \"a b\"");
  for (const char* rule :
       {"node-*", "node-*=", "a b=1", "=1", "node-*=2-1", "node-*=1-", "node-*=-1", "n=1x", "n=4294967296"})
    expect_says(refusal([&](Settings& s) { s.users = {rule}; }),
                std::string("cluster.users is \"") + rule +
                    "\"; allowed: PATTERN=UID or PATTERN=FIRST-LAST, as node-*=1000-59999");
  expect_says(refusal([](Settings& s) {
                s.nodes = {"rack-*", "node-b"};
              }),
              "cluster.nodes is \"rack-*, node-b\"; allowed: a list that allows this node too, "
              "cluster.node = \"node-a\"");
  expect_says(refusal([](Settings& s) { s.node_timeout_ms = 299; }),
              "cluster.node_timeout_ms is \"299\"; allowed: at least three times");
}

// An address of this node coordinates, and what it advertises is its name: it would wait for itself.
TEST_F(ClusterSettings, TheCoordinatorByItsAddressAloneIsToldWhatIsMissing) {
  const std::string allowed =
      "allowed: cluster.advertise = \"127.0.0.1:7410\" if this node is to coordinate, else "
      "the address of another node as cluster.coordinator";
  for (const char* listen : {"0.0.0.0:7410", "127.0.0.1:7410"}) {
    const std::string text = refusal([&](Settings& s) {
      s.listen = listen;
      s.coordinator = "127.0.0.1:7410";
    });
    expect_says(
        text,
        "cluster.advertise is \"node-a:7410\", and cluster.coordinator is \"127.0.0.1:7410\", which is "
        "this node too");
    expect_says(text, allowed);
  }
  // Others: of another machine, and of another daemon on this one.
  for (const auto& [listen, coordinator] : {std::pair("0.0.0.0:7410", "192.0.2.1:7410"),
                                            {"0.0.0.0:7410", "127.0.0.1:7411"},
                                            {"127.0.0.2:7410", "127.0.0.1:7410"}}) {
    Settings settings = settings_;
    settings.listen = listen;
    settings.coordinator = coordinator;
    const Result<Settings> completed = complete(settings);
    EXPECT_TRUE(completed.ok()) << completed.status().to_string();
  }
}

TEST_F(ClusterSettings, Certificates) {
  expect_says(refusal([](Settings& s) { s.tls_ca = ""; }), "cluster.tls_ca is \"\", which names no file");
  expect_says(refusal([](Settings& s) { s.tls_cert += "x"; }), "which can't be read: No such file");
  expect_says(refusal([](Settings& s) { s.tls_key = "/"; }),
              "cluster.tls_key is \"/\", which can't be read: it is no file");
  std::ofstream(file("empty")) << "";
  expect_says(refusal([&](Settings& s) { s.tls_cert = file("empty"); }), "which has no certificate");
  expect_says(refusal([&](Settings& s) { s.tls_key = file("ca.pem"); }), "which has no private key");
  expect_says(refusal([&](Settings& s) { s.tls_key = file("node-b.key"); }),
              "which is not the key of cluster.tls_cert");
  expect_says(refusal([](Settings& s) { s.node = s.coordinator = "node-c:7410", s.node = "node-c"; }),
              "cluster.node is \"node-c\", which is no DNS name of cluster.tls_cert; allowed: node-a");
  expect_says(refusal([](Settings& s) { s.node = "10.0.0.1"; }),
              "cluster.node is \"10.0.0.1\", which is no DNS name of cluster.tls_cert; allowed: node-a");
  expect_says(refusal([](Settings& s) { s.advertise = s.coordinator = "10.0.0.2:7410"; }),
              "cluster.coordinator is \"10.0.0.2:7410\", whose host is no name of cluster.tls_cert");
  make("", "/other");
  expect_says(refusal([&](Settings& s) { s.tls_ca = file("other/ca.pem"); }),
              "which does not lead to cluster.tls_ca: ");
  make("--days 0");
  expect_says(refusal([](Settings&) {}), "whose certificate expired at");
}

// Its node was ended at the coordinator's port as a flood, and neither end said why.
TEST_F(ClusterSettings, AChainThatNoCoordinatorTakesIsRefusedWithItsSize) {
  const auto with = [this](int authorities) {
    std::ofstream chain(file("long.pem"));
    for (int i = -1; i < authorities; ++i)
      chain << std::ifstream(file(i < 0 ? "node-a.pem" : "ca.pem")).rdbuf();
    return file("long.pem");
  };
  Settings settings = settings_;
  settings.tls_cert = with(8);
  EXPECT_TRUE(complete(settings).ok()) << complete(settings).status().to_string();
  const std::string text = refusal([&](Settings& s) { s.tls_cert = with(99); });
  expect_says(text, "long.pem\", whose 100 certificates have ");
  expect_says(text, " bytes; allowed: 12288; only those between the node's certificate and cluster.tls_ca");
}

TEST_F(ClusterSettings, CertificatesAreForBothEnds) {
  const auto make_for = [&](const std::string& uses) {
    std::ofstream(file("extensions")) << "subjectAltName=DNS:node-a\n"
                                      << (uses.empty() ? "" : "extendedKeyUsage=" + uses);
    const std::string command =
        "cd " + directory_ +
        " && openssl req -new -key node-a.key -subj /CN=node-a -out request 2>log && openssl x509 "
        "-req -in request -CA ca.pem -CAkey ca.key -days 9 -extfile extensions -out node-a.pem "
        "2>log";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  };
  make_for("serverAuth");
  expect_says(
      refusal([](Settings&) {}),
      "whose extendedKeyUsage lacks clientAuth; allowed: one with serverAuth and clientAuth, or without");
  make_for("clientAuth,emailProtection");
  expect_says(refusal([](Settings&) {}), "whose extendedKeyUsage lacks serverAuth");
  for (const char* uses : {"", "clientAuth,serverAuth"}) {
    make_for(uses);
    EXPECT_TRUE(complete(settings_).ok()) << complete(settings_).status().to_string();
  }
}

TEST_F(ClusterSettings, AnUnreadableKey) {
  if (::geteuid() == 0) {
    // Root reads everything; another user does not.
    ASSERT_EQ(::seteuid(65534), 0);
    const std::string text = refusal([](Settings&) {});
    ASSERT_EQ(::seteuid(0), 0);
    expect_says(text, "which can't be read: Permission denied");
  } else {
    fs::permissions(file("node-a.key"), fs::perms::none);
    expect_says(refusal([](Settings&) {}), "which can't be read: Permission denied");
  }
}

TEST_F(ClusterSettings, InsecureIsForLoopbackAlone) {
  const auto insecure = [](Settings& s) {
    s.insecure = true;
    s.tls_ca = s.tls_cert = s.tls_key = "";
    s.listen = s.advertise = s.coordinator = "127.0.0.1:7410";
  };
  Settings good = settings_;
  insecure(good);
  EXPECT_TRUE(complete(good).ok()) << complete(good).status().to_string();
  expect_says(refusal([&](Settings& s) { insecure(s), s.listen = "0.0.0.0:7410"; }),
              "cluster.listen is \"0.0.0.0:7410\"; allowed: with cluster.insecure a loopback address");
  expect_says(refusal([&](Settings& s) { insecure(s), s.coordinator = "10.0.0.1:7410"; }),
              "cluster.coordinator");
  expect_says(refusal([&](Settings& s) { s.insecure = true; }), "only without cluster.tls_ca");
}

// The output of deploy/test-ca.sh, and its exit status.
TEST(TestCa, WrongUsageIsToldWithWhatIsAllowed) {
  for (const auto& [arguments, said] :
       {std::pair("--days x /tmp/none a", "--days is \"x\"; allowed: 0..99999"),
        {"/tmp/none a --days", "--days has no value; allowed: 0..99999"},
        {"--weeks 3", "unknown option \"--weeks\""},
        {"/tmp/none", "at least one NODE"}}) {
    FILE* output = ::popen((std::string(EPD_TEST_CA) + " " + arguments + " 2>&1").c_str(), "r");
    ASSERT_NE(output, nullptr);
    std::string text(4096, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), output));
    EXPECT_EQ(WEXITSTATUS(::pclose(output)), 2) << arguments;
    expect_says(text, said);
  }
}

TEST_F(ClusterSettings, WhatDoctorIsTold) {
  CertificateFacts facts;
  EXPECT_TRUE(check_certificates(settings_, &facts).ok());
  EXPECT_EQ(facts.names, (std::vector<std::string>{"node-a", "10.0.0.1"}));
  EXPECT_NEAR(static_cast<double>(facts.expires_unix_s - std::time(nullptr)), 90 * 86'400.0, 600);
}

// The certificate files as gRPC gets them.
class ClusterGoodFiles : public ClusterSettings {
 protected:
  ClusterGoodFiles() {
    log_.install();
    Result<std::unique_ptr<GoodFiles>> files = GoodFiles::open(settings_);
    EXPECT_TRUE(files.ok()) << files.status().to_string();
    if (files.ok()) files_ = std::move(*files);
  }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void empty(const char* name) const { std::ofstream(file(name), std::ios::trunc).flush(); }
  std::vector<std::string> said() {
    std::vector<std::string> list;
    for (const Event& event : log_.read(0, 100, 0).events) list.push_back(event.text);
    return list;
  }

  EventLog log_;
  std::unique_ptr<GoodFiles> files_;
};

TEST_F(ClusterGoodFiles, WhatIsNotGoodIsNotTakenUp) {
  const std::string identity = text_of(files_->identity());
  const std::string authorities = text_of(files_->authorities());
  EXPECT_NE(identity.find("PRIVATE KEY"), std::string::npos);
  EXPECT_NE(identity.find("BEGIN CERTIFICATE"), std::string::npos);
  EXPECT_NE(authorities.find("BEGIN CERTIFICATE"), std::string::npos);
  const auto expect_same = [&](const char* what) {
    files_->look();
    EXPECT_EQ(text_of(files_->identity()), identity) << what;
    EXPECT_EQ(text_of(files_->authorities()), authorities) << what;
  };
  for (const char* name : {"node-a.key", "node-a.pem", "ca.pem"}) {
    const std::string before = text_of(file(name));
    empty(name);
    expect_same(name);
    std::ofstream(file(name)) << before.substr(0, before.size() / 2);
    expect_same(name);
    fs::remove(file(name));
    expect_same(name);
    std::ofstream(file(name)) << before;
  }
  const std::string authority = text_of(file("ca.pem"));
  std::ofstream(file("ca.pem")) << authority << authority.substr(0, authority.size() / 2);
  expect_same("an authority, and half of another one");
  fs::rename(file("node-b.key"), file("node-a.key"));
  expect_same("the key of another certificate");
}

TEST_F(ClusterGoodFiles, NewOnesAreTakenUpTogether) {
  const std::string identity_path = files_->identity();
  const std::string identity = text_of(identity_path);
  const std::string authorities = text_of(files_->authorities());
  struct stat before {};
  struct stat after {};
  ASSERT_EQ(::stat(identity_path.c_str(), &before), 0);
  EXPECT_EQ(before.st_mode & 0777, 0400u);
  make("", "/new");
  for (const char* name : {"node-a.key", "node-a.pem", "ca.pem"}) {
    EXPECT_EQ(text_of(files_->identity()), identity) << "before " << name;
    fs::rename(file("new/") + name, file(name));
    files_->look();
  }
  EXPECT_EQ(files_->identity(), identity_path);
  EXPECT_NE(text_of(files_->identity()), identity);
  EXPECT_NE(text_of(files_->authorities()), authorities);
  ASSERT_EQ(::stat(identity_path.c_str(), &after), 0);
  EXPECT_NE(after.st_mtime, before.st_mtime) << "gRPC must see that it has changed between two reads";
}

// A renewal left no trace: only invalid files were logged.
TEST_F(ClusterGoodFiles, ARenewalIsSaidAndMovesTheExpiry) {
  const std::int64_t expires = files_->expires_unix_s();
  EXPECT_NEAR(static_cast<double>(expires - std::time(nullptr)), 90 * 86'400.0, 600);
  make("--days 10", "/new");
  fs::rename(file("new/node-a.key"), file("node-a.key"));
  files_->look();
  EXPECT_EQ(files_->expires_unix_s(), expires) << "what is not good has no effect";
  for (const char* name : {"node-a.pem", "ca.pem"}) fs::rename(file("new/") + name, file(name));
  for (int i = 0; i < 3; ++i) files_->look();
  EXPECT_NEAR(static_cast<double>(files_->expires_unix_s() - std::time(nullptr)), 10 * 86'400.0, 600);
  EXPECT_EQ(said(), (std::vector<std::string>{"invalid certificate files", "certificate authorities renewed",
                                              "certificate renewed", "certificate expires soon",
                                              "certificate files are valid again"}));
}

TEST_F(ClusterGoodFiles, ThatTheyAreNotGoodIsSaidOnce) {
  const std::string key = text_of(file("node-a.key"));
  files_->look();
  EXPECT_EQ(said(), std::vector<std::string>{});
  empty("node-a.key");
  for (int i = 0; i < 5; ++i) files_->look();
  EXPECT_EQ(said(), std::vector<std::string>{"invalid certificate files"});
  std::ofstream(file("node-a.key")) << key;
  for (int i = 0; i < 5; ++i) files_->look();
  EXPECT_EQ(said(),
            (std::vector<std::string>{"invalid certificate files", "certificate files are valid again"}));
}

}  // namespace
}  // namespace epd::cluster

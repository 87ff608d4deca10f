// Refusals at a cluster's port: named, counted, and nobody else is hurt.
#include "support/cases.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/ranks.h"
#include "support/sockets.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <unistd.h>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include "epd/v1/cluster.grpc.pb.h"

namespace epd::test {
namespace {

std::string contents(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// A program that has a node's certificate and says what it likes.
class RawNode {
 public:
  RawNode(const std::string& address, const std::string& directory, const std::string& node) {
    const grpc::SslCredentialsOptions files{contents(directory + "/ca.pem"),
                                            contents(directory + "/" + node + ".key"),
                                            contents(directory + "/" + node + ".pem")};
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = v1::Cluster::NewStub(grpc::CreateCustomChannel(address, grpc::SslCredentials(files), arguments));
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    stream_ = stub_->Attach(&context_);
  }
  static v1::Frame hello(const std::string& name) {
    v1::Frame frame;
    v1::Hello& hello = *frame.mutable_hello();
    hello.set_version_min(3);
    hello.set_version_max(3);
    hello.set_cluster("test");
    v1::NodeDescription& node = *hello.mutable_node();
    node.set_name(name);
    node.set_boot_id(std::string(16, 'r'));
    node.set_address("127.0.0.1:1");
    node.set_listen("127.0.0.1:1");
    node.set_daemon_version("raw");
    return frame;
  }
  bool write(const v1::Frame& frame) { return stream_->Write(frame); }
  std::optional<v1::Frame> read() {
    v1::Frame frame;
    return stream_->Read(&frame) ? std::optional(frame) : std::nullopt;
  }
  // The status with which the stream has been ended.
  grpc::Status end() {
    while (read()) {
    }
    return stream_->Finish();
  }
  void cancel() { context_.TryCancel(); }

 private:
  std::unique_ptr<v1::Cluster::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::Frame, v1::Frame>> stream_;
};

class NodesRefused : public ClusterOfDaemons {
 protected:
  void SetUp() override {
    ClusterOfDaemons::SetUp();
    if (HasFatalFailure()) return;
    start("a");
    start("b");
    await("a", "b", "up");
    await("b", "a", "up");
    begun_ = now_seconds();
  }
  // b has been there all the while: its stream is the one of the beginning.
  void expect_bystander_untouched() {
    const Json b = node("a", "b");
    ASSERT_FALSE(b.is_null());
    EXPECT_EQ(b["state"], "up");
    EXPECT_GE(static_cast<double>(b["since_ms"].get<std::uint64_t>()) / 1000, now_seconds() - begun_ - 1);
    EXPECT_EQ(at("a").log().find("\"node lost\" node=\"node-b"), std::string::npos);
    EXPECT_EQ(at("b").log().find("no coordinator"), std::string::npos);
  }
  void expect_ended(RawNode& raw, grpc::StatusCode code, const std::string& text) {
    const grpc::Status status = raw.end();
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_NE(status.error_message().find(text), std::string::npos) << status.error_message();
    await_in_log(text);
  }

  // The log writes a quotation mark as \".
  void await_in_log(std::string text) {
    for (std::size_t i = text.find('"'); i != std::string::npos; i = text.find('"', i + 2))
      text.insert(i, 1, '\\');
    EXPECT_GE(until(kSoon, [&] { return at("a").log().find(text) != std::string::npos; }), 0)
        << "the log does not name it: " << text;
  }

  double begun_ = 0;
};

TEST_F(NodesRefused, AnotherCa) {
  const std::string other = directory() + "/other";
  make_certificates(other, {"node-c"});
  start("c", {{"cluster.tls_ca", "\"" + other + "/ca.pem\""},
              {"cluster.tls_cert", "\"" + other + "/node-c.pem\""},
              {"cluster.tls_key", "\"" + other + "/node-c.key\""}});
  await_refusal("a", "handshake");
  await_in_log("the TLS handshake failed");
  const std::string problem = status(at("c"))["daemon"]["cluster"]["problem"];
  EXPECT_NE(problem.find("certificate verify failed"), std::string::npos) << problem;
  const std::string doctor = at("c").epctl({"doctor"}).out;
  EXPECT_NE(doctor.find("into cluster.tls_ca here"), std::string::npos) << doctor;
  EXPECT_EQ(state("a", "c"), "unknown");
  // However often it tries.
  await_refusal("a", "handshake", 4);
  const std::string log = at("c").log();
  EXPECT_EQ(log.find("event=\"grpc\""), std::string::npos) << log;
  EXPECT_EQ(log.find("no coordinator"), log.rfind("no coordinator")) << log;
  expect_bystander_untouched();
}

TEST_F(NodesRefused, AHostThatTheCertificateDoesNotName) {
  start("c", {{"cluster.coordinator", "\"localhost:" + std::to_string(port("a")) + "\""}});
  const std::string text = "does not name \"localhost\"";
  EXPECT_GE(until(kSoon,
                  [&] {
                    const std::string problem = status(at("c"))["daemon"]["cluster"]["problem"];
                    return problem.find(text) != std::string::npos;
                  }),
            0);
  expect_bystander_untouched();
}

TEST_F(NodesRefused, ACertificateOfAnotherCaOnItsOwnSideToo) {
  // It accepts the coordinator's certificate; the coordinator does not accept its.
  const std::string other = directory() + "/other";
  make_certificates(other, {"node-b"});
  std::filesystem::copy(directory() + "/ca.pem", other + "/ca.pem",
                        std::filesystem::copy_options::overwrite_existing);
  RawNode raw(address("a"), other, "node-b");
  raw.write(RawNode::hello("node-b"));
  EXPECT_EQ(raw.end().error_code(), grpc::StatusCode::UNAVAILABLE);
  await_refusal("a", "handshake");
  expect_bystander_untouched();
}

TEST_F(NodesRefused, AnotherName) {
  RawNode raw(address("a"), directory(), "node-c");
  raw.write(RawNode::hello("node-b"));
  expect_ended(raw, grpc::StatusCode::PERMISSION_DENIED,
               "it calls itself node-b, which its certificate does not name; allowed: node-c");
  EXPECT_EQ(refused("a", "identity"), 1u);
  expect_bystander_untouched();
}

TEST_F(NodesRefused, ANameThatIsNotAllowed) {
  // A coordinator with a list; its own b stays outside as well.
  Daemon& d = start("d", {{"cluster.node", "\"node-a\""},
                          {"cluster.tls_cert", "\"" + directory() + "/node-a.pem\""},
                          {"cluster.tls_key", "\"" + directory() + "/node-a.key\""},
                          {"cluster.coordinator", "\"" + address("d") + "\""},
                          {"cluster.nodes", "[\"node-a\", \"rack-*\"]"}});
  start("c", {{"cluster.coordinator", "\"" + address("d") + "\""}});
  EXPECT_GE(until(kSoon, [&] { return refused("d", "identity") != 0; }), 0);
  EXPECT_GE(
      until(kSoon,
            [&] {
              return d.log().find("node node-c is not allowed; cluster.nodes of node-a is node-a, rack-*") !=
                     std::string::npos;
            }),
      0);
  const std::string problem = status(at("c"))["daemon"]["cluster"]["problem"];
  EXPECT_NE(problem.find("node node-c is not allowed"), std::string::npos) << problem;
  expect_bystander_untouched();
}

// A node could take ranks of any user's groups.
TEST_F(NodesRefused, ARankOfAUserThatTheNodeIsNotGiven) {
  start("d", {{"cluster.node", "\"node-a\""},
              {"cluster.tls_cert", "\"" + directory() + "/node-a.pem\""},
              {"cluster.tls_key", "\"" + directory() + "/node-a.key\""},
              {"cluster.coordinator", "\"" + address("d") + "\""},
              {"cluster.users", "[\"node-a=0-4000000000\", \"node-c=4100000000\"]"}});
  start("c", {{"cluster.coordinator", "\"" + address("d") + "\""}});
  await("d", "c", "up");
  const std::vector<RankOutcome> outcomes = run_ranks(1, 60, [&](std::uint32_t rank) -> std::string {
    Case c;
    c.span = EPD_SPAN_CLUSTER;
    const Session session(at("c").socket(), at("c").device(0));
    const Group group(session, c.config("mine", rank));
    return "it has joined";
  });
  const std::string text = outcomes.at(0).to_string();
  EXPECT_NE(text.find("node node-c may not speak for user " + std::to_string(::geteuid())), std::string::npos)
      << text;
  EXPECT_NE(text.find("PERMISSION_DENIED"), std::string::npos) << text;
  expect_bystander_untouched();
}

TEST_F(NodesRefused, AnotherClusterAndVersionsWithoutOverlap) {
  RawNode stranger(address("a"), directory(), "node-c");
  v1::Frame frame = RawNode::hello("node-c");
  frame.mutable_hello()->set_cluster("staging");
  stranger.write(frame);
  expect_ended(stranger, grpc::StatusCode::FAILED_PRECONDITION,
               "its cluster.name is \"staging\", that of the coordinator \"test\"");
  RawNode newer(address("a"), directory(), "node-c");
  frame = RawNode::hello("node-c");
  frame.mutable_hello()->set_version_min(5);
  frame.mutable_hello()->set_version_max(6);
  newer.write(frame);
  expect_ended(newer, grpc::StatusCode::FAILED_PRECONDITION, "it speaks versions 5..6, this daemon 3..3");
  EXPECT_EQ(refused("a", "other_cluster"), 1u);
  EXPECT_EQ(refused("a", "version"), 1u);
  expect_bystander_untouched();
}

TEST_F(NodesRefused, WhoDoesNotCoordinateTakesNobodyIn) {
  // node-b's certificate names no address: its port is asked for by a node that coordinates elsewhere, by
  // name.
  grpc::SslCredentialsOptions files{contents(directory() + "/ca.pem"), contents(directory() + "/node-c.key"),
                                    contents(directory() + "/node-c.pem")};
  grpc::ChannelArguments arguments;
  arguments.SetSslTargetNameOverride("node-b");
  const auto stub =
      v1::Cluster::NewStub(grpc::CreateCustomChannel(address("b"), grpc::SslCredentials(files), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  const auto stream = stub->Attach(&context);
  v1::Frame answer;
  EXPECT_FALSE(stream->Read(&answer));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_EQ(status.error_message(), "node node-b does not coordinate; the coordinator is at " + address("a"));
  EXPECT_EQ(refused("b", "not_coordinator"), 1u);
  expect_bystander_untouched();
}

TEST_F(NodesRefused, ANameInUse) {
  RawNode raw(address("a"), directory(), "node-b");
  raw.write(RawNode::hello("node-b"));
  expect_ended(raw, grpc::StatusCode::ABORTED, "another daemon is node node-b already");
  expect_bystander_untouched();
}

// Frames that no daemon sends: each ends its stream and nothing else.
TEST_F(NodesRefused, IllegalFrames) {
  const auto greeted = [&](RawNode& raw) {
    EXPECT_TRUE(raw.write(RawNode::hello("node-c")));
    std::optional<v1::Frame> frame = raw.read();
    EXPECT_TRUE(frame && frame->has_welcome());
    return frame.value_or(v1::Frame()).welcome();
  };
  const auto message = [](const v1::Welcome& welcome, std::uint64_t number) {
    v1::Frame frame;
    frame.mutable_message()->set_term(welcome.term());
    frame.mutable_message()->set_boot_id(std::string(16, 'r'));
    frame.mutable_message()->set_number(number);
    return frame;
  };
  using grpc::StatusCode;
  std::uint64_t count = 0;
  const auto expect_refused = [&](RawNode& raw, const std::string& text,
                                  StatusCode code = StatusCode::INVALID_ARGUMENT) {
    expect_ended(raw, code, text);
    EXPECT_EQ(refused("a", "frame"), ++count);
  };
  {
    RawNode raw(address("a"), directory(), "node-c");
    raw.write({});
    expect_refused(raw, "an empty frame");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    raw.write(message({}, 1));
    expect_refused(raw, "the first frame is no Hello");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    v1::Frame frame = RawNode::hello("node-c");
    frame.mutable_hello()->mutable_node()->set_boot_id("short");
    raw.write(frame);
    expect_refused(raw, "has 5 bytes; allowed: 16");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    greeted(raw);
    raw.write(RawNode::hello("node-c"));
    expect_refused(raw, "a frame that is no message, after Hello");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    raw.write(message(greeted(raw), 7));
    expect_refused(raw, "message 7 follows message 0");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    v1::Frame frame = message(greeted(raw), 1);
    frame.mutable_message()->set_term(99);
    raw.write(frame);
    expect_refused(raw, "term is 99; allowed: ");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    v1::Frame frame = message(greeted(raw), 1);
    frame.mutable_message()->set_payload("\xff\xff\xff");
    raw.write(frame);
    expect_refused(raw, "a message of 3 bytes that is none");
  }
  {
    RawNode raw(address("a"), directory(), "node-c");
    v1::Frame frame = message(greeted(raw), 1);
    frame.mutable_message()->set_payload(std::string(600 << 10, 'x'));
    raw.write(frame);
    expect_refused(raw, "bytes; allowed: 524288", StatusCode::RESOURCE_EXHAUSTED);
  }
  {  // Far too long: gRPC itself ends it.
    RawNode raw(address("a"), directory(), "node-c");
    v1::Frame frame = message(greeted(raw), 1);
    frame.mutable_message()->set_payload(std::string(32 << 20, 'x'));
    raw.write(frame);
    EXPECT_FALSE(raw.end().ok());
  }
  expect_bystander_untouched();
}

TEST_F(NodesRefused, PlainTextAndGarbage) {
  std::mt19937 random(1);
  std::string garbage(4096, '\0');
  for (char& c : garbage) c = static_cast<char>(random());
  garbage[0] = '\x00';
  const std::string tls_like = "\x16\x03\x01\x02\x00" + garbage;
  for (const std::string& text : {std::string("GET / HTTP/1.1\r\n\r\n"),
                                  std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), garbage, tls_like}) {
    const UniqueFd fd = tcp_connect(port("a"));
    ASSERT_TRUE(fd.valid());
    const timeval patience{10, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    EXPECT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
    char answer[256];
    while (::recv(fd.get(), answer, sizeof(answer), 0) > 0) {
    }
  }
  await_refusal("a", "plain_text", 3);
  await_refusal("a", "handshake", 1);
  await_in_log("it does not begin with TLS, which this port speaks");
  expect_bystander_untouched();
}

TEST_F(NodesRefused, Floods) {
  // Connections that say nothing, more than one address may have, and such as come and go.
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(tcp_connect(port("a"), "127.0.0.9"));
  await_refusal("a", "connections", 236);
  await_in_log("there are 64 connections of its address already");
  // One address of a node's: it gets in all the same.
  std::vector<UniqueFd> of_b;
  for (int i = 0; i < 64; ++i) of_b.push_back(tcp_connect(port("a")));
  start("c");
  await("a", "c", "up");
  at("c").stop();
  of_b.clear();
  for (int i = 0; i < 500; ++i) {
    const UniqueFd fd = tcp_connect(port("a"), "127.0.1." + std::to_string(1 + i / 2));
    EXPECT_EQ(::send(fd.get(), i % 2 == 0 ? "x" : "\x16", 1, MSG_NOSIGNAL), 1);
  }
  await_refusal("a", "plain_text", 250);
  // Streams of a node that begin and end, and one that says more than anybody reads.
  for (int i = 0; i < 30; ++i) {
    RawNode raw(address("a"), directory(), "node-c");
    raw.write(RawNode::hello("node-c"));
    if (i % 2 == 0) raw.cancel();
    if (i % 2 == 1) raw.read();
    raw.cancel();
  }
  {
    // Until the one before is seen to have ended, the name is in use.
    std::unique_ptr<RawNode> raw;
    std::optional<v1::Frame> welcome;
    EXPECT_GE(until(kSoon,
                    [&] {
                      raw = std::make_unique<RawNode>(address("a"), directory(), "node-c");
                      raw->write(RawNode::hello("node-c"));
                      welcome = raw->read();
                      return welcome.has_value();
                    }),
              0);
    ASSERT_TRUE(welcome && welcome->has_welcome());
    v1::Frame beat;
    beat.mutable_message()->set_term(welcome->welcome().term());
    beat.mutable_message()->set_boot_id(std::string(16, 'r'));
    for (int i = 0; i < 20'000 && raw->write(beat); ++i) {
    }
    EXPECT_EQ(state("a", "c"), "up");
  }
  EXPECT_LT(at("a").epctl({"status"}).seconds, 5.0);
  expect_bystander_untouched();
  silent.clear();
}

}  // namespace
}  // namespace epd::test

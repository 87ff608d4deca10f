// A program with a node's certificate floods the coordinator by HTTP/2. Its connections are ended; nobody
// else notices.
#include "support/cases.h"
#include "support/census.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/script.h"
#include "support/sockets.h"

#include <openssl/ssl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include "epd/v1/cluster.pb.h"

namespace epd::test {
namespace {

using Time = std::chrono::steady_clock::time_point;

constexpr std::uint64_t kMostKib = 64 << 10;  // that the coordinator's daemon may grow by
constexpr int kConnections = 4;
constexpr std::chrono::milliseconds kFloodTime(700);
constexpr std::size_t kAtOnce = 16 << 10;  // bytes that are written at a time

enum FrameType : std::uint8_t {
  kData = 0,
  kHeaders = 1,
  kReset = 3,
  kSettings = 4,
  kPing = 6,
  kContinuation = 9
};
constexpr std::uint8_t kEndHeaders = 4;

std::string frame(FrameType type, std::uint8_t flags, std::uint32_t stream, const std::string& payload) {
  std::string bytes;
  for (const int shift : {16, 8, 0}) bytes += static_cast<char>(payload.size() >> shift);
  bytes += static_cast<char>(type);
  bytes += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(stream >> shift);
  return bytes + payload;
}

// HPACK, without Huffman. `first` 0x40: the receiver's table keeps the field; 0: it does not.
std::string field(char first, const std::string& name, const std::string& value) {
  const auto text = [](const std::string& s) {
    std::string length;
    if (s.size() < 127) {
      length += static_cast<char>(s.size());
    } else {
      length += '\x7f';
      std::size_t rest = s.size() - 127;
      for (; rest >= 128; rest /= 128) length += static_cast<char>(rest % 128 + 128);
      length += static_cast<char>(rest);
    }
    return length + s;
  };
  return first + text(name) + text(value);
}

std::string headers(char first, const std::string& path) {
  return "\x83\x87" + field(first, ":path", path) + field(first, ":authority", "a") +
         field(first, "content-type", "application/grpc") + field(first, "te", "trailers");
}
const std::string kAttach = "/epd.v1.Cluster/Attach";
// Those of the first stream of a connection again, in six bytes.
const std::string kAgain = "\x83\x87\xc1\xc0\xbf\xbe";

// The bytes that one connection sends after its first stream, again and again.
struct Flood {
  const char* name;
  std::function<std::string(std::uint32_t stream)> bytes;
};

std::vector<Flood> floods() {
  const auto begun = [](const std::string& fields) {
    return [=](std::uint32_t stream) { return frame(kHeaders, kEndHeaders, stream, fields); };
  };
  const auto reset = [=](const std::string& fields) {
    return [=](std::uint32_t stream) {
      return frame(kHeaders, kEndHeaders, stream, fields) + frame(kReset, 0, stream, std::string(4, '\0'));
    };
  };
  const std::string long_field = field('\0', "x", std::string(16'000, 'x'));
  return {
      {"streams begun and reset", reset(kAgain)},
      {"streams begun", begun(kAgain)},
      {"streams of another method", reset(headers('\0', "/x"))},
      {"streams without a path", reset("\x83\x87")},
      {"long headers", begun(headers('\0', kAttach) + long_field)},
      {"continuations",
       [=](std::uint32_t stream) {
         return stream == 3 ? frame(kHeaders, 0, 3, kAgain) : frame(kContinuation, 0, 3, long_field);
       }},
      {"a field without end",
       [=](std::uint32_t stream) {
         return stream == 3 ? frame(kHeaders, 0, 3, kAgain + std::string("\0\1x\x7f\xff\xff\xff\x07", 8))
                            : frame(kContinuation, 0, 3, std::string(16'000, 'x'));
       }},
      {"pings", [](std::uint32_t) { return frame(kPing, 0, 0, std::string(8, 'p')); }},
      {"settings", [](std::uint32_t) { return frame(kSettings, 0, 0, std::string("\0\x03\0\0\0\x05", 6)); }},
  };
}

// The first bytes of a TLS handshake.
std::string client_hello() {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  const std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(context.get()), SSL_free);
  BIO* const out = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl.get(), BIO_new(BIO_s_mem()), out);
  SSL_connect(ssl.get());  // waits for an answer
  std::string bytes(4096, '\0');
  const int n = BIO_read(out, bytes.data(), static_cast<int>(bytes.size()));
  RANK_CHECK(n > 0, "no ClientHello");
  bytes.resize(static_cast<std::size_t>(n));
  return bytes;
}

// The first bytes that Attach carries.
std::string hello_of(const std::string& name) {
  v1::Frame hello;
  hello.mutable_hello()->set_version_min(3);
  hello.mutable_hello()->set_version_max(3);
  hello.mutable_hello()->set_cluster("test");
  v1::NodeDescription& node = *hello.mutable_hello()->mutable_node();
  node.set_name(name);
  node.set_boot_id(std::string(16, 'f'));
  node.set_address("127.0.0.1:1");
  node.set_listen("127.0.0.1:1");
  node.set_daemon_version("flood");
  const std::string bytes = hello.SerializeAsString();
  return std::string("\0\0\0\0", 4) + static_cast<char>(bytes.size()) + bytes;
}

// An attacker who has a node's certificate.
class Attacker {
 public:
  // `greets`: a Hello goes first. Where it is taken, the flood comes from a node that is welcome.
  Attacker(std::uint16_t port, const std::string& directory, const std::string& node, bool greets)
      : port_(port), context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free) {
    SSL_CTX_set_alpn_protos(context_.get(), reinterpret_cast<const unsigned char*>("\x02h2"), 3);
    const std::string files = directory + "/" + node;
    RANK_CHECK(
        SSL_CTX_use_certificate_chain_file(context_.get(), (files + ".pem").c_str()) == 1 &&
            SSL_CTX_use_PrivateKey_file(context_.get(), (files + ".key").c_str(), SSL_FILETYPE_PEM) == 1,
        files);
    begin_ = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(kSettings, 0, 0, "") +
             frame(kHeaders, kEndHeaders, 1, headers('\x40', kAttach));
    if (greets) begin_ += frame(kData, 0, 1, hello_of(node));
    greets_ = greets;
  }
  // Sends until it is ended, or until then; the number of bytes.
  std::uint64_t send(const Flood& flood, Time end) const {
    const UniqueFd fd = tcp_connect(port_);
    if (!fd.valid()) return 0;
    const timeval patience{0, 300'000};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(context_.get()), SSL_free);
    SSL_set_fd(ssl.get(), fd.get());
    if (SSL_connect(ssl.get()) != 1) return 0;
    std::string bytes = begin_;
    if (greets_) {
      SSL_write(ssl.get(), bytes.data(), static_cast<int>(bytes.size()));
      char answer[16 << 10];
      // The coordinator's name is in Welcome.
      for (std::string heard; heard.find("node-a") == std::string::npos;) {
        const int n = SSL_read(ssl.get(), answer, sizeof(answer));
        if (n <= 0) break;
        heard.append(answer, static_cast<std::size_t>(n));
      }
      bytes.clear();
    }
    std::uint64_t sent = 0;
    std::uint32_t stream = 3;
    while (std::chrono::steady_clock::now() < end) {
      for (; bytes.size() < kAtOnce; stream += 2) bytes += flood.bytes(stream);
      const int n = SSL_write(ssl.get(), bytes.data(), static_cast<int>(bytes.size()));
      if (n <= 0) break;
      sent += static_cast<std::uint64_t>(n);
      bytes.clear();
    }
    return sent;
  }

 private:
  const std::uint16_t port_;
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context_;
  std::string begin_;
  bool greets_ = false;
};

class NodesFlood : public ClusterOfDaemons {
 protected:
  void SetUp() override {
    ASSERT_TRUE(prepare());
    for (const char* letter : {"a", "b", "c"}) start(letter);
    for (const char* letter : {"b", "c"}) await("a", letter, "up");
    for (std::uint32_t rank = 0; rank < 2; ++rank)
      ranks_.emplace_back([this, rank] { return run_rounds(rank); });
    ASSERT_TRUE(rounds_pass());
  }
  void TearDown() override { asks_->ask(); }

  // Runs rounds of a group of the nodes b and c. No round may fail.
  std::string run_rounds(std::uint32_t rank) {
    const Case c = spanning_case();
    Daemon& daemon = at(rank == 0 ? "b" : "c");
    const Session session(daemon.socket(), daemon.device(0));
    const Group group(session, c.config("bystanders", rank));
    for (std::uint64_t round = 0; asks_->comes(rank, round); ++round) {
      ScriptOptions o;
      o.rounds = 1;
      o.first_op = 2 * round;
      ScriptRunner(group, c, rank, o).run();
      rounds_->fetch_add(1);
      sleep_ms(2);
    }
    return "";
  }
  bool rounds_pass() const {
    const std::uint64_t before = *rounds_;
    return eventually(60, [&] { return *rounds_ >= before + 10; });
  }
  // `node`: whose certificate it has.
  std::string attack(const Flood& flood, const std::string& node, bool greets) {
    ::signal(SIGPIPE, SIG_IGN);
    std::atomic<std::uint64_t> sent = 0;
    std::atomic<std::uint64_t> connections = 0;
    const Attacker attacker(port("a"), directory(), node, greets);
    std::vector<std::thread> threads;
    const Time end = std::chrono::steady_clock::now() + kFloodTime;
    for (int i = 0; i < kConnections; ++i) {
      threads.emplace_back([&] {
        for (; std::chrono::steady_clock::now() < end; ++connections) sent += attacker.send(flood, end);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return std::to_string(sent >> 10) + " KiB on " + std::to_string(connections) + " connections";
  }
  void expect_held(const Flood& flood, const std::string& node, bool greets) {
    SCOPED_TRACE(flood.name);
    Shared<Gate> over;
    RankProcess attacker([&]() -> std::string {
      const std::string text = attack(flood, node, greets);
      over->arrive();
      return text;
    });
    const double begin = now_seconds();
    const std::uint64_t idle_kib = take_census(at("a").pid()).own_kib;
    std::uint64_t most_kib = idle_kib;
    std::vector<double> seconds;
    while (over->count == 0 && now_seconds() < begin + 30) {
      const CommandResult status = at("a").epctl({"status"});
      EXPECT_EQ(status.exit_code, 0) << status.err;
      seconds.push_back(status.seconds);
      most_kib = std::max(most_kib, take_census(at("a").pid()).own_kib);
    }
    const RankOutcome outcome = attacker.wait(60);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    std::sort(seconds.begin(), seconds.end());
    std::printf("%s%s: %s; %lu MiB above idle, epctl status p95 %.2f s\n", flood.name,
                greets ? " by a node" : "", outcome.text.c_str(),
                static_cast<unsigned long>((most_kib - idle_kib) >> 10),
                seconds.empty() ? 0 : seconds[seconds.size() * 95 / 100]);
    if (kMemoryIsOurs) {
      EXPECT_LT(most_kib, idle_kib + kMostKib);
    }
    EXPECT_TRUE(rounds_pass());
  }

  Shared<LastRound> asks_;
  Shared<std::atomic<std::uint64_t>> rounds_;
  std::vector<RankProcess> ranks_;
};

// Each takes gRPC 65 KiB, until its time is over.
TEST_F(NodesFlood, HandshakesThatAreNotEndedTakeBoundedMemory) {
  constexpr std::uint64_t kMostOfHandshakesKib = 160 << 10;
  Shared<Gate> begun;
  Shared<Gate> over;
  const std::uint64_t idle_kib = take_census(at("a").pid()).own_kib;
  RankProcess attacker([&]() -> std::string {
    const rlimit many{4096, 4096};
    RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &many) == 0, "setrlimit");
    const std::string hello = client_hello();
    std::vector<UniqueFd> half_open;
    for (int i = 0; i < 2000; ++i) {  // of 60 addresses
      half_open.push_back(tcp_connect(port("a"), "127.0.1." + std::to_string(1 + i % 60)));
      (void)::send(half_open.back().get(), hello.data(), hello.size(), MSG_NOSIGNAL);
    }
    begun->arrive();
    over->wait_for(1);
    return "";
  });
  begun->wait_for(1);
  start("d");
  await("a", "d", "up");
  const CommandResult status = at("a").epctl({"status"});
  EXPECT_EQ(status.exit_code, 0) << status.err;
  const std::uint64_t kib = take_census(at("a").pid()).own_kib;
  EXPECT_TRUE(rounds_pass());
  over->arrive();
  const RankOutcome outcome = attacker.wait(30);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  std::printf("2,000 handshakes: %lu MiB above idle\n", static_cast<unsigned long>((kib - idle_kib) >> 10));
  if (kMemoryIsOurs) {
    EXPECT_LT(kib, idle_kib + kMostOfHandshakesKib);
  }
  asks_->ask();
  expect_all_ok(wait_all(ranks_, 60));
}

// The daemon took gigabytes, healthy nodes were lost, and their groups ended.
TEST_F(NodesFlood, OfHttp2CostsLittleMemoryAndNoOtherNode) {
  // Each by a node that has not flooded yet: one that has waits.
  std::vector<std::string> nodes;
  for (std::size_t i = 0; i < floods().size(); ++i) nodes.push_back("node-x" + std::to_string(i));
  make_certificates(directory(), nodes);
  for (const bool greets : {false, true}) {
    for (std::size_t i = 0; i < nodes.size(); ++i) expect_held(floods()[i], nodes[i], greets);
  }
  EXPECT_GE(refused("a", "flood"), floods().size());
  for (const char* letter : {"b", "c"})
    EXPECT_EQ(at("a").log().find(std::string("\"node lost\" node=\"node-") + letter), std::string::npos);
  asks_->ask();
  expect_all_ok(wait_all(ranks_, 60));
  start("d");
  await("a", "d", "up");
}

}  // namespace
}  // namespace epd::test

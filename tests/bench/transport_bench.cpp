// transport_bench: messages over daemon/transport between two processes, by UCX over TCP on loopback. Both
// poll. transport.sh compares it with raw UCX.
#include "common/fd.h"
#include "transport/ucx.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace epd::transport {
namespace {

using std::chrono::steady_clock;

struct Options {
  std::uint64_t bytes = 256 << 10;
  std::uint64_t messages = 8000;
  std::uint32_t window = 16;
  std::size_t events = 4;
  bool round_trip = false;
  bool rendezvous = false;
  bool print_environment = false;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "transport_bench: %s\n", what.c_str());
  std::_Exit(1);
}
void must(const Status& status, const char* what) {
  if (!status.ok()) fail(std::string(what) + ": " + status.to_string());
}

// At most PIPE_BUF: whole or not at all.
void write_all(int fd, const void* data, std::size_t bytes) {
  if (::write(fd, data, bytes) != static_cast<ssize_t>(bytes)) fail("the other side has ended");
}
void read_all(int fd, void* data, std::size_t bytes) {
  for (auto* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t got = ::read(fd, at, bytes);
    if (got <= 0) fail("the other side has ended");
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

// One side, with the other as its only peer. Received messages are given back at once.
class Side {
 public:
  Side(const Options& options, int in, int out, int core) : options_(options) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<std::size_t>(core), &cores);
    (void)::sched_setaffinity(0, sizeof(cores), &cores);
    UcxOptions ucx;
    ucx.devices = "lo";
    ucx.limits = {std::max<std::uint64_t>(options.bytes, 8), options.window + 1};
    if (options.rendezvous) ucx.rendezvous_bytes = 1;
    Result<std::unique_ptr<Transport>> made = open_ucx(ucx);
    must(made.status(), "open");
    transport_ = std::move(made).value();
    peer_ = exchange(in, out);
    body_.resize(options.bytes);
  }

  void send() {
    for (;;) {
      const Status status = transport_->send(peer_, header_, body_, 0);
      if (status.ok()) break;
      if (status.code() != StatusCode::kWouldBlock) must(status, "send");
      turn();
    }
    ++under_way_;
  }
  void turn() {
    const std::size_t count = transport_->progress(std::span(events_).first(options_.events));
    for (std::size_t i = 0; i < count; ++i) {
      must(events_[i].status, "event");
      if (events_[i].kind == EventKind::kSent) --under_way_;
      if (events_[i].kind != EventKind::kReceived) continue;
      ++received_;
      transport_->release(events_[i].body);
    }
  }
  void receive(std::uint64_t messages) {
    while (received_ < messages) turn();
    received_ -= messages;
  }
  void settle(std::uint32_t under_way) {
    while (under_way_ > under_way) turn();
  }

 private:
  PeerId exchange(int in, int out) {
    Address own = transport_->address();
    const std::size_t bytes = own.size();
    own.resize(kMaxAddressBytes);
    Address other(kMaxAddressBytes);
    write_all(out, &bytes, sizeof(bytes));
    write_all(out, own.data(), own.size());
    std::size_t other_bytes = 0;
    read_all(in, &other_bytes, sizeof(other_bytes));
    read_all(in, other.data(), other.size());
    other.resize(std::min(other_bytes, kMaxAddressBytes));
    Result<PeerId> peer = transport_->connect(other);
    must(peer.status(), "connect");
    // The other side must have connected, too, before anything is sent.
    char ready = 1;
    write_all(out, &ready, 1);
    read_all(in, &ready, 1);
    return *peer;
  }

  const Options& options_;
  std::unique_ptr<Transport> transport_;
  PeerId peer_ = 0;
  std::array<std::byte, 64> header_{};
  std::vector<std::byte> body_;
  std::array<Event, 32> events_;
  std::uint64_t received_ = 0;
  std::uint32_t under_way_ = 0;
};

double seconds_of(Side& side, const Options& options, bool first) {
  const auto begin = steady_clock::now();
  if (options.round_trip) {
    for (std::uint64_t i = 0; i < options.messages; ++i) {
      if (first) side.send();
      side.receive(1);
      if (!first) side.send();
    }
  } else if (first) {
    for (std::uint64_t i = 0; i < options.messages; ++i) {
      side.settle(options.window - 1);
      side.send();
    }
    side.receive(1);  // all has arrived
  } else {
    side.receive(options.messages);
    side.send();
  }
  side.settle(0);
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

int run(const Options& options) {
  for (const auto& [name, value] : ucx_environment()) ::setenv(name.c_str(), value.c_str(), 1);
  int there[2];
  int back[2];
  if (::pipe(there) != 0 || ::pipe(back) != 0) fail("no pipes");
  const pid_t other = ::fork();
  if (other == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Side side(options, there[0], back[1], 0);
    Options warmup = options;
    warmup.messages = options.messages / 10 + 1;
    seconds_of(side, warmup, false);
    seconds_of(side, options, false);
    char end = 0;
    read_all(there[0], &end, 1);  // the first side must not hear of our end before its own
    std::_Exit(0);
  }
  Side side(options, back[0], there[1], 1);
  Options warmup = options;
  warmup.messages = options.messages / 10 + 1;
  seconds_of(side, warmup, true);
  const double seconds = seconds_of(side, options, true);
  write_all(there[1], "", 1);
  ::waitpid(other, nullptr, 0);
  // As ucx_perftest counts: MiB a second; half a round trip in us.
  if (options.round_trip) {
    std::printf("%.3f\n", seconds / static_cast<double>(options.messages) / 2 * 1e6);
  } else {
    std::printf("%.2f\n", static_cast<double>(options.bytes * options.messages) / seconds / (1 << 20));
  }
  return 0;
}

}  // namespace
}  // namespace epd::transport

int main(int argc, char** argv) {
  using namespace epd::transport;
  Options options;
  CLI::App app("Measures daemon/transport over UCX on loopback: MiB a second, or half a round trip in us");
  app.add_option("--bytes", options.bytes, "of a body");
  app.add_option("--messages", options.messages)->check(CLI::PositiveNumber);
  app.add_option("--window", options.window, "sends under way")->check(CLI::Range(1, 1024));
  app.add_option("--events", options.events, "taken at a time")->check(CLI::Range(1, 32));
  app.add_flag("--round-trip", options.round_trip, "one message there, one back");
  app.add_flag("--rendezvous", options.rendezvous, "all bodies by rendezvous");
  app.add_flag("--environment", options.print_environment, "print what UCX is given, and end");
  CLI11_PARSE(app, argc, argv);
  if (options.print_environment) {
    for (const auto& [name, value] : ucx_environment()) std::printf("%s=%s\n", name.c_str(), value.c_str());
    return 0;
  }
  return run(options);
}

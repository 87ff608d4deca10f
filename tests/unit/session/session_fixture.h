// The attach socket, by a client that speaks the protocol by hand.
#pragma once

#include "session/session_table.h"

#include "proto/attach.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// The kernel's answers about a process that connects, where a test replaces them (session_test.cpp).
extern std::atomic<int> g_peer_pidfd_error;
extern std::atomic<std::int64_t>
    g_peer_uid;  // of the next to connect, and those after it have others; -1: its own

namespace epd::session {

using abi::AttachType;

class FakeHost final : public SessionHost {
 public:
  Status may_attach(const PeerIdentity&) override { return attach_status; }
  Quota max_sessions_of(const PeerIdentity&) override { return quota; }
  Status may_use_device(const PeerIdentity&, std::uint32_t device) override {
    return device == failed_device ? internal_error("host:" + std::to_string(device) + " has failed")
                                   : Status();
  }
  std::uint64_t ending_sessions(std::uint32_t) const override { return ending; }
  int engine_bell(std::uint32_t) const override { return engine_bell_.get(); }
  void session_opened(const Session& session) override { opened.push_back(session.id); }
  void session_closed(Session session, const std::string& how) override {
    closed.push_back(session.id);
    closed_how = how;
  }
  void join_requested(const Session& session, std::uint32_t request, const abi::Join& join) override {
    joins.push_back({session.id, request});
    last_join = join;
  }
  void leave_requested(const Session& session, std::uint32_t request, const abi::Leave&) override {
    leaves.push_back({session.id, request});
  }
  void map_requested(const Session& session, std::uint32_t request, const abi::MapMemory& map,
                     std::vector<UniqueFd> memory) override {
    last_memory = std::move(memory);
    maps.push_back({session.id, request});
    last_map = map;
  }

  void rows_told(const Session& session, const abi::RowsTold& message) override {
    last_rows = {session.id, message};
  }

  Status attach_status;
  Quota quota;
  std::uint32_t failed_device = 99;
  std::uint64_t ending = 0;
  std::vector<std::uint64_t> opened, closed;
  std::string closed_how;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> joins, leaves, maps;
  abi::Join last_join{};
  abi::MapMemory last_map{};
  std::pair<std::uint64_t, abi::RowsTold> last_rows{};
  std::vector<UniqueFd> last_memory;
  UniqueFd engine_bell_ = make_eventfd().value();
};

inline abi::Hello good_hello() {
  abi::Hello hello{};
  hello.version_min = abi::kAbiVersionMin;
  hello.version_max = abi::kAbiVersion;
  hello.layout_hash = abi::layout_hash();
  hello.nonce = 4711;
  abi::set_text(hello.library, "test", 4);
  return hello;
}

class Attach : public testing::Test {
 protected:
  Attach() {
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-session-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/sub/epd.sock";
    start({});
  }
  ~Attach() override {
    g_peer_pidfd_error = 0;
    g_peer_uid.store(-1);
    table_.reset();
    std::filesystem::remove_all(directory_);
  }

  void start(const SessionLimits& limits) {
    table_.reset();
    arrived_ = 0;
    Result<Listener> listener = Listener::open({path_, 0660, {}});
    ASSERT_TRUE(listener.ok()) << listener.status().to_string();
    SessionTable::Options options;
    options.daemon = "epd test";
    options.devices = {{"host:0"}, {"host:1"}};
    options.limits = limits;
    table_ = std::make_unique<SessionTable>(std::move(options), clock_, host_,
                                            PeerResources{closer_, descriptors_});
    const Status status = table_->listen(std::move(*listener));
    ASSERT_TRUE(status.ok()) << status.to_string();
  }

  UniqueFd connect() {
    const std::uint64_t before = seen();
    UniqueFd socket = connect_unseen();
    EXPECT_TRUE(pump_until([&] { return seen() > before; })) << "the connection has not arrived";
    return socket;
  }
  std::uint64_t seen() const { return arrived_ + table_->total_refused(); }
  UniqueFd connect_unseen() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }

  void pump() {
    pollfd waiting{table_->poll_fd(), POLLIN, 0};
    if (::poll(&waiting, 1, 1) > 0) table_->process();
    for (const auto& [id, session] : table_->connections()) arrived_ = std::max(arrived_, id);
  }
  // Lets the table work until `done`, at most for some seconds.
  bool pump_until(const std::function<bool()>& done) {
    for (int i = 0; i < 5'000 && !done(); ++i) pump();
    return done();
  }

  // Receives the next event: a packet, or the end.
  ReceiveResult receive(const UniqueFd& socket, Packet& packet) {
    EXPECT_TRUE(pump_until([&] { return readable(socket); })) << "neither a packet nor the end";
    Status error;
    const ReceiveResult result = receive_packet(socket.get(), packet, error);
    EXPECT_NE(result, ReceiveResult::kMalformed) << error.to_string();
    return result;
  }
  static bool readable(const UniqueFd& socket) {
    pollfd entry{socket.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
  }
  // Nothing comes for a while.
  bool is_silent(const UniqueFd& socket) {
    for (int i = 0; i < 30; ++i) pump();
    return !readable(socket);
  }

  template <typename T>
  Packet exchange(const UniqueFd& socket, AttachType type, const T& body, std::uint32_t request = 1) {
    EXPECT_TRUE(send_message(socket.get(), type, body, {}, request).ok());
    Packet packet;
    if (receive(socket, packet) != ReceiveResult::kPacket) packet.header.type = 0;
    return packet;
  }
  // A request that the host is to be told of, and that has no reply yet.
  template <typename T>
  void ask(const UniqueFd& socket, AttachType type, const T& body, std::uint32_t request,
           const FdList& memory = {}) {
    const auto told = [this] { return host_.joins.size() + host_.leaves.size() + host_.maps.size(); };
    const std::size_t before = told();
    EXPECT_TRUE(send_message(socket.get(), type, body, memory, request).ok());
    EXPECT_TRUE(pump_until([&] { return told() > before; }))
        << "request " << request << " has not reached the host";
    EXPECT_FALSE(readable(socket));
  }

  UniqueFd attach(const char* device = "") {
    UniqueFd socket = connect();
    abi::Hello hello = good_hello();
    abi::set_text(hello.device, device, std::strlen(device));
    welcome_ = exchange(socket, AttachType::kHello, hello);
    EXPECT_EQ(welcome_.header.type, static_cast<std::uint16_t>(AttachType::kWelcome)) << text_of(welcome_);
    return socket;
  }

  static std::string text_of(const Packet& packet) {
    if (packet.header.type != static_cast<std::uint16_t>(AttachType::kRefused))
      return "type " + std::to_string(packet.header.type);
    const abi::Refused refused = packet.read<abi::Refused>().value();
    return std::string(status_name(refused.status)) + ": " + refused.text;
  }

  void expect_refused_and_closed(const UniqueFd& socket, const Packet& reply,
                                 const std::vector<std::string>& words) {
    for (const std::string& word : words)
      EXPECT_NE(text_of(reply).find(word), std::string::npos) << text_of(reply) << " lacks " << word;
    Packet next;
    EXPECT_EQ(receive(socket, next), ReceiveResult::kClosed);
  }

  std::string directory_, path_;
  ManualClock clock_;
  FakeHost host_;
  Closer closer_;
  DescriptorBudget descriptors_{100'000};
  std::unique_ptr<SessionTable> table_;
  Packet welcome_;
  std::uint64_t arrived_ = 0;  // the highest id that a connection has had
};

}  // namespace epd::session

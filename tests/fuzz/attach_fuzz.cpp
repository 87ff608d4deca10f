// Attach messages: whatever connections come and whatever packets they send, through real porters, handshake,
// session table and group registry (engines are played, time is stepped), a bystander that attached before
// continues to join and leave. When the hostile ones have gone, nothing of theirs is left: no connection,
// group, arena or descriptor. Input: a program of steps for up to four connections, see Step.

#include "base/log.h"
#include "fuzz.h"
#include "membership/registry.h"
#include "porter.h"
#include "session/session_table.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>

namespace epd::test {
namespace {

using abi::AttachType;
using session::Session;
using session::SessionTable;

constexpr std::uint32_t kDevices = 2;
constexpr std::size_t kConnections = 4;

enum Step : std::uint8_t {
  kConnect,
  kChoose,     // the connection that the next steps are about
  kHello,      // well-formed, then dented
  kJoin,       // likewise
  kLeave,      // likewise, of the last membership
  kDetach,     // likewise
  kAnyPacket,  // right header, any type and body
  kAnyBytes,   // not even a header
  kWithFds,    // with descriptors, and a header that says how many, or lies
  kListen,     // reads what the daemon has sent
  kTime,
  kClose,
  kShutdown,  // of the sending side only
  kEngine,    // dies and comes back
  kNumSteps,
};

// The supervisor without engines: whatever the registry asks of one is answered at once.
class Host final : public session::SessionHost {
 public:
  explicit Host(const Clock& clock) : registry_(clock, {4, 60'000, 3'000, 10'000, 30'000}) {
    registry_.handle(membership::NodeUp{membership::kLocalNode, {{"host:0", {}}, {"host:1", {}}}});
    for (std::uint32_t device = 0; device < kDevices; ++device)
      registry_.handle(membership::EngineUp{engine(device)});
    auto file = make_sealed_memfd("fuzz-arena", 4096);
    require(file.ok(), "a file to hand out");
    arena_ = std::move(*file);
  }

  Status may_attach(const PeerIdentity&) override { return {}; }
  Status may_use_device(const PeerIdentity&, std::uint32_t) override { return {}; }
  Quota max_sessions_of(const PeerIdentity&) override { return {kConnections, "fuzz"}; }
  std::uint64_t ending_sessions(std::uint32_t) const override { return 0; }
  int engine_bell(std::uint32_t) const override { return engine_bell_.get(); }
  void session_opened(const Session&) override {}
  void session_closed(Session session, const std::string& how) override {
    registry_.handle(membership::SessionClosed{{membership::kLocalNode, session.id}, how});
  }
  void join_requested(const Session& session, std::uint32_t request_id, const abi::Join& join) override {
    membership::JoinRequest request;
    request.id = {{membership::kLocalNode, session.id}, request_id};
    request.uid = session.peer.uid;
    request.pid = session.peer.pid;
    request.engine = engine(session.device);
    request.join = join;
    request.max_groups = {3, "fuzz"};
    registry_.handle(request);
  }
  void leave_requested(const Session& session, std::uint32_t request_id, const abi::Leave& leave) override {
    registry_.handle(
        membership::LeaveRequest{{{membership::kLocalNode, session.id}, request_id}, leave.member});
  }
  // Judged as the supervisor does it; no engine maps anything.
  void map_requested(const Session& session, std::uint32_t request_id, const abi::MapMemory& map,
                     std::vector<UniqueFd> memory) override {
    const std::string wrong = abi::check_memory_range(map.range, memory.size());
    maps_.emplace_back(session.id, request_id, wrong);
  }
  void rows_told(const Session& /*session*/, const abi::RowsTold& /*message*/) override {}

  // Until nothing is left to do.
  void carry_out(SessionTable& table) {
    for (auto actions = registry_.take_actions(); !actions.empty(); actions = registry_.take_actions()) {
      for (const membership::Action& action : actions)
        std::visit([&](const auto& a) { answer(table, a); }, action);
    }
    for (const auto& [session, request, wrong] : std::exchange(maps_, {}))
      table.refuse(session, request, invalid_argument(wrong));
  }
  void restart(std::uint32_t device) {
    registry_.handle(membership::EngineDown{engine(device), "fuzz", {}});
    registry_.handle(membership::EngineUp{engine(device)});
  }
  membership::GroupRegistry& registry() { return registry_; }
  std::size_t held() const { return held_.size(); }

 private:
  static membership::EngineId engine(std::uint32_t device) { return {membership::kLocalNode, device}; }

  void answer(SessionTable&, const membership::StartGroup& a) {
    registry_.handle(membership::GroupReady{a.engine, {a.group.label.id, StatusCode::kOk, {}}, {}});
  }
  void answer(SessionTable&, const membership::SendStopMember& a) {
    registry_.handle(membership::MemberStopped{a.engine, a.message});
  }
  void answer(SessionTable&, const membership::SendBreak& a) {
    registry_.handle(membership::Broken{a.engine, {a.message.group_id, a.message.epoch, 0}});
  }
  void answer(SessionTable&, const membership::SendRemoveGroup& a) {
    registry_.handle(membership::GroupRemoved{a.engine, a.message});
  }
  void answer(SessionTable&, const membership::KillEngine& a) { restart(a.engine.device); }
  void answer(SessionTable&, const membership::AcquireMemory& a) {
    const abi::GroupShape& shape = a.shape;
    require(shape.num_ranks >= 1 && shape.num_ranks <= abi::kMaxRanks && a.rank < shape.num_ranks &&
                shape.hidden <= abi::kMaxHidden && shape.max_tokens <= abi::kMaxTokens &&
                shape.topk <= abi::kMaxTopk && shape.depth <= abi::kMaxDepth,
            "memory is asked for shapes within their limits only");
    require(held_.insert({a.group_id, a.rank}).second, "memory is asked for once");
    registry_.handle(membership::MemoryAcquired{a.request, a.group_id, a.rank, {}});
  }
  void answer(SessionTable&, const membership::ReleaseMemory& a) {
    require(held_.erase({a.group_id, a.rank}) == 1, "memory is released once");
  }
  void answer(SessionTable&, const membership::MarkLost& a) {
    require(held_.count({a.group_id, a.rank}) == 1, "its memory is still there");
  }
  void answer(SessionTable&, const membership::CloseStreams& a) {
    require(held_.count({a.group_id, a.rank}) == 1, "its memory is still there");
  }
  void answer(SessionTable& table, const membership::ReplyJoined& a) {
    table.reply(a.request.session.number, a.request.number, AttachType::kJoined, a.message,
                {arena_.get(), arena_.get()});
  }
  void answer(SessionTable& table, const membership::ReplyLeft& a) {
    table.reply(a.request.session.number, a.request.number, AttachType::kLeft, a.message);
  }
  void answer(SessionTable& table, const membership::ReplyRefused& a) {
    require(!a.status.ok() && !a.status.message().empty(), "a refusal has a code and a text");
    table.refuse(a.request.session.number, a.request.number, a.status);
  }
  template <typename T>
  void answer(SessionTable&, const T&) {}  // what needs no answer

  membership::GroupRegistry registry_;
  std::vector<std::tuple<std::uint64_t, std::uint32_t, std::string>> maps_;
  std::set<std::pair<std::uint64_t, std::uint32_t>> held_;
  UniqueFd arena_;
  UniqueFd engine_bell_ = make_eventfd().value();
};

// Counts descriptors of the kinds that sessions hold: libFuzzer opens files and pipes of its own.
std::size_t open_descriptors() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry, gone).string();
    for (const char* kind : {"socket:", "anon_inode:", "/memfd:", "pidfd:"}) {
      if (target.rfind(kind, 0) == 0) ++count;
    }
  }
  return count;
}

class Target {
 public:
  Target() : host_(clock_) {
    log_set_levels(LogLevel::kOff);
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-fuzz-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/epd.sock";
    Result<session::Listener> listener = session::Listener::open({path_, 0600, {}});
    require(listener.ok(), listener.status().to_string());
    SessionTable::Options options;
    options.daemon = "epd fuzz";
    options.devices = {{"host:0"}, {"host:1"}};
    options.limits = {kConnections, 5'000};
    table_ = std::make_unique<SessionTable>(std::move(options), clock_, host_,
                                            session::PeerResources{closer_, budget_});
    const Status listening = table_->listen(std::move(*listener));
    require(listening.ok(), listening.to_string());
    bystander_ = connect();
    require(exchange(bystander_, AttachType::kHello, good_hello()) == AttachType::kWelcome,
            "bystander attaches");
    packet_.fds.clear();
    descriptors_ = open_descriptors();
  }
  ~Target() {
    table_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  void run(Bytes input) {
    for (int steps = 0; steps < 200 && !input.empty(); ++steps) {
      step(input);
      turn();
      if (steps % 16 == 15) check_bystander();
    }
    for (UniqueFd& socket : sockets_) socket.reset();
    turn();
    check_bystander();
    require(table_->connections().size() == 1, "connections are gone with their sockets");
    require(table_->attached() == 1, "only the bystander is attached");
    require(host_.registry().groups().empty() && host_.held() == 0, "groups and arenas are gone");
    close_all();
    require(open_descriptors() == descriptors_, "descriptors are closed");
  }

 private:
  static abi::Hello good_hello() {
    abi::Hello hello{};
    hello.version_min = abi::kAbiVersionMin;
    hello.version_max = abi::kAbiVersion;
    hello.layout_hash = abi::layout_hash();
    return hello;
  }
  static abi::Join good_join(const char* name, std::uint32_t ranks) {
    abi::Join join{};
    abi::set_text(join.group, name, std::strlen(name));
    join.rank = -1;
    join.shape.num_ranks = ranks;
    join.shape.num_experts = ranks * 2;
    join.shape.max_tokens = 8;
    join.shape.hidden = 128;
    join.shape.topk = 2;
    join.shape.depth = 2;
    return join;
  }

  // As the gate does it, but that the porter has no thread: it moves when the others do.
  UniqueFd connect() {
    auto outer = make_socketpair();
    auto inner = make_socketpair();
    require(outer.ok() && inner.ok(), "there are sockets");
    Result<PeerIdentity> peer = peer_identity(outer->second.get());
    require(peer.ok(), "the peer is known");
    table_->admit({++last_number_, std::move(*peer), std::move(inner->first)});
    porters_.push_back(std::make_unique<Porting>(std::move(outer->second), std::move(inner->second)));
    turn();
    return std::move(outer->first);
  }

  void turn() {
    pollfd waiting{table_->poll_fd(), POLLIN, 0};
    do {
      std::erase_if(porters_, [](const auto& porting) { return !porting->porter.move(); });
      table_->process();
      host_.carry_out(*table_);
      table_->tick();
      host_.registry().tick();
      host_.carry_out(*table_);
      std::erase_if(porters_, [](const auto& porting) { return !porting->porter.move(); });
    } while (::poll(&waiting, 1, 0) > 0);
  }

  // Until nothing is being closed any more.
  void close_all() {
    for (int i = 0; i < 5'000 && !closer_.idle(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  template <typename T>
  AttachType exchange(const UniqueFd& socket, AttachType type, const T& body) {
    require(send_message(socket.get(), type, body, {}, 1).ok(), "the bystander sends");
    turn();
    Status error;
    require(receive_packet(socket.get(), packet_, error) == ReceiveResult::kPacket,
            "the bystander is answered");
    return static_cast<AttachType>(packet_.header.type);
  }

  void check_bystander() {
    // Hostile groups may have used up what all may have together; its own it can always have.
    const AttachType answer = exchange(bystander_, AttachType::kJoin, good_join("bystander", 1));
    if (answer == AttachType::kRefused) {
      require(packet_.read<abi::Refused>().value().status == StatusCode::kResourceExhausted,
              "only a quota refuses the bystander");
      return;
    }
    require(answer == AttachType::kJoined, "the bystander joins");
    const std::uint32_t member = packet_.read<abi::Joined>().value().member;
    require(exchange(bystander_, AttachType::kLeave, abi::Leave{member, 0}) == AttachType::kLeft,
            "the bystander leaves");
    packet_.fds.clear();
  }

  template <typename T>
  void send_dented(Bytes& input, AttachType type, T body) {
    input.dent(body);
    (void)send_message(sockets_[chosen_].get(), type, body, {}, input.byte());
  }

  void send_with_descriptors(Bytes& input) {
    // Memory to be mapped, or a Hello, which brings none.
    const std::size_t count = input.byte() % (abi::kMaxMessageFds + 3);
    const std::uint8_t said = input.byte();
    abi::Hello hello = good_hello();
    input.dent(hello);
    abi::MapMemory map{member_, 0, {}};
    map.range.generation = 1;
    map.range.by = abi::MemoryBy::kDescriptor;
    map.range.pieces = static_cast<std::uint32_t>(count);
    map.range.bytes = map.range.whole = 4096 * count;
    input.dent(map);
    const bool maps = input.byte() % 2 == 0;
    void* body = maps ? static_cast<void*>(&map) : &hello;
    const std::size_t bytes = maps ? sizeof(map) : sizeof(hello);
    const auto type = maps ? static_cast<std::uint16_t>(AttachType::kMapMemory) : std::uint16_t{input.byte()};
    const abi::WireHeader header{abi::kWireMagic, type, said,
                                 static_cast<std::uint32_t>(sizeof(header) + bytes), 1};
    iovec parts[2] = {{const_cast<abi::WireHeader*>(&header), sizeof(header)}, {body, bytes}};
    alignas(cmsghdr) char control[CMSG_SPACE((abi::kMaxMessageFds + 3) * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (count != 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(count * sizeof(int));
      const int fd = count % 2 == 0 ? memory_.get() : bystander_.get();
      for (std::size_t i = 0; i < count; ++i) std::memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof(int));
    }
    (void)::sendmsg(sockets_[chosen_].get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  void send_packet_of(Bytes& input) {
    const std::uint16_t type = input.byte();
    const std::string body = input.text(input.word() % (abi::kMaxMessageBytes - sizeof(abi::WireHeader)));
    (void)send_packet(sockets_[chosen_].get(), type, input.byte(), body.data(), body.size());
  }

  void listen() {
    Status error;
    while (receive_packet(sockets_[chosen_].get(), packet_, error) == ReceiveResult::kPacket) {
      if (packet_.header.type == static_cast<std::uint16_t>(AttachType::kJoined))
        member_ = packet_.read<abi::Joined>().value().member;
    }
    packet_.fds.clear();
  }

  void step(Bytes& input) {
    UniqueFd& socket = sockets_[chosen_];
    const std::uint8_t step = input.byte() % kNumSteps;
    if (!socket.valid() && step != kChoose && step != kTime && step != kEngine) socket = connect();
    switch (step) {
      case kConnect: socket = connect(); break;
      case kChoose: chosen_ = input.byte() % kConnections; break;
      case kHello: send_dented(input, AttachType::kHello, good_hello()); break;
      case kJoin: {
        const std::uint8_t which = input.byte();
        send_dented(input, AttachType::kJoin, good_join(which % 2 == 0 ? "a" : "b", 1 + which / 2 % 3));
        break;
      }
      case kLeave: send_dented(input, AttachType::kLeave, abi::Leave{member_, 0}); break;
      case kDetach:
        (void)send_packet(socket.get(), static_cast<std::uint16_t>(AttachType::kDetach), 0, "",
                          input.byte() % 2);
        break;
      case kAnyPacket: send_packet_of(input); break;
      case kAnyBytes: {
        const std::string bytes = input.text(input.word() % 4096);
        (void)::send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
      }
      case kWithFds: send_with_descriptors(input); break;
      case kListen: listen(); break;
      case kTime: clock_.advance_ms(std::uint64_t{input.byte()} * 500); break;
      case kClose: socket.reset(); break;
      case kShutdown: ::shutdown(socket.get(), SHUT_WR); break;
      case kEngine: host_.restart(input.byte() % kDevices); break;
      default: break;
    }
  }

  ManualClock clock_;
  Host host_;
  Closer closer_;
  DescriptorBudget budget_{100'000};
  std::string directory_, path_;
  std::unique_ptr<SessionTable> table_;
  struct Porting {
    Porting(UniqueFd outer, UniqueFd inner)
        : peer(std::move(outer)), loop(std::move(inner)), porter({peer.get(), loop.get(), -1}) {}
    UniqueFd peer, loop;
    session::PacketPorter porter;
  };
  std::vector<std::unique_ptr<Porting>> porters_;
  std::uint64_t last_number_ = 0;
  UniqueFd bystander_;
  UniqueFd memory_ = make_sealed_memfd("fuzz", 4096).value();  // what a Join may carry
  std::size_t descriptors_ = 0;
  std::array<UniqueFd, kConnections> sockets_;
  std::size_t chosen_ = 0;
  std::uint32_t member_ = 0;
  Packet packet_;
};

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static epd::test::Target target;
  target.run({data, size});
  return 0;
}

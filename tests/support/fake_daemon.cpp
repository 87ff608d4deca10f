#include "fake_daemon.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace epd::testing {
namespace {

using std::chrono::milliseconds;

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "fake daemon: %s\n", result.status().to_string().c_str());
    std::abort();
  }
  return std::move(result).value();
}

// Words that the client reads or writes at the same time.
template <typename T>
T load(T& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}
template <typename T>
void store(T& word, std::type_identity_t<T> value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

UniqueFd make_segment(const char* name, std::uint64_t bytes, bool sealed) {
  if (sealed) return must(make_sealed_memfd(name, bytes));
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC));
  EPD_CHECK(fd.valid() && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  return fd;
}

}  // namespace

FakeDaemon::FakeDaemon(FakeSettings settings) : settings_(std::move(settings)) {
  char directory[] = "/tmp/epd-fake-XXXXXX";
  EPD_CHECK(::mkdtemp(directory) != nullptr);
  directory_ = directory;
  path_ = directory_ + "/epd.sock";
  listener_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  EPD_CHECK(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  EPD_CHECK(::listen(listener_.get(), 8) == 0);
  stop_ = must(make_eventfd());
  news_ = must(make_eventfd());
  server_ = std::thread([this] { serve(); });
  engine_ = std::thread([this] { run_engine(); });
}

FakeDaemon::~FakeDaemon() {
  stopping_ = true;
  ring_eventfd(stop_.get());
  ring_eventfd(news_.get());
  server_.join();
  engine_.join();
  ::unlink(path_.c_str());
  ::rmdir(directory_.c_str());
}

void FakeDaemon::set(const FakeSettings& settings) {
  const std::lock_guard lock(mutex_);
  settings_ = settings;
  ring_eventfd(news_.get());
}

// ---- supervisor -----------------------------------------------------------------------------------

void FakeDaemon::serve() {
  while (!stopping_) {
    pollfd entries[3] = {{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}, {-1, POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      entries[2].fd = settings_.deaf ? -1 : connection_.get();
    }
    ::poll(entries, 3, 20);
    const std::lock_guard lock(mutex_);
    if (entries[1].revents != 0) {
      connection_ = UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      continue;
    }
    if (!connection_.valid() || entries[2].revents == 0 || entries[2].fd != connection_.get()) continue;
    if (settings_.deaf) continue;  // since a moment ago
    Packet packet;
    Status error;
    switch (receive_packet(connection_.get(), packet, error)) {
      case ReceiveResult::kPacket: handle(packet); break;
      case ReceiveResult::kNothing: break;
      default: connection_.reset();
    }
  }
}

void FakeDaemon::handle(Packet& packet) {
  const std::uint32_t id = packet.header.request_id;
  switch (static_cast<abi::AttachType>(packet.header.type)) {
    case abi::AttachType::kHello:
      if (settings_.close_on_hello) {
        connection_.reset();
      } else if (settings_.refuse_hello) {
        reply_refused(*settings_.refuse_hello, id);
      } else if (!settings_.silent_hello) {
        welcome(must(packet.read<abi::Hello>()), id);
      }
      return;
    case abi::AttachType::kJoin:
      if (settings_.refuse_join) {
        reply_refused(*settings_.refuse_join, id);
      } else if (!settings_.silent_join) {
        const auto request = must(packet.read<abi::Join>());
        if (settings_.hold_join == request.group) {
          held_.push_back({request, id});
        } else {
          join(request, id);
        }
      }
      return;
    case abi::AttachType::kLeave: {
      const auto leave = must(packet.read<abi::Leave>());
      ++left_;
      (void)send_message(connection_.get(), abi::AttachType::kLeft, abi::Left{leave.member, 0}, {}, id);
      return;
    }
    case abi::AttachType::kMapMemory: {
      const auto map = must(packet.read<abi::MapMemory>());
      for (const auto& member : members_) {
        if (member->member == map.member) member->mapped.push_back(map.range);
      }
      if (settings_.refuse_map) return reply_refused(*settings_.refuse_map, id);
      (void)send_message(connection_.get(), abi::AttachType::kMapped,
                         abi::Mapped{map.member, map.range.number}, {}, id);
      return;
    }
    case abi::AttachType::kRowsTold: return;
    case abi::AttachType::kDetach: connection_.reset(); return;  // as a daemon does; the client waits for it
    default: std::abort();
  }
}

bool FakeDaemon::await_held(std::size_t count) const {
  for (int i = 0; i < 10'000; ++i) {
    {
      const std::lock_guard lock(mutex_);
      if (held_.size() >= count) return true;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

void FakeDaemon::answer_join(std::int32_t rank) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(held_.begin(), held_.end(),
                                  [rank](const HeldJoin& held) { return held.join.rank == rank; });
  EPD_CHECK(found != held_.end());
  HeldJoin held = std::move(*found);
  held_.erase(found);
  join(held.join, held.request_id);
}

void FakeDaemon::reply_refused(const Status& status, std::uint32_t request_id) {
  abi::Refused refused{status.code(), {}};
  abi::set_text(refused.text, status.message().data(), status.message().size());
  (void)send_message(connection_.get(), abi::AttachType::kRefused, refused, {}, request_id);
}

void FakeDaemon::welcome(const abi::Hello& hello, std::uint32_t request_id) {
  const UniqueFd a_fd = make_segment("fake-a", sizeof(abi::SegmentA), settings_.sealed);
  const UniqueFd b_fd =
      make_segment("fake-b", std::max(settings_.segment_b_bytes, std::uint64_t{1}), settings_.sealed);
  segment_a_ = must(Mapping::map(a_fd.get(), sizeof(abi::SegmentA), Access::kReadWrite));
  if (settings_.segment_b_bytes >= sizeof(abi::SegmentB)) {
    segment_b_ = must(Mapping::map(b_fd.get(), sizeof(abi::SegmentB), Access::kReadWrite));
    b().magic = settings_.magic ? abi::kSegmentBMagic : 0;
    b().state = static_cast<std::uint32_t>(abi::SessionState::kServing);
  }
  a().magic = abi::kSegmentAMagic;
  members_.clear();
  auto [ours, theirs] = must(make_socketpair());
  client_bell_ = std::move(ours);
  auto [is_rung, rings] = must(make_socketpair());
  engine_bell_ = std::move(is_rung);
  ring_eventfd(news_.get());
  const UniqueFd b_read_only = must(reopen_read_only(b_fd.get()));

  abi::Welcome body{};
  body.version = settings_.version;
  body.layout_hash = settings_.layout_hash;
  body.nonce = hello.nonce + (settings_.wrong_nonce ? 1 : 0);
  body.session_id = 77;
  body.boot_id[0] = 0xab;
  body.boot_id[15] = 0x01;
  abi::set_text(body.daemon, "fake 9.9.9", 10);
  const bool cuda = settings_.device_kind == abi::DeviceKind::kCuda;
  abi::set_text(body.device, cuda ? "cuda:3" : "host:3", 6);
  body.device_kind = settings_.device_kind;
  body.device_uuid = settings_.device_uuid;
  if (settings_.short_welcome) {
    (void)send_packet(connection_.get(), static_cast<std::uint16_t>(abi::AttachType::kWelcome), request_id,
                      &body, 10);
  } else if (settings_.welcome_fds == 4) {
    (void)send_message(connection_.get(), abi::AttachType::kWelcome, body,
                       {a_fd.get(), b_read_only.get(), rings.get(), theirs.get()}, request_id);
  } else {
    (void)send_message(connection_.get(), abi::AttachType::kWelcome, body, {a_fd.get()}, request_id);
  }
}

void FakeDaemon::join(const abi::Join& request, std::uint32_t request_id) {
  if (request.restores != 0 && settings_.keeps_member) {
    abi::Joined kept{};
    kept.epoch = members_.back()->epoch + 1;
    kept.kept = 1;
    (void)send_message(connection_.get(), abi::AttachType::kJoined, kept, {}, request_id);
    return;
  }
  auto member = std::make_unique<FakeMember>();
  member->member = static_cast<std::uint32_t>(members_.size()) + 100;
  member->shape = request.shape;
  const std::uint64_t user_bytes = abi::UserArenaLayout(request.shape).total_bytes;
  const std::uint64_t file_bytes =
      abi::WaitsLayout(request.shape).total_bytes - static_cast<std::uint64_t>(settings_.less_board_bytes);
  const UniqueFd user_fd =
      make_segment(settings_.arena_name.c_str(), abi::align_up(user_bytes, settings_.arena_unit), true);
  const UniqueFd board_fd = make_segment("fake-board", file_bytes, true);
  member->user = must(Mapping::map(user_fd.get(), user_bytes, Access::kReadWrite));
  member->board_mapping = must(Mapping::map(board_fd.get(), file_bytes, Access::kReadWrite));
  member->board().magic = abi::kBoardMagic;
  member->board().epoch = member->epoch;
  member->board().active[0] = settings_.active;
  member->board().state = static_cast<std::uint32_t>(abi::GroupState::kActive);
  const UniqueFd board_read_only = must(reopen_read_only(board_fd.get()));
  const std::uint64_t results_bytes = abi::ResultsLayout(request.shape).total_bytes;
  const bool cuda = settings_.device_kind == abi::DeviceKind::kCuda;
  const UniqueFd results_fd = make_segment(cuda ? "epd_fake_cuda_host" : "fake-results",
                                           abi::align_up(results_bytes, settings_.arena_unit), true);
  member->results_mapping = must(Mapping::map(results_fd.get(), results_bytes, Access::kReadWrite));
  const UniqueFd results_read_only = must(reopen_read_only(results_fd.get()));
  const int results = cuda ? results_fd.get() : results_read_only.get();

  abi::Joined joined{};
  joined.member = member->member;
  joined.rank = request.rank < 0 ? 0 : static_cast<std::uint32_t>(request.rank);
  joined.group_id = 5;
  joined.epoch = member->epoch;
  joined.resume_index = settings_.resume_index;
  joined.sum_ranks = request.shape.sum_ranks != 0 ? request.shape.sum_ranks : request.shape.num_ranks;
  joined.shares_device = settings_.shares_device ? 1 : 0;
  joined.user_bytes = user_bytes + static_cast<std::uint64_t>(settings_.more_user_bytes);
  joined.board_bytes = sizeof(abi::Board);
  members_.push_back(std::move(member));
  (void)send_message(connection_.get(), abi::AttachType::kJoined, joined,
                     {user_fd.get(), board_read_only.get(), results}, request_id);
}

void FakeDaemon::goodbye(StatusCode status, const std::string& text, bool close) {
  const std::lock_guard lock(mutex_);
  abi::Goodbye body{status, {}};
  abi::set_text(body.text, text.data(), text.size());
  (void)send_message(connection_.get(), abi::AttachType::kGoodbye, body);
  if (close) connection_.reset();
}

void FakeDaemon::hang_up() {
  const std::lock_guard lock(mutex_);
  connection_.reset();
  client_bell_.reset();
}

void FakeDaemon::hang_up_doorbell() {
  const std::lock_guard lock(mutex_);
  client_bell_.reset();
}

// ---- engine ---------------------------------------------------------------------------------------

std::optional<FakeCall> FakeDaemon::take_locked() {
  for (const auto& member : members_) {
    const std::uint32_t number = member->next_call;
    abi::PackedCall& place = member->calls().host_calls[number % abi::kCallSlots];
    abi::PackedCall packed;
    bool there = true;
    for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i) {
      packed.words[i] = load(place.words[i]);
      there = there && packed.words[i] >> 32 == std::uint32_t{number + 1};
    }
    if (!there) continue;
    ++member->next_call;
    return FakeCall{abi::unpack(packed), member.get()};
  }
  return std::nullopt;
}

// Sleeps as an engine does, and for so long that a client that forgets to ring hangs its test.
void FakeDaemon::run_engine() {
  while (!stopping_) {
    int bell = -1;
    {
      const std::lock_guard lock(mutex_);
      if (segment_b_.valid() && settings_.automatic) {
        b().engine_sleep.sleeping.store(1, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        while (const auto call = take_locked()) {
          publish_counts_locked(*call);
          end_locked(*call, abi::CallEnding::kCarriedOut);
        }
      }
      if (segment_b_.valid()) bell = engine_bell_.get();
    }
    pollfd entries[2] = {{news_.get(), POLLIN, 0}, {bell, POLLIN, 0}};
    ::poll(entries, 2, 10'000);
    const std::lock_guard lock(mutex_);
    char bytes[64];
    if (entries[0].revents != 0) [[maybe_unused]]
      const ssize_t n = ::read(news_.get(), bytes, sizeof(bytes));
    const bool same = entries[1].revents != 0 && bell == engine_bell_.get();
    while (same && ::recv(bell, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) ++rings_;
  }
}

std::optional<FakeCall> FakeDaemon::next_call(int timeout_ms) {
  const auto end = std::chrono::steady_clock::now() + milliseconds(timeout_ms);
  do {
    {
      const std::lock_guard lock(mutex_);
      if (auto call = take_locked()) return call;
    }
    std::this_thread::sleep_for(milliseconds(1));
  } while (std::chrono::steady_clock::now() < end);
  return std::nullopt;
}

void FakeDaemon::complete(const FakeCall& call, StatusCode status, std::int32_t failed_rank,
                          const std::string& message) {
  const std::lock_guard lock(mutex_);
  FakeMember& member = *call.member;
  if (status == StatusCode::kOk) return end_locked(call, abi::CallEnding::kCarriedOut);
  end_locked(call, abi::CallEnding::kFailed);
  member.board().failed_rank = failed_rank;
  write_board_locked(member, abi::GroupState::kActive, member.epoch + 1, member.next_index, status, message);
}

void FakeDaemon::end(const FakeCall& call, abi::CallEnding ending) {
  const std::lock_guard lock(mutex_);
  end_locked(call, ending);
}

void FakeDaemon::end_locked(const FakeCall& call, abi::CallEnding ending) {
  FakeMember& member = *call.member;
  const bool well = ending == abi::CallEnding::kCarriedOut;
  const auto index = static_cast<std::uint32_t>(member.next_index);
  if (well && call.op != abi::Op::kNoop) ++member.next_index;
  const std::uint32_t values[] = {
      static_cast<std::uint32_t>(ending), call.num_tokens, 0, 70, call.result, index, 0, 1};
  ++member.writing;
  for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
    store(member.results().places[abi::place_of(call.result)].words[i],
          std::uint64_t{member.writing} << 32 | values[i]);
  if (!well) store(member.calls().failed, load(member.calls().failed) + 1);
  store(member.results().host_ended, call.number + 1);
  ring_locked();
}

void FakeDaemon::ring_locked() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (a().client_sleep.sleeping.load(std::memory_order_relaxed) == 0) return;
  const char byte = 0;
  [[maybe_unused]] const ssize_t n = ::send(client_bell_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void FakeDaemon::publish_counts(const FakeCall& call) {
  const std::lock_guard lock(mutex_);
  publish_counts_locked(call);
}

void FakeDaemon::publish_sent(const FakeCall& call) {
  const std::lock_guard lock(mutex_);
  store(call.member->results().sent[call.slot], call.result + 1);
  ring_locked();
}

// Pretends that all rows came from the last rank, for the first expert.
void FakeDaemon::publish_counts_locked(const FakeCall& call) {
  if (call.op != abi::Op::kDispatch) return;
  const abi::GroupShape& shape = call.member->shape;
  const abi::PlacementParts parts(shape);
  std::vector<std::uint32_t> counts(parts.words);
  counts[parts.rank_offsets + shape.num_ranks] = counts[parts.expert_counts] = call.num_tokens;
  if (shape.per_expert()) {
    for (std::uint32_t i = 1; i <= shape.experts_per_rank(); ++i)
      counts[parts.expert_offsets + i] = call.num_tokens;
  }
  const abi::ResultsLayout layout(shape);
  auto* const words =
      call.member->results_mapping.as<std::uint64_t>(layout.counts + layout.counts_stride * call.slot);
  for (std::size_t i = 0; i < counts.size(); ++i)
    store(words[i], std::uint64_t{call.result + 1} << 32 | counts[i]);
  ring_locked();
}

bool FakeDaemon::await_rings(std::uint64_t count) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (rings_ < count && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  return rings_ == count;
}

void FakeDaemon::end_session(StatusCode status, const std::string& text) {
  const std::lock_guard lock(mutex_);
  abi::set_text(b().message, text.data(), text.size());
  b().end_status.store(static_cast<std::uint32_t>(status), std::memory_order_relaxed);
  b().state.store(static_cast<std::uint32_t>(abi::SessionState::kEnded), std::memory_order_release);
  ring_locked();
}

void FakeDaemon::set_serving(bool serving) {
  const std::lock_guard lock(mutex_);
  const abi::SessionState state = serving ? abi::SessionState::kServing : abi::SessionState::kStarting;
  b().state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
}

bool FakeDaemon::client_sleeps() const {
  const std::lock_guard lock(mutex_);
  return a().client_sleep.sleeping.load(std::memory_order_acquire) != 0;
}

bool FakeDaemon::await_client_sleep() const {
  for (int i = 0; i < 10'000; ++i) {
    if (client_sleeps()) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

// ---- groups ---------------------------------------------------------------------------------------

FakeMember& FakeDaemon::member(std::size_t index) {
  const std::lock_guard lock(mutex_);
  return *members_.at(index);
}

void FakeDaemon::write_board(abi::GroupState state, std::uint64_t epoch, std::uint64_t resume_index,
                             StatusCode cause, const std::string& message) {
  const std::lock_guard lock(mutex_);
  write_board_locked(*members_.at(0), state, epoch, resume_index, cause, message);
}

void FakeDaemon::write_board_locked(FakeMember& member, abi::GroupState state, std::uint64_t epoch,
                                    std::uint64_t resume_index, StatusCode cause,
                                    const std::string& message) {
  abi::Board& board = member.board();
  const std::uint32_t change = board.change.load(std::memory_order_relaxed) | 1u;
  board.change.store(change, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  board.state.store(static_cast<std::uint32_t>(state), std::memory_order_relaxed);
  board.epoch.store(epoch, std::memory_order_relaxed);
  board.resume_index.store(resume_index, std::memory_order_relaxed);
  board.cause.store(static_cast<std::uint32_t>(cause), std::memory_order_relaxed);
  abi::set_text(board.message, message.data(), message.size());
  board.change.store(change + 1, std::memory_order_release);
  member.epoch = epoch;
  member.next_index = resume_index;
  ring_locked();
}

}  // namespace epd::testing

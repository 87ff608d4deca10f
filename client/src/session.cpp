#include "session.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <new>

namespace epd::client {
namespace {

template <std::size_t N, std::size_t M>
void copy_text(char (&to)[N], const char (&from)[M]) {
  abi::set_text(to, from, abi::text_length(from));
}

}  // namespace

Session::Session(Attachment attachment) : attachment_(std::move(attachment)) {}

Status Session::prepare() {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  watch_wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid() || !watch_wake_.valid()) return errno_status("eventfd");
  return HomeProcess::make(home_);
}

Status Session::in_home_process() const {
  if (home_.here()) return {};
  return invalid_argument("this is process " + std::to_string(::getpid()) + ", forked off process " +
                          std::to_string(home_.pid()) +
                          ", which attached; allowed: sessions that this process attaches itself");
}

Session::~Session() {
  const Deadline deadline = Deadline::in_ms(kLeaveMs);
  // All of them first: to leave one is to wait for all streams of the context, whatever they wait for.
  if (groups_.size() > 1) {
    Lock lock(mutex_);
    drain_locked();
    for (const auto& group : groups_) begin_leave_locked(*group);
    await_releases(lock);
  }
  while (!groups_.empty()) leave(groups_.back().get(), deadline);
  {
    const Lock lock(mutex_);
    end_locked({StatusCode::kAborted, "the session was detached"});
  }
  stop_hooks();
  stop_watch();
  // A courtesy to whoever reads the daemon's log: without it the end of the connection is a death.
  if (send(attachment_.socket, abi::AttachType::kDetach, 0, nullptr, 0).ok()) await_end();
  if (given != nullptr) given->end();
}

// The daemon closes when it has let go of the session's ranks: who attaches after that finds them free.
void Session::await_end() const {
  const SteadyClock::time_point end = SteadyClock::now() + std::chrono::milliseconds(kDetachMs);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - SteadyClock::now()).count();
    pollfd entry{attachment_.socket.get(), POLLIN, 0};
    if (left <= 0 || ::poll(&entry, 1, static_cast<int>(left)) <= 0) return;
    char packet[64];
    if (::recv(attachment_.socket.get(), packet, sizeof(packet), MSG_DONTWAIT) <= 0) return;
  }
}

epd_session_info_t Session::info() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  const abi::Welcome& welcome = attachment_.welcome;
  epd_session_info_t info{};
  info.session_id = welcome.session_id;
  copy_text(info.device, welcome.device);
  copy_text(info.daemon, welcome.daemon);
  static_assert(sizeof(info.boot_id) == 2 * sizeof(welcome.boot_id) + 1);
  for (std::size_t i = 0; i < sizeof(welcome.boot_id); ++i) {
    info.boot_id[2 * i] = kDigits[welcome.boot_id[i] >> 4];
    info.boot_id[2 * i + 1] = kDigits[welcome.boot_id[i] & 15];
  }
  info.device_kind = static_cast<epd_device_kind_t>(welcome.device_kind);
  info.resident = welcome.resident;
  return info;
}

Status Session::check() {
  probe();
  const Lock lock(mutex_);
  note_ended_locked();
  return ended_;
}

void Session::end_locked(Status status) {
  if (!ended_.ok()) return;
  ended_ = std::move(status);
  abort_locked(ended_.code(), ended_.message().c_str(), nullptr);
  for (const auto& group : groups_) want_release_locked(*group);
  notify_ready_locked(nullptr);
  kick();
}

void Session::note_ended_locked() {
  if (!ended_.ok()) return;
  if (b().state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(abi::SessionState::kEnded)) {
    return;
  }
  StatusCode code = checked_code(b().end_status.load(std::memory_order_relaxed));
  if (code == StatusCode::kOk) code = StatusCode::kAborted;
  std::string text;
  try {
    text.assign(b().message, abi::text_length(b().message));
    if (text.empty()) text = "the daemon ended this session";
  } catch (const std::bad_alloc&) {
    text.clear();  // the status alone must do
  }
  end_locked({code, std::move(text)});
}

void Session::kick() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof(one));
}

void Session::probe() {
  {
    const Lock lock(mutex_);
    const SteadyClock::time_point now = SteadyClock::now();
    if (!ended_.ok() || now - last_probe_ < std::chrono::milliseconds(1)) return;
    last_probe_ = now;
  }
  pollfd entry{attachment_.socket.get(), POLLIN | POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) > 0) look_at_socket();
}

}  // namespace epd::client

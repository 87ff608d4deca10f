#include "stream_port.h"

#include "thread.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <utility>

namespace epd::client {
namespace {

// When what has been released is released again: the first time, and no less often than the second.
constexpr int kAgainAfter_ms = 10;
constexpr int kAgainAtLeast_ms = 1000;

}  // namespace

Status submitted_but(const Status& status, epd_ticket_t ticket, const char* what) {
  if (status.ok()) return {};
  return {status.code(), status.message() + "; ticket " + std::to_string(ticket) +
                             " was submitted and is valid, but " + what};
}

Status StreamPort::prepare() {
  watch_wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return watch_wake_.valid() ? Status() : errno_status("eventfd");
}

Status StreamPort::wait_after(void* stream, const StreamWait& wait, epd_ticket_t ticket) {
  return submitted_but(device_->wait(stream, wait, wait_by_), ticket, "the stream does not wait for it");
}

Status StreamPort::start_watch_locked() {
  if (watch_thread_.joinable()) return {};
  return start_thread(
      "epd-watch", [this] { watch(); }, watch_thread_);
}

void StreamPort::kick_watch() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(watch_wake_.get(), &one, sizeof(one));
}

// The application may sleep in a call of CUDA's for a stream that waits for the daemon. So somebody must look
// whether the daemon is there, even if no thread is in the library. Costs nothing until the connection
// closes.
void StreamPort::watch() {
  Lock lock = waits_.lock();
  for (int again_ms = kAgainAfter_ms;;) {
    if (release_a_group(lock)) continue;
    if (watch_stopping_) return;
    const int socket = connection_.ended().ok() ? connection_.socket().get() : -1;
    const int timeout_ms = any_released_locked() ? again_ms : -1;
    lock.unlock();
    pollfd entries[2] = {{watch_wake_.get(), POLLIN, 0}, {socket, POLLRDHUP, 0}};
    const bool in_vain = ::poll(entries, 2, timeout_ms) == 0;
    if (entries[0].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t n = ::read(watch_wake_.get(), &count, sizeof(count));
    }
    if (entries[1].revents != 0) connection_.look_at_socket();
    lock.lock();
    if (!in_vain) continue;
    want_releases_again_locked();
    again_ms = std::min(2 * again_ms, kAgainAtLeast_ms);
  }
}

bool StreamPort::any_released_locked() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group* group) { return group->release == Group::Release::kDone; });
}

// The engine may outlive the daemon for a moment, in which it writes `done` of an operation that it gives up,
// behind what has been written here for later ones.
void StreamPort::want_releases_again_locked() {
  for (Group* const group : groups_) {
    if (group->release == Group::Release::kDone) group->release = Group::Release::kWanted;
  }
}

// All slots of a group that has ended: of their last operations, also of those that have completed, for the
// engine may have died between saying so and writing the word. Or a slot whose operations have ended badly.
bool StreamPort::release_a_group(Lock& lock) {
  // Stays as long as there is something to release, see remove().
  const auto found =
      std::find_if(groups_.begin(), groups_.end(), [](const Group* group) { return group->wants_release(); });
  if (found == groups_.end()) return false;
  Group& group = **found;
  const bool all = group.release == Group::Release::kWanted;
  const AllSlotWords before = group.words;
  lock.unlock();
  unblocker_.unblock(group, before, all);
  lock.lock();
  for (std::uint32_t slot = 0; slot < group.shape.depth; ++slot) {
    if (all || before[slot].releasing) group.words[slot].releasing = false;
  }
  if (all) group.release = Group::Release::kDone;
  released_.notify_all();
  return true;
}

// Not while others are in flight there: the engine may write for these at any time, and a word must not fall
// back. They end too, for what makes an operation fail without its word ends all.
void StreamPort::want_slot_release_locked(Group& group, std::uint32_t slot) noexcept {
  SlotWords& words = group.words[slot];
  if (!words.behind || group.release != Group::Release::kNo || group.stream_in_flight(slot)) return;
  words.behind = false;
  words.releasing = true;
  kick_watch();
}

bool StreamPort::await_slot_release(Lock& lock, const Group& group, std::uint32_t slot) {
  const SlotWords& words = group.words[slot];
  if (!words.releasing) return false;
  released_.wait(lock, [&] { return !words.releasing; });
  return true;
}

void StreamPort::want_release_locked(Group& group) {
  if (group.release != Group::Release::kNo || !group.used_by_streams()) return;
  group.release = Group::Release::kWanted;
  kick_watch();
}

void StreamPort::want_releases_locked() {
  for (Group* const group : groups_) want_release_locked(*group);
}

void StreamPort::await_releases(Lock& lock) {
  released_.wait(lock, [&] {
    return std::none_of(groups_.begin(), groups_.end(),
                        [](const Group* group) { return group->wants_release(); });
  });
}

void StreamPort::remove(Group& group) {
  Lock lock = waits_.lock();
  if (exists()) {
    released_.wait(lock, [&] { return !group.wants_release(); });
    lock.unlock();
    // As cudaFree does: the waits just released, and whatever else of the application's reads the arena, must
    // have run before it is unmapped.
    device_->synchronize();
    lock.lock();
    released_.wait(lock, [&] { return !group.wants_release(); });
  }
  std::erase(groups_, &group);
  if (group.release == Group::Release::kNo) return;
  lock.unlock();
  [[maybe_unused]] const Status written = device_->finish_aside();
}

void StreamPort::stop_watch() {
  {
    const Lock lock = waits_.lock();
    watch_stopping_ = true;
  }
  kick_watch();
  if (watch_thread_.joinable()) watch_thread_.join();
}

}  // namespace epd::client

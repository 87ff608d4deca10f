// Session: operations that begin and end in a stream of the application's, and the thread that sees to it
// that no stream waits for a daemon that is gone. See README, "Streams".
#include "session.h"
#include "ticket_status.h"

#include <poll.h>
#include <unistd.h>
#include <algorithm>
#include <utility>

namespace epd::client {
namespace {

// Streams compare 32 bits of a ticket, cyclically: a word that is 2^31 behind would look as if it were ahead.
constexpr std::uint64_t kStaleAfter = std::uint64_t{1} << 30;

// When what has been released is released again: the first time, and no less often than the second.
constexpr int kAgainAfter_ms = 10;
constexpr int kAgainAtLeast_ms = 1000;

std::uint32_t low(epd_ticket_t ticket) {
  return static_cast<std::uint32_t>(ticket);
}

// Brings the words of a slot, that no stream has used for so long, up to just before the ticket.
Status renew_words(Device& device, const Group& group, std::uint32_t slot, epd_ticket_t ticket) {
  const std::uintptr_t base = group.user_base();
  Status status = device.write_aside(base + group.arena.ready_word(slot), low(ticket - 1));
  if (status.ok()) status = device.write_aside(base + group.arena.done_word(slot), low(ticket - 1));
  return status.ok() ? device.finish_aside() : status;
}

// Of a call that fails though it has submitted something.
Status submitted_but(const Status& status, epd_ticket_t ticket, const char* what) {
  if (status.ok()) return {};
  return {status.code(), status.message() + "; ticket " + std::to_string(ticket) +
                             " was submitted and is valid, but " + what};
}

}  // namespace

Status Session::check_stream(const SubmitRequest& request) const {
  if (!request.stream.any() || attachment_.device != nullptr) return {};
  const void* const stream = request.stream.stream;
  const abi::Welcome& welcome = attachment_.welcome;
  return invalid_argument((stream == nullptr
                               ? std::string("stream is NULL, CUDA's legacy default stream")
                               : "stream is " + std::to_string(reinterpret_cast<std::uintptr_t>(stream))) +
                          "; allowed: EPD_NO_STREAM, as this session's device is " +
                          std::string(welcome.device, abi::text_length(welcome.device)));
}

bool Session::begins_and_waits(const SubmitRequest& request) const {
  return request.stream.any() && attachment_.wait_by == WaitBy::kKernel &&
         (request.flags & abi::kFlagDefer) == 0;
}

// Without the session's mutex: while a stream's queue is full the driver makes its caller wait, and what
// empties the queue may need the mutex (completions, the end of the session).
Status Session::mark_ready(Lock& lock, Group& group, const SubmitRequest& request, epd_ticket_t ticket) {
  Status status = start_watch_locked();
  if (!status.ok()) return status;
  // Before anything is enqueued: a session that ends now releases this ticket too.
  SlotWords& words = group.words[request.slot];
  const epd_ticket_t before = words.last;
  const bool stale = ticket - before >= kStaleAfter;
  // Renewing would begin and end it.
  if (stale && group.stream_in_flight(request.slot)) {
    return would_block("slot " + std::to_string(request.slot) + " still has ticket " +
                       std::to_string(before) + " in flight, " + std::to_string(ticket - before) +
                       " tickets ago");
  }
  words.last = ticket;
  lock.unlock();
  Device& device = *attachment_.device;
  if (stale) status = renew_words(device, group, request.slot, ticket);
  if (status.ok()) {
    const std::uintptr_t ready = group.user_base() + group.arena.ready_word(request.slot);
    void* const stream = request.stream.stream;
    bool captures = false;
    status = begins_and_waits(request) ? device.check_stream(stream, captures)
                                       : device.write(stream, ready, low(ticket), attachment_.wait_by);
  }
  lock.lock();
  if (!status.ok()) words.last = before;
  return status;
}

// The stream may come to it late, but by the limit after this an engine that runs has ended it.
StreamWait Session::end_of(const Group& group, const Operation& op, epd_ticket_t ticket) {
  const auto limit = std::max<nanoseconds>(op.answer_by - SteadyClock::now(), kAnswerGrace);
  return {group.user_base() + group.arena.done_word(op.slot), low(ticket),
          static_cast<std::uint64_t>(limit.count())};
}

Status Session::enqueue_wait(void* stream, const StreamWait& wait, epd_ticket_t ticket) {
  return submitted_but(attachment_.device->wait(stream, wait, attachment_.wait_by), ticket,
                       "the stream does not wait for it");
}

Status Session::begin_and_wait(const Group& group, const SubmitRequest& request, const StreamWait& wait,
                               epd_ticket_t ticket) {
  const std::uintptr_t ready = group.user_base() + group.arena.ready_word(request.slot);
  return submitted_but(attachment_.device->write_and_wait(request.stream.stream, ready, wait), ticket,
                       "the stream neither lets it begin nor waits for it");
}

Status Session::wait_on_stream(Group& group, epd_ticket_t ticket, void* stream) {
  if (stream == EPD_NO_STREAM) return invalid_argument("stream is EPD_NO_STREAM; allowed: a stream");
  if (group.calls.by_calls()) return wait_for_call_on_stream(group, ticket, stream);
  StreamWait wait;
  {
    const Lock lock(mutex_);
    const auto found = operations_.find(ticket);
    if (found == operations_.end()) return unknown_ticket(ticket);
    if (found->second.group != &group) return of_another_group(ticket);
    if (!found->second.in_stream) return not_in_stream(ticket);
    wait = end_of(group, found->second, ticket);
  }
  return enqueue_wait(stream, wait, ticket);
}

// ---- the watch ------------------------------------------------------------------------------------

Status Session::start_watch_locked() {
  if (watch_thread_.joinable()) return {};
  return start_thread(
      "epd-watch", [this] { watch(); }, watch_thread_);
}

void Session::kick_watch() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(watch_wake_.get(), &one, sizeof(one));
}

// The application may sleep in a call of CUDA's for a stream that waits for the daemon. So somebody must look
// whether the daemon is there, even if no thread is in the library. Costs nothing until the connection
// closes.
void Session::watch() {
  Lock lock(mutex_);
  for (int again_ms = kAgainAfter_ms;;) {
    if (release_a_group(lock)) continue;
    if (watch_stopping_) return;
    const int socket = ended_.ok() ? attachment_.socket.get() : -1;
    const int timeout_ms = any_released_locked() ? again_ms : -1;
    lock.unlock();
    pollfd entries[2] = {{watch_wake_.get(), POLLIN, 0}, {socket, POLLRDHUP, 0}};
    const bool in_vain = ::poll(entries, 2, timeout_ms) == 0;
    if (entries[0].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t n = ::read(watch_wake_.get(), &count, sizeof(count));
    }
    if (entries[1].revents != 0) look_at_socket();
    lock.lock();
    if (!in_vain) continue;
    want_releases_again_locked();
    again_ms = std::min(2 * again_ms, kAgainAtLeast_ms);
  }
}

bool Session::any_released_locked() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& group) { return group->release == Group::Release::kDone; });
}

// The engine may outlive the daemon for a moment, in which it writes `done` of an operation that it gives up,
// behind what has been written here for later ones.
void Session::want_releases_again_locked() {
  for (const auto& group : groups_) {
    if (group->release == Group::Release::kDone) group->release = Group::Release::kWanted;
  }
}

// All slots of a group that has ended: of their last operations, also of those that have completed, for the
// engine may have died between saying so and writing the word. Or a slot whose operations have ended badly.
bool Session::release_a_group(Lock& lock) {
  for (const auto& owned : groups_) {
    Group& group = *owned;  // stays as long as there is something to release, see await_release
    if (!group.wants_release()) continue;
    const bool all = group.release == Group::Release::kWanted;
    const auto before = group.words;
    lock.unlock();
    if (group.calls.by_calls()) close_calls(group);
    for (std::uint32_t slot = 0; slot < group.shape.depth; ++slot) {
      const epd_ticket_t ticket = all ? before[slot].last : before[slot].releasing ? before[slot].ended : 0;
      if (ticket == 0) continue;
      const std::uintptr_t done = group.user_base() + group.arena.done_word(slot);
      // Where this fails, context or driver are gone, and the streams with them.
      [[maybe_unused]] const Status written = attachment_.device->write_aside(done, low(ticket));
    }
    // The word must not fall back behind what the engine writes for the slot's next operation.
    if (!all) [[maybe_unused]]
      const Status finished = attachment_.device->finish_aside();
    lock.lock();
    for (std::uint32_t slot = 0; slot < group.shape.depth; ++slot) {
      if (all || before[slot].releasing) group.words[slot].releasing = false;
    }
    if (all) group.release = Group::Release::kDone;
    released_.notify_all();
    return true;
  }
  return false;
}

// `closed` comes first, see abi::CommandWords: of a kernel that rings and this one sees the other.
void Session::close_calls(const Group& group) {
  Device& device = *attachment_.device;
  const CommandPlaces at{group.command_words()};
  // As above.
  [[maybe_unused]] Status written = device.write_aside(at.closed(), 1);
  for (std::uint32_t flag = 0; flag < abi::kCommandFlags; ++flag)
    written = device.write_aside(at.flag(flag), 1);
}

// Not while others are in flight there: the engine may write for these at any time, and a word must not fall
// back. They end too, for what makes an operation fail without its word ends all.
void Session::want_slot_release_locked(Group& group, std::uint32_t slot) noexcept {
  SlotWords& words = group.words[slot];
  if (!words.behind || group.release != Group::Release::kNo || group.stream_in_flight(slot)) return;
  words.behind = false;
  words.releasing = true;
  kick_watch();
}

bool Session::await_slot_release(Lock& lock, const Group& group, std::uint32_t slot) {
  const SlotWords& words = group.words[slot];
  if (!words.releasing) return false;
  released_.wait(lock, [&] { return !words.releasing; });
  return true;
}

// From here on nothing is submitted in the group any more: it is left, or the session has ended.
void Session::want_release_locked(Group& group) {
  if (group.release != Group::Release::kNo) return;
  if (group.calls.rung) {
    group.release = Group::Release::kWanted;
    kick_watch();
    return;
  }
  for (const SlotWords& words : group.words) {
    if (words.last == 0) continue;
    group.release = Group::Release::kWanted;
    kick_watch();
    return;
  }
}

void Session::await_releases(Lock& lock) {
  released_.wait(lock, [&] {
    return std::none_of(groups_.begin(), groups_.end(),
                        [](const auto& group) { return group->wants_release(); });
  });
}

void Session::await_release(Group& group) {
  if (attachment_.device == nullptr) return;
  {
    Lock lock(mutex_);
    released_.wait(lock, [&] { return !group.wants_release(); });
  }
  // As cudaFree does: the waits just released, and whatever else of the application's reads the arena, must
  // have run before it is unmapped.
  attachment_.device->synchronize();
  Lock lock(mutex_);
  released_.wait(lock, [&] { return !group.wants_release(); });
  if (group.release == Group::Release::kNo) return;
  group.release = Group::Release::kOver;
  lock.unlock();
  [[maybe_unused]] const Status written = attachment_.device->finish_aside();
}

void Session::stop_watch() {
  {
    const Lock lock(mutex_);
    watch_stopping_ = true;
  }
  kick_watch();
  if (watch_thread_.joinable()) watch_thread_.join();
}

}  // namespace epd::client

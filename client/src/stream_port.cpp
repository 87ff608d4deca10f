#include "stream_port.h"

#include "thread.h"
#include "ticket_status.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <utility>

namespace epd::client {

using stream_kernels::StagedStep;

namespace {

// Streams that were unblocked are unblocked again after the first time. The pause doubles, up to the second.
constexpr int kAgainAfter_ms = 10;
constexpr int kMemoryLook_ms = 500;
constexpr int kAgainAtLeast_ms = 1000;

Status not_waiting(const Status& status, epd_ticket_t ticket) {
  return submitted_but(status, ticket, "the stream does not wait for it");
}

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

Status StreamPort::wait_after(Group& group, void* stream, const Following& its) {
  if (group.events.empty()) return wait_and_copy(group, stream, its);
  bool captures = false;
  const Status status = device_->check_stream(stream, captures);
  if (!status.ok()) return not_waiting(status, its.ticket);
  // An event that is recorded in a capture belongs to the graph.
  return captures ? wait_and_copy(group, stream, its) : wait_with_event(group, stream, its);
}

Status StreamPort::wait_and_copy(const Group& group, void* stream, const Following& its) {
  const Status status = device_->wait(stream, its.flag);
  if (!status.ok()) return not_waiting(status, its.ticket);
  if (its.copies.num_out == 0) return {};
  StagedStep step;
  step.staging = group.staging_words(its.slot);
  step.copies = its.copies;
  step.copies.num_in = 0;
  return submitted_but(device_->launch(stream, its.op, step), its.ticket, "its outputs are not copied");
}

// The event may belong to a later operation of the slot by the time that somebody looks at it. It completes
// later then, never earlier.
Status StreamPort::wait_with_event(Group& group, void* stream, const Following& its) {
  SlotEvent& slot = group.events[its.slot];
  const std::lock_guard<std::mutex> pair(group.events_mutex);
  // Only this function writes the ticket, under the mutex that it has.
  if (slot.ticket == its.ticket)
    return not_waiting(device_->wait_event(stream, slot.event.get()), its.ticket);
  Status status = wait_and_copy(group, stream, its);
  if (status.ok()) status = not_waiting(device_->record(stream, slot.event.get()), its.ticket);
  if (!status.ok()) return status;
  const Lock lock = waits_.lock();
  slot.ticket = its.ticket;
  return {};
}

Status StreamPort::wait_for_copies(Group& group, void* stream, std::uint32_t slot, epd_ticket_t ticket) {
  const std::lock_guard<std::mutex> pair(group.events_mutex);
  if (group.events.empty() || group.events[slot].ticket != ticket) return copied_elsewhere(ticket);
  return not_waiting(device_->wait_event(stream, group.events[slot].event.get()), ticket);
}

Status StreamPort::make_events(Group& group) const {
  if (!has_events()) return {};
  std::vector<SlotEvent> events(group.shape.depth);
  for (SlotEvent& its : events) {
    Status made = device_->make_event(its.event);
    if (!made.ok()) return made;
  }
  group.events = std::move(events);
  return {};
}

Status StreamPort::event_of(const Group& group, epd_ticket_t ticket, void*& event) {
  if (!exists())
    return {StatusCode::kUnsupported, "the session's device has no events; allowed: on CUDA devices"};
  if (!has_events())
    return invalid_argument(
        "the streams of the session do not wait by event; allowed: with EPD_WAIT_BY_EVENT at attach");
  const Lock lock = waits_.lock();
  const auto found = std::find_if(group.events.begin(), group.events.end(),
                                  [&](const SlotEvent& its) { return ticket != 0 && its.ticket == ticket; });
  if (found == group.events.end())
    return not_found("ticket " + std::to_string(ticket) +
                     " has no event: its slot has a later operation, no stream waits for it (defer_receive), "
                     "it was captured, or it is no ticket of a stream's operation in this group");
  event = found->event.get();
  return {};
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

// The application may wait in a CUDA call for a stream that waits for the daemon, with no thread in the
// library. So this thread watches the connection. It costs nothing until the connection closes, but for a
// look at what the application has freed.
void StreamPort::watch() {
  Lock lock = waits_.lock();
  for (int again_ms = kAgainAfter_ms;;) {
    if (unblock_a_group(lock)) continue;
    if (watch_stopping_) return;
    const int socket = connection_.ended().ok() ? connection_.socket().get() : -1;
    const bool unblocked = any_unblocked_locked();
    const bool mapped = any_mapped_locked();
    const int timeout_ms = unblocked ? again_ms : mapped ? kMemoryLook_ms : -1;
    lock.unlock();
    pollfd entries[2] = {{watch_wake_.get(), POLLIN, 0}, {socket, POLLRDHUP, 0}};
    const bool in_vain = ::poll(entries, 2, timeout_ms) == 0;
    if (entries[0].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t n = ::read(watch_wake_.get(), &count, sizeof(count));
    }
    if (entries[1].revents != 0) connection_.look_at_socket();
    if (in_vain && mapped) unblocker_.look_at_memory();
    lock.lock();
    if (!in_vain || !unblocked) continue;
    want_unblocks_again_locked();
    again_ms = std::min(2 * again_ms, kAgainAtLeast_ms);
  }
}

bool StreamPort::any_unblocked_locked() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group* group) { return group->unblock == Group::Unblock::kDone; });
}

bool StreamPort::any_mapped_locked() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group* group) { return group->mapped.has_news(); });
}

// The engine may live a moment longer than the daemon, and write `done` of an operation that it gives up.
// That may be behind what the library has written for later ones.
void StreamPort::want_unblocks_again_locked() {
  for (Group* const group : groups_) {
    if (group->unblock == Group::Unblock::kDone) group->unblock = Group::Unblock::kWanted;
  }
}

// Called for a group that has ended, also if all its operations have completed: the engine may have died
// between a completion and the word.
bool StreamPort::unblock_a_group(Lock& lock) {
  // The group stays until its streams are unblocked, see remove().
  const auto found =
      std::find_if(groups_.begin(), groups_.end(), [](const Group* group) { return group->wants_unblock(); });
  if (found == groups_.end()) return false;
  Group& group = **found;
  lock.unlock();
  unblocker_.unblock(group);
  lock.lock();
  group.unblock = Group::Unblock::kDone;
  unblocked_.notify_all();
  return true;
}

void StreamPort::want_unblock_locked(Group& group) {
  if (group.unblock != Group::Unblock::kNo || !group.calls.in_streams) return;
  group.unblock = Group::Unblock::kWanted;
  kick_watch();
}

void StreamPort::want_unblocks_locked() {
  for (Group* const group : groups_) want_unblock_locked(*group);
}

void StreamPort::await_unblocks(Lock& lock) {
  sleep_until_ready(unblocked_, lock, [&] {
    return std::none_of(groups_.begin(), groups_.end(),
                        [](const Group* group) { return group->wants_unblock(); });
  });
}

void StreamPort::remove(Group& group) {
  Lock lock = waits_.lock();
  if (exists()) {
    sleep_until_ready(unblocked_, lock, [&] { return !group.wants_unblock(); });
    lock.unlock();
    // Like cudaFree: the waits that just ended, and all other work of the application that reads the arena,
    // must have run before it is unmapped.
    device_->synchronize();
    lock.lock();
    sleep_until_ready(unblocked_, lock, [&] { return !group.wants_unblock(); });
  }
  std::erase(groups_, &group);
  if (group.unblock == Group::Unblock::kNo) return;
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

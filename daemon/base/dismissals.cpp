#include "dismissals.h"

#include "base/thread.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <algorithm>
#include <utility>

namespace epd {

void Dismissals::add(std::uint32_t uid, int socket, std::vector<std::byte> last_words) {
  const bool own = users_.contains(uid) || users_.size() < kMostUsers;
  users_[own ? uid : kOthers].waiting.push_back({socket, std::move(last_words)});
}

bool Dismissals::waiting() const {
  return std::any_of(users_.begin(), users_.end(),
                     [](const auto& entry) { return !entry.second.waiting.empty(); });
}

void Dismissals::run(bool no_room) {
  for (auto& [uid, user] : users_) {
    std::erase_if(user.batches, [](const auto& batch) { return batch->done && !task_lives(batch->tid); });
    const std::size_t running = user.batches.size();
    if (user.waiting.empty()) continue;
    const std::size_t enough =
        running == 0 ? 1 : std::min(kFirstBatch << std::min<std::size_t>(running, 8), kLargestBatch);
    if (user.waiting.size() < enough && !no_room) continue;
    start(user);
  }
  std::erase_if(
      users_, [](const auto& entry) { return entry.second.waiting.empty() && entry.second.batches.empty(); });
}

// If no thread can be started, the connections keep waiting.
bool Dismissals::start(User& user) {
  const auto batch = std::make_shared<Batch>();
  auto own = std::make_unique<std::shared_ptr<Batch>>(batch);
  user.batches.reserve(user.batches.size() + 1);
  batch->sockets.reserve(user.waiting.size());
  for (const Dismissed& one : user.waiting) batch->sockets.push_back(one.socket);
  std::sort(batch->sockets.begin(), batch->sockets.end());
  batch->dismissed.swap(user.waiting);
  const bool started = start_detached_thread(end_batch, own.get()).ok();
  if (started) (void)own.release();
  if (!started || !batch->departure.has_left()) {
    user.waiting.swap(batch->dismissed);
    return false;
  }
  user.batches.push_back(batch);
  for (const int socket : batch->sockets) own_table::close(socket);
  batch->departure.permit();
  return true;
}

void* Dismissals::end_batch(void* argument) {
  const std::unique_ptr<std::shared_ptr<Batch>> own(static_cast<std::shared_ptr<Batch>*>(argument));
  Batch& batch = **own;
  if (!batch.departure.leave_sorted(batch.sockets)) return nullptr;
  batch.tid = ::gettid();
  for (Dismissed& one : batch.dismissed) {
    if (one.last_words.empty()) continue;
    iovec part{one.last_words.data(), one.last_words.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    own_table::send(one.socket, message, MSG_DONTWAIT);
  }
  batch.done = true;
  return nullptr;
}

}  // namespace epd

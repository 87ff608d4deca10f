#include "base/closer.h"

#include "base/thread.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <algorithm>

namespace epd {
namespace {

void empty_memory(int memfd) {
  struct stat info {};
  if (::fstat(memfd, &info) == 0 && info.st_size > 0)
    (void)::fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, info.st_size);
}

}  // namespace

Closer::~Closer() {
  const std::lock_guard lock(shared_->mutex);
  for (auto& [uid, queue] : shared_->queues) {
    for (Closing& closing : queue.waiting) (void)closing.fd.release();
    queue.waiting.clear();
  }
}

void Closer::close(UniqueFd descriptor, std::uint32_t uid) {
  add({std::move(descriptor)}, uid);
}

void Closer::add(Closing closing, std::uint32_t uid) {
  if (!closing.fd.valid()) return;
  const std::lock_guard lock(shared_->mutex);
  Queue& queue = shared_->queues[uid];
  queue.waiting.push_back(std::move(closing));
  // The daemon's own descriptors never wait behind those of users.
  if (!queue.has_thread && (shared_->threads < kMaxThreads || uid == kDaemon))
    queue.has_thread = start_thread(uid);
}

std::size_t Closer::waiting(std::uint32_t uid) const {
  const std::lock_guard lock(shared_->mutex);
  const auto queue = shared_->queues.find(uid);
  return queue == shared_->queues.end() ? 0 : queue->second.waiting.size() + (queue->second.closing ? 1 : 0);
}

bool Closer::idle() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->queues.empty() && shared_->threads == 0;
}

struct Closer::Thread {
  std::shared_ptr<Shared> shared;
  std::uint32_t uid;
};

// False: there is no room for a thread now. A thread that has finished its queue takes this one, or the next
// close() starts one.
bool Closer::start_thread(std::uint32_t uid) {
  auto thread = std::make_unique<Thread>(Thread{shared_, uid});
  if (!start_detached_thread(run, thread.get()).ok()) return false;
  (void)thread.release();
  ++shared_->threads;
  return true;
}

void Closer::serve(Shared& shared, std::uint32_t uid, std::unique_lock<std::mutex>& lock) {
  for (;;) {
    Queue& queue = shared.queues.at(uid);
    queue.closing = !queue.waiting.empty();
    if (!queue.closing) break;
    Closing next = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    lock.unlock();
    if (next.empty) empty_memory(next.fd.get());
    next.fd.reset();
    lock.lock();
  }
  shared.queues.erase(uid);
}

void* Closer::run(void* argument) {
  const std::unique_ptr<Thread> own(static_cast<Thread*>(argument));
  Shared& shared = *own->shared;
  std::unique_lock lock(shared.mutex);
  serve(shared, own->uid, lock);
  for (;;) {
    const auto next = std::find_if(shared.queues.begin(), shared.queues.end(),
                                   [](const auto& entry) { return !entry.second.has_thread; });
    if (next == shared.queues.end()) break;
    next->second.has_thread = true;
    serve(shared, next->first, lock);
  }
  --shared.threads;
  return nullptr;
}

}  // namespace epd

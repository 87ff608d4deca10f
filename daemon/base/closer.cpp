#include "base/closer.h"

#include "base/thread.h"

namespace epd {
Closer::~Closer() {
  const std::lock_guard lock(shared_->mutex);
  for (UniqueFd& fd : shared_->waiting) (void)fd.release();
  shared_->waiting.clear();
}

void Closer::close(UniqueFd descriptor) {
  if (!descriptor.valid()) return;
  const std::lock_guard lock(shared_->mutex);
  shared_->waiting.push_back(std::move(descriptor));
  if (shared_->threads < kMaxThreads) start_thread();
}

bool Closer::idle() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->waiting.empty() && shared_->threads == 0;
}

// If there is no room for a thread now, those that run take it along, or the next close() starts one.
void Closer::start_thread() {
  auto shared = std::make_unique<std::shared_ptr<Shared>>(shared_);
  if (!start_detached_thread(run, shared.get()).ok()) return;
  (void)shared.release();
  ++shared_->threads;
}

void* Closer::run(void* argument) {
  const std::unique_ptr<std::shared_ptr<Shared>> own(static_cast<std::shared_ptr<Shared>*>(argument));
  Shared& shared = **own;
  std::unique_lock lock(shared.mutex);
  while (!shared.waiting.empty()) {
    UniqueFd fd = std::move(shared.waiting.front());
    shared.waiting.pop_front();
    lock.unlock();
    fd.reset();
    lock.lock();
  }
  --shared.threads;
  return nullptr;
}

}  // namespace epd

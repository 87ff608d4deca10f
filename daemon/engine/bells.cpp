#include "bells.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

namespace epd {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;

Status exhausted(const std::string& why) {
  return {StatusCode::kResourceExhausted, "the engine can't watch the session's doorbells: " + why};
}

// Detached, with all signals blocked. 0, or the error.
int start_thread(void* (*run)(void*), void* argument) {
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  ::pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  pthread_t thread;
  const int error = ::pthread_create(&thread, &attributes, run, argument);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_attr_destroy(&attributes);
  return error;
}

}  // namespace

struct Bells::Shared {
  UniqueFd engine_bell;
  UniqueFd client_bell;
  std::shared_ptr<const UniqueFd> loop_bell;
  UniqueFd orders;  // an eventfd, the engine's own: to ring the client, or to look at `closing`
  std::atomic<bool> closing{false};
  std::atomic<bool> closed{false};

  void serve();
  void clear_engine_bell() const;
};

// Not read(): the client shares the description and may have made it blocking.
void Bells::Shared::clear_engine_bell() const {
  std::uint64_t rings;
  iovec part{&rings, sizeof(rings)};
  [[maybe_unused]] const ssize_t n = ::preadv2(engine_bell.get(), &part, 1, -1, RWF_NOWAIT);
}

// A bell is emptied before what it says is passed on: a ring that comes between is passed on once more.
void Bells::Shared::serve() {
  pollfd waiting[] = {{orders.get(), POLLIN, 0}, {engine_bell.get(), POLLIN, 0}};
  while (!closing.load(std::memory_order_acquire)) {
    if (::poll(waiting, 2, -1) < 0) continue;
    if (waiting[1].revents != 0) {
      clear_engine_bell();
      ring_eventfd(loop_bell->get());
    }
    if (waiting[0].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t n = ::read(orders.get(), &count, sizeof(count));
      const char byte = 0;
      [[maybe_unused]] const ssize_t sent = ::send(client_bell.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
  }
  engine_bell.reset();
  client_bell.reset();
  closed.store(true, std::memory_order_release);
  ring_eventfd(loop_bell->get());
}

Result<std::unique_ptr<Bells>> Bells::start(UniqueFd engine_bell, UniqueFd client_bell,
                                            std::shared_ptr<const UniqueFd> loop_bell) {
  Result<UniqueFd> orders = make_eventfd();
  if (!orders.ok()) return exhausted(orders.status().message());
  auto shared = std::make_shared<Shared>();
  shared->engine_bell = std::move(engine_bell);
  shared->client_bell = std::move(client_bell);
  shared->loop_bell = std::move(loop_bell);
  shared->orders = std::move(*orders);
  auto of_thread = std::make_unique<std::shared_ptr<Shared>>(shared);
  const auto run = [](void* argument) -> void* {
    ::pthread_setname_np(::pthread_self(), "epd-bells");
    const std::unique_ptr<std::shared_ptr<Shared>> own(static_cast<std::shared_ptr<Shared>*>(argument));
    (*own)->serve();
    return nullptr;
  };
  if (const int error = start_thread(run, of_thread.get()); error != 0)
    return exhausted(std::string("no thread: ") + std::strerror(error));
  (void)of_thread.release();
  return std::unique_ptr<Bells>(new Bells(std::move(shared)));
}

void Bells::ring_client() {
  ring_eventfd(shared_->orders.get());
}

void Bells::close() {
  shared_->closing.store(true, std::memory_order_release);
  ring_eventfd(shared_->orders.get());
}

bool Bells::closed() const {
  return shared_->closed.load(std::memory_order_acquire);
}

}  // namespace epd

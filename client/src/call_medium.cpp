#include "call_medium.h"

#include <sys/socket.h>
#include <atomic>

namespace epd::client {
namespace {

template <typename T>
std::atomic_ref<T> word_at(std::uintptr_t address) {
  return std::atomic_ref(*reinterpret_cast<T*>(address));
}

}  // namespace

Status HostMedium::map_results(const UniqueFd& fd, std::uint64_t bytes, ResultsMemory& out) {
  Result<Mapping> mapped = map_sealed(fd, bytes, Access::kReadOnly, "the results of calls");
  if (mapped.ok()) out.of_host = std::move(*mapped);
  return mapped.status();
}

Status HostMedium::call(std::uintptr_t place, const abi::PackedCall& call) {
  for (const std::uint64_t& word : call.words)
    word_at<std::uint64_t>(place + sizeof(word) * static_cast<std::size_t>(&word - call.words))
        .store(word, std::memory_order_release);
  return {};
}

// The engine looks at the ring before it sleeps, so the bell's word is not needed.
Status HostMedium::ring(std::uintptr_t /*bell*/) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (b_.engine_sleep.sleeping.load(std::memory_order_relaxed) == abi::kAwake) return {};
  const char byte = 0;
  [[maybe_unused]] const ssize_t sent = ::send(bell_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  return {};
}

Status HostMedium::write(std::uintptr_t word, std::uint32_t value) {
  word_at<std::uint32_t>(word).store(value, std::memory_order_release);
  return {};
}

Status HostMedium::read(std::uintptr_t from, std::span<std::uint32_t> words) {
  for (std::uint32_t& word : words) {
    word = word_at<std::uint32_t>(from).load(std::memory_order_acquire);
    from += sizeof(word);
  }
  return {};
}

}  // namespace epd::client

#include "fake_cuda/word_kernels.h"

#include "fake_cuda/memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace epd::fake_cuda {
namespace {

using Word = std::uint32_t;

template <typename T>
T parameter(void** parameters, std::size_t index) {
  T value;
  std::memcpy(&value, parameters[index], sizeof(value));
  return value;
}

// A kernel that touches what its device does not reach.
bool fault(Stream& stream, const char* kernel, const Word* word) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s: the word at %p is not memory of device %d, or mapped for it", kernel,
                static_cast<const void*>(word), stream.device().machine);
  complain(text);
  stream.device().fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  return false;
}

bool reaches(const Stream& stream, const Word* word) {
  return reinterpret_cast<std::uintptr_t>(word) % sizeof(Word) == 0 &&
         memory().accessible(stream.device().ordinal, word, sizeof(Word));
}

bool signal(Stream& stream, const char* kernel, Word* word, Word value) {
  const auto store = [&] { std::atomic_ref(*word).store(value, std::memory_order_release); };
  return (reaches(stream, word) && memory().with(stream.device().ordinal, word, sizeof(Word), store)) ||
         fault(stream, kernel, word);
}

bool await(Stream& stream, const char* kernel, Word* word, Word value, std::uint64_t limit_ns) {
  const auto begin = std::chrono::steady_clock::now();
  bool mapped = reaches(stream, word);
  const bool good = stream.wait_until([&] {
    bool there = false;
    mapped = mapped && memory().with(stream.device().ordinal, word, sizeof(Word), [&] {
      const Word now = std::atomic_ref(*word).load(std::memory_order_acquire);
      there = static_cast<std::int32_t>(now - value) >= 0;
    });
    const auto passed = std::chrono::steady_clock::now() - begin;
    return there || !mapped || passed >= std::chrono::nanoseconds(limit_ns);
  });
  return mapped ? good : fault(stream, kernel, word);
}

}  // namespace

bool is_word_kernel(const std::string& kernel) {
  return std::find(kWordKernels.begin(), kWordKernels.end(), kernel) != kWordKernels.end();
}

Stream::Work word_kernel(const std::string& kernel, void** parameters, Stream& stream) {
  auto* const first = parameter<Word*>(parameters, 0);
  if (first == nullptr) return [] { return true; };
  if (kernel == kWordKernels[0])
    return [&stream, first, value = parameter<Word>(parameters, 1)] {
      return signal(stream, kWordKernels[0], first, value);
    };
  if (kernel == kWordKernels[1])
    return [&stream, first, value = parameter<Word>(parameters, 1),
            limit_ns = parameter<std::uint64_t>(parameters, 2)] {
      return await(stream, kWordKernels[1], first, value, limit_ns);
    };
  return [&stream, first, done = parameter<Word*>(parameters, 1), value = parameter<Word>(parameters, 2),
          limit_ns = parameter<std::uint64_t>(parameters, 3)] {
    return signal(stream, kWordKernels[2], first, value) &&
           await(stream, kWordKernels[2], done, value, limit_ns);
  };
}

}  // namespace epd::fake_cuda

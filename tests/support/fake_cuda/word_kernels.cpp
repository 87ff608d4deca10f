#include "fake_cuda/word_kernels.h"

#include "fake_cuda/played_thread.h"
#include "stream_words.h"

#include <algorithm>
#include <cstring>

namespace epd::fake_cuda {
namespace {

using abi::CallWords;
using Word = std::uint32_t;

template <typename T>
T parameter(void** parameters, std::size_t index) {
  T value;
  std::memcpy(&value, parameters[index], sizeof(T));  // NOLINT(bugprone-sizeof-expression): T a pointer
  return value;
}

// The entries of client/src/stream_kernels.cu.
std::function<void()> code_of(const std::string& kernel, void** parameters) {
  auto* const first = parameter<Word*>(parameters, 0);
  if (first == nullptr) return [] {};
  if (kernel == kWordKernels[0])
    return [first, value = parameter<Word>(parameters, 1)] { ordered::store_release_system(first, value); };
  if (kernel == kWordKernels[1])
    return
        [first, value = parameter<Word>(parameters, 1), limit_ns = parameter<std::uint64_t>(parameters, 2)] {
          stream_kernels::await(first, value, limit_ns);
        };
  if (kernel == kWordKernels[2])
    return [first, done = parameter<const Word*>(parameters, 1), value = parameter<Word>(parameters, 2),
            limit_ns = parameter<std::uint64_t>(parameters, 3)] {
      ordered::store_release_system(first, value);
      stream_kernels::await(done, value, limit_ns);
    };
  auto* const words = parameter<CallWords*>(parameters, 0);
  if (kernel == kWordKernels[3])
    return [words, its = parameter<stream_kernels::Enqueued>(parameters, 1)] {
      stream_kernels::enqueue(*words, its);
    };
  return [words, slot = parameter<Word>(parameters, 1), limit_ns = parameter<std::uint64_t>(parameters, 2)] {
    stream_kernels::await_last(*words, slot, limit_ns);
  };
}

}  // namespace

bool is_word_kernel(const std::string& kernel) {
  return std::find(kWordKernels.begin(), kWordKernels.end(), kernel) != kWordKernels.end();
}

Stream::Work word_kernel(const std::string& kernel, void** parameters) {
  return [kernel, code = code_of(kernel, parameters)](Stream& stream) { return play(stream, kernel, code); };
}

}  // namespace epd::fake_cuda

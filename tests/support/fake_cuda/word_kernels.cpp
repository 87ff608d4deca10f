#include "fake_cuda/word_kernels.h"

#include "fake_cuda/memory.h"
#include "proto/commands.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace epd::fake_cuda {
namespace {

using Word = std::uint32_t;

template <typename T>
T parameter(void** parameters, std::size_t index) {
  T value;
  std::memcpy(&value, parameters[index], sizeof(T));  // NOLINT(bugprone-sizeof-expression): T a pointer
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

// ---- commands

using abi::CommandWords;

struct Command {
  CommandWords* words = nullptr;
  Word slot = 0;
  Word program = 0;
  Word num_tokens = 0;
  const Word* num_tokens_at = nullptr;
  Word flagged = 0;
  Word waits = 0;
  std::uint64_t limit_ns = 0;
};

bool reaches(const Stream& stream, const CommandWords* words) {
  return reinterpret_cast<std::uintptr_t>(words) % alignof(CommandWords) == 0 &&
         memory().accessible(stream.device().ordinal, words, sizeof(*words));
}

Word load(const Word& word) {
  return std::atomic_ref(const_cast<Word&>(word)).load(std::memory_order_acquire);
}
void store(Word& word, Word value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

// Until the command before `end` has ended, or none will any more.
bool await_end(Stream& stream, const char* kernel, const CommandWords* words, Word end,
               std::uint64_t limit_ns) {
  const auto begin = std::chrono::steady_clock::now();
  bool mapped = true;
  const bool good = stream.wait_until([&] {
    bool there = false;
    mapped = memory().with(stream.device().ordinal, words, sizeof(*words), [&] {
      there = abi::has_ended(load(words->done), end) || load(words->closed) != 0;
    });
    const auto passed = std::chrono::steady_clock::now() - begin;
    return there || !mapped || passed >= std::chrono::nanoseconds(limit_ns);
  });
  return mapped ? good : fault(stream, kernel, &words->done);
}

// Returns its number + 1.
Word ring(const Command& command) {
  CommandWords& words = *command.words;
  if (command.flagged != 0) store(words.flags[command.program], 0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool closed = load(words.closed) != 0;
  const Word epoch = load(words.epoch);
  const Word given = command.num_tokens_at != nullptr ? load(*command.num_tokens_at) : command.num_tokens;
  const Word number = std::atomic_ref(words.tail).fetch_add(1);
  store(words.rung[command.slot], number + 1);
  if (closed) {
    store(words.flags[command.program], 1);
    return number + 1;
  }
  const std::uint64_t packed = abi::pack(
      {number, std::min(given, abi::kMostCommandTokens), command.program, command.flagged != 0, epoch});
  std::atomic_ref(words.commands[number % abi::kCommandSlots]).store(packed, std::memory_order_release);
  return number + 1;
}

bool command(Stream& stream, const Command& command) {
  const char* const kernel = kWordKernels[3];
  if (command.num_tokens_at != nullptr && !reaches(stream, command.num_tokens_at))
    return fault(stream, kernel, command.num_tokens_at);
  if (!reaches(stream, command.words)) return fault(stream, kernel, &command.words->tail);
  const Word end = ring(command);
  return command.waits == 0 || await_end(stream, kernel, command.words, end, command.limit_ns);
}

bool await_command(Stream& stream, const CommandWords* words, Word slot, std::uint64_t limit_ns) {
  const char* const kernel = kWordKernels[4];
  if (!reaches(stream, words)) return fault(stream, kernel, &words->done);
  return await_end(stream, kernel, words, load(words->rung[slot]), limit_ns);
}

}  // namespace

bool is_word_kernel(const std::string& kernel) {
  return std::find(kWordKernels.begin(), kWordKernels.end(), kernel) != kWordKernels.end();
}

Stream::Work word_kernel(const std::string& kernel, void** parameters) {
  auto* const first = parameter<Word*>(parameters, 0);
  if (first == nullptr) return [](Stream&) { return true; };
  if (kernel == kWordKernels[0])
    return [first, value = parameter<Word>(parameters, 1)](Stream& stream) {
      return signal(stream, kWordKernels[0], first, value);
    };
  if (kernel == kWordKernels[1])
    return [first, value = parameter<Word>(parameters, 1),
            limit_ns = parameter<std::uint64_t>(parameters, 2)](Stream& stream) {
      return await(stream, kWordKernels[1], first, value, limit_ns);
    };
  if (kernel == kWordKernels[3])
    return [given = Command{parameter<CommandWords*>(parameters, 0), parameter<Word>(parameters, 1),
                            parameter<Word>(parameters, 2), parameter<Word>(parameters, 3),
                            parameter<const Word*>(parameters, 4), parameter<Word>(parameters, 5),
                            parameter<Word>(parameters, 6), parameter<std::uint64_t>(parameters, 7)}](
               Stream& stream) { return command(stream, given); };
  if (kernel == kWordKernels[4])
    return [words = parameter<CommandWords*>(parameters, 0), slot = parameter<Word>(parameters, 1),
            limit_ns = parameter<std::uint64_t>(parameters, 2)](Stream& stream) {
      return await_command(stream, words, slot, limit_ns);
    };
  return [first, done = parameter<Word*>(parameters, 1), value = parameter<Word>(parameters, 2),
          limit_ns = parameter<std::uint64_t>(parameters, 3)](Stream& stream) {
    return signal(stream, kWordKernels[2], first, value) &&
           await(stream, kWordKernels[2], done, value, limit_ns);
  };
}

}  // namespace epd::fake_cuda

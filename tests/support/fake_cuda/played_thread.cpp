#include "fake_cuda/played_thread.h"

#include "fake_cuda/memory.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>

namespace epd::fake_cuda {
namespace {

std::atomic<std::uint64_t> passed{0};  // beyond the clock's time

struct Over {};
struct OutOfReach {
  const void* at;
};

class PlayedThread : public ordered::Player {
 public:
  explicit PlayedThread(Stream& stream) : stream_(stream) { ordered::player = this; }
  ~PlayedThread() override { ordered::player = nullptr; }
  PlayedThread(const PlayedThread&) = delete;
  PlayedThread& operator=(const PlayedThread&) = delete;

  // It stays mapped meanwhile. (What is larger than a word is aligned like its words.)
  void begin(const void* at, std::size_t bytes) override {
    if (stream_.held()) wait_while_held();
    const std::size_t word = bytes < sizeof(std::uint64_t) ? bytes : sizeof(std::uint64_t);
    if (reinterpret_cast<std::uintptr_t>(at) % word != 0 ||
        !memory().begin_use(stream_.device().ordinal, at, bytes))
      throw OutOfReach{at};
    if (!stream_.destroyed()) return;
    memory().end_use();  // its addresses may be another's by now
    throw Over{};
  }
  void end() override { memory().end_use(); }
  void look_again(std::uint32_t looks) override {
    if (stream_.over()) throw Over{};
    stream_.look_failed();
    if (looks <= 1) backoff_ = Backoff();
    backoff_.pause();
  }
  std::uint64_t nanoseconds() override {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) + passed;
  }

 private:
  void wait_while_held() {
    if (!stream_.wait_until([] { return true; })) throw Over{};
  }

  Stream& stream_;
  Backoff backoff_;
};

}  // namespace

void pass_time(std::uint64_t nanoseconds) {
  passed += nanoseconds;
}

bool play(Stream& stream, const std::string& kernel, const std::function<void()>& code) {
  const PlayedThread thread(stream);
  try {
    code();
    return true;
  } catch (const Over&) {
    return false;
  } catch (const OutOfReach& fault) {
    char text[160];
    std::snprintf(text, sizeof(text), "%s: the word at %p is not memory of device %d, or mapped for it",
                  kernel.c_str(), fault.at, stream.device().machine);
    return stream.fault(text);
  }
}

}  // namespace epd::fake_cuda

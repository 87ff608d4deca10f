// Calls: whatever bytes a client writes where its host's calls lie, the engine must continue to serve others.
// Input: records of 20 bytes, a word that says which number its call bears, and the lower halves of the
// call's words. They are written one after another for a fresh session that has joined a group of one rank.
// Then a thread continues to write, while the engine takes them: words of calls, the bell, the sleep word and
// the arena's topk_idx, with bytes of the input and of a generator seeded by it. A bystander session must get
// its noops carried out throughout.

#include "engine_harness.h"
#include "fuzz.h"

#include "base/log.h"
#include "proto/arena.h"
#include "proto/call_words.h"

#include <atomic>
#include <numeric>
#include <random>
#include <thread>

namespace epd::test {
namespace {

constexpr abi::GroupShape kShape = [] {
  abi::GroupShape shape{
      1, 4, 8, 128, 2, 2, abi::Payload::kFp8Cast, abi::IndexType::kInt64, abi::LossPolicy::kFailFast};
  shape.num_more_formats = 2;  // bf16, e4m3 with its scales
  shape.more_formats[1].payload = abi::Payload::kFp8;
  return shape;
}();

constexpr int kNoops = 4;  // of the bystander, while the calls are written
constexpr std::size_t kRecord = sizeof(std::uint32_t) + sizeof(abi::CallHalves);

// A client that writes while it is read.
class Scribbler {
 public:
  Scribbler(const RawSession& session, const RawGroup& group, const std::uint8_t* data, std::size_t size)
      : sleep_(session.a().client_sleep),
        words_(group.words(0)),
        indices_(group.region<std::uint64_t>(0, 0, abi::Region::kTopkIdx)),
        data_(data),
        size_(size),
        random_(std::accumulate(data, data + size, std::uint64_t{size})),
        thread_([this] { run(); }) {}
  ~Scribbler() {
    stop_ = true;
    thread_.join();
  }

 private:
  void run() {
    while (!stop_) {
      step();
      std::this_thread::yield();
    }
  }

  void step() {
    const std::uint64_t random = random_();
    std::uint64_t& word =
        words_.host_calls[random / 8 % abi::kCallSlots].words[random / 512 % abi::PackedCall::kWords];
    switch (random % 8) {
      case 0:
      case 1: write(word, std::uint64_t{word >> 32 << 32 | pick(random)}); break;  // of the same call
      case 2: write(word, std::uint64_t{(random / 8 % abi::kCallSlots + 1) << 32 | pick(random)}); break;
      case 3: write(word, random_()); break;
      case 4: write(words_.bell[1], static_cast<std::uint32_t>(random >> 32)); break;
      case 5: sleep_.sleeping.store(static_cast<std::uint32_t>(random >> 32)); break;
      default: {
        const std::size_t count = std::size_t{kShape.max_tokens} * kShape.topk;
        write(indices_[random >> 16 & (count - 1)], random % 3 == 0 ? random_() : (random >> 32) % 5 - 1);
      }
    }
  }

  // Most words of the input are worth more than random ones.
  std::uint32_t pick(std::uint64_t random) const {
    std::uint32_t value = static_cast<std::uint32_t>(random >> 32);
    if (size_ >= 4 && random % 3 != 0) std::memcpy(&value, data_ + (random >> 24) % (size_ - 3), 4);
    return value;
  }
  template <typename T>
  static void write(T& place, T value) {
    std::atomic_ref(place).store(value, std::memory_order_relaxed);
  }

  abi::SleepLine& sleep_;
  abi::CallWords& words_;
  std::uint64_t* indices_;
  const std::uint8_t* data_;
  const std::size_t size_;
  std::mt19937_64 random_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

class Target {
 public:
  Target() {
    log_set_levels(LogLevel::kOff);
    engine_.start();
    bystander_.add_to(engine_);
    group_.add_to_engine({&engine_}, {&bystander_}, 0, false);
  }

  void run(const std::uint8_t* data, std::size_t size) {
    const std::uint64_t id = ++next_id_;
    RawSession hostile(id);
    hostile.add_to(engine_);
    const RawGroup group(id, kShape);
    group.add_to_engine({&engine_}, {&hostile}, 0, false);
    abi::CallWords& words = group.words(0);
    for (std::size_t i = 0; (i + 1) * kRecord <= size && i < abi::kCallSlots; ++i) {
      std::uint32_t number;
      abi::CallHalves halves;
      std::memcpy(&number, data + i * kRecord, sizeof(number));
      std::memcpy(&halves, data + i * kRecord + sizeof(number), sizeof(halves));
      // Most inputs should be seen at all; some keep their own number.
      if ((number & 7u) != 7u) number = static_cast<std::uint32_t>(i);
      const abi::PackedCall packed = abi::pack(halves, number);
      for (std::uint32_t word = 0; word < abi::PackedCall::kWords; ++word)
        std::atomic_ref(words.host_calls[i].words[word]).store(packed.words[word], std::memory_order_release);
    }
    hostile.ring();

    {
      const Scribbler scribbler(hostile, group, data, size);
      for (int i = 0; i < kNoops; ++i) check_bystander();
    }
    engine_.send(abi::LinkType::kRemoveGroup, abi::GroupRef{id});
    require(engine_.expect(abi::LinkType::kGroupRemoved).has_value(), "the group can be removed");
    engine_.send(abi::LinkType::kRemoveSession, abi::SessionRef{id});
    require(engine_.expect(abi::LinkType::kSessionRemoved).has_value(), "the session can be removed");
  }

 private:
  void check_bystander() {
    const std::uint32_t number = its_.ring(kNoopCall, 0, 1);
    require(its_.ends_well(number, 30'000), "bystander is served");
  }

  EngineThread engine_{0};
  RawSession bystander_{1};
  RawGroup group_{1, kShape};
  Ringer its_ = group_.host_ringer(0, bystander_);
  std::uint64_t next_id_ = 1;
};

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static epd::test::Target target;
  target.run(data, size);
  return 0;
}

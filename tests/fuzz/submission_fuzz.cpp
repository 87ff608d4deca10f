// Ring contents: whatever bytes a client writes into its submission ring, the engine must go on serving
// others. Input: 128-byte slots, written one after another into the ring of a fresh session that has
// joined a group of one rank. Then a thread goes on writing, while the engine takes them: slots, sequences,
// indices, the sleep word and the arena's topk_idx, with bytes of the input and of a generator seeded by it.
// A bystander session must get its noops back throughout.

#include "engine_harness.h"
#include "fuzz.h"

#include "base/log.h"
#include "proto/arena.h"

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

constexpr int kNoops = 4;  // of the bystander, while the ring is written

// A client that writes while it is read.
class Scribbler {
 public:
  Scribbler(const RawSession& session, const RawGroup& group, const std::uint8_t* data, std::size_t size)
      : a_(session.a()),
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
    abi::Submission& slot = a_.submissions.slots[random / 8 % abi::kSubmissionSlots];
    switch (random % 8) {
      case 0:
      case 1: {  // a word of a slot
        auto* words = reinterpret_cast<std::uint32_t*>(&slot);
        write(words[random >> 16 & 31u], pick(random));
        break;
      }
      case 2: write(slot.sequence, random / 8 % abi::kSubmissionSlots + 1); break;
      case 3: write(slot.sequence, random_()); break;
      case 4: a_.completion_head.value.store(random >> 32 & 127u, std::memory_order_release); break;
      case 5: a_.client_sleep.sleeping.store(static_cast<std::uint32_t>(random >> 32)); break;
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

  abi::SegmentA& a_;
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
    std::size_t slots = 0;
    for (; (slots + 1) * sizeof(abi::Submission) <= size && slots < abi::kSubmissionSlots; ++slots) {
      abi::Submission& place = hostile.a().submissions.slots[slots];
      std::memcpy(reinterpret_cast<char*>(&place) + 8, data + slots * sizeof(place) + 8, sizeof(place) - 8);
      // Most inputs should be seen at all; some keep their own sequence.
      std::uint64_t sequence = slots + 1;
      if ((data[slots * sizeof(place)] & 7u) == 7u) std::memcpy(&sequence, data + slots * sizeof(place), 8);
      std::atomic_ref(place.sequence).store(sequence, std::memory_order_release);
    }
    // A consumer index that cannot be: the session loses, nobody else.
    if (size % 3 == 1 && size > 8) {
      std::uint64_t index;
      std::memcpy(&index, data, sizeof(index));
      hostile.a().completion_head.value.store(index, std::memory_order_release);
    }

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
    abi::Submission noop{};
    noop.op = abi::Op::kNoop;
    noop.member = RawGroup::member(0);
    noop.epoch = 1;
    const std::uint64_t ticket = bystander_.submit(noop);
    const auto done = bystander_.wait(30000);
    require(done.has_value() && done->ticket == ticket && done->status == StatusCode::kOk,
            "bystander is served");
  }

  EngineThread engine_{0};
  RawSession bystander_{1};
  RawGroup group_{1, kShape};
  std::uint64_t next_id_ = 1;
};

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static epd::test::Target target;
  target.run(data, size);
  return 0;
}

// Ring contents: whatever bytes a client writes into its submission ring, the engine must go on serving
// others. Input: 128-byte slots, written one after another into the ring of a fresh session that has
// joined a group of one rank; a bystander session must get its noop back after each input.

#include "engine_harness.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace epd::test {
namespace {

constexpr abi::GroupShape kShape{
    1, 4, 8, 128, 2, 2, abi::Payload::kFp8Cast, abi::IndexType::kInt64, abi::LossPolicy::kFailFast};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

class Target {
 public:
  Target() {
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

    abi::Submission noop{};
    noop.op = abi::Op::kNoop;
    noop.member = RawGroup::member(0);
    noop.epoch = 1;
    const std::uint64_t ticket = bystander_.submit(noop);
    const auto done = bystander_.wait(30000);
    require(done.has_value() && done->ticket == ticket && done->status == StatusCode::kOk,
            "bystander is served");
    engine_.send(abi::LinkType::kRemoveGroup, abi::GroupRef{id});
    require(engine_.expect(abi::LinkType::kGroupRemoved).has_value(), "the group can be removed");
    engine_.send(abi::LinkType::kRemoveSession, abi::SessionRef{id});
    require(engine_.expect(abi::LinkType::kSessionRemoved).has_value(), "the session can be removed");
  }

 private:
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

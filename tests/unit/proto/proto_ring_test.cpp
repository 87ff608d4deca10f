// The rings: order, content, what a hostile side may write, two threads and two processes.
#include "proto/ring.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

namespace epd::abi {
namespace {

constexpr std::size_t kSlots = 8;

struct TestSlot {
  std::uint64_t sequence;
  std::uint64_t words[15];
};

struct SharedRing {
  IndexLine head;
  RingSlots<TestSlot, kSlots> ring;
};

TestSlot make_slot(std::uint64_t number) {
  TestSlot slot{};
  for (std::uint64_t i = 0; i < 15; ++i) slot.words[i] = number * 1000003 + i;
  return slot;
}

bool slot_is(const TestSlot& slot, std::uint64_t number) {
  for (std::uint64_t i = 0; i < 15; ++i)
    if (slot.words[i] != number * 1000003 + i) return false;
  return slot.sequence == number + 1;
}

bool expired(std::chrono::steady_clock::time_point start) {
  return std::chrono::steady_clock::now() - start > std::chrono::seconds(40);
}

// Both return how many slots went through intact before an error or the time limit.
std::uint64_t produce(SharedRing& shared, std::uint64_t count) {
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t tail = 0; tail < count;) {
    switch (ring_push(shared.ring, tail, shared.head, make_slot(tail))) {
      case PushResult::kPushed: ++tail; break;
      case PushResult::kFull:
        if (expired(start)) return tail;
        ::sched_yield();
        break;
      case PushResult::kCorrupt: return tail;
    }
  }
  return count;
}

std::uint64_t consume(SharedRing& shared, std::uint64_t count) {
  const auto start = std::chrono::steady_clock::now();
  TestSlot copy{};
  for (std::uint64_t head = 0; head < count;) {
    if (!ring_peek(shared.ring, head, copy)) {
      if (expired(start)) return head;
      ::sched_yield();
      continue;
    }
    if (!slot_is(copy, head)) return head;
    shared.head.value.store(++head, std::memory_order_release);
  }
  return count;
}

class SharedRingMemory {
 public:
  SharedRingMemory()
      : memory_(
            ::mmap(nullptr, sizeof(SharedRing), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~SharedRingMemory() {
    if (memory_ != MAP_FAILED) ::munmap(memory_, sizeof(SharedRing));
  }
  bool valid() const { return memory_ != MAP_FAILED; }
  SharedRing& ring() { return *static_cast<SharedRing*>(memory_); }

 private:
  void* memory_;
};

TEST(Ring, ZeroedMemoryIsAnEmptyRing) {
  auto shared = std::make_unique<SharedRing>();
  TestSlot copy{};
  EXPECT_FALSE(ring_peek(shared->ring, 0, copy));
  EXPECT_EQ(ring_push(shared->ring, 0, shared->head, make_slot(0)), PushResult::kPushed);
  ASSERT_TRUE(ring_peek(shared->ring, 0, copy));
  EXPECT_TRUE(slot_is(copy, 0));
}

TEST(Ring, FullUntilTheConsumerPublishes) {
  auto shared = std::make_unique<SharedRing>();
  for (std::uint64_t i = 0; i < kSlots; ++i)
    ASSERT_EQ(ring_push(shared->ring, i, shared->head, make_slot(i)), PushResult::kPushed);
  EXPECT_EQ(ring_push(shared->ring, kSlots, shared->head, make_slot(99)), PushResult::kFull);

  TestSlot copy{};
  ASSERT_TRUE(ring_peek(shared->ring, 0, copy));
  EXPECT_EQ(ring_push(shared->ring, kSlots, shared->head, make_slot(99)), PushResult::kFull)
      << "looking at a slot must not free it";
  shared->head.value.store(1);
  EXPECT_EQ(ring_push(shared->ring, kSlots, shared->head, make_slot(kSlots)), PushResult::kPushed);
  EXPECT_EQ(ring_push(shared->ring, kSlots + 1, shared->head, make_slot(99)), PushResult::kFull);
}

TEST(Ring, ManyTurnsKeepOrderAndContent) {
  auto shared = std::make_unique<SharedRing>();
  std::uint64_t tail = 0;
  std::uint64_t head = 0;
  std::mt19937_64 random(1);
  TestSlot copy{};
  while (head < 5000) {
    for (std::uint64_t i = random() % (kSlots + 1); i > 0 && tail - head < kSlots; --i, ++tail)
      ASSERT_EQ(ring_push(shared->ring, tail, shared->head, make_slot(tail)), PushResult::kPushed);
    for (std::uint64_t i = random() % (kSlots + 1); i > 0 && head < tail; --i) {
      ASSERT_TRUE(ring_peek(shared->ring, head, copy));
      ASSERT_TRUE(slot_is(copy, head)) << "slot " << head;
      shared->head.value.store(++head);
    }
    if (head == tail) {
      ASSERT_FALSE(ring_peek(shared->ring, head, copy)) << "a slot of the turn before is not new";
    }
  }
}

TEST(Ring, PositionsMayWrapAroundTheirType) {
  auto shared = std::make_unique<SharedRing>();
  std::uint64_t position = ~std::uint64_t{0} - 3;
  shared->head.value.store(position);
  TestSlot copy{};
  for (int i = 0; i < 8; ++i, ++position) {
    ASSERT_EQ(ring_push(shared->ring, position, shared->head, make_slot(position)), PushResult::kPushed);
    // Position 2^64-1 has sequence 0, which empty memory shows too: no ring lives that long.
    if (position + 1 == 0) {
      shared->head.value.store(position + 1);
      continue;
    }
    ASSERT_TRUE(ring_peek(shared->ring, position, copy));
    EXPECT_EQ(copy.sequence, position + 1);
    shared->head.value.store(position + 1);
  }
}

TEST(Ring, ImpossibleConsumerIndexIsReportedAndNothingIsWritten) {
  auto shared = std::make_unique<SharedRing>();
  for (const std::uint64_t bad :
       {std::uint64_t{11}, std::uint64_t{1}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    shared->head.value.store(bad);
    EXPECT_EQ(ring_push(shared->ring, 10, shared->head, make_slot(10)), PushResult::kCorrupt) << bad;
  }
  for (TestSlot& slot : shared->ring.slots) {
    EXPECT_EQ(slot.sequence, 0u);
    EXPECT_EQ(slot.words[0], 0u);
  }
}

TEST(Ring, WrongSequenceIsNeverASlot) {
  auto shared = std::make_unique<SharedRing>();
  TestSlot copy{};
  for (const std::uint64_t sequence :
       {std::uint64_t{0}, std::uint64_t{2}, std::uint64_t{kSlots + 1}, ~std::uint64_t{0}}) {
    shared->ring.slots[0].sequence = sequence;
    EXPECT_FALSE(ring_peek(shared->ring, 0, copy)) << sequence;
  }
}

TEST(Ring, PeekGivesAPrivateCopy) {
  auto shared = std::make_unique<SharedRing>();
  ASSERT_EQ(ring_push(shared->ring, 0, shared->head, make_slot(0)), PushResult::kPushed);
  TestSlot copy{};
  ASSERT_TRUE(ring_peek(shared->ring, 0, copy));
  std::memset(static_cast<void*>(&shared->ring.slots[0]), 0xff, sizeof(TestSlot));
  EXPECT_TRUE(slot_is(copy, 0)) << "a hostile producer changes the slot after it was taken";
  EXPECT_EQ(copy.sequence, 1u);
}

TEST(Ring, TwoThreads) {
  constexpr std::uint64_t kCount = 100'000;
  auto shared = std::make_unique<SharedRing>();
  std::uint64_t produced = 0;
  std::thread producer([&] { produced = produce(*shared, kCount); });
  const std::uint64_t consumed = consume(*shared, kCount);
  producer.join();
  EXPECT_EQ(produced, kCount);
  EXPECT_EQ(consumed, kCount);
}

TEST(Ring, TwoProcesses) {
  constexpr std::uint64_t kCount = 100'000;
  SharedRingMemory shared;
  ASSERT_TRUE(shared.valid());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(produce(shared.ring(), kCount) == kCount ? 0 : 1);
  EXPECT_EQ(consume(shared.ring(), kCount), kCount);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace epd::abi

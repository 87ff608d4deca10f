// A kernel that stays: what its CTA 0 finds for all to do, by one thread. For device and host, see
// proto/ordered.h.
#pragma once

#include "cuda/commands.h"

#include <cstring>

namespace epd::kernels::cuda {

struct Entry {
  Task task;
  std::uint32_t place;  // of one of the queue
  bool by_command;
  bool failed;  // it does not run
};

// Heralds before this kernel's first one. Each CTA asks before it has left any: until then there is no more,
// and a kernel that was stopped before has been left by all its CTAs.
EPD_DEVICE inline std::uint32_t first_herald(const ResidentState& state) {
  return static_cast<std::uint32_t>(load_acquire(&state.left));
}

// Until all CTAs have left herald - 1. Whether it failed.
EPD_DEVICE inline bool await_left(const ResidentState& state, std::uint32_t herald) {
  while (true) {
    const std::uint64_t left = load_acquire(&state.left);
    if (static_cast<std::uint32_t>(left) == herald) return left >> 32 != 0;
    look_again(1);
  }
}

// Of CTA 0 of a lane that takes no commands: the queue's next entry, or Herald::kAside.
EPD_DEVICE inline HeraldWord await_queue(const ResidentArguments& own, Watch& watch) {
  for (std::uint32_t looks = 1;; ++looks) {
    const std::uint64_t entry = load_acquire_system(own.state->entries + watch.entry % kQueueEntries);
    if (static_cast<std::uint32_t>(entry >> 32) == watch.entry + 1) {
      if (!is_of_former_round(own, entry)) return static_cast<HeraldWord>(entry);
      ++watch.entry;
      continue;
    }
    if (looks % kLooksPerRound == 0) {
      const HeraldWord aside = look_aside(own, watch);
      if (aside != 0) return aside;
    }
    pause(looks);
  }
}

// Of CTA 0: the next thing to do, when all CTAs have left what was before. One thread. With commands the host
// hears of that first; without any, entries are looked for meanwhile.
EPD_DEVICE inline HeraldWord find_work(const ResidentArguments& own, Watch& watch, std::uint32_t herald) {
  if (own.commands.words == nullptr) {
    const HeraldWord found = await_queue(own, watch);
    await_left(*own.state, herald);
    return found;
  }
  const bool failed = await_left(*own.state, herald);
  conclude(own.commands, watch, failed);
  return await_work(own, watch);
}

// Of CTA 0, for all: until the client's stream has got as far as the operation. One thread; what the stream
// wrote before is visible to whoever sees the herald. What is to be heralded: `found`, that it has failed, or
// Herald::kAside (the next kernel waits on).
EPD_DEVICE inline HeraldWord await_ready(const ResidentArguments& own, const Operation& op,
                                         HeraldWord found) {
  if (op.signal.ready == nullptr) return found;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  EPD_NO_UNROLL
  for (std::uint32_t looks = 1;; ++looks) {
    const auto ahead = static_cast<std::int32_t>(load_acquire_system(op.signal.ready) - op.signal.value);
    if (ahead >= 0) return found;
    if (looks % 64 == 0 && must_leave(op, deadline_ns, 0))
      return found | static_cast<HeraldWord>(Herald::kFailed);
    if (looks % kLooksPerRound == 0 && round_is_over(own)) return static_cast<HeraldWord>(Herald::kAside);
    look_again(looks);
  }
}

EPD_DEVICE inline Entry entry_of(HeraldWord found) {
  return {static_cast<Task>(found >> 16 & 0x1fff), found & 0xffff, (found & Herald::kByCommand) != 0,
          (found & Herald::kFailed) != 0};
}

// Whether CTA 0 has to bring its operation from the host's memory.
EPD_DEVICE inline bool is_brought(const Entry& entry) {
  return !entry.by_command && entry.task != Task::kStop;
}

// Before all CTAs hear of `found`: where CTA 0 looks next, or the next kernel. One thread.
EPD_DEVICE inline void pass_entry(const ResidentArguments& own, Watch& watch, HeraldWord found,
                                  const Entry& entry) {
  if ((found & (Herald::kByCommand | Herald::kAside)) == 0) ++watch.entry;
  if (entry.task == Task::kStop) end_watch(own, watch);
}

// What all CTAs do next; of a call, what it has become.
EPD_DEVICE inline void tell_entry(ResidentState& state, std::uint32_t herald, HeraldWord found,
                                  const TakenCall& call) {
  const std::uint64_t number = std::uint64_t{herald + 1} << 32;
  if ((found & Herald::kByCommand) != 0) {
    std::uint32_t words[TakenCall::kWords];
    std::memcpy(words, &call, sizeof(words));
    fence_device();
    for (std::uint32_t i = 0; i < TakenCall::kWords; ++i)
      store_relaxed(&state.herald.call[i], number | words[i]);
    store_relaxed(&state.herald.entry, number | found);
  } else {
    store_release(&state.herald.entry, number | found);
  }
}

}  // namespace epd::kernels::cuda

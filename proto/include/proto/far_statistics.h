// An engine's view of the network between nodes, in its page: written by its loop alone, with relaxed stores;
// read by anybody without a request. All of it begins again with the engine.
#pragma once

#include "proto/far.h"
#include "proto/statistics.h"
#include "proto/wire.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

namespace epd::abi {

// A text that its one writer changes while others read it: they get all of it, or "".
template <std::size_t Bytes>
class PageText {
 public:
  // Text that does not fit is cut off.
  void store(std::string_view text) {
    std::array<char, Bytes> bytes{};
    std::memcpy(bytes.data(), text.data(), std::min(text.size(), Bytes - 1));
    if (read_words() == bytes) return;
    const std::uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (std::size_t i = 0; i < kWords; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + 8 * i, sizeof(word));
      words_[i].store(word, std::memory_order_relaxed);
    }
    version_.store(version + 2, std::memory_order_release);
  }

  void clear() {
    if (words_[0].load(std::memory_order_relaxed) != 0) store("");
  }

  // "" if it changes all the time, or if its writer was killed while it wrote.
  std::string load() const {
    constexpr int kTries = 16;
    for (int i = 0; i < kTries; ++i) {
      const std::uint32_t version = version_.load(std::memory_order_acquire);
      const std::array<char, Bytes> bytes = read_words();
      std::atomic_thread_fence(std::memory_order_acquire);
      if (version % 2 != 0 || version_.load(std::memory_order_relaxed) != version) continue;
      const auto* const end = std::find(bytes.begin(), bytes.end() - 1, '\0');
      return {bytes.begin(), end};
    }
    return "";
  }

  // Called by a writer whose predecessor may have been killed.
  void reset() {
    version_.store(0, std::memory_order_relaxed);
    for (auto& word : words_) word.store(0, std::memory_order_relaxed);
  }

 private:
  static_assert(Bytes % 8 == 0 && Bytes > 0);
  static constexpr std::size_t kWords = Bytes / 8;

  std::array<char, Bytes> read_words() const {
    std::array<char, Bytes> bytes;
    for (std::size_t i = 0; i < kWords; ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes.data() + 8 * i, &word, sizeof(word));
    }
    return bytes;
  }

  std::atomic<std::uint32_t> version_;  // odd: it is being written
  std::atomic<std::uint64_t> words_[kWords];
};

enum class FarState : std::uint32_t {
  kIdle = 0,  // no group needs it
  kConnecting = 1,
  kConnected = 2,  // it has said something
  kDown = 3,       // and tried again
};

enum class FarBatch : std::uint32_t { kRows = 0, kAsks = 1, kSums = 2 };
inline constexpr std::size_t kNumFarBatches = 3;
// Names of far::Drop, for dropped messages.
inline constexpr const char* kFarDropNames[] = {
    "none",   "header", "type",  "group",   "broken",  "epoch",    "engine", "token",    "ranks", "operation",
    "credit", "twice",  "batch", "records", "content", "stranger", "format", "checksum", "number"};
inline constexpr std::size_t kNumFarDrops = std::size(kFarDropNames);

// Counters of one far engine.
struct FarCounters {
  std::atomic<std::uint64_t> batches_sent[kNumFarBatches];
  std::atomic<std::uint64_t> bytes_sent[kNumFarBatches];  // of bodies
  std::atomic<std::uint64_t> batches_received[kNumFarBatches];
  std::atomic<std::uint64_t> bytes_received[kNumFarBatches];
  std::atomic<std::uint64_t> dropped[kNumFarDrops];
  // Times that an operation had batches to pack and no credit for any; how long, with those that continue.
  std::atomic<std::uint64_t> credit_stalls;
  std::atomic<std::uint64_t> credit_stall_ns;
  // The longest of them, and the far rank that gave no credits.
  std::atomic<std::uint64_t> longest_stall_ns;
  std::atomic<std::uint64_t> longest_stall_group;
  std::atomic<std::uint32_t> longest_stall_rank;
};

inline constexpr std::size_t kFarCarrierBytes = 64;
inline constexpr std::size_t kFarLanesBytes = 2048;

struct FarRow {
  alignas(64) std::atomic<std::uint64_t> key;  // 0 = free; another one for each owner
  std::atomic<std::uint32_t> node;             // 0: of the row that several share
  std::atomic<std::uint32_t> device_index;
  std::atomic<std::uint32_t> state;  // FarState
  std::atomic<std::uint32_t> groups;
  std::atomic<std::uint64_t> window_bytes;   // promised for it: windows and send buffers of those groups
  std::atomic<std::uint64_t> round_trip_ns;  // of the last ping that was answered; 0: none was
  std::atomic<std::uint64_t> answered_ns;    // when it was, CLOCK_MONOTONIC
  PageText<kFarNodeBytes> node_name;
  PageText<kTextBytes> reason;              // why it is not connected; "": nothing has been tried yet
  PageText<kFarCarrierBytes> carrier;       // of this side, when it was connected last: "UCX 1.13.1"
  PageText<kFarCarrierBytes> peer_carrier;  // of the other
  PageText<kFarLanesBytes> lanes;
  FarCounters counters;
};

inline constexpr std::size_t kFarRows = 256;  // and one more, for those that found none

struct FarTable {
  std::atomic<std::uint64_t> promised_bytes;  // windows and send buffers of all groups
  std::atomic<std::uint64_t> max_bytes;       // network.max_bytes
  std::atomic<std::uint32_t> check;           // FarCheck; 0: no far engine can be reached
  PageText<kTextBytes> problem;               // why no far engine can be reached; "": they can
  PageText<kFarCarrierBytes> carrier;
  PageText<kTextBytes> library;
  PageText<kTextBytes> interfaces;
  FarRow rows[kFarRows + 1];
};

}  // namespace epd::abi

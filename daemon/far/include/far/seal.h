#pragma once

#include "far/port.h"
#include "proto/far.h"
#include "proto/far_statistics.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace epd::far {

// Fills in the checksums body_crc and header_crc. All else is complete.
void seal(abi::FarHeader& header, std::span<const std::byte> body, abi::FarCheck check);

// Whether the header has come as it was sent. Called before anything of it is read.
bool header_is_whole(const abi::FarHeader& header);
// Whether the body has come as it was sent. The header is whole. Bodies that `check` leaves out are not
// checked. For a batch only the CRCs of its records are checked: whoever uses a record checks the record
// itself (kernels/far.h).
bool body_is_whole(const abi::FarHeader& header, std::span<const std::byte> body, abi::FarCheck check);

// A random key that is made for each epoch and known to its members only.
using EpochKey = std::array<std::uint64_t, 2>;

std::uint64_t sip_hash(const EpochKey& key, std::span<const std::byte> bytes);
// The token of messages from one engine to another: SipHash-2-4 of their names in the cluster, under the
// epoch's key. It stops stale, misconfigured and off-path senders, but not one that reads the data network.
std::uint64_t message_token(const EpochKey& key, std::uint64_t from_engine, std::uint64_t to_engine);

// Authentication codes of messages: AES-128-GMAC (NIST SP 800-38D). Without the epoch's key nobody can make,
// change or reflect a message unnoticed.
// Each direction between two engines has its own key, and a new one when its sender begins the epoch again:
// HMAC-SHA256 of both engines and the time of that beginning, under the epoch's key. A nonce is a message's
// number and its series, so none occurs twice under a key.
class MacKey {
 public:
  // The key of messages from one engine to another. `began_ns`: when the sender began the epoch.
  MacKey(const EpochKey& key, EngineId from, EngineId to, std::uint64_t began_ns);

  // Fills in `mac`. All fields before it are complete.
  void sign(abi::FarHeader& header, std::span<const std::byte> body) const;
  bool verify(const abi::FarHeader& header, std::span<const std::byte> body) const;

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;  // EVP_CIPHER_CTX
};

// Why a message was dropped. A node that sends wrong data hurts its own group at most, and is counted.
enum class Drop : std::uint32_t {
  kNone,
  kHeader,     // no header of this protocol: abi::read_far_header says why
  kType,       // of a type that is not for this group's operations, or not for this operation
  kGroup,      // of another group
  kBroken,     // between epochs
  kEpoch,      // of another epoch
  kEngine,     // from an engine that has none of the group's ranks
  kToken,      // of another epoch's key, or of another engine
  kRanks,      // from_rank is not on that engine, to_rank not here, or neither is the other's gateway
  kOperation,  // of one that has ended, or that cannot have begun
  kCredit,     // more batches, or more credits back, than the window has
  kTwice,      // the same batch or announcement again
  kBatch,      // a batch number, or a number of batches, that cannot be
  kRecords,    // sizes that do not fit the group's rows
  kContent,    // counts, places or tokens that cannot be
  kStranger,   // the sender's transport is no peer
  kFormat,     // of a transport that this one does not speak, or larger than it takes
  kChecksum,   // header or body are not as they were sent
  kNumber,     // a number that has come before, of an earlier beginning of the epoch, or too far ahead
};
inline constexpr std::uint32_t kNumDrops = 19;
const char* drop_name(Drop drop);
// Whether this reason occurs without a fault: for messages that are under way when a group breaks or ends.
constexpr bool happens(Drop drop) {
  return drop == Drop::kGroup || drop == Drop::kBroken || drop == Drop::kEpoch || drop == Drop::kOperation ||
         drop == Drop::kStranger;
}

class DropCounts {
 public:
  void count(Drop drop, std::uint64_t times = 1) { counts_[static_cast<std::uint32_t>(drop)] += times; }
  std::uint64_t of(Drop drop) const { return counts_[static_cast<std::uint32_t>(drop)]; }
  std::uint64_t total() const;
  bool any_fault() const;    // one that does not happen() by itself
  std::string text() const;  // "token 3, epoch 1"; "none"

 private:
  std::array<std::uint64_t, kNumDrops> counts_{};
};

// Sizes of a group's records and batches. They follow from its shape, and from configuration that is the same
// on all nodes.
struct FarSizes {
  std::array<std::uint32_t, abi::kMaxFormats> row_stride{};  // in each row format of the group; 0: none
  std::uint32_t ask_stride = 0;
  std::uint32_t sum_stride[2] = {};  // without and with weights that come back
  std::uint32_t batch_bytes = 0;     // a body's, at most. There is room for two tokens' sums
  std::uint32_t window = 0;          // batches

  FarSizes() = default;
  // `most_ranks`: of a node.
  FarSizes(const abi::GroupShape& shape, std::uint32_t most_ranks, std::uint32_t batch_bytes,
           std::uint32_t window_bytes);
  // `stride`: one of row_stride.
  std::uint32_t rows_per_batch(std::uint32_t stride) const { return batch_bytes / stride; }
  std::uint32_t asks_per_batch() const { return batch_bytes / ask_stride; }
};

// The counters and names of far engines, for people.
class Ledger {
 public:
  virtual ~Ledger() = default;
  // The reference is valid until the next call.
  virtual abi::FarCounters& counters(EngineId engine) = 0;
  // Counts dropped messages of that engine.
  virtual void dropped(EngineId engine, Drop why, std::uint64_t times = 1) {
    abi::count(counters(engine).dropped[static_cast<std::uint32_t>(why)], times);
  }
  // "node-b"
  virtual std::string node_name(EngineId engine) const = 0;
};

}  // namespace epd::far

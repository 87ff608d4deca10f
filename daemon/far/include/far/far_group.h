// The far side of one group in one engine: the peers of an epoch, their windows, and messages for operations
// that are not in flight yet. The engine's loop owns it and makes every call.
#pragma once

#include "far/flow.h"
#include "far/port.h"
#include "far/seal.h"

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace epd::far {

// A message for an operation. Its body is held until settle().
struct Arrival {
  abi::FarHeader header;
  Body body;
};

// An operation in flight, as its messages find it.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // kNone: the receiver keeps it until it calls FarGroup::settle(). Otherwise it is dropped and counted.
  virtual Drop receive(const Arrival& arrival) = 0;
};

class FarGroup {
 public:
  struct Facts {
    std::uint64_t id = 0;
    abi::GroupShape shape{};
    EngineId engine = 0;  // this one
    std::uint32_t batch_bytes = 256u << 10;
    std::uint32_t window_bytes = 1u << 20;
    Ledger* ledger = nullptr;  // null: nothing is counted by engine. Outlives the group
    abi::FarCheck check = abi::FarCheck::kCrc;
    std::uint64_t gap_ns = 0;  // a message missing for this long is lost; 0: never
  };
  struct Epoch {
    std::uint64_t epoch = 0;
    std::uint64_t first_index = 0;         // its first operation, as tags count
    std::span<const std::uint32_t> nodes;  // [R]
    std::span<const EngineId> engines;     // [R]
    std::span<const std::uint8_t> masked;  // [R] or empty
    std::uint32_t node = 0;                // this one
    EpochKey key{};
    std::uint64_t now_ns = 1;  // differs in each begin() of this node, also after an engine's restart
  };
  FarGroup(const Facts& facts, Port& port);
  ~FarGroup();
  FarGroup(const FarGroup&) = delete;
  FarGroup& operator=(const FarGroup&) = delete;

  // Begins with full windows. Every engine of the group has entered the epoch before any sends in it.
  void begin(const Epoch& epoch);
  // Called on a break. Held and queued messages are given back or forgotten. No operation is open.
  void end();
  bool in_epoch() const { return state_ != nullptr; }
  // The most bytes that its send buffers, and batches under way to it, take in this epoch.
  std::uint64_t memory_bytes() const;
  // The part with one engine.
  std::uint64_t memory_bytes(EngineId engine) const;

  // ---- for the port

  // `from` is the sender, as the port knows. The body is aligned.
  void received(EngineId from, std::span<const std::byte> header, const Body& body);
  // Sends what waits, and credits that are due. True: something was sent.
  bool step(std::uint64_t now_ns);
  // When step() has something to do even if nothing comes; 0: never.
  std::uint64_t due_ns() const;
  const DropCounts& drops() const { return drops_; }
  // Counts a message of that engine that is dropped, also one that was taken first.
  void drop(EngineId from, Drop why);
  // An engine whose message of the epoch came corrupted, or never came. The epoch can't continue with it.
  struct Fault {
    EngineId engine = 0;
    std::string what;  // "sent rows of rank 3 with a wrong checksum"
  };
  // Returns the faults since the last call: at most one of each engine in an epoch.
  std::vector<Fault> take_faults() { return std::exchange(faults_, {}); }
  // Completes a message: the fields that are equal in all of the epoch, its number, code and checksums.
  void seal(Message& message);
  // Whether the code of a message with this epoch's token is right. True if messages have none.
  bool is_authentic(EngineId from, const abi::FarHeader& header, std::span<const std::byte> body);
  // Drops a message that an operation has taken. A wrong checksum is a fault of the engine.
  void drop_content(const abi::FarHeader& header, Drop why);

  // ---- for operations

  const Span& span() const;
  const abi::GroupShape& shape() const { return facts_.shape; }
  bool has_record_crcs() const { return facts_.check == abi::FarCheck::kCrc; }
  const FarSizes& sizes() const;
  // Messages that have come for it are delivered at once. Operations of a rank are opened in order.
  void open(std::uint32_t rank, std::uint64_t tag, Receiver& receiver);
  void close(std::uint32_t rank, std::uint64_t tag);

  // The windows to the gateway `far_rank`, for rows and asks, and to a rank whose gateway this one is, for
  // sums.
  Window& rows_window(std::uint32_t rank, std::uint32_t far_rank);
  Window& sums_window(std::uint32_t rank, std::uint32_t far_rank);
  // The number of batches that the operation may pack now, by credits, order and buffers.
  std::uint32_t room_for_rows(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag);
  std::uint32_t room_for_sums(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag);
  // An operation has batches to pack for that rank, and no room. If credits are missing, the time until some
  // come is counted.
  void wants_rows(std::uint32_t rank, std::uint32_t far_rank);
  void wants_sums(std::uint32_t rank, std::uint32_t far_rank);
  // "rank 3 on node-b"
  std::string name_of_rank(std::uint32_t rank) const;
  // Takes a credit and a buffer for a batch. There is room.
  Buffer take_rows(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag);
  Buffer take_sums(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag);
  // The caller sets type, tag, ranks, batch, records, body_bytes, batches and flags. The rest is filled in.
  void post(const abi::FarHeader& header, Buffer body);
  // An arrival is done with: a batch's credit goes back.
  void settle(const Arrival& arrival);

  // ---- for tests and people

  // Returns "", or what differs from the state without operations: windows, debts, messages.
  std::string unsettled() const;

 private:
  struct Channel;
  struct Stall;
  struct Pair;
  struct Rank;
  struct State;

  Drop judge(EngineId from, std::span<const std::byte> bytes, const Body& body, abi::FarHeader& header) const;
  Drop judge_ranks(const abi::FarHeader& header) const;
  Drop judge_sizes(const abi::FarHeader& header) const;
  Drop check(EngineId from, const Arrival& arrival);
  Drop take_in(const Arrival& arrival);
  void add_fault(EngineId engine, const std::string& what);
  void add_corrupt(EngineId from, const abi::FarHeader& header, const char* wrong);
  void find_gaps();
  void follow_last();
  Pair& pair(std::uint32_t rank, std::uint32_t far_rank);
  EngineId engine_of(std::uint32_t rank) const;
  void count_batch(const abi::FarHeader& header, EngineId engine, bool sent);
  void count_stall(Pair& pair, Window& window, Stall& stall);
  Debt* debt_of(const abi::FarHeader& header);
  void give_back_credits();
  void post_credit(const Pair& with);
  void add_credits(abi::FarHeader& header, Pair& pair) const;

  const Facts facts_;
  Port& port_;
  std::unique_ptr<State> state_;  // of the epoch
  DropCounts drops_;
  std::vector<Fault> faults_;
  std::uint64_t now_ns_ = 0;  // of the last step
};

}  // namespace epd::far

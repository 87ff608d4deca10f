// Windows of batches between two ranks. Pure.
//
// A batch takes a credit when it is handed to the port. The receiver gives it back when it has forwarded
// (rows), served (asks) or added up (sums) the batch. Each pair has one window for rows and asks and another
// for sums: asks in both directions could fill a common one, and leave only when sums can.
#pragma once

#include <cstdint>
#include <deque>
#include <set>

namespace epd::far {

// The sender's side. Operations take credits in order: operation i + 1 takes none before operation i has
// taken all of its. Otherwise a later operation could hold what an earlier one needs, and wait for that one.
class Window {
 public:
  explicit Window(std::uint32_t batches) : batches_(batches), credits_(batches) {}

  // Operations enter in the order of their tags.
  void enter(std::uint64_t tag) { order_.push_back(tag); }
  // The operation has taken all its credits, or has ended.
  void leave(std::uint64_t tag);
  bool in_turn(std::uint64_t tag) const { return !order_.empty() && order_.front() == tag; }
  // The number of credits that the operation may take now.
  std::uint32_t available(std::uint64_t tag) const { return in_turn(tag) ? credits_ : 0; }
  void take(std::uint64_t tag);
  // False, and nothing changes: fewer are out.
  bool give_back(std::uint32_t credits);

  std::uint32_t credits() const { return credits_; }
  std::uint32_t batches() const { return batches_; }

 private:
  std::uint32_t batches_;
  std::uint32_t credits_;
  std::deque<std::uint64_t> order_;  // operations that have not taken all
};

// The receiver's side.
class Debt {
 public:
  explicit Debt(std::uint32_t batches) : batches_(batches) {}

  // A batch has come. False: the sender has no credit for it.
  bool receive();
  // A batch is done with, so its credit is owed.
  void settle(std::uint64_t now_ns);
  // Whether credits need a message of their own: half the window is owed, or some for kPatienceNs.
  bool is_due(std::uint64_t now_ns) const;
  // When is_due() becomes true if nothing else happens; 0: nothing is owed.
  std::uint64_t due_ns() const { return owed_ == 0 ? 0 : since_ns_ + kPatienceNs; }
  // Takes the owed credits for a message that goes anyway.
  std::uint16_t take();

  std::uint32_t owed() const { return owed_; }
  std::uint32_t held() const { return held_; }

  static constexpr std::uint64_t kPatienceNs = 50'000;

 private:
  std::uint32_t batches_;
  std::uint32_t held_ = 0;  // have come and are not done with
  std::uint32_t owed_ = 0;
  std::uint64_t since_ns_ = 0;
};

// The numbers of messages that have come from one engine in an epoch, in any order.
class Sequence {
 public:
  // The most that a number may be beyond the first missing one.
  static constexpr std::uint64_t kMostAhead = 1u << 16;

  // False: the number has come before or is too far ahead, or its sender has begun the epoch again since.
  // `began_ns`: when the sender began. An engine that begins an epoch again counts from 1.
  bool take(std::uint64_t began_ns, std::uint64_t number, std::uint64_t now_ns);
  // Since when a number has been missing, while later ones have come; 0: none is missing.
  std::uint64_t gap_since_ns() const { return gap_since_ns_; }
  // All numbers below this one have come.
  std::uint64_t next() const { return next_; }

 private:
  std::uint64_t began_ns_ = 0;
  std::uint64_t next_ = 1;
  std::set<std::uint64_t> ahead_;
  std::uint64_t gap_since_ns_ = 0;
};

}  // namespace epd::far

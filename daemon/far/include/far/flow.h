// Windows of batches between two ranks. Pure.
//
// A batch takes a credit when it is handed to the port. The receiver gives it back when it has forwarded
// (rows), served (asks) or added up (sums) the batch. Each pair has one window for rows and asks and another
// for sums: asks in both directions could fill a common one, and leave only when sums can.
#pragma once

#include <cstdint>
#include <deque>

namespace epd::far {

// The sender's side. Operations take credits in their order: none of operation i + 1 before operation i has
// taken all of its. Else a later operation could hold what an earlier one needs, and wait for that.
class Window {
 public:
  explicit Window(std::uint32_t batches) : batches_(batches), credits_(batches) {}

  // By the operations' tags, ascending.
  void enter(std::uint64_t tag) { order_.push_back(tag); }
  // It has taken all, or has ended.
  void leave(std::uint64_t tag);
  bool in_turn(std::uint64_t tag) const { return !order_.empty() && order_.front() == tag; }
  // How many the operation may take now.
  std::uint32_t available(std::uint64_t tag) const { return in_turn(tag) ? credits_ : 0; }
  void take(std::uint64_t tag);
  // False: so many are not out. Nothing is changed then.
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
  // It is done with; its credit is owed.
  void settle(std::uint64_t now_ns);
  // Whether they are to be given back by a message of their own: half the window is owed, or some for
  // kPatienceNs.
  bool is_due(std::uint64_t now_ns) const;
  // When that will be if nothing else happens; 0: nothing is owed.
  std::uint64_t due_ns() const { return owed_ == 0 ? 0 : since_ns_ + kPatienceNs; }
  // What is owed goes with a message.
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

}  // namespace epd::far

// A client that does what no library does: it speaks the protocols by hand, and to the end of what they
// forbid.
#pragma once

#include "support/raw_client.h"

#include "common/memory.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace epd::test {

// Throws RankFailure where the daemon does not play along: for processes of their own (RankProcess).
class HostileSession {
 public:
  HostileSession(const std::string& socket, const std::string& device);

  // Sends a request and gives "OK" or "STATUS: text". The last answer, its descriptors included, stays in
  // answer().
  template <typename T>
  std::string ask(abi::AttachType type, const T& body) {
    return ask(type, &body, sizeof(body));
  }
  // The same of an answer to what was sent by hand.
  std::string next_answer();
  Packet& answer() { return answer_; }

  // Maps what came with the answer to a join that was made by hand. join() does so.
  void map_rank(const abi::Joined& joined);
  // A group of one rank in which this session is alone; throws if refused.
  abi::Joined join(const std::string& group);
  static abi::Join good_join(const std::string& group);
  // A noop of the membership, to be changed by the test; with a fresh number and a fresh place for its
  // result.
  abi::Call noop(const abi::Joined& joined);
  abi::Call dispatch(const abi::Joined& joined, std::uint32_t num_tokens);

  // Into the ring, whether it has room or not, and rings.
  void push(const abi::Joined& joined, const abi::Call& call);
  void ring() const;
  // How the membership's next call has ended; nothing after `seconds`.
  std::optional<abi::CallEnd> take(const abi::Joined& joined, double seconds = 10);
  // Calls of the membership that have been made, and that have ended.
  std::uint32_t made(const abi::Joined& joined) { return rank(joined).made; }
  std::uint32_t ended(const abi::Joined& joined);
  abi::CallWords& words(const abi::Joined& joined);
  // "STATUS: text" that the session ended with; "" if it lives on.
  std::string ended(double seconds = 10) const;

  abi::SegmentA& a() const { return *a_.as<abi::SegmentA>(); }
  const abi::SegmentB& b() const { return *b_.as<abi::SegmentB>(); }
  std::uint64_t id() const { return welcome_.session_id; }
  int socket() const { return client_.fd(); }
  int bell() const { return bell_.get(); }
  int client_bell() const { return client_bell_.get(); }
  // Segment A and segment B.
  const std::vector<UniqueFd>& segments() const { return segments_; }

 private:
  // The memory of a membership.
  struct Rank {
    Mapping arena, results;
    std::uint32_t made = 0;
    std::uint32_t taken = 0;
  };
  Rank& rank(const abi::Joined& joined) { return ranks_.at(joined.member); }
  std::string ask(abi::AttachType type, const void* body, std::size_t bytes);

  RawClient client_;
  Packet answer_;
  abi::Welcome welcome_{};
  std::vector<UniqueFd> segments_;
  UniqueFd bell_;  // the engine's
  UniqueFd client_bell_;
  Mapping a_, b_;
  std::map<std::uint32_t, Rank> ranks_;
};

}  // namespace epd::test

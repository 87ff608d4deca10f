// A client that speaks the attach protocol by hand: for what libepd never sends.
#pragma once

#include "common/fd.h"
#include "common/memory.h"
#include "common/packet.h"
#include "proto/attach.h"
#include "proto/call_words.h"
#include "proto/results.h"

#include <optional>
#include <string>

namespace epd::test {

class RawClient {
 public:
  explicit RawClient(const std::string& socket);  // connects; valid() says whether
  RawClient(UniqueFd unconnected, const std::string& socket);
  static UniqueFd make_unconnected();
  bool valid() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }

  // A Hello that the daemon accepts; change what the test is about.
  static abi::Hello good_hello();
  bool send(abi::AttachType type, const void* body, std::size_t bytes) const;
  bool send_bytes(const void* data, std::size_t bytes) const;
  // The next packet; none if the daemon hangs up or `seconds` pass.
  std::optional<Packet> receive(double seconds) const;
  // True when the daemon has closed the connection, unread packets aside.
  bool closed_within(double seconds) const;

 private:
  UniqueFd socket_;
};

// A rank that writes to shared memory by hand, step by step, where libepd does several at once. Throws
// RankFailure where the daemon does not play along.
class RawRank {
 public:
  RawRank(const std::string& socket, const std::string& device, const abi::Join& join);

  // The steps of the first call: its words (or only the first of them), the bell.
  void write(const abi::Call& call, std::uint32_t words = abi::PackedCall::kWords) const;
  void ring() const;
  // How it has ended, if it has.
  bool ended(abi::CallEnd& end) const;
  bool counted() const;

  const abi::Joined& joined() const { return joined_; }
  abi::SegmentA& a() const { return *a_.as<abi::SegmentA>(); }
  abi::SegmentB& b() const { return *b_.as<abi::SegmentB>(); }
  const abi::Board& board() const { return *board_.as<abi::Board>(); }
  std::byte* arena() const { return arena_.bytes(); }

 private:
  RawClient client_;
  UniqueFd bell_;
  Mapping a_, b_, arena_, board_, results_;
  abi::GroupShape shape_;
  abi::Joined joined_{};
};

// Writes a call of the host in its place, by words.
void write_call(abi::CallWords& words, const abi::Call& call, std::uint32_t count = abi::PackedCall::kWords);
bool read_end(const Mapping& results, std::uint32_t result, abi::CallEnd& end);

// "STATUS: text" of a refusal, or what came instead.
std::string refusal(const std::optional<Packet>& packet);

}  // namespace epd::test

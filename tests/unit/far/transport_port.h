// A port on a transport that the same thread steps. Bodies are given to the group aligned.
#pragma once

#include "far/far_group.h"
#include "transport/transport.h"

#include <array>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace epd::test {

class TransportPort final : public far::Port {
 public:
  explicit TransportPort(std::unique_ptr<transport::Transport> transport)
      : transport_(std::move(transport)) {}

  void connect(far::EngineId engine, std::span<const std::byte> address);
  transport::Transport& transport() { return *transport_; }

  // far::Port
  bool send(std::unique_ptr<far::Message>& message) override;
  void release(const far::Body& body) override;

  // Gives the group what has come. True: there was something.
  bool step(far::FarGroup& group);
  // Records that were sent, of a type.
  std::uint64_t records(abi::FarType type) const { return records_[static_cast<std::size_t>(type)]; }
  // From now on some bodies of that type are spoiled before they leave. Null: no more.
  void spoil(std::mt19937* random, abi::FarType type) {
    spoil_ = random;
    spoiled_type_ = type;
  }
  // Messages that are not away, and bodies that were not released.
  std::size_t under_way() const { return sent_.size(); }
  std::size_t held() const { return held_; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  std::unique_ptr<transport::Transport> transport_;
  std::map<far::EngineId, transport::PeerId> peers_;
  std::map<transport::PeerId, far::EngineId> engines_;
  std::map<std::uint64_t, std::unique_ptr<far::Message>> sent_;  // by cookie
  std::map<std::uint64_t, std::vector<Line>> aligned_;           // by hold
  std::uint64_t last_ = 0;
  std::size_t held_ = 0;
  std::array<std::uint64_t, 16> records_{};
  std::mt19937* spoil_ = nullptr;
  abi::FarType spoiled_type_{};
};

}  // namespace epd::test

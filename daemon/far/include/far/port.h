// How far messages leave an engine, and where their bodies lie. An engine's loop calls a port; what stands
// behind it may be a thread of its own.
#pragma once

#include "proto/far.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace epd::far {

// By this engines know each other, in the whole cluster.
using EngineId = std::uint64_t;

class BufferPool;

// Memory of a message's body. It goes back to its pool, or is freed if that is gone.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes) : memory_(bytes) {}
  ~Buffer();
  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() { return memory_.data(); }
  const std::byte* data() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.size(); }

 private:
  friend class BufferPool;
  std::vector<std::byte> memory_;
  std::weak_ptr<BufferPool> pool_;
};

// Buffers of one size, at most so many. They are made when they are needed first.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  BufferPool(std::size_t bytes, std::uint32_t most) : bytes_(bytes), left_(most) {}

  std::uint32_t available() const { return static_cast<std::uint32_t>(free_.size()) + left_; }
  Buffer take();  // one is available

 private:
  friend class Buffer;
  const std::size_t bytes_;
  std::uint32_t left_;  // that were not made yet
  std::vector<std::vector<std::byte>> free_;
};

// On its way to another engine. header.body_bytes of the buffer travel.
struct Message {
  abi::FarHeader header{};
  EngineId engine = 0;
  Buffer body;

  std::span<const std::byte> bytes() const { return {body.data(), header.body_bytes}; }
};

// A received body, aligned to 16 bytes or more, unchanged until it is released.
struct Body {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t hold = 0;  // the port's
};

class Port {
 public:
  virtual ~Port() = default;
  // Takes the message, and keeps it until it is away. False: there is no room; the message stays here.
  virtual bool send(std::unique_ptr<Message>& message) = 0;
  // The loop needs it no more.
  virtual void release(const Body& body) = 0;
};

}  // namespace epd::far

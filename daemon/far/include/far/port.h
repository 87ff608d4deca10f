// How messages leave an engine, and the memory of their bodies. An engine's loop calls a port, which may use
// a thread of its own.
#pragma once

#include "common/status.h"
#include "proto/far.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace epd::far {

// Names an engine in the whole cluster.
using EngineId = std::uint64_t;

class BufferPool;

// The memory of a message's body. It goes back to its pool, or is freed if the pool is gone.
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

// A limited number of buffers of one size. They are made on first use.
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

inline Buffer::~Buffer() {
  if (const std::shared_ptr<BufferPool> pool = pool_.lock()) pool->free_.push_back(std::move(memory_));
}

inline Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(pool_, other.pool_);
  return *this;
}

inline Buffer BufferPool::take() {
  EPD_CHECK(available() > 0);
  Buffer buffer;
  if (free_.empty()) {
    --left_;
    buffer.memory_.resize(bytes_);
  } else {
    buffer.memory_ = std::move(free_.back());
    free_.pop_back();
  }
  buffer.pool_ = weak_from_this();
  return buffer;
}

// A message to another engine. The first header.body_bytes of the buffer are sent.
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
  // Takes the message, and keeps it until it has left. False: there is no room, and the message stays here.
  virtual bool send(std::unique_ptr<Message>& message) = 0;
  // The loop no longer needs the body.
  virtual void release(const Body& body) = 0;
};

}  // namespace epd::far

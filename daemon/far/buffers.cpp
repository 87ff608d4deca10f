#include "common/status.h"
#include "far/port.h"

#include <utility>

namespace epd::far {

Buffer::~Buffer() {
  if (const std::shared_ptr<BufferPool> pool = pool_.lock()) pool->free_.push_back(std::move(memory_));
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(pool_, other.pool_);
  return *this;
}

Buffer BufferPool::take() {
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

}  // namespace epd::far

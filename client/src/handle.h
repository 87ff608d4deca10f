// What a caller holds in place of a session or a group: a word of the library's that outlives the object, so
// that a handle that is used after its end is known for what it is, and not read as if it were the object.
//
// A word is never freed nor used again: 16 bytes for each attach and join. What it can't tell: a call that
// races with the one that ends the handle, and a pointer that never was a handle.
#pragma once

#include <atomic>
#include <memory>

namespace epd::client {

template <typename T>
class Handle {
 public:
  // Null once the object has ended.
  T* object() const { return object_.load(std::memory_order_acquire); }
  void end() noexcept { object_.store(nullptr, std::memory_order_release); }

  // Gives it to a caller, for good. `object.given` ends it.
  static Handle* give(std::unique_ptr<Handle> handle, T& object) noexcept {
    handle->object_.store(&object, std::memory_order_release);
    object.given = handle.get();
    handle->earlier_ = latest_.load(std::memory_order_relaxed);
    while (!latest_.compare_exchange_weak(handle->earlier_, handle.get(), std::memory_order_release)) {
    }
    return handle.release();
  }

 private:
  // All that were given, for leak checkers: callers forget them.
  inline static std::atomic<Handle*> latest_{nullptr};

  std::atomic<T*> object_{nullptr};
  Handle* earlier_ = nullptr;
};

}  // namespace epd::client

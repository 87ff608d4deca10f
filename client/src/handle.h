// A handle stands for a session or a group. It is the address of a word that names the object and
// outlives it. So a handle that is used after its object's end is recognised.
//
// A word is never freed or used again. Each attach and each join costs 16 bytes for good. Two mistakes are
// not recognised: a call that races with the end of its own handle, and a pointer that never was a handle.
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
  // From here on it names this object, which ends it; the one before does no more.
  void move_to(T& object) noexcept {
    if (T* const before = this->object(); before != nullptr) before->given = nullptr;
    object.given = this;
    object_.store(&object, std::memory_order_release);
  }

  // Gives the handle to a caller. `object.given` ends it.
  static Handle* give(std::unique_ptr<Handle> handle, T& object) noexcept {
    handle->move_to(object);
    handle->earlier_ = latest_.load(std::memory_order_relaxed);
    while (!latest_.compare_exchange_weak(handle->earlier_, handle.get(), std::memory_order_release)) {
    }
    return handle.release();
  }

 private:
  // All handles that were given, so that leak checkers find them.
  inline static std::atomic<Handle*> latest_{nullptr};

  std::atomic<T*> object_{nullptr};
  Handle* earlier_ = nullptr;
};

}  // namespace epd::client

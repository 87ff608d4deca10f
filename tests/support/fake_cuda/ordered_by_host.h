// proto/ordered.h for the host: a thread that plays a device's. Orders are as strong as the device's; every
// scope is the whole system. Each access and each look asks the player first.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define EPD_DEVICE
#define EPD_NO_INLINE
#define EPD_NO_UNROLL

namespace epd::ordered {

// The part that the calling thread plays. Its functions may throw: the device's thread ends there.
class Player {
 public:
  virtual ~Player() = default;
  // Around each access.
  virtual void begin(const void* at, std::size_t bytes) = 0;
  virtual void end() = 0;
  // Between two looks.
  virtual void look_again(std::uint32_t looks) = 0;
  virtual std::uint64_t nanoseconds() = 0;
};
inline thread_local Player* player = nullptr;

template <typename T, typename Use>
inline auto access(const T* at, Use use) {
  player->begin(at, sizeof(T));
  struct End {
    ~End() { player->end(); }
  } end;
  return use(*const_cast<T*>(at));  // NOLINT: atomic_ref wants what it may write
}
template <typename T>
inline T load(const T* at, std::memory_order order) {
  return access(at, [order](T& word) { return std::atomic_ref(word).load(order); });
}
template <typename T>
inline void store(T* at, std::type_identity_t<T> value, std::memory_order order) {
  access(at, [=](T& word) { std::atomic_ref(word).store(value, order); });
}

inline void read_early(const std::uint64_t&) {}
template <typename T>
inline T load_acquire_system(const T* at) {
  return load(at, std::memory_order_acquire);
}
template <typename T>
inline T load_relaxed_system(const T* at) {
  return load(at, std::memory_order_relaxed);
}
template <typename T>
inline T load_acquire(const T* at) {
  return load(at, std::memory_order_acquire);
}
template <typename T>
inline T load_relaxed(const T* at) {
  return load(at, std::memory_order_relaxed);
}
template <typename T>
inline void store_release_system(T* at, std::type_identity_t<T> value) {
  store(at, value, std::memory_order_release);
}
template <typename T>
inline void store_relaxed_system(T* at, std::type_identity_t<T> value) {
  store(at, value, std::memory_order_relaxed);
}
template <typename T>
inline void store_relaxed(T* at, std::type_identity_t<T> value) {
  store(at, value, std::memory_order_relaxed);
}
template <typename T>
inline void store_release(T* at, std::type_identity_t<T> value) {
  store(at, value, std::memory_order_release);
}

struct [[gnu::may_alias]] alignas(16) Words {
  std::uint32_t x, y, z, w;
};
template <typename T>
inline void load_whole(T& to, const T& from) {
  struct [[gnu::may_alias]] Word {
    std::uint32_t value;
  };
  static_assert(sizeof(T) % sizeof(Word) == 0);
  access(&from, [&to](T& source) {
    auto* const words = reinterpret_cast<Word*>(&source);
    for (std::size_t i = 0; i < sizeof(T) / sizeof(Word); ++i)
      reinterpret_cast<Word*>(&to)[i].value = std::atomic_ref(words[i].value).load(std::memory_order_relaxed);
  });
}
inline std::uint32_t load_here(const std::uint32_t* at) {
  return load(at, std::memory_order_relaxed);
}
inline Words load_here(const Words* at) {
  Words words;
  load_whole(words, *at);
  return words;
}
template <typename Word>
inline Word load_alone(const Word* at) {
  return access(at, [](const Word& source) {
    Word word;
    std::memcpy(&word, &source, sizeof(word));
    return word;
  });
}
template <typename Word>
inline void store_alone(Word* at, Word value) {
  access(at, [&value](Word& target) { std::memcpy(&target, &value, sizeof(value)); });
}
inline Words load_of_host(const Words* at) {
  return load_here(at);
}

inline void fence_device() {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}
inline void fence_system() {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}
inline void fence_sequential_system() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

inline std::uint32_t count_up(std::uint32_t* at, std::uint32_t last) {
  return access(at, [last](std::uint32_t& word) {
    const std::atomic_ref<std::uint32_t> count(word);
    std::uint32_t before = count.load(std::memory_order_relaxed);
    while (!count.compare_exchange_weak(before, before >= last ? 0 : before + 1, std::memory_order_acq_rel)) {
    }
    return before;
  });
}
inline std::uint32_t count_in(std::uint32_t* at, std::uint32_t count) {
  return access(at, [count](std::uint32_t& word) {
    return std::atomic_ref(word).fetch_add(count, std::memory_order_acq_rel);
  });
}
inline std::uint32_t add(std::uint32_t* at, std::uint32_t value) {
  return access(at, [value](std::uint32_t& word) {
    return std::atomic_ref(word).fetch_add(value, std::memory_order_relaxed);
  });
}
inline void add_system(std::uint32_t* at, std::uint32_t value) {
  add(at, value);
}
inline void set_bits_system(std::uint32_t* at, std::uint32_t bits) {
  access(at,
         [bits](std::uint32_t& word) { std::atomic_ref(word).fetch_or(bits, std::memory_order_relaxed); });
}
inline std::uint64_t exchange(std::uint64_t* at, std::uint64_t value) {
  return access(at, [value](std::uint64_t& word) {
    return std::atomic_ref(word).exchange(value, std::memory_order_relaxed);
  });
}

inline std::uint64_t exchange_system(std::uint64_t* at, std::uint64_t value) {
  return exchange(at, value);
}
inline std::uint64_t fetch_or_system(std::uint64_t* at, std::uint64_t bits) {
  return access(at, [bits](std::uint64_t& word) {
    return std::atomic_ref(word).fetch_or(bits, std::memory_order_acq_rel);
  });
}

inline std::uint64_t nanoseconds() {
  return player->nanoseconds();
}
inline void look_again(std::uint32_t looks) {
  player->look_again(looks);
}
inline void look_after(std::uint32_t looks, std::uint32_t /*sleep_ns*/) {
  player->look_again(looks);
}

inline std::int32_t lowest_bit(std::uint32_t set) {
  return __builtin_ffs(static_cast<int>(set)) - 1;
}

}  // namespace epd::ordered

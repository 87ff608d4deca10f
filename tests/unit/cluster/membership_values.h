// Values of all that agents and coordinator say to each other: their fields one by one, random ones, and
// whether two are the same. A field that is added anywhere does not compile until it is counted here.
#pragma once

#include "membership/cluster_messages.h"
#include "proto/shape_rules.h"

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace epd::membership {

#define EPD_FIELDS(n, ...) EPD_FIELDS_##n(__VA_ARGS__)
#define EPD_FIELDS_1(Type)                  \
  template <typename F>                     \
  void each(const F& f, Type& x, Type& y) { \
    auto& [a] = x;                          \
    auto& [b] = y;                          \
    f(a, b);                                \
  }
#define EPD_FIELDS_2(Type)                  \
  template <typename F>                     \
  void each(const F& f, Type& x, Type& y) { \
    auto& [a1, a2] = x;                     \
    auto& [b1, b2] = y;                     \
    f(a1, b1), f(a2, b2);                   \
  }
#define EPD_FIELDS_3(Type)                  \
  template <typename F>                     \
  void each(const F& f, Type& x, Type& y) { \
    auto& [a1, a2, a3] = x;                 \
    auto& [b1, b2, b3] = y;                 \
    f(a1, b1), f(a2, b2), f(a3, b3);        \
  }
#define EPD_FIELDS_4(Type)                      \
  template <typename F>                         \
  void each(const F& f, Type& x, Type& y) {     \
    auto& [a1, a2, a3, a4] = x;                 \
    auto& [b1, b2, b3, b4] = y;                 \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4); \
  }
#define EPD_FIELDS_5(Type)                                 \
  template <typename F>                                    \
  void each(const F& f, Type& x, Type& y) {                \
    auto& [a1, a2, a3, a4, a5] = x;                        \
    auto& [b1, b2, b3, b4, b5] = y;                        \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5); \
  }
#define EPD_FIELDS_6(Type)                                            \
  template <typename F>                                               \
  void each(const F& f, Type& x, Type& y) {                           \
    auto& [a1, a2, a3, a4, a5, a6] = x;                               \
    auto& [b1, b2, b3, b4, b5, b6] = y;                               \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6); \
  }
#define EPD_FIELDS_7(Type)                                                       \
  template <typename F>                                                          \
  void each(const F& f, Type& x, Type& y) {                                      \
    auto& [a1, a2, a3, a4, a5, a6, a7] = x;                                      \
    auto& [b1, b2, b3, b4, b5, b6, b7] = y;                                      \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6), f(a7, b7); \
  }
#define EPD_FIELDS_8(Type)                                                                  \
  template <typename F>                                                                     \
  void each(const F& f, Type& x, Type& y) {                                                 \
    auto& [a1, a2, a3, a4, a5, a6, a7, a8] = x;                                             \
    auto& [b1, b2, b3, b4, b5, b6, b7, b8] = y;                                             \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6), f(a7, b7), f(a8, b8); \
  }
#define EPD_FIELDS_9(Type)                                                                             \
  template <typename F>                                                                                \
  void each(const F& f, Type& x, Type& y) {                                                            \
    auto& [a1, a2, a3, a4, a5, a6, a7, a8, a9] = x;                                                    \
    auto& [b1, b2, b3, b4, b5, b6, b7, b8, b9] = y;                                                    \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6), f(a7, b7), f(a8, b8), f(a9, b9); \
  }
#define EPD_FIELDS_10(Type)                                                                 \
  template <typename F>                                                                     \
  void each(const F& f, Type& x, Type& y) {                                                 \
    auto& [a1, a2, a3, a4, a5, a6, a7, a8, a9, a10] = x;                                    \
    auto& [b1, b2, b3, b4, b5, b6, b7, b8, b9, b10] = y;                                    \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6), f(a7, b7), f(a8, b8); \
    f(a9, b9), f(a10, b10);                                                                 \
  }
#define EPD_FIELDS_11(Type)                                                                 \
  template <typename F>                                                                     \
  void each(const F& f, Type& x, Type& y) {                                                 \
    auto& [a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11] = x;                               \
    auto& [b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11] = y;                               \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6), f(a7, b7), f(a8, b8); \
    f(a9, b9), f(a10, b10), f(a11, b11);                                                    \
  }
#define EPD_FIELDS_12(Type)                                                                 \
  template <typename F>                                                                     \
  void each(const F& f, Type& x, Type& y) {                                                 \
    auto& [a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12] = x;                          \
    auto& [b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12] = y;                          \
    f(a1, b1), f(a2, b2), f(a3, b3), f(a4, b4), f(a5, b5), f(a6, b6), f(a7, b7), f(a8, b8); \
    f(a9, b9), f(a10, b10), f(a11, b11), f(a12, b12);                                       \
  }

EPD_FIELDS(2, EngineId)
EPD_FIELDS(2, SessionId)
EPD_FIELDS(2, RequestId)
EPD_FIELDS(2, EpochKey)
EPD_FIELDS(3, GroupLabel)
EPD_FIELDS(3, RankDescription)
EPD_FIELDS(4, MemberDescription)
EPD_FIELDS(3, FarEngine)
// How SMs linger is each node's own.
template <typename F>
void each(const F& f, abi::GroupSettings& x, abi::GroupSettings& y) {
  f(x.group_id, y.group_id), f(x.sms, y.sms), f(x.priority, y.priority);
}
EPD_FIELDS(10, GroupDescription)
EPD_FIELDS(2, DeviceDescription)
EPD_FIELDS(2, EngineReport)
EPD_FIELDS(12, RankReport)
EPD_FIELDS(3, GroupReport)
EPD_FIELDS(7, Attach)
EPD_FIELDS(1, AgentHeartbeat)
EPD_FIELDS(1, Told)
EPD_FIELDS(2, ToCoordinator)
EPD_FIELDS(2, Welcome)
EPD_FIELDS(2, Order)
EPD_FIELDS(1, PutOut)
EPD_FIELDS(3, ToAgent)
EPD_FIELDS(2, NodeDrains)
EPD_FIELDS(4, MemoryAcquired)
EPD_FIELDS(4, abi::Binding)
EPD_FIELDS(2, abi::Bindings)
EPD_FIELDS(8, abi::Join)
EPD_FIELDS(2, Quota)
EPD_FIELDS(9, JoinRequest)
EPD_FIELDS(2, LeaveRequest)
EPD_FIELDS(2, SessionClosed)
EPD_FIELDS(3, EvictRank)
EPD_FIELDS(3, BoardIndex)
EPD_FIELDS(2, EngineUp)
EPD_FIELDS(3, EngineDown)
EPD_FIELDS(3, abi::GroupReady)
EPD_FIELDS(3, GroupReady)
EPD_FIELDS(2, abi::GroupWaits)
EPD_FIELDS(2, GroupWaits)
EPD_FIELDS(4, abi::MemberRef)
EPD_FIELDS(2, MemberStopped)
EPD_FIELDS(7, abi::Break)
EPD_FIELDS(2, BreakRequested)
EPD_FIELDS(3, abi::Broken)
EPD_FIELDS(2, Broken)
EPD_FIELDS(2, abi::Resumed)
EPD_FIELDS(2, Resumed)
EPD_FIELDS(1, abi::GroupRef)
EPD_FIELDS(2, GroupRemoved)
EPD_FIELDS(4, abi::RankRefused)
EPD_FIELDS(2, RankRefused)
EPD_FIELDS(4, PeerLost)
EPD_FIELDS(3, StartGroup)
EPD_FIELDS(3, SendRank)
EPD_FIELDS(3, SendMember)
EPD_FIELDS(2, SendFarEngine)
EPD_FIELDS(2, SendStopMember)
EPD_FIELDS(4, SendBreak)
EPD_FIELDS(2, SendRelease)
EPD_FIELDS(8, abi::Resume)
EPD_FIELDS(5, SendResume)
EPD_FIELDS(2, SendRemoveGroup)
EPD_FIELDS(4, CloseStreams)
EPD_FIELDS(2, KillEngine)
EPD_FIELDS(6, AcquireMemory)
EPD_FIELDS(3, ReleaseMemory)
EPD_FIELDS(6, MarkLost)
EPD_FIELDS(11, abi::Joined)
EPD_FIELDS(3, ReplyJoined)
EPD_FIELDS(2, abi::Left)
EPD_FIELDS(2, ReplyLeft)
EPD_FIELDS(2, ReplyRefused)
EPD_FIELDS(1, WakeSession)
template <typename F>
void each(const F&, Superseded&, Superseded&) {}
template <typename F>
void each(const F&, CoordinatorHeartbeat&, CoordinatorHeartbeat&) {}

// Whether all fields are equal. By this a value that was said is told from what was heard.
class Same {
 public:
  template <typename T>
  static bool of(T a, T b) {
    Same same;
    same.look(a, b);
    return same.same_;
  }

 private:
  template <typename T>
  void look(T& a, T& b) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
                  std::is_same_v<T, abi::GroupShape>) {
      same_ &= a == b;
    } else if constexpr (std::is_array_v<T>) {
      same_ &= std::memcmp(a, b, sizeof(T)) == 0;
    } else if constexpr (std::is_same_v<T, Status>) {
      same_ &= a.to_string() == b.to_string();
    } else if constexpr (requires { a.index(); }) {
      same_ &= a.index() == b.index();
      if (same_) {
        std::visit(
            [&](auto& x) {
              if constexpr (requires { each([](auto&, auto&) {}, x, x); })
                look(x, std::get<std::decay_t<decltype(x)>>(b));
            },
            a);
      }
    } else if constexpr (requires { a.begin(); }) {
      same_ &= a.size() == b.size();
      for (std::size_t i = 0; i < a.size() && same_; ++i) look(a[i], b[i]);
    } else {
      each([this](auto& x, auto& y) { look(x, y); }, a, b);
    }
  }

  bool same_ = true;
};

// Random values that daemons may say.
class Random {
 public:
  explicit Random(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  template <typename T>
  T value() {
    T v{};
    fill(v);
    return v;
  }
  // Of the alternative with that index.
  template <typename Variant>
  Variant alternative(std::size_t index) {
    Variant v;
    choose(v, index, std::make_index_sequence<std::variant_size_v<Variant>>());
    return v;
  }

 private:
  template <typename Variant, std::size_t... kIndices>
  void choose(Variant& v, std::size_t index, std::index_sequence<kIndices...>) {
    ((kIndices == index ? fill_alternative(v.template emplace<kIndices>()) : void()), ...);
  }
  template <typename T>
  void fill_alternative(T& v) {
    if constexpr (requires { each([](auto&, auto&) {}, v, v); }) fill(v);
  }

  template <typename T>
  void fill(T& v) {
    if constexpr (std::is_same_v<T, bool>) {
      v = below(2) != 0;
    } else if constexpr (std::is_same_v<T, StatusCode>) {
      v = static_cast<StatusCode>(below(kNumStatusCodes));
    } else if constexpr (std::is_enum_v<T>) {
      v = static_cast<T>(below(2));
    } else if constexpr (std::is_same_v<T, std::uint64_t>) {
      v = below(abi::kLastEpoch + 1);
    } else if constexpr (std::is_arithmetic_v<T>) {
      v = static_cast<T>(below(8));
    } else if constexpr (std::is_same_v<T, std::string>) {
      v = text(below(12));
    } else if constexpr (std::is_same_v<T, Status>) {
      v = Status(static_cast<StatusCode>(1 + below(kNumStatusCodes - 1)), text(20));
    } else if constexpr (std::is_same_v<T, abi::GroupShape>) {
      const auto ranks = static_cast<std::uint32_t>(1 + below(4));
      v = {ranks,
           ranks * 2,
           16,
           128,
           2,
           2,
           abi::Payload::kBf16,
           abi::IndexType::kInt64,
           abi::LossPolicy::kDegrade};
      v.span = static_cast<abi::Span>(below(2));
      v.num_handles = static_cast<std::uint32_t>(below(9));
      v.num_more_formats = static_cast<std::uint32_t>(below(3));
      if (v.num_more_formats > 0) v.more_formats[0].payload = abi::Payload::kFp8Cast;
      if (v.num_more_formats > 1) v.more_formats[1] = {abi::Payload::kFp8, abi::ScaleFormat::kUe8m0};
    } else if constexpr (std::is_array_v<T>) {
      fill_array(v);
    } else if constexpr (requires { v.resize(1); }) {
      v.resize(below(4));
      for (auto& one : v) fill(one);
    } else if constexpr (requires { v.index(); }) {
      v = alternative<T>(below(std::variant_size_v<T>));
    } else if constexpr (requires { v.fill({}); }) {
      for (auto& one : v) fill(one);
    } else {
      each([this](auto& x, auto&) { fill(x); }, v, v);
      mend(v);
    }
  }
  template <std::size_t N>
  void fill_array(char (&v)[N]) {
    const std::string t = text(below(N));
    abi::set_text(v, t.data(), t.size());
  }
  void fill_array(std::uint64_t (&)[2]) {}  // of abi::Resume: what is beside it counts

  // What fields say of each other, or is not carried.
  template <typename T>
  void mend(T&) {}
  void mend(GroupDescription& v) {
    v.ranks.resize(v.shape.num_ranks);
    for (std::uint32_t i = 0; i < v.ranks.size(); ++i) v.ranks[i].rank = i;
    for (MemberDescription& member : v.members) member.rank %= v.shape.num_ranks;
  }
  void mend(AcquireMemory& v) { v.rank %= v.shape.num_ranks; }
  void mend(abi::Break& v) { v.fatal %= 2; }
  void mend(abi::MemberRef& v) { v.reserved = 0; }
  void mend(abi::Left& v) { v.reserved = 0; }
  void mend(abi::Joined& v) {
    v.shares_device %= 2;
    v.kept = 0;
  }
  void mend(abi::Join& v) { v.restores = 0; }
  void mend(abi::Bindings& v) { v.whole = {}; }  // groups that span nodes are of host devices
  void mend(abi::Resume& v) { v.view = 0; }
  void mend(NodeDrains& v) { v.node = kLocalNode; }

  std::string text(std::size_t size) {
    std::string t(size, ' ');
    for (char& c : t) c = static_cast<char>(0x20 + below(0x5f));
    return t;
  }

  std::mt19937_64 random_;
};

}  // namespace epd::membership

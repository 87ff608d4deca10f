// Protobuf's encoding of the messages of epd/v1/membership.proto. fields(io, struct) shows each field to
// `io`: a Writer appends it, a Reader judges it and fills it in. A Reader skips fields that it does not know,
// so newer daemons may send more.
#pragma once

#include "common/status.h"
#include "frames.h"
#include "membership/messages.h"
#include "proto/shape_rules.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace epd::cluster {

using namespace membership;

// Limits that membership.proto names.
constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kAnyWord = std::numeric_limits<std::uint32_t>::max();
constexpr std::int64_t kLeastInt = std::numeric_limits<std::int32_t>::min();
constexpr std::uint64_t kMostInt = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kMostNode = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxDevices = 1024;  // of a node
constexpr std::uint64_t kMostRank = abi::kMaxRanks - 1;
constexpr std::uint64_t kMostCode = kNumStatusCodes - 1;
constexpr std::size_t kMaxWireText = 1024;
constexpr std::size_t kMaxNameText = 253;   // of a node
constexpr std::size_t kMaxBoards = 65'536;  // ranks on one device
constexpr std::size_t kMaxGroups = 65'536;  // of one node

enum class Kind { kUint32, kUint64, kFixed64, kInt32, kSint32, kBool };
constexpr bool is_signed(Kind kind) {
  return kind == Kind::kInt32 || kind == Kind::kSint32;
}

// A field as protobuf encodes it.
struct WireField {
  enum Type : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  static constexpr Type type_of(Kind kind) { return kind == Kind::kFixed64 ? kFixed64 : kVarint; }

  std::uint64_t number = 0;
  std::uint32_t type = kVarint;
  std::uint64_t value = 0;  // of a number
  std::string_view bytes;   // of kBytes
};
// Takes the value, or the field, at the beginning of the bytes. False: there is none.
bool take_varint(std::string_view& bytes, std::uint64_t& value);
bool take_fixed64(std::string_view& bytes, std::uint64_t& value);
bool take_field(std::string_view& bytes, WireField& field);

// Returns what is wrong with the message as a whole, or "".
std::string check(const GroupDescription& group);
std::string check(const AcquireMemory& action);

class Writer {
 public:
  std::string take() { return std::move(bytes_); }

  template <Kind K, typename Value, typename Low, typename Most>
  void number(std::uint32_t number, const char*, Value& value, Low, Most) {
    if (value == Value{}) return;
    put_tag(number, WireField::type_of(K));
    put<K>(value);
  }
  void text(std::uint32_t number, const char*, std::string& value, std::size_t most) {
    if (!value.empty()) put_bytes(number, printable(value.substr(0, most)));
  }
  template <std::size_t N>
  void text(std::uint32_t number, const char* name, char (&value)[N], std::size_t) {
    std::string as_string(value, std::find(value, value + N, '\0'));
    text(number, name, as_string, N - 1);
  }
  void bytes(std::uint32_t number, const char*, std::string& value, std::size_t) {
    if (!value.empty()) put_bytes(number, value);
  }
  template <typename Value>
  void part(std::uint32_t number, const char*, Value& value) {
    Writer writer;
    fields(writer, value);
    put_bytes(number, writer.bytes_);
  }
  template <typename Value>
  void list(std::uint32_t number, const char* name, std::vector<Value>& values, std::size_t) {
    for (Value& value : values) part(number, name, value);
  }
  template <Kind K, typename Value>
  void numbers(std::uint32_t number, const char*, std::vector<Value>& values, std::size_t, std::uint64_t) {
    Writer writer;
    for (const Value value : values) writer.put<K>(value);
    if (!values.empty()) put_bytes(number, writer.bytes_);
  }
  template <typename Value, typename Variant>
  void choice(std::uint32_t number, const char* name, Variant& variant) {
    if (Value* value = std::get_if<Value>(&variant); value != nullptr) {
      part(number, name, *value);
      chosen_ = true;
    }
  }
  // Fails for an alternative that is on its registry's own side alone.
  void chosen(const char*, const char*) { EPD_CHECK(chosen_); }
  template <typename Value>
  void judge(const Value&) {}

 private:
  static std::string printable(std::string text);
  void put_varint(std::uint64_t value);
  void put_fixed64(std::uint64_t value);
  void put_tag(std::uint32_t number, WireField::Type type) { put_varint(number << 3 | type); }
  void put_bytes(std::uint32_t number, const std::string& bytes);
  template <Kind K, typename Value>
  void put(const Value value) {
    if constexpr (K == Kind::kFixed64) {
      put_fixed64(static_cast<std::uint64_t>(value));
    } else if constexpr (is_signed(K)) {
      const auto wide = static_cast<std::int64_t>(value);
      put_varint(K == Kind::kInt32 ? wide : (static_cast<std::uint64_t>(wide) << 1) ^ (wide >> 63));
    } else {
      put_varint(static_cast<std::uint64_t>(value));
    }
  }

  std::string bytes_;
  bool chosen_ = false;
};

class Reader {
 public:
  // The first thing that was wrong in what has been read.
  const Status& status() const { return status_; }
  template <typename Value>
  void read(std::string_view bytes, Value& value) {
    if (!judge_encoding("the message", bytes)) return;
    bytes_ = bytes;
    fields(*this, value);
  }

  template <Kind K, typename Value, typename Low, typename Most>
  void number(std::uint32_t number, const char* name, Value& value, Low low, Most most) {
    std::uint64_t wire = 0;
    each(number, [&](const WireField& field) {
      if (field.type == WireField::type_of(K)) wire = field.value;
    });
    judge_number<K>(name, wire, value, static_cast<std::int64_t>(low), static_cast<std::uint64_t>(most));
  }
  void text(std::uint32_t number, const char* name, std::string& value, std::size_t most) {
    const std::string_view wire = last(number);
    if (judge_text(name, wire, most)) value = wire;
  }
  template <std::size_t N>
  void text(std::uint32_t number, const char* name, char (&value)[N], std::size_t) {
    const std::string_view wire = last(number);
    if (judge_text(name, wire, N - 1)) std::fill(std::copy(wire.begin(), wire.end(), value), value + N, '\0');
  }
  void bytes(std::uint32_t number, const char* name, std::string& value, std::size_t most) {
    const std::string_view wire = last(number);
    if (wire.size() <= most) {
      value = wire;
    } else {
      refuse(name, "of " + std::to_string(wire.size()) + " bytes", "at most " + std::to_string(most));
    }
  }
  template <typename Value>
  void part(std::uint32_t number, const char* name, Value& value) {
    nested(name, last(number), value);
  }
  template <typename Value>
  void list(std::uint32_t number, const char* name, std::vector<Value>& values, std::size_t most) {
    if (!judge_size(name, count(number), most)) return;
    each(number, [&](const WireField& field) {
      if (field.type == WireField::kBytes && status_.ok()) nested(name, field.bytes, values.emplace_back());
    });
  }
  // Each number may be a field of its own, or one field may hold all.
  template <Kind K, typename Value>
  void numbers(std::uint32_t number, const char* name, std::vector<Value>& values, std::size_t size,
               std::uint64_t most) {
    const auto add = [&](std::uint64_t wire) {
      if (judge_size(name, values.size() + 1, size))
        judge_number<K>(name, wire, values.emplace_back(), 0, most);
    };
    each(number, [&](const WireField& field) {
      if (field.type == WireField::type_of(K)) add(field.value);
      std::string_view packed = field.bytes;
      for (std::uint64_t wire = 0; !packed.empty() && status_.ok(); add(wire)) {
        const bool fine = K == Kind::kFixed64 ? take_fixed64(packed, wire) : take_varint(packed, wire);
        if (!fine) return refuse(name, "a list that ends within a number", "protobuf's encoding");
      }
    });
  }
  template <typename Value, typename Variant>
  void choice(std::uint32_t number, const char* name, Variant& variant) {
    if (count(number) == 0) return;
    nested(name, last(number), variant.template emplace<Value>());
    chosen_ = true;
  }
  void chosen(const char* name, const char* known) {
    if (!std::exchange(chosen_, false)) refuse(name, "none that is known", known);
  }
  template <typename Value>
  void judge(const Value& value) {
    if (!status_.ok()) return;
    if (const std::string wrong = check(value); !wrong.empty()) status_ = invalid_argument(path() + wrong);
  }

 private:
  template <typename Do>
  void each(std::uint32_t number, const Do& act) const {
    WireField field;
    for (std::string_view rest = bytes_; !rest.empty();) {
      take_field(rest, field);  // judged before
      if (field.number == number) act(field);
    }
  }
  std::string_view last(std::uint32_t number) const;
  std::size_t count(std::uint32_t number) const;
  template <typename Value>
  void nested(const char* name, std::string_view bytes, Value& value) {
    if (!status_.ok() || !judge_encoding(name, bytes)) return;
    path_.emplace_back(name);
    const std::string_view outer = std::exchange(bytes_, bytes);
    const bool outer_chosen = std::exchange(chosen_, false);
    fields(*this, value);
    chosen_ = outer_chosen;
    bytes_ = outer;
    path_.pop_back();
  }
  template <Kind K, typename Value>
  void judge_number(const char* name, std::uint64_t wire, Value& value, std::int64_t low,
                    std::uint64_t most) {
    if constexpr (is_signed(K)) {
      const std::uint64_t plain = K == Kind::kInt32 ? wire : wire >> 1 ^ (0 - (wire & 1));
      const auto number = static_cast<std::int64_t>(plain);
      if (number >= low && number <= static_cast<std::int64_t>(most)) {
        value = static_cast<Value>(number);
        return;
      }
      refuse(name, std::to_string(number), std::to_string(low) + " .. " + std::to_string(most));
    } else if (wire <= most) {
      value = static_cast<Value>(wire);
    } else {
      refuse(name, std::to_string(wire), std::to_string(low) + " .. " + std::to_string(most));
    }
  }
  bool judge_encoding(const char* name, std::string_view bytes);
  bool judge_text(const char* name, std::string_view wire, std::size_t most);
  bool judge_size(const char* name, std::size_t size, std::size_t most);
  void refuse(const char* name, const std::string& value, const std::string& allowed);
  std::string path() const;

  Status status_;
  std::vector<std::string_view> path_;
  std::string_view bytes_;  // of the message that is read
  bool chosen_ = false;
};

// ---- messages whose structs are not as they are sent

template <typename Io>
void fields(Io& io, Status& v) {
  StatusCode code = v.code();
  std::string text = v.message();
  io.template number<Kind::kUint32>(1, "code", code, 0, kMostCode);
  io.text(2, "text", text, kMaxWireText);
  v = Status(code, std::move(text));
}

template <typename Io>
void fields(Io& io, abi::Join& v) {
  std::string group(v.group, abi::text_length(v.group));
  io.bytes(1, "group", group, abi::kMaxGroupName);
  abi::set_text(v.group, group.data(), group.size());
  io.template number<Kind::kSint32>(2, "rank", v.rank, kLeastInt, kMostInt);
  io.template number<Kind::kUint32>(3, "timeout_ms", v.timeout_ms, 0, kAnyWord);
  io.template number<Kind::kUint32>(4, "sms", v.sms, 0, kAnyWord);
  io.template number<Kind::kSint32>(5, "priority", v.priority, kLeastInt, kMostInt);
  io.part(6, "shape", v.shape);
}

#include "fields.inc"

}  // namespace epd::cluster

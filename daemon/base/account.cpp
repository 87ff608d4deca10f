#include "base/account.h"

#include <grp.h>
#include <pwd.h>
#include <cerrno>
#include <charconv>
#include <vector>

namespace epd {
namespace {

constexpr std::size_t kMaxRecord = std::size_t{1} << 20;

std::optional<std::uint32_t> number(const std::string& text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value > kMaxAccountId)
    return std::nullopt;
  return value;
}

// `ask(buffer)` is getpwnam_r or getgrnam_r. A group of many members needs a large buffer.
template <typename Ask>
void with_buffer(const Ask& ask) {
  std::vector<char> buffer(4096);
  while (ask(buffer) == ERANGE && buffer.size() < kMaxRecord) buffer.resize(buffer.size() * 2);
}

}  // namespace

std::optional<std::uint32_t> find_user_id(const std::string& name_or_number) {
  passwd record{};
  passwd* found = nullptr;
  with_buffer([&](std::vector<char>& buffer) {
    return ::getpwnam_r(name_or_number.c_str(), &record, buffer.data(), buffer.size(), &found);
  });
  return found != nullptr ? std::optional<std::uint32_t>(found->pw_uid) : number(name_or_number);
}

std::optional<std::uint32_t> find_group_id(const std::string& name_or_number) {
  group record{};
  group* found = nullptr;
  with_buffer([&](std::vector<char>& buffer) {
    return ::getgrnam_r(name_or_number.c_str(), &record, buffer.data(), buffer.size(), &found);
  });
  return found != nullptr ? std::optional<std::uint32_t>(found->gr_gid) : number(name_or_number);
}

}  // namespace epd

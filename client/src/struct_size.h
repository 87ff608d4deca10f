// The size rule of the C ABI: structs begin with the size that the caller was compiled with.
#pragma once

#include "errors.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace epd::client {

// No struct becomes longer than this. A larger size is a caller's mistake, not a newer header.
inline constexpr std::size_t kMaxStructBytes = 4096;

// All structs begin with a size_t, so the size of each version of a struct is a multiple of sizeof(size_t).
// Another size would end within a field.
constexpr bool is_struct_size(std::size_t size) {
  return size != 0 && size <= kMaxStructBytes && size % sizeof(size) == 0;
}

template <typename T>
Status wrong_size(const char* name, std::size_t size) {
  return invalid_argument(std::string(name) + ".size is " + std::to_string(size) +
                          "; allowed: sizeof the struct (this library knows " + std::to_string(sizeof(T)) +
                          ")");
}

// Copies the caller's struct into `copy`, whose other fields stay zero. Refuses a longer struct whose unknown
// fields are not zero: it asks for something that this library can't do.
template <typename T>
Status read_struct(const T* from, const char* name, T& copy) {
  if (from == nullptr) return invalid_argument(std::string(name) + " is NULL");
  std::size_t size;
  std::memcpy(&size, from, sizeof(size));
  if (!is_struct_size(size)) return wrong_size<T>(name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return invalid_argument(std::string(name) + " has a field at byte " + std::to_string(i) +
                              " that libepd " EPD_CLIENT_VERSION " does not know (it knows " +
                              std::to_string(sizeof(T)) + " bytes); allowed: zero");
    }
  }
  std::memcpy(static_cast<void*>(&copy), from, size < sizeof(T) ? size : sizeof(T));
  return {};
}

// The number in an enum. A caller in C may have written any number, and reading it as the enum would be
// undefined.
template <typename Enum>
std::uint32_t number_in(const Enum& value) {
  std::uint32_t number;
  static_assert(sizeof(value) == sizeof(number));
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

// Checks the size of an output struct. The caller checks for NULL.
template <typename T>
Status check_output(const T* to, const char* name) {
  std::size_t size;
  std::memcpy(&size, to, sizeof(size));
  return is_struct_size(size) ? Status() : wrong_size<T>(name, size);
}

// Writes what fits into the caller's struct, after check_output. Its size stays.
template <typename T>
void write_struct(T* to, T value) {
  std::memcpy(&value.size, to, sizeof(value.size));
  std::memcpy(static_cast<void*>(to), &value, value.size < sizeof(T) ? value.size : sizeof(T));
}

}  // namespace epd::client

#include "shared_memory.h"

namespace epd::client {

Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Access access, const std::string& what) {
  const std::string from = what + " from the daemon";
  const Result<std::uint64_t> size = sealed_size(fd.get());
  if (!size.ok()) return internal_error(from + " is unusable: " + size.status().message());
  if (size.value() < bytes) {
    return internal_error(from + " has " + std::to_string(size.value()) +
                          " bytes; needed: " + std::to_string(bytes));
  }
  Result<Mapping> mapping = Mapping::map(fd.get(), bytes, access);
  if (mapping.ok()) return mapping;
  return Status(mapping.status().code(), from + ": " + mapping.status().message());
}

}  // namespace epd::client

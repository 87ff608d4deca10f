#include "shared_memory.h"

namespace epd::client {
namespace {

// Nothing in its first bytes can raise SIGBUS.
Status check_sealed(const UniqueFd& fd, std::uint64_t bytes, const std::string& from) {
  const Result<std::uint64_t> size = sealed_size(fd.get());
  if (!size.ok()) return internal_error(from + " is unusable: " + size.status().message());
  if (size.value() >= bytes) return {};
  return internal_error(from + " has " + std::to_string(size.value()) +
                        " bytes; needed: " + std::to_string(bytes));
}

}  // namespace

Result<Mapping> map_sealed(const UniqueFd& fd, std::uint64_t bytes, Access access, const std::string& what) {
  const std::string from = what + " from the daemon";
  if (Status status = check_sealed(fd, bytes, from); !status.ok()) return status;
  Result<Mapping> mapping = Mapping::map(fd.get(), bytes, access);
  if (mapping.ok()) return mapping;
  return Status(mapping.status().code(), from + ": " + mapping.status().message());
}

Status map_sealed_over(Mapping& former, const UniqueFd& fd, Access access, const std::string& what) {
  const std::string from = what + " from the daemon";
  if (Status status = check_sealed(fd, former.size(), from); !status.ok()) return status;
  const Status mapped = former.map_over(fd.get(), access);
  return mapped.ok() ? mapped : Status(mapped.code(), from + ": " + mapped.message());
}

}  // namespace epd::client

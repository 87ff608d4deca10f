// The versions that this epctl was built from. Client libraries of the same build report the same.
#pragma once

#include <cstdint>
#include <string>

namespace epd::ctl {

struct OwnVersion {
  std::string version;
  std::string commit;
  std::uint32_t abi_version_min = 0;
  std::uint32_t abi_version_max = 0;
  std::string layout_hash;  // hexadecimal
  std::string grpc_version;
};

OwnVersion own_version();

}  // namespace epd::ctl

#include "versions.h"

#include "common/build_info.h"
#include "connection.h"
#include "proto/attach.h"
#include "proto/wire.h"

#include <array>
#include <cstdio>

namespace epd::ctl {

OwnVersion own_version() {
  std::array<char, 20> hash{};
  std::snprintf(hash.data(), hash.size(), "%016llx", static_cast<unsigned long long>(abi::layout_hash()));
  return {build_info().version, build_info().commit, abi::kAbiVersionMin,
          abi::kAbiVersion,     hash.data(),         grpc_version()};
}

}  // namespace epd::ctl

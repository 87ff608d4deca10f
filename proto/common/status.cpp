#include "common/status.h"

#include <cstring>

namespace epd {

Status errno_status(const std::string& what, int error) {
  const bool exhausted = error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
  return {exhausted ? StatusCode::kResourceExhausted : StatusCode::kInternal,
          what + ": " + std::strerror(error)};
}

}  // namespace epd

#include "kit/shared_array.h"

#include "kit/error.h"

#include <sys/mman.h>

namespace epd::kit {

SharedBytes::SharedBytes(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail_errno("mapping " + std::to_string(bytes) + " bytes");
  data_ = memory;
}

SharedBytes::~SharedBytes() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace epd::kit

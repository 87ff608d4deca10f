// Ranges in the domain "epd" around submissions and waits, for profilers (NVTX). Without a profiler in the
// process a range is the test of a pointer. Only where CUDA's headers were there to build with.
#pragma once

#ifdef EPD_CLIENT_HAS_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace epd::client {

#ifdef EPD_CLIENT_HAS_NVTX

// Null if no tool listens.
inline nvtxDomainHandle_t nvtx_domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("epd");
  return domain;
}

class Range {
 public:
  explicit Range(const char* name) : domain_(nvtx_domain()) {
    if (domain_ == nullptr) return;
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    nvtxDomainRangePushEx(domain_, &attributes);
  }
  ~Range() {
    if (domain_ != nullptr) nvtxDomainRangePop(domain_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const nvtxDomainHandle_t domain_;
};

#else

class Range {
 public:
  explicit Range(const char* /*name*/) {}
};

#endif

}  // namespace epd::client

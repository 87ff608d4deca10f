// What a launch of one of the client library's kernels is told to do.
#pragma once

#include "step.h"

#include <cstdint>
#include <cstring>

namespace epd::fake_cuda {

// A kernel that copies nothing takes the first part of a step alone.
inline stream_kernels::StagedStep step_of(const char* kernel, void** parameters) {
  bool copies = false;
  for (std::uint32_t i = stream_kernels::kFirstThatCopies; i < stream_kernels::kNumKernels; ++i)
    copies = copies || std::strcmp(kernel, stream_kernels::kKernelNames[i]) == 0;
  stream_kernels::StagedStep step;
  std::memcpy(static_cast<void*>(&step), parameters[0], copies ? sizeof(step) : sizeof(stream_kernels::Step));
  return step;
}

}  // namespace epd::fake_cuda

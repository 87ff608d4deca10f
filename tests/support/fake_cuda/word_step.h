// The parameters of a launch of one of the client library's kernels.
#pragma once

#include "step.h"

#include <cstdint>
#include <cstring>

namespace epd::fake_cuda {

inline stream_kernels::Copying copying_of(const char* kernel) {
  for (std::uint32_t i = 0; i < stream_kernels::kNumKernels; ++i) {
    if (std::strcmp(kernel, stream_kernels::kKernelNames[i]) == 0) return stream_kernels::copying_of(i);
  }
  return stream_kernels::Copying::kNothing;
}

// A kernel that copies nothing takes only the first part of a step. A FewStep's number of pieces is taken
// from it.
inline stream_kernels::StagedStep step_of(const char* kernel, void** parameters) {
  using stream_kernels::Copying;
  const Copying copying = copying_of(kernel);
  stream_kernels::StagedStep step;
  std::memcpy(static_cast<void*>(&step), parameters[0],
              copying == Copying::kPieces ? sizeof(step) : sizeof(stream_kernels::Step));
  if (copying != Copying::kFew) return step;
  for (const stream_kernels::FewWords& piece :
       static_cast<const stream_kernels::FewStep*>(parameters[0])->in) {
    if (piece.to != nullptr) ++step.copies.num_in;
  }
  return step;
}

}  // namespace epd::fake_cuda

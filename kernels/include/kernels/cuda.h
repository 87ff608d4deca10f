// Dispatch and combine on a CUDA device. A main kernel does a whole operation, with counting and exchange.
// This file has the image of the kernels and the division of an operation's work. The caller launches the
// kernels.
#pragma once

#include "kernels/operation.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::kernels::cuda {

// Returns the bytes of device memory that an operation in flight needs for itself.
std::size_t workspace_bytes(const Shape& shape, std::uint32_t max_sms);

// Divides the work of `op` among `sms` CTAs. `max_shared_bytes` is the shared memory that the device gives
// one CTA. division.stages of a combine is an input. Returns false if a row does not fit.
bool configure(Kind kind, std::size_t max_shared_bytes, std::uint32_t sms, kernels::Operation& op);

// The kernels, as a fat binary for cuLibraryLoadData. Each kernel may have max_shared_bytes less kStaticBytes
// of dynamic shared memory.
// - epd_gate and epd_main are a pair; their parameter is WorkerArguments. epd_gate is one warp without
//   dynamic shared memory. epd_main has WorkerArguments::ctas CTAs of kMaxThreads, and is launched behind
//   its gate with programmatic stream serialization. CTAs that a call does not use leave at once.
// - epd_launch_probe is the launch probe. It does nothing; that it has run shows that the GPU still starts
//   kernels.
std::span<const std::byte> image();
bool image_checks_ranges();  // whether it is the debug image (cuda/common/range.h)
// Shared memory beside the dynamic part: the operation's copy, the group view, a few words, and the driver's
// part. The rest is for a client's kernel that waits for an operation: it must not keep a main kernel's CTA
// from its SM.
inline constexpr std::uint32_t kStaticBytes = 12 * 1024;
inline constexpr const char* kKernelNames[] = {"epd_gate", "epd_main", "epd_launch_probe"};
inline constexpr const char* kGateKernel = kKernelNames[0];
inline constexpr const char* kMainKernel = kKernelNames[1];
inline constexpr const char* kLaunchProbeKernel = kKernelNames[2];
inline constexpr std::uint32_t kGateThreads = 32;

}  // namespace epd::kernels::cuda

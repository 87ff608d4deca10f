// Dispatch and combine on a CUDA device: one launch does a whole operation, counting and exchange
// included. The image of the kernels, and how an operation's work is divided. The caller launches them.
#pragma once

#include "kernels/cuda_operation.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::kernels::cuda {

// Bytes of device memory that an operation in flight needs for itself.
std::size_t workspace_bytes(const Shape& shape, std::uint32_t max_sms);

// Divides the work among `sms` CTAs. `max_shared_bytes`: what one may have on the device. False: a row does
// not fit. movers.stages of a combine is taken as it is given.
bool configure(Kind kind, std::size_t max_shared_bytes, std::uint32_t sms, Operation& op);

// The kernels, for cuLibraryLoadData: a fat binary, and what is in it. Each may have as much dynamic shared
// memory as max_shared_bytes less kStaticBytes. The first three run one operation, to which their only
// parameter points in device memory. The resident one stays; its parameter is ResidentArguments. It runs on
// as many SMs as it has CTAs, of kMaxThreads and all shared memory, so that nothing else fits beside it, and
// operations may ask for fewer. The pulse does nothing: that it has run says that kernels begin.
std::span<const std::byte> image();
bool image_checks_ranges();  // cuda/common/range.h: of the debug image
// The operation's copy, the group's view, a few words, the driver's; and room for a kernel of a client's that
// waits for this one, which must not keep a launched CTA from its SM.
inline constexpr std::uint32_t kStaticBytes = 12 * 1024;
inline constexpr const char* kKernelNames[] = {"epd_dispatch", "epd_combine", "epd_combine_per_expert",
                                               "epd_resident", "epd_pulse"};
inline constexpr const char* kResidentKernel = kKernelNames[3];
inline constexpr const char* kPulseKernel = kKernelNames[4];

// Of `op`, which is configured: movers.ctas CTAs of movers.threads threads and movers.shared_bytes, one CTA
// on an SM; all must be able to run at once.
const char* kernel_name(Kind kind, const Operation& op);

}  // namespace epd::kernels::cuda

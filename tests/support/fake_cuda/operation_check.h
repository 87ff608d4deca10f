// Whether a kernel could run an operation: everything that it would touch is in the device's reach.
#pragma once

#include "fake_cuda/kernel_protocol.h"

#include <string>

namespace epd::fake_cuda {

// Empty: it could. Else what is wrong, for people.
std::string check_operation(const Launch& launch, kernels::Task task, const kernels::cuda::Operation& op,
                            const KernelDevice& device);

}  // namespace epd::fake_cuda

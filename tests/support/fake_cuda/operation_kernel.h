// Dispatch and combine, by a host.
#pragma once

#include "fake_cuda/kernel_protocol.h"

#include <string>

namespace epd::fake_cuda {

// Runs an operation that check_operation() has found nothing wrong with. As run_kernel().
std::string run_operation(kernels::Task task, const kernels::cuda::Operation& op, const KernelDevice& device);

}  // namespace epd::fake_cuda

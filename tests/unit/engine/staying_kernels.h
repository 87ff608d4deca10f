// Which kernels of this process hold SMs of a device, as the fake driver sees it.
#pragma once

#include "fake_cuda/staying.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <vector>

namespace epd::test {

class StayingKernels {
 public:
  StayingKernels() {
    void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    look_ = reinterpret_cast<decltype(look_)>(::dlsym(driver, "cuFakeStayingKernels"));
    EXPECT_NE(look_, nullptr) << "this is another driver";
  }

  std::vector<fake_cuda::StayingKernel> on(int device) const {
    std::vector<fake_cuda::StayingKernel> kernels(16);
    kernels.resize(std::min(look_(device, kernels.data(), 16), 16u));
    return kernels;
  }

 private:
  unsigned (*look_)(int, fake_cuda::StayingKernel*, unsigned) = nullptr;
};

}  // namespace epd::test

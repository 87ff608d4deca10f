// Files in the fake driver's folder of faults (fake_cuda/README.md), and the SMs that kernels hold.
#pragma once

#include "fake_cuda/staying.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

namespace epd::fake_cuda_test {

// The fake driver reads this once, when the first test of the program asks it for something.
inline const std::string& fault_dir() {
  static const std::string dir = ::testing::TempDir() + "epd-pairs-" + std::to_string(::getpid());
  return dir;
}
[[maybe_unused]] inline const int g_told = ::setenv("EPD_FAKE_CUDA_FAULT_DIR", fault_dir().c_str(), 1);

class FaultDir {
 public:
  FaultDir() { std::filesystem::create_directory(fault_dir()); }
  ~FaultDir() { std::filesystem::remove_all(fault_dir()); }
  FaultDir(const FaultDir&) = delete;
  FaultDir& operator=(const FaultDir&) = delete;

  static void begin(const std::string& file, const std::vector<std::string>& words = {}) {
    std::ofstream to(fault_dir() + "/" + file);
    for (const std::string& word : words) to << word << '\n';
  }
  static void end(const std::string& file) { std::filesystem::remove(fault_dir() + "/" + file); }
};

// SMs of device 0 that kernels hold, fewest first.
inline std::vector<unsigned> sms_of_kernels() {
  fake_cuda::StayingKernel kernels[8];
  std::vector<unsigned> sms;
  for (unsigned i = std::min(cuFakeStayingKernels(0, kernels, 8), 8u); i-- > 0;)
    sms.push_back(kernels[i].ctas);
  std::sort(sms.begin(), sms.end());
  return sms;
}
inline unsigned sms_held() {
  const std::vector<unsigned> sms = sms_of_kernels();
  return std::accumulate(sms.begin(), sms.end(), 0u);
}

}  // namespace epd::fake_cuda_test

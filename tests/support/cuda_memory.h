// Copies between a test's memory and a GPU's: regions of a group on a CUDA device are not the host's to touch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epd::test {

// Whether there is a driver to open (a true one, or support/fake_cuda by LD_LIBRARY_PATH). Says nothing of GPUs.
bool has_cuda_driver();

// Blocking, by GPU `gpu` as the driver numbers them. Throw RankFailure. Not before a fork that is to use the driver.
void copy_to_gpu(int gpu, void* to, const void* from, std::size_t bytes);
void copy_from_gpu(int gpu, void* to, const void* from, std::size_t bytes);

}  // namespace epd::test
